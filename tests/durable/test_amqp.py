"""What AMQP clients were told is safe, after the gateway was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess

PERSISTENT = pika.BasicProperties(delivery_mode=2)
TRANSIENT = pika.BasicProperties(delivery_mode=1)


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path) as started:
        yield started


@contextmanager
def channel(gateway: GatewayProcess, *, confirm: bool = True) -> Iterator[BlockingChannel]:
    parameters = pika.ConnectionParameters(LOOPBACK, gateway.ports["amqp091"])
    connection = pika.BlockingConnection(parameters)
    opened = connection.channel()
    if confirm:
        opened.confirm_delivery()
    yield opened
    with suppress(pika.exceptions.AMQPError):  # the gateway may have been killed meanwhile
        connection.close()


def publish(to: BlockingChannel, count: int, *, queue: str = "q", first: int = 0) -> None:
    for number in range(first, first + count):
        to.basic_publish("", queue, str(number).encode(), PERSISTENT)


def taken(opened: BlockingChannel, count: int, *, queue: str = "q", ack: bool = True) -> list[int]:
    """`count` messages from a consumer, as numbers."""
    found = []
    for method, _, body in opened.consume(queue, inactivity_timeout=20):
        assert method is not None, f"only {len(found)} of {count} messages came"
        found.append(int(body))
        if ack:
            opened.basic_ack(method.delivery_tag)
        if len(found) == count:
            break
    opened.cancel()
    return found


def test_confirmed_messages_survive_in_order_with_what_they_say(gateway: GatewayProcess) -> None:
    said = pika.BasicProperties(
        delivery_mode=2,
        content_type="text/plain",
        message_id="id-1",
        correlation_id="c",
        headers={"n": 7, "nested": {"a": [1, "two"]}},
    )
    with channel(gateway) as opened:
        opened.queue_declare("q", durable=True)
        opened.basic_publish("", "q", b"first", said)
        publish(opened, 50)
        gateway.restart()
    with channel(gateway) as opened:
        method, properties, body = opened.basic_get("q", auto_ack=True)
        assert (body, method.redelivered) == (b"first", True)
        for name in ("content_type", "message_id", "correlation_id", "headers", "delivery_mode"):
            assert getattr(properties, name) == getattr(said, name)
        assert taken(opened, 50) == list(range(50))


def test_transient_messages_and_what_is_not_durable_are_gone(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("kept", durable=True)
        opened.queue_declare("lost")
        opened.exchange_declare("passing", "direct")
        for mode in (TRANSIENT, PERSISTENT, TRANSIENT):
            opened.basic_publish("", "kept", b"1" if mode is PERSISTENT else b"0", mode)
        opened.basic_publish("", "lost", b"x", PERSISTENT)
    gateway.restart()
    with channel(gateway) as opened:
        assert opened.queue_declare("kept", durable=True, passive=True).method.message_count == 1
        assert taken(opened, 1, queue="kept") == [1]
        for missing in ("queue_declare", "exchange_declare"):
            with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"):
                getattr(opened, missing)("lost" if missing[0] == "q" else "passing", passive=True)
            opened = opened.connection.channel()


def test_definitions_survive_and_so_do_their_ends(gateway: GatewayProcess) -> None:
    arguments: dict[str, Any] = {"x-message-ttl": 3_600_000}
    with channel(gateway) as opened:
        opened.exchange_declare("events", "topic", durable=True)
        opened.exchange_declare("copies", "fanout", durable=True)
        opened.exchange_declare("gone", "fanout", durable=True)
        for queue in ("a", "b", "c", "gone"):
            opened.queue_declare(queue, durable=True, arguments=arguments)
        opened.queue_bind("a", "events", "plant.#")
        opened.queue_bind("b", "events", "plant.*")
        opened.queue_bind("c", "amq.headers", "", {"x-match": "all", "kind": "alarm", "level": 3})
        opened.exchange_bind("copies", "events", "copy")
        opened.queue_bind("b", "copies", "")
        opened.queue_unbind("b", "events", "plant.*")
        opened.queue_delete("gone")
        opened.exchange_delete("gone")
    gateway.restart()
    with channel(gateway) as opened:
        opened.queue_declare("a", durable=True, arguments=arguments)
        opened.exchange_declare("events", "topic", durable=True)
        opened.basic_publish("events", "plant.x", b"1", PERSISTENT)
        opened.basic_publish("events", "copy", b"2", PERSISTENT)
        headers = pika.BasicProperties(delivery_mode=2, headers={"kind": "alarm", "level": 3})
        opened.basic_publish("amq.headers", "", b"3", headers)
        assert [taken(opened, 1, queue=queue) for queue in "abc"] == [[1], [2], [3]]
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="404"):
            opened.queue_declare("gone", passive=True)


def test_what_was_acknowledged_stays_away_and_what_was_not_returns(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("q", durable=True)
        publish(opened, 20)
        opened.basic_qos(prefetch_count=20)
        tags = {}
        for method, _, body in opened.consume("q"):
            tags[int(body)] = method.delivery_tag
            if len(tags) == 20:
                break
        for number in range(0, 20, 2):
            opened.basic_ack(tags[number])
        opened.connection.process_data_events()
        assert gateway.terminate() == 0
    gateway.start()
    with channel(gateway) as opened:
        assert taken(opened, 10) == list(range(1, 20, 2))


def test_purged_and_deleted_messages_stay_away(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("q", durable=True)
        publish(opened, 10)
        assert opened.queue_purge("q").method.message_count == 10
        publish(opened, 1, first=10)
        opened.queue_declare("other", durable=True)
        publish(opened, 3, queue="other")
        opened.queue_delete("other")
        opened.queue_declare("other", durable=True)
    gateway.restart()
    with channel(gateway) as opened:
        assert taken(opened, 1) == [10]
        assert opened.queue_declare("other", durable=True, passive=True).method.message_count == 0


SMALL = {"queue_memory_messages_max": 100}


@pytest.mark.parametrize("restart", [False, True])
def test_a_queue_longer_than_memory_keeps_its_order(tmp_path: Path, restart: bool) -> None:
    with GatewayProcess(tmp_path, limits=SMALL) as gateway:
        with channel(gateway) as opened:
            opened.queue_declare("q", durable=True)
            publish(opened, 1_000)
            if restart:
                gateway.restart()
        with channel(gateway) as opened:
            count = opened.queue_declare("q", durable=True, passive=True).method.message_count
            assert count == 1_000
            got = [opened.basic_get("q", auto_ack=True)[2] for _ in range(300)]
            assert [int(body) for body in got] == list(range(300))
            assert taken(opened, 700) == list(range(300, 1_000))
            publish(opened, 5)
            assert taken(opened, 5) == list(range(5))
            assert opened.queue_declare("q", durable=True, passive=True).method.message_count == 0


def test_a_long_queue_is_purged_whole(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, limits=SMALL) as gateway:
        with channel(gateway) as opened:
            opened.queue_declare("q", durable=True)
            publish(opened, 500)
            assert opened.queue_purge("q").method.message_count == 500
            assert opened.basic_get("q")[0] is None
            publish(opened, 1, first=7)
        gateway.restart()
        with channel(gateway) as opened:
            assert taken(opened, 1) == [7]
