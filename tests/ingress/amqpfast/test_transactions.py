"""Channels with transactions (3.3.3 - 3.3.5): what COMMIT and ROLLBACK do to sends, notifies and acks."""

from __future__ import annotations

import pytest

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import Notifies, Replies
from gateway.protocols.amqpfast.sender import Transfer
from gateway.settings import Limits
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, PEER, Fast, fresh
from tests.ingress.clients import eventually
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


def waiting(gateway: Running, queue: str = "q") -> int:
    return gateway.ask(lambda: len(gateway.gateway.fast_hosts["/"].queues[queue]))


def unacknowledged(gateway: Running, queue: str = "q") -> int:
    return gateway.ask(lambda: gateway.gateway.fast_hosts["/"].queues[queue].unacknowledged)


def test_what_is_sent_is_seen_after_the_commit(gateway: Running) -> None:
    with Fast(gateway).open(transacted=True) as client, Fast(gateway).open() as other:
        handle = client.handle("q")
        other.consume(other.handle("q"))
        client.put(handle, b"1", b"2")
        assert other.quiet()
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert other.bodies(2) == [b"1", b"2"]


def test_what_is_sent_is_gone_after_a_rollback_or_the_end_of_the_channel(gateway: Running) -> None:
    with Fast(gateway).open(transacted=True) as client:
        handle = client.handle("q")
        client.put(handle, b"1")
        assert client.ask(m.ChannelRollback(1))[3] == 200
        assert client.ask(m.ChannelCommit(1))[3] == 200
        client.put(handle, b"2")
        client.cut()
    eventually(lambda: not gateway.ask(lambda: gateway.gateway.fast_hosts.clients))
    assert waiting(gateway) == 0


def test_a_peer_is_called_by_the_commit(gateway: Running) -> None:
    """3.3.4: SENDs are committed to any mixture of queues, topics and peers."""
    with Fast(gateway).open(transacted=True) as client, Fast(gateway).open() as other:
        queue, echo, closed = client.handle("q"), client.handle("echo", PEER), client.handle("echo", PEER)
        other.consume(other.handle("q"))
        client.put(echo, b"1")
        client.put(queue, b"2")
        client.put(echo, b"3")
        client.put(closed, b"whose answer nobody awaits any more")
        client.machine.close_handle(closed)
        client.flush()
        assert client.quiet()
        assert other.quiet()
        client.say(m.ChannelCommit(1, client.machine.new_tag(1)))
        client.next(Replies)
        heard = [row for event in client.events if isinstance(event, Notifies) for row in event.rows]
        assert [(row[0], row[4]) for row in heard] == [(echo, b"1"), (echo, b"3")], "before the reply"
        assert other.bodies(1) == [b"2"]
        client.events.clear()
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert client.quiet(), "once"


@pytest.mark.parametrize("end", ["rollback", "close"])
def test_a_peer_is_not_called_by_what_is_rolled_back(gateway: Running, end: str) -> None:
    with Fast(gateway).open(transacted=True) as client:
        client.put(client.handle("echo", PEER), b"1", b"2")
        if end == "rollback":
            assert client.ask(m.ChannelRollback(1))[3] == 200
        else:
            client.machine.close_channel(1)
            client.flush()
            assert client.channel(transacted=True) == 2
        channel = client.machine.channels[0]
        assert client.ask(m.ChannelCommit(channel), channel)[3] == 200
        assert client.quiet()


def test_calls_of_peers_count_against_the_limits_of_a_transaction() -> None:
    with (
        running(settings_of(limits=Limits(transaction_messages_max=3))) as gateway,
        Fast(gateway).open(transacted=True) as client,
    ):
        queue, echo = client.handle("q"), client.handle("echo", PEER)
        client.put(queue, b"1", b"2")
        client.put(echo, b"3")
        client.put(echo, b"4", confirm=False)
        assert client.channel_closed() == (1, 506)


def test_a_stream_is_not_for_a_transaction(gateway: Running) -> None:
    with Fast(gateway).open(transacted=True) as client:
        echo = client.handle("echo", PEER)
        Transfer(client.machine, echo, EMPTY, 0, streaming=True).write(b"one")
        client.flush()
        assert client.handle_closed() == (echo, 503)
        assert client.ask(m.ChannelCommit(1))[3] == 200


def test_a_rollback_brings_back_what_was_notified_acknowledged_or_not(gateway: Running) -> None:
    with Fast(gateway).open(transacted=True) as client, Fast(gateway).open() as other:
        handle = client.handle("q")
        other.put(other.handle("q"), b"1", b"2", b"3")
        client.consume(handle, prefetch=2)
        client.rows(2)
        client.ack(1)
        assert client.bodies(1) == [b"3"]  # the window opens at the acknowledgement
        assert client.ask(m.ChannelRollback(1))[3] == 200
        rows = client.rows(2)
        assert [(row[4], row[1], fresh(row)) for row in rows] == [(b"1", 4, False), (b"2", 5, False)]
        client.ack(5)
        client.rows(1)
        client.ack(6)
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert (waiting(gateway), unacknowledged(gateway)) == (0, 0)


def test_an_acknowledgement_counts_when_it_is_committed(gateway: Running) -> None:
    with Fast(gateway).open(transacted=True) as client, Fast(gateway).open() as other:
        handle = other.handle("q")
        other.put(handle, b"1", b"2")
        client.consume(client.handle("q"))
        client.rows(2)
        client.ack(2)
        client.cut()
        other.consume(handle)
        assert [(row[4], fresh(row)) for row in other.rows(2)] == [(b"1", False), (b"2", False)]


@pytest.mark.parametrize("confirms, left", [("all", 0), ("acked", 1)])
def test_what_a_commit_confirms(confirms: str, left: int) -> None:
    listener = make_listener(protocol="amqpfast", host=LOOPBACK, port=0, commit_confirms=confirms)
    with (
        running(settings_of(listeners={"amqpfast": listener})) as gateway,
        Fast(gateway).open(transacted=True) as client,
        Fast(gateway).open() as other,
    ):
        other.put(other.handle("q"), b"1", b"2")
        client.consume(client.handle("q"))
        client.rows(2)
        client.ack(1)
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert unacknowledged(gateway) == left
        client.cut()
        eventually(lambda: waiting(gateway) == left)


def test_a_message_for_several_destinations_and_many_messages_commit_as_one(gateway: Running) -> None:
    with Fast(gateway).open(transacted=True) as client:
        client.handle("a.x")
        client.handle("a.y")
        client.put(client.handle("a."), *[b"x"] * 100)
        assert waiting(gateway, "a.x") == 0
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert (waiting(gateway, "a.x"), waiting(gateway, "a.y")) == (100, 100)


def test_a_transaction_has_a_limit() -> None:
    with running(settings_of(limits=Limits(transaction_messages_max=3))) as gateway:
        with Fast(gateway).open(transacted=True) as client:
            handle = client.handle("q")
            client.put(handle, b"1", b"2", b"3")
            client.put(handle, b"4", confirm=False)
            assert client.channel_closed() == (1, 506)
        assert waiting(gateway) == 0
