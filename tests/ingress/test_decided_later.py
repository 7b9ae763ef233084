"""What a slow disk decides after a channel of AMQP 0-9-1 was closed reaches no later one of its number."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import ChannelClosed, ChannelOpened, Closed, Confirms, MethodReceived
from gateway.settings import StoreSettings
from gateway.store.database import StoreDatabase
from tests.access.test_doors import PASSWORD, change, settings
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_fixture import running, settings_of
from tests.store.parts import PATIENCE_SECS

PERSISTENT = b"\x10\x00\x02"  # flags of basic properties with the delivery mode alone, and the mode
pytestmark = pytest.mark.interpreted


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Commits wait while this event is not set."""
    works = threading.Event()
    works.set()
    commit = StoreDatabase.commit

    def slowly(database: StoreDatabase, group: Any) -> Any:
        assert works.wait(PATIENCE_SECS)
        return commit(database, group)

    monkeypatch.setattr(StoreDatabase, "commit", slowly)
    return works


@pytest.mark.parametrize("by_peer", [True, False])
def test_a_confirm_does_not_reach_the_next_channel_of_that_number(
    tmp_path: Path, disk: threading.Event, by_peer: bool
) -> None:
    store = StoreSettings(path=tmp_path)
    with running(settings_of(store=store)) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        disk.clear()
        client.publish("", "q", b"1", b"2", properties=PERSISTENT)
        if by_peer:
            client.machine.close_channel(1)
            client.flush()
            while client.machine._channels:
                client.machine.receive_data(client.sock.recv(65_536), 0.0)
        else:
            client.say(m.BasicAck(77))
            client.next(ChannelClosed)
        assert client.machine.open_channel() == 1
        client.flush()
        client.next(ChannelOpened)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        client.publish("", "q", b"3", properties=PERSISTENT)
        disk.set()
        assert client.next(Confirms).confirms == [(1, 1, False, True)]


@pytest.mark.parametrize("enters", [True, False])
def test_a_commit_whose_channel_new_rules_close_does_not_hold_its_client(
    tmp_path: Path, disk: threading.Event, enters: bool
) -> None:
    store = StoreSettings(path=tmp_path)
    users = {"ann": ("ann",)}
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    wide = settings({"ann": {"amqp091": {"/": everything}}}, users, store=store)
    narrow = settings({"ann": {"amqp091": {"/": everything | {"read": "^$"}} if enters else {}}}, users)
    with running(wide) as gateway, Amqp(gateway, user="ann", password=PASSWORD).open() as client:
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.call(m.TxSelect(), m.TxSelectOk)
        client.call(m.BasicConsume("q"), m.BasicConsumeOk)
        disk.clear()
        client.publish("", "q", b"1", properties=PERSISTENT)
        client.say(m.TxCommit())
        gateway.until(lambda: gateway.gateway.store.figures.pending)
        change(gateway, narrow)
        disk.set()
        if enters:
            assert client.refusal().reply_code == 403
            client.say(m.TxSelect())
            assert client.next(MethodReceived).method == m.TxSelectOk()
        else:
            client.next(Closed)
            while client.sock.recv(65_536):
                pass
