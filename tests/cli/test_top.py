"""`gateway top`: pages out of two looks, against a gateway that carries messages, and on a terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from gateway.cli.exits import Exit
from gateway.cli.top_output import Snapshot, page, take_snapshot
from gateway.settings import Http
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

GATEWAY = str(Path(sys.executable).with_name("gateway"))


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(settings_of(http=Http(host=LOOPBACK, port=0))) as started:
        yield started


def url(gateway: Running) -> str:
    return f"http://{LOOPBACK}:{gateway.gateway.http_port}"


def test_a_page_has_rates_and_the_longest_queues(gateway: Running) -> None:
    connection = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
    channel = connection.channel()
    channel.confirm_delivery()
    for name in ("short", "evil\x1b[31m"):
        channel.queue_declare(name)
    before = take_snapshot(url(gateway), None)
    for name, count in (("short", 1), ("evil\x1b[31m", 20)):
        for _ in range(count):
            channel.basic_publish("", name, b"x")
    now = take_snapshot(url(gateway), None)
    later = Snapshot({**now.status, "at_secs": before.status["at_secs"] + 2.0}, now.queues)
    lines = page(before, later)
    assert lines[0].startswith("gateway ")
    assert lines[0].endswith(", ready")
    rows = [line.split() for line in lines]
    (amqp,) = [row for row in rows if row[:1] == ["amqp091"]]
    assert amqp[:5] == ["amqp091", "amqp091", "open", "1", "10"], "21 messages in two seconds"
    assert next(row for row in rows if row[:1] == ["evil\\x1b[31m"])[3:5] == ["20", "+10.0"]
    assert [row[0] for row in rows if row[1:3] == ["amqp091", "/"]] == ["evil\\x1b[31m", "short"]
    by_name = [line.partition(" ")[0] for line in page(before, later, "queue")]
    assert by_name.index("evil\\x1b[31m") < by_name.index("short"), "texts from a to z"
    rates = [line.split() for line in page(before, later, "in/s")]
    endpoints = [row[0] for row in rates if row[2:3] == ["open"]]
    assert endpoints[0] == "amqp091", "the highest rate first"
    assert page(later, before)[2:], "counters that have begun anew are no reason to fail"
    connection.close()


def test_a_column_that_no_table_has(run: Run) -> None:
    ran = run("top", "--once", "--sort", "size")
    assert ran.code == Exit.USAGE
    assert "B/s in" in ran.err


def test_one_page_is_printed(run: Run, gateway: Running) -> None:
    ran = run("top", "--once", "--interval", "0.2", "--url", url(gateway))
    assert (ran.code, ran.err) == (Exit.OK, "")
    assert "endpoint" in ran.out
    assert "\x1b" not in ran.out
    assert run("top", "--once", "--url", "http://127.0.0.1:1").code == Exit.FAILED
    assert run("top", "--interval", "0").code == Exit.USAGE


def test_it_is_shown_on_a_terminal_until_ctrl_c(gateway: Running) -> None:
    outer, inner = pty.openpty()
    command = [GATEWAY, "top", "--interval", "0.2", "--url", url(gateway)]
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
    os.close(inner)
    try:
        seen, deadline = b"", time.monotonic() + 30
        while seen.count(b"endpoint") < 2:
            assert time.monotonic() < deadline, seen
            if select.select([outer], [], [], 1.0)[0]:
                seen += os.read(outer, 65_536)
        process.send_signal(2)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outer)
