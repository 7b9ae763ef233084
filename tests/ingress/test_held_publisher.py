"""A client whose publishes a full queue holds is answered in everything else, in each protocol."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.ingress import listener
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as amqp
from gateway.protocols.amqp091.events import ChannelOpened, Confirms
from gateway.protocols.amqp091.spec import HEARTBEAT_FRAME
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.lifetime import PING_RESPOND
from gateway.protocols.amqpfast.spec import CLOSE_WAIT_SECS
from gateway.protocols.mqtt.packets import Suback, Subscription
from gateway.protocols.mqtt.spec import PacketType, Version
from gateway.settings import Limits, StoreSettings
from tests.ingress.amqp_client import NOTHING, Amqp
from tests.ingress.amqpfast.client import PERSISTENT, Fast
from tests.ingress.clients import PATIENCE_SECS, Mqtt, connect, eventually, stats
from tests.interop.gateway_fixture import Running, running, settings_of

MAX: Final = 10
FULL: Final = Limits(queue_messages_max=MAX)
MAPPING: Final = """\
version: 1
routes:
  - name: in
    from: {endpoint: mqtt, topic: "full"}
    to: {endpoint: amqp091, exchange: "", routing_key: q}
"""


def fast_depth(gateway: Running, name: str = "q") -> int:
    """Return how many messages are in a queue of AMQP/Fast."""
    return gateway.ask(lambda: len(gateway.gateway.fast_hosts["/"].queues[name]))


def depth(gateway: Running, name: str = "q") -> int:
    """Return how many messages are in a queue of AMQP 0-9-1, 0 if there is none."""

    def look() -> int:
        queue = gateway.gateway.host.queues.get(name)
        return 0 if queue is None else len(queue)

    return gateway.ask(look)


def waiting(gateway: Running, listener: str) -> int:
    """Return how many messages and commands wait on all connections of a listener."""

    def look() -> int:
        connections = list(gateway.gateway.listeners[listener].ingress_clients.connections)
        lines = [line for one in connections for line in one.waiting._lines.values()]  # type: ignore[attr-defined]
        return sum(line.messages for line in lines)

    return gateway.ask(look)


# AMQP/Fast.


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Running]:
    with running(settings_of(limits=FULL, store=StoreSettings(path=tmp_path))) as gateway:
        yield gateway


def filled(client: Fast, name: str = "q", channel: int = 1) -> int:
    """Fill a queue until it holds the channel; returns the handle."""
    handle = client.handle(name, channel=channel)
    client.put(handle, *[b"%d" % number for number in range(MAX)])
    client.put(handle, b"over")
    return handle


def fast_drained(gateway: Running, count: int, name: str = "q") -> list[bytes]:
    """Consume messages from a queue of AMQP/Fast."""
    with Fast(gateway).open() as other:
        handle = other.handle(name)
        other.consume(handle)
        bodies: list[bytes] = []
        while len(bodies) < count:
            rows = other.rows(1)
            bodies += [row[4] for row in rows]
            other.ack(rows[-1][1])
        return bodies


def pinged(client: Fast) -> None:
    """Have a PING answered."""
    before = client.machine.received[m.ConnectionPing.type]
    client.send(PING_RESPOND)
    while client.machine.received[m.ConnectionPing.type] == before:
        client.hear()


def test_fast_answers_everything_but_what_waits(fast: Running) -> None:
    with Fast(fast).open() as client:
        other = client.channel()
        handle = filled(client)
        client.put(handle, b"waits", b"waits too", confirm=False)
        pinged(client)
        client.put(client.handle("free", channel=other), b"goes on")
        assert (fast_depth(fast), fast_depth(fast, "free")) == (MAX + 1, 1)
        assert fast_drained(fast, MAX + 3)[-2:] == [b"waits", b"waits too"]
        client.put(handle, b"again")


def test_fast_keeps_the_order_behind_what_waits(fast: Running) -> None:
    with Fast(fast).open() as client:
        handle = filled(client)
        free = client.handle("free")
        client.put(handle, b"waits", confirm=False)
        client.put(free, b"behind it", confirm=False)
        client.say(m.HandleConsume(free, prefetch=1))
        pinged(client)
        assert fast_depth(fast, "free") == 0
        assert fast_drained(fast, MAX + 2)[-1] == b"waits"
        assert client.bodies(1) == [b"behind it"]


def test_fast_channel_close_is_answered_and_takes_what_waits_along(fast: Running) -> None:
    with Fast(fast).open() as client:
        handle = filled(client)
        client.put(handle, b"waits", confirm=False)
        client.machine.close_channel(1)
        client.flush()
        again = client.channel()
        client.put(client.handle("free", channel=again), b"goes on")
        assert fast_depth(fast) == MAX + 2
        assert fast_drained(fast, MAX + 2)[-1] == b"waits"


def test_fast_connection_close_is_answered(fast: Running) -> None:
    with Fast(fast).open() as client:
        handle = filled(client)
        client.put(handle, b"waits", confirm=False)
        client.leave()
    assert fast_drained(fast, MAX + 2)[-1] == b"waits"


@pytest.mark.parametrize("how", ["idle", "in a transaction", "held by a full queue", "with its sending shut"])
def test_fast_client_that_closes_reads_the_answer_and_closes_the_socket_itself(
    how: str, fast: Running
) -> None:
    """The gateway waits for some seconds only."""
    with Fast(fast).open() as client:
        if how == "in a transaction":
            work = client.channel(transacted=True)
            client.put(client.handle("q", channel=work), b"never committed", confirm=False)
        elif how == "held by a full queue":
            client.put(filled(client), b"waits", confirm=False)
        began = time.monotonic()
        client.machine.close()
        client.flush()
        if how == "with its sending shut":
            client.sock.shutdown(socket.SHUT_WR)
        while not client.machine.closed:
            client.machine.receive_data(client.sock.recv(1), 0.0)
        with Fast(fast).open() as other:  # several wake-ups of the gateway later
            pinged(other)
        if how != "with its sending shut":
            client.sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.sock.recv(1)
        if how == "idle":
            client.sock.settimeout(PATIENCE_SECS)
            assert client.rest() == b""
            assert time.monotonic() - began > CLOSE_WAIT_SECS / 2
        else:
            client.cut()
        eventually(lambda: fast.ask(lambda: not stats(fast, "amqpfast").connections))
    if how == "held by a full queue":
        assert fast_drained(fast, MAX + 2)[-1] == b"waits"


@pytest.mark.parametrize("head", [b"", PERSISTENT])
def test_fast_client_that_is_cut_has_published_what_it_sent(fast: Running, head: bytes) -> None:
    with Fast(fast).open() as client:
        handle = filled(client)
        client.put(handle, b"waits", confirm=False, **({"head": head} if head else {}))
        eventually(lambda: waiting(fast, "amqpfast") == 1)
    assert fast_drained(fast, MAX + 2)[-1] == b"waits"


def test_fast_more_than_may_wait_costs_the_channel(fast: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ingress.waiting_publishes.MESSAGES_MAX", 5)
    monkeypatch.setattr("gateway.ingress.amqpfast.connection.UNREAD_SECS_MAX", 0.1)
    with Fast(fast).open() as client:
        other = client.channel()
        handle = filled(client)
        client.put(handle, *[b"waits"] * 6, confirm=False)
        assert client.channel_closed() == (1, 506)
        free = client.handle("free", channel=other)
        client.put(free, b"goes on")
        assert fast_depth(fast) == MAX + 1
        refused = stats(fast, "amqpfast")._refused_messages
        assert dict(refused) == {("released", "quota"): 6}
        again = client.channel()
        client.put(client.handle("free", channel=again), b"another channel of that number")
        assert fast_depth(fast, "free") == 2


def test_fast_what_waits_on_a_handle_goes_with_it_for_a_fault(fast: Running) -> None:
    """The number of the handle may be used again."""
    with Fast(fast).open() as client:
        handle = filled(client)
        free = client.handle("free")
        client.put(handle, b"waits", confirm=False)
        client.put(free, b"goes on", confirm=False)
        eventually(lambda: waiting(fast, "amqpfast") == 2)

        def fault() -> None:
            connection: Any = next(iter(fast.gateway.listeners["amqpfast"].ingress_clients.connections))
            connection.close_handle(connection.handles[handle], 404, "test")
            connection.ingress.flush()

        fast.ask(fault)
        assert client.handle_closed() == (handle, 404)
        assert dict(stats(fast, "amqpfast")._refused_messages) == {("released", "quota"): 1}
        assert len(fast_drained(fast, MAX + 1)) == MAX + 1
        eventually(lambda: fast_depth(fast, "free") == 1)
        assert fast_depth(fast) == 0


def test_fast_commit_waits_and_its_transaction_is_whole(fast: Running) -> None:
    with Fast(fast).open() as client:
        filled(client)
        work = client.channel(transacted=True)
        handle = client.handle("q", channel=work)
        client.put(handle, b"first", head=PERSISTENT)
        assert client.ask(m.ChannelCommit(work), work)[3] == 200  # held from here on
        client.put(handle, b"second", b"third", head=PERSISTENT)
        tag = client.machine.new_tag(work)
        client.say(m.ChannelCommit(work, tag))
        pinged(client)
        assert fast_depth(fast) == MAX + 2
        assert fast_drained(fast, MAX + 4)[-2:] == [b"second", b"third"]
        assert client.reply()[2:4] == (tag, 200)


# AMQP 0-9-1.


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    mapping = tmp_path / "m.yaml"
    mapping.write_text(MAPPING)
    settings = settings_of(
        limits=FULL, store=StoreSettings(path=tmp_path / "store"), mappings=(str(mapping),)
    )
    with running(settings) as one:
        yield one


def declared(gateway: Running, *names: str) -> None:
    with Amqp(gateway).open() as client:
        for name in names:
            client.call(amqp.QueueDeclare(name, durable=True), amqp.QueueDeclareOk)


def overfilled(client: Amqp, key: str = "q") -> None:
    """Fill a queue until it holds channel 1, which confirms."""
    client.call(amqp.ConfirmSelect(), amqp.ConfirmSelectOk)
    for count in (MAX, 1):
        client.publish("", key, *[b"x"] * count)
        told = 0
        while told < count:
            for _, tag, multiple, ack in client.next(Confirms).confirms:
                assert ack
                told = tag - (MAX if count == 1 else 0) if multiple else told + 1


def publish_on(client: Amqp, channel: int, key: str, *bodies: bytes) -> None:
    for body in bodies:
        client.machine.send_content(channel, amqp.BasicPublish("", key), NOTHING, body)
    client.flush()


def got(gateway: Running, count: int, key: str = "q") -> list[bytes]:
    """Consume messages from a queue of AMQP 0-9-1."""
    with Amqp(gateway).open() as client:
        client.call(amqp.BasicConsume(key, no_ack=True), amqp.BasicConsumeOk)
        return [row[6] for row in client.delivered(count)]


def test_amqp_answers_everything_but_what_waits(gateway: Running) -> None:
    declared(gateway, "q", "free")
    with Amqp(gateway).open() as client:
        overfilled(client)
        client.open_channel()
        publish_on(client, 1, "q", b"waits", b"waits too")
        publish_on(client, 2, "free", b"goes on")
        eventually(lambda: depth(gateway, "free") == 1)
        assert depth(gateway) == MAX + 1
        client.machine.send_method(2, amqp.QueueDeclare("another"))
        client.flush()
        assert client.events()
        assert got(gateway, MAX + 3)[-2:] == [b"waits", b"waits too"]
        confirms = client.next(Confirms).confirms
        assert confirms[0][1] > MAX + 1


def test_amqp_keeps_the_order_behind_what_waits(gateway: Running) -> None:
    declared(gateway, "q", "free")
    with Amqp(gateway).open() as client:
        overfilled(client)
        client.open_channel()
        publish_on(client, 1, "q", b"waits")
        publish_on(client, 1, "free", b"behind it")
        client.machine.send_method(1, amqp.QueuePurge("free"))
        publish_on(client, 2, "free", b"beside it")
        eventually(lambda: depth(gateway, "free") == 1)
        got(gateway, MAX + 2)
        eventually(lambda: depth(gateway, "free") == 0)  # the purge came behind both


def test_amqp_channel_close_is_answered_and_takes_what_waits_along(gateway: Running) -> None:
    declared(gateway, "q", "free")
    with Amqp(gateway).open() as client:
        overfilled(client)
        publish_on(client, 1, "q", b"waits")
        client.machine.close_channel(1)
        number = client.machine.open_channel()
        client.flush()
        client.next(ChannelOpened)
        publish_on(client, number, "free", b"goes on")
        eventually(lambda: depth(gateway, "free") == 1)
        assert depth(gateway) == MAX + 2


def test_amqp_connection_close_is_answered(gateway: Running) -> None:
    declared(gateway, "q")
    with Amqp(gateway).open() as client:
        overfilled(client)
        publish_on(client, 1, "q", b"waits")
        client.machine.close()
        client.flush()
        while not client.machine.closed:
            client.machine.receive_data(client.sock.recv(65_536), 0.0)
    eventually(lambda: depth(gateway) == MAX + 2)


def test_amqp_client_that_is_cut_has_published_what_it_sent(gateway: Running) -> None:
    declared(gateway, "q")
    with Amqp(gateway).open() as client:
        overfilled(client)
        publish_on(client, 1, "q", b"waits")
        eventually(lambda: waiting(gateway, "amqp091") == 1)
    eventually(lambda: depth(gateway) == MAX + 2)
    assert got(gateway, MAX + 2)[-1] == b"waits"


def test_amqp_queue_that_is_deleted_while_a_publish_waits(gateway: Running) -> None:
    declared(gateway, "q")
    with Amqp(gateway).open() as client:
        overfilled(client)
        client.machine.send_content(1, amqp.BasicPublish("", "q", mandatory=True), NOTHING, b"waits")
        client.flush()
        eventually(lambda: waiting(gateway, "amqp091") == 1)
        with Amqp(gateway).open() as other:
            other.call(amqp.QueueDelete("q"), amqp.QueueDeleteOk)
        assert client.next(Confirms).confirms == [(1, MAX + 2, False, True)]


def test_amqp_heartbeats_go_on(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of the client are read, so that its silence is noticed while it is held."""
    monkeypatch.setattr(listener, "TICK_SECS", 0.1)
    declared(gateway, "q")
    with Amqp(gateway, heartbeat=1).open() as client:
        overfilled(client)
        publish_on(client, 1, "q", b"waits")
        for _ in range(2):
            assert client.sock.recv(1_000).endswith(HEARTBEAT_FRAME)
            client.send(HEARTBEAT_FRAME)
        client.sock.settimeout(10.0)
        while client.sock.recv(1_000):  # from here on it is silent, which ends the connection
            pass
    eventually(lambda: depth(gateway) == MAX + 2)


def test_amqp_more_than_may_wait_is_not_read(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ingress.waiting_publishes.MESSAGES_MAX", 5)
    declared(gateway, "q")
    with Amqp(gateway).open() as client:
        overfilled(client)
        publish_on(client, 1, "q", *[b"waits"] * 6)
        eventually(lambda: waiting(gateway, "amqp091") == 6)
        publish_on(client, 1, "q", b"is not read")
        bodies = got(gateway, MAX + 8)
        assert bodies[-1] == b"is not read"
        assert waiting(gateway, "amqp091") == 0


def test_amqp_commit_waits_and_its_transaction_is_whole(gateway: Running) -> None:
    declared(gateway, "q")
    with Amqp(gateway).open() as filler, Amqp(gateway).open() as client:
        overfilled(filler)
        client.call(amqp.TxSelect(), amqp.TxSelectOk)
        client.publish("", "q", b"first")
        client.call(amqp.TxCommit(), amqp.TxCommitOk)  # held from here on
        client.publish("", "q", b"second", b"third")
        client.say(amqp.TxCommit())
        eventually(lambda: waiting(gateway, "amqp091") == 1)
        assert depth(gateway) == MAX + 2
        assert got(gateway, MAX + 4)[-2:] == [b"second", b"third"]
        client.call(amqp.QueueDeclare("q", passive=True), amqp.TxCommitOk)


def test_amqp_messages_that_expire_let_go_of_what_waits(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        arguments = (("x-message-ttl", Value(ValueType.INT32, 300)),)
        client.call(amqp.QueueDeclare("short", arguments=arguments), amqp.QueueDeclareOk)
        overfilled(client, "short")
        publish_on(client, 1, "short", b"waits")
        (confirm,) = client.next(Confirms).confirms
        assert confirm[1] == MAX + 2


# MQTT.


def mqtt_filled(gateway: Running, version: Version) -> Mqtt:
    """A client that the full queue behind a route holds."""
    declared(gateway, "q")
    client = connect(gateway, version=version, keep_alive=60)[0]
    for packet_id in range(1, MAX + 2):
        client.publish("full", b"x", 1, packet_id)
        assert client.acked(PacketType.PUBACK)[0] == packet_id
    return client


@pytest.mark.parametrize("version", [Version.V311, Version.V5])
def test_mqtt_answers_everything_but_what_waits(gateway: Running, version: Version) -> None:
    with mqtt_filled(gateway, version) as client:
        client.publish("full", b"waits", 1, 100)
        client.publish("full", b"waits too", 0)
        client.ping()
        client.ping()
        assert depth(gateway) == MAX + 1
        assert got(gateway, MAX + 3)[-2:] == [b"waits", b"waits too"]
        assert client.acked(PacketType.PUBACK) == (100, 0)


@pytest.mark.parametrize("version", [Version.V311, Version.V5])
def test_mqtt_disconnect_is_taken_and_takes_what_waits_along(gateway: Running, version: Version) -> None:
    with mqtt_filled(gateway, version) as client:
        client.publish("full", b"waits", 1, 100)
        client.machine.disconnect()
        client.flush()
        assert client.closed()
    assert depth(gateway) == MAX + 2


def test_mqtt_client_that_is_cut_has_published_what_it_sent(gateway: Running) -> None:
    with mqtt_filled(gateway, Version.V5) as client:
        client.publish("full", b"waits", 0)
        eventually(lambda: waiting(gateway, "mqtt") == 1)
    eventually(lambda: depth(gateway) == MAX + 2)


def test_mqtt_subscribe_waits_behind_what_was_published(gateway: Running) -> None:
    with mqtt_filled(gateway, Version.V5) as client:
        client.publish("full", b"waits", 0)
        client.machine.subscribe(7, [Subscription("full", 0)], {})
        client.flush()
        client.ping()
        assert not client.events(Suback)
        got(gateway, MAX + 2)
        assert client.next(Suback).packet_id == 7
        assert client.quiet()


def test_mqtt_more_than_may_wait_is_not_read(gateway: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ingress.waiting_publishes.MESSAGES_MAX", 5)
    with mqtt_filled(gateway, Version.V5) as client:
        for _ in range(6):
            client.publish("full", b"waits", 0)
        eventually(lambda: waiting(gateway, "mqtt") == 6)
        client.publish("full", b"is not read", 0)
        assert got(gateway, MAX + 8)[-1] == b"is not read"
        client.ping()
