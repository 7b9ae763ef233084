"""What a client takes and does not acknowledge, or sends and does not commit, is bounded, in bytes too."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ingress.delivery_limit import Outstanding
from gateway.model.message import MESSAGE_BYTES
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import ChannelClosed, GetResponse
from gateway.protocols.amqpfast import commands as fast
from gateway.protocols.amqpfast.events import ChannelClosed as FastChannelClosed
from gateway.settings import Limits
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import eventually
from tests.interop.gateway_fixture import Running, running, settings_of

BODY = bytes(1_000)
LARGE = bytes(700_000)  # a queue hands out no two of them together
LARGE_MAX = 3 * (len(LARGE) + MESSAGE_BYTES)
WEIGHT = len(BODY) + MESSAGE_BYTES + 2  # the flags of no properties


class Starved:
    """A stream that counts how often its peer was to be told to go on."""

    def __init__(self) -> None:
        self.times = 0

    def request_resume(self) -> None:
        self.times += 1


@pytest.mark.interpreted
def test_whoever_was_refused_goes_on_when_half_is_acknowledged() -> None:
    stream: Any = Starved()
    outstanding = Outstanding(stream, 100)
    outstanding.byte_count += 99
    assert not outstanding.full
    outstanding.subtract(99)
    assert stream.times == 0  # nobody waits
    outstanding.byte_count += 300
    assert outstanding.full
    outstanding.subtract(249)
    assert stream.times == 0
    outstanding.subtract(1)
    outstanding.subtract(50)
    assert (stream.times, outstanding.byte_count, outstanding.full) == (1, 0, False)


def held(gateway: Running, listener: str) -> list[int]:
    """What the clients of a listener have not acknowledged."""
    connections: Any = gateway.gateway.listeners[listener].connections
    return gateway.ask(lambda: [one.outstanding.byte_count for one in connections])


# AMQP 0-9-1.


def test_a_consumer_gets_no_more_than_it_may_hold_and_then_the_rest() -> None:
    limits = Limits(unacknowledged_bytes_max=LARGE_MAX)
    with running(settings_of(limits=limits)) as gateway, Amqp(gateway).open() as client:
        for queue in ("a", "b"):
            client.call(m.QueueDeclare(queue), m.QueueDeclareOk)
            client.call(m.BasicConsume(queue), m.BasicConsumeOk)
        for _ in range(5):
            client.publish("", "a", LARGE)
            client.publish("", "b", LARGE)
        first = [row[2] for row in client.delivered(3)]
        client.call(m.QueueDeclare("a", passive=True), m.QueueDeclareOk)  # no more has come by then
        assert held(gateway, "amqp091") == [LARGE_MAX + 6]
        client.say(m.BasicAck(first[-1], True))
        got = len(first)
        while got < 10:
            rows = client.delivered(1)
            got += len(rows)
            client.say(m.BasicAck(rows[-1][2], True))
        eventually(lambda: held(gateway, "amqp091") == [0])


def test_get_is_refused_beyond_the_bytes_of_the_connection() -> None:
    limits = Limits(unacknowledged_bytes_max=3 * WEIGHT)
    with running(settings_of(limits=limits)) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        for _ in range(5):
            client.publish("", "q", BODY)
        for _ in range(3):
            client.say(m.BasicGet("q"))
            client.next(GetResponse)
        client.say(m.BasicGet("q"))
        closed = client.next(ChannelClosed)
        assert (closed.reply_code, "unacknowledged_bytes_max" in closed.text) == (406, True)
        eventually(lambda: gateway.ask(lambda: len(gateway.gateway.host.queues["q"])) == 5)
        assert held(gateway, "amqp091") == [0]


def test_get_is_refused_beyond_the_messages_of_the_channel() -> None:
    with (
        running(settings_of(limits=Limits(prefetch_max=2))) as gateway,
        Amqp(gateway).open() as client,
    ):
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.publish("", "q", *[b""] * 9)
        for _ in range(4):
            client.say(m.BasicGet("q", no_ack=True))
            client.next(GetResponse)
        for _ in range(2):
            client.say(m.BasicGet("q"))
            last = client.next(GetResponse).method
        client.say(m.BasicAck(last.delivery_tag, False), m.BasicGet("q"))
        client.next(GetResponse)
        client.say(m.BasicGet("q"))
        closed = client.next(ChannelClosed)
        assert (closed.reply_code, "prefetch_max" in closed.text) == (406, True)


@pytest.mark.parametrize(
    "limits, body, count",
    [
        (Limits(transaction_messages_max=3), b"", 3),
        (Limits(transaction_bytes_max=3 * WEIGHT), BODY, 3),
        (Limits(transaction_bytes_max=3 * MESSAGE_BYTES + 6), b"", 3),
    ],
)
def test_a_transaction_is_bounded(limits: Limits, body: bytes, count: int) -> None:
    with running(settings_of(limits=limits)) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.call(m.TxSelect(), m.TxSelectOk)
        for _ in range(2):  # what is committed counts no longer
            client.publish("", "q", *[body] * count)
            client.call(m.TxCommit(), m.TxCommitOk)
        client.publish("", "q", *[body] * (count + 1))
        closed = client.next(ChannelClosed)
        assert (closed.reply_code, "limits.transaction_" in closed.text) == (406, True)
        assert gateway.ask(lambda: len(gateway.gateway.host.queues["q"])) == 2 * count


def test_what_is_acknowledged_in_a_transaction_counts_until_the_commit() -> None:
    with running() as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.publish("", "q", BODY)
        client.call(m.TxSelect(), m.TxSelectOk)
        client.say(m.BasicGet("q"))
        client.say(m.BasicAck(client.next(GetResponse).method.delivery_tag, False))
        client.call(m.QueueDeclare("q", passive=True), m.QueueDeclareOk)
        assert held(gateway, "amqp091") == [WEIGHT]
        client.call(m.TxCommit(), m.TxCommitOk)
        assert held(gateway, "amqp091") == [0]


# AMQP/Fast.


def test_a_fast_consumer_gets_no_more_than_it_may_hold_and_then_the_rest() -> None:
    limits = Limits(unacknowledged_bytes_max=3 * (len(BODY) + MESSAGE_BYTES))
    with running(settings_of(limits=limits)) as gateway, Fast(gateway).open() as client:
        handle = client.handle("q")
        client.consume(handle)
        for _ in range(6):
            client.put(handle, BODY)  # one at a time
        assert len(client.rows(3)) == 3
        assert client.quiet()
        assert held(gateway, "amqpfast")[0] >= 3 * (len(BODY) + MESSAGE_BYTES)
        client.ack(3)
        assert len(client.rows(3)) == 3
        client.ack(6)
        eventually(lambda: held(gateway, "amqpfast") == [0])


@pytest.mark.parametrize("ending", ["close", "unget", "rollback"])
def test_what_returns_to_its_queue_counts_no_longer(ending: str) -> None:
    with (
        running() as gateway,
        Fast(gateway).open(transacted=ending == "rollback") as client,
        Fast(gateway).open() as other,
    ):
        other.put(other.handle("q"), BODY)
        handle = client.handle("q")
        client.consume(handle, prefetch=1)
        client.rows(1)
        assert sum(held(gateway, "amqpfast")) > 0
        client.say(fast.HandleFlow(handle, flow_pause=True))
        if ending == "close":
            client.machine.close_handle(handle)
            client.machine.close_channel(1)
            client.flush()
        elif ending == "unget":
            client.say(fast.HandleUnget(handle, message_number=1))
        else:
            client.say(fast.ChannelRollback(1))
        eventually(lambda: held(gateway, "amqpfast") == [0, 0])


def test_a_fast_transaction_counts_empty_messages() -> None:
    limits = Limits(transaction_bytes_max=4 * MESSAGE_BYTES)
    with running(settings_of(limits=limits)) as gateway, Fast(gateway).open(transacted=True) as client:
        handle = client.handle("q")
        client.put(handle, b"", b"", b"")
        client.put(handle, b"", b"", confirm=False)
        assert client.next(FastChannelClosed).reply_code == 506
