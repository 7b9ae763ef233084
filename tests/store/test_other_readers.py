"""Another program that reads the database, as a backup does, delays nothing."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gateway.model.outcome import ACCEPTED
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Confirms
from gateway.settings import StoreSettings
from gateway.store import writer
from gateway.store.database import BUSY_SECS, FILE, StoreDatabase
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_fixture import running, settings_of
from tests.store.parts import Opened

PROMPT_SECS = BUSY_SECS / 2


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Have a read transaction open."""
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM rows").fetchone()
        yield
        other.execute("COMMIT")


@pytest.fixture
def tidied(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set whenever the log is about to be emptied, which is soon after each commit."""
    begun, shorten = threading.Event(), StoreDatabase.shorten

    def noticed(database: StoreDatabase) -> bool:
        begun.set()
        return shorten(database)

    monkeypatch.setattr(StoreDatabase, "shorten", noticed)
    monkeypatch.setattr(writer, "TIDY_SECS", 0.05)
    return begun


def test_commits_go_on_and_the_log_is_emptied_when_the_reader_has_ended(
    tmp_path: Path, tidied: threading.Event
) -> None:
    wal = tmp_path / f"{FILE}-wal"
    with Opened(tmp_path) as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, b"before")
        with reading(tmp_path):
            for position in range(1, 4):
                one.append(log, position, b"x")
                tidied.clear()
                assert tidied.wait(10.0)
                began = time.monotonic()
                assert one.append(log, position + 10, b"meanwhile") is ACCEPTED
                assert time.monotonic() - began < PROMPT_SECS
            assert wal.stat().st_size
        end = time.monotonic() + 10.0
        while wal.stat().st_size:
            assert time.monotonic() < end, "the log was not emptied"


def test_the_end_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    one = Opened(tmp_path)
    one.append(one.store.log("queue", "q"), 0, b"x")
    with reading(tmp_path):
        began = time.monotonic()
        one.store.close()
        assert time.monotonic() - began < PROMPT_SECS
    with Opened(tmp_path) as again:
        assert again.read_from(again.store.log("queue", "q"), 0, 1) == [(0, b"x")]


def test_confirms_come_while_somebody_reads(tmp_path: Path, tidied: threading.Event) -> None:
    with running(settings_of(store=StoreSettings(path=tmp_path))) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        with reading(tmp_path):
            client.publish("", "q", b"x", properties=b"\x10\x00\x02")
            client.next(Confirms)
            tidied.clear()
            assert tidied.wait(10.0)
            began = time.monotonic()
            client.publish("", "q", b"x", properties=b"\x10\x00\x02")
            client.next(Confirms)
            assert time.monotonic() - began < PROMPT_SECS
