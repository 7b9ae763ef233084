"""What AMQP/Fast clients were told is safe, after the gateway was killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.protocols.amqpfast import commands as m
from tests.ingress.amqpfast.client import PERSISTENT, TOPIC, Fast, fresh, head
from tests.interop.gateway_process import GatewayProcess


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path) as started:
        yield started


def test_confirmed_persistent_messages_survive_in_order_with_their_heads(gateway: GatewayProcess) -> None:
    said = head(persistent=True, priority=5, identifier="id", headers={"n": -3})
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, *[b"%d" % number for number in range(50)], head=PERSISTENT)
        client.put(handle, b"first", head=said)
        client.put(handle, b"transient")
        gateway.restart()
    with Fast(gateway).open() as client:
        client.consume(client.handle("q"))
        rows = client.rows(51)
        assert [row[4] for row in rows] == [b"first", *[b"%d" % number for number in range(50)]]
        assert rows[0][3] == said
        assert not any(fresh(row) for row in rows)
        assert client.quiet()


def flags(gateway: GatewayProcess, count: int) -> list[tuple[bytes, bool]]:
    """What is in the queue, and whether it is redelivered; then all of it waits again, delivered."""
    with Fast(gateway).open() as client:
        client.consume(client.handle("q"))
        return [(row[4], not fresh(row)) for row in client.rows(count)]


def stop_and_start(gateway: GatewayProcess) -> None:
    assert gateway.terminate() == 0
    gateway.start()


@pytest.mark.parametrize("priorities", [(0, 0, 0, 0), (0, 9, 0, 3)], ids=["one priority", "several"])
def test_what_nobody_was_handed_is_not_redelivered_after_a_planned_stop(
    gateway: GatewayProcess, priorities: tuple[int, ...]
) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        for priority, body in zip(priorities, (b"a", b"b", b"c", b"d"), strict=True):
            client.put(handle, body, head=head(persistent=True, priority=priority))
        client.consume(handle, prefetch=1)
        (first,) = client.bodies(1)
        stop_and_start(gateway)
    order = [b"a", b"b", b"c", b"d"] if not any(priorities) else [b"b", b"d", b"a", b"c"]
    assert first == order[0]
    with Fast(gateway).open() as client:
        client.put(client.handle("q"), b"e", head=PERSISTENT)
    stop_and_start(gateway)
    expected = [(first, True), *((body, False) for body in (*order[1:], b"e"))]
    assert flags(gateway, 5) == expected, "nothing was delivered in between, so nothing has changed"
    gateway.restart()
    assert flags(gateway, 5) == [(body, True) for body, _ in expected], "after a kill nobody knows"


def test_what_a_durable_subscription_was_owed_and_not_handed_is_not_redelivered(
    gateway: GatewayProcess,
) -> None:
    with Fast(gateway, "d").open() as client:
        handle = client.handle("t", TOPIC)
        client.consume(handle, identifier="sub", prefetch=1)
        client.put(handle, b"1", b"2", b"3", head=PERSISTENT, confirm=False)
        assert client.bodies(1) == [b"1"]
        client.ack(1)
        assert client.bodies(1) == [b"2"]
        stop_and_start(gateway)
    with Fast(gateway, "d").open() as client:
        client.consume(client.handle("t", TOPIC), identifier="sub")
        assert [(row[4], not fresh(row)) for row in client.rows(2)] == [(b"2", True), (b"3", False)]


def test_what_was_acknowledged_does_not_come_back(gateway: GatewayProcess) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1", b"2", b"3", head=PERSISTENT)
        client.consume(handle)
        client.rows(3)
        client.ack(2)
        gateway.restart()
    with Fast(gateway).open() as client:
        client.consume(client.handle("q"))
        assert client.bodies(1) == [b"3"]
        assert client.quiet()


def test_a_durable_subscription_survives_with_its_messages_and_selector(gateway: GatewayProcess) -> None:
    with Fast(gateway, "d").open() as client:
        handle = client.handle("plant.", TOPIC)
        client.consume(handle, identifier="sub", selector=b"n > 1")
        gateway.restart()
    with Fast(gateway).open() as client:
        handle = client.handle("plant.x", TOPIC)
        for number in range(4):
            client.put(handle, b"%d" % number, head=head(persistent=True, headers={"n": number}))
        gateway.restart()
    with Fast(gateway, "d").open() as client:
        handle = client.handle("plant.", TOPIC)
        client.consume(handle, identifier="sub", selector=b"n > 1")
        rows = client.rows(2)
        assert [(row[4], row[5]) for row in rows] == [(b"2", b"plant.x"), (b"3", b"plant.x")]
        client.ack(2)
        assert client.ask(m.HandleCancel(handle, 0, "", "sub"))[3] == 200
        gateway.restart()
    with Fast(gateway, "d").open() as client:
        handle = client.ask_handle("plant.", TOPIC)
        client.reply()
        tag = client.machine.new_tag(1)
        client.say(m.HandleCancel(handle, tag, "", "sub"))
        assert client.handle_closed() == (handle, 404)


def test_a_transaction_is_there_whole_or_not_at_all(gateway: GatewayProcess) -> None:
    with Fast(gateway).open(transacted=True) as client:
        one, other = client.handle("q1"), client.handle("q2")
        client.put(one, b"1", head=PERSISTENT)
        client.put(other, b"2", head=PERSISTENT)
        assert client.ask(m.ChannelCommit(1))[3] == 200
        client.put(one, b"never", head=PERSISTENT)
        gateway.restart()
    with Fast(gateway).open() as client:
        client.consume(client.handle("q1"))
        client.consume(client.handle("q2"))
        assert sorted(client.bodies(2)) == [b"1", b"2"]
        assert client.quiet()


def test_a_temporary_queue_is_gone(gateway: GatewayProcess) -> None:
    with Fast(gateway, "t").open() as client:
        handle = client.ask_handle("mine", temporary=True)
        client.reply()
        client.put(handle, b"x", head=PERSISTENT)
        gateway.restart()
    with Fast(gateway, "t").open() as client:
        client.consume(client.handle("mine"))
        assert client.quiet()


def test_what_is_no_longer_declared_is_kept_as_long_as_it_holds_messages(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path)
    host = {"destinations": {"queues": ["full", "empty"]}}
    gateway.configuration["listeners"]["amqpfast"]["virtual_hosts"] = {"/": host}
    with gateway:
        with Fast(gateway).open() as client:
            client.put(client.handle("full"), b"x", head=PERSISTENT)
        host["destinations"]["queues"] = ["other"]
        gateway.restart()
        with Fast(gateway).open() as client:
            handle = client.ask_handle("empty")
            assert client.handle_closed() == (handle, 404)
            client.consume(client.handle("full"))
            assert client.bodies(1) == [b"x"]
            client.ack(1)
        gateway.restart()
        with Fast(gateway).open() as client:
            handle = client.ask_handle("full")
            assert client.handle_closed() == (handle, 404)


def test_what_does_not_fit_the_memory_comes_from_the_disk_also_when_priorities_differ(tmp_path: Path) -> None:
    gateway = GatewayProcess(tmp_path, limits={"queue_memory_messages_max": 20})
    with gateway:
        with Fast(gateway).open() as client:
            handle = client.handle("q")
            for number in range(100):
                said = head(persistent=number % 3 != 0, priority=number % 2)
                client.put(handle, b"%d" % number, head=said)
            client.consume(handle, prefetch=7)
            found: list[int] = []
            while len(found) < 100:
                row = client.rows(1)[0]
                found.append(int(row[4]))
                client.ack(row[1])
            assert sorted(found) == list(range(100))
            assert found != list(range(100))
            client.put(handle, *[b"%d" % number for number in range(50)], head=PERSISTENT)
        gateway.restart()
        with Fast(gateway).open() as client:
            client.consume(client.handle("q"))
            assert client.bodies(50) == [b"%d" % number for number in range(50)]
