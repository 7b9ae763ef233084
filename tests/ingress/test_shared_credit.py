"""Credit that consumers share, of a channel or of a connection, serves all of their queues in turn."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.ingress.amqp091 import channel
from gateway.protocols.amqp091 import methods as m
from gateway.settings import Limits
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_fixture import running, settings_of

QUEUES = ("a", "b", "c")
COUNT = 20
LARGE = bytes(300_000)  # four of them congest a stream
A_LONG_TIME = 3_600.0


def filled(client: Amqp, body: bytes, **more: Any) -> None:
    """All queues with messages, and a consumer of each."""
    for name in QUEUES:
        client.call(m.QueueDeclare(name), m.QueueDeclareOk)
        client.publish("", name, *[body] * COUNT)
    client.say(*[m.BasicConsume(name, name, no_wait=True, **more) for name in QUEUES])


def order(client: Amqp, *, acknowledged: bool) -> list[str]:
    """Which queues the messages come from, in order; each is acknowledged as it comes."""
    found: list[str] = []
    while len(found) < COUNT * len(QUEUES):
        for _, tag, number, *_ in client.delivered(1):
            found.append(tag[1:].decode())
            if acknowledged:
                client.say(m.BasicAck(number))
    return found


def in_turn(found: list[str]) -> bool:
    """Whether nobody had all of its messages before another had a quarter of them: large ones come in runs,
    as the socket takes them.
    """
    return all(
        min(Counter(found[:at])[name] for name in QUEUES) >= COUNT // 4
        for at, name in enumerate(found)
        if Counter(found[:at])[name] == COUNT - 1
    )


def test_the_credit_of_a_channel() -> None:
    with running() as gateway, Amqp(gateway).open() as client:
        client.call(m.BasicQos(0, 3, True), m.BasicQosOk)
        filled(client, b"")
        assert in_turn(order(client, acknowledged=True))


def test_the_credit_of_a_channel_with_two_consumers_of_each_queue() -> None:
    with running() as gateway, Amqp(gateway).open() as client:
        client.call(m.BasicQos(0, 1, True), m.BasicQosOk)
        filled(client, b"")
        client.say(*[m.BasicConsume(name, f"{name}'", no_wait=True) for name in QUEUES])
        found = [name[0] for name in order(client, acknowledged=True)]
        assert in_turn(found)


def test_the_bytes_of_a_connection() -> None:
    limits = Limits(unacknowledged_bytes_max=4 * len(LARGE))
    with running(settings_of(limits=limits)) as gateway, Amqp(gateway).open() as client:
        filled(client, LARGE)
        assert in_turn(order(client, acknowledged=True))


def test_a_client_that_reads_slowly() -> None:
    with running() as gateway, Amqp(gateway).open() as client:
        filled(client, LARGE, no_ack=True)
        assert in_turn(order(client, acknowledged=False))


@pytest.mark.parametrize("more", [4, 0])
def test_more_credit_is_used_a_moment_after_the_answer(more: int) -> None:
    with running() as gateway, Amqp(gateway).open() as client:
        waiting_for_credit(client)
        client.call(m.BasicQos(0, more, True), m.BasicQosOk)
        assert [row[2] for row in client.delivered(2)] == [3, 4]


def test_what_came_at_the_heels_of_the_answer_would_be_read_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More credit, and then less again: the former has no effect any more, whatever becomes of its time."""
    monkeypatch.setattr(channel, "RAISE_SECS", A_LONG_TIME)
    with running() as gateway, Amqp(gateway).open() as client:
        waiting_for_credit(client)
        client.call(m.BasicQos(0, 4, True), m.BasicQosOk)
        assert ready(client) == 2
        client.call(m.BasicQos(0, 1, True), m.BasicQosOk)
        client.say(m.BasicAck(1))
        assert ready(client) == 2
        client.say(m.BasicAck(2))
        assert [row[2] for row in client.delivered(1)] == [3]


def test_more_credit_that_nothing_waits_for_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "RAISE_SECS", A_LONG_TIME)
    with running() as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("a"), m.QueueDeclareOk)
        client.call(m.BasicQos(0, 1, True), m.BasicQosOk)
        client.say(m.BasicConsume("a", "a", no_wait=True))
        client.call(m.BasicQos(0, 2, True), m.BasicQosOk)
        client.publish("", "a", b"", b"")
        assert len(client.delivered(2)) == 2


def waiting_for_credit(client: Amqp) -> None:
    """A queue of four messages, two of which its consumer has, as its channel allows."""
    client.call(m.QueueDeclare("a"), m.QueueDeclareOk)
    client.publish("", "a", *[b""] * 4)
    client.call(m.BasicQos(0, 2, True), m.BasicQosOk)
    client.say(m.BasicConsume("a", "a", no_wait=True))
    assert len(client.delivered(2)) == 2


def ready(client: Amqp) -> int:
    """The messages that wait in the queue."""
    return client.call(m.QueueDeclare("a", passive=True), m.QueueDeclareOk).message_count
