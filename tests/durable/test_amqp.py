"""What AMQP clients were told is safe, after the gateway was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from gateway.broker.amqp091.definitions import BINDINGS_FEW
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.wrong_clock import Clock

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
    try:
        yield opened
    finally:
        with suppress(pika.exceptions.AMQPError):  # the gateway may have been killed meanwhile
            connection.close()


def publish(to: BlockingChannel, count: int, *, queue: str = "q", first: int = 0) -> None:
    for number in range(first, first + count):
        to.basic_publish("", queue, str(number).encode(), PERSISTENT)


def taken(opened: BlockingChannel, count: int, *, queue: str = "q", ack: bool = True) -> list[int]:
    """`count` messages from a consumer, as numbers."""
    found: list[int] = []
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


@pytest.mark.parametrize("bindings", [1, 2 * BINDINGS_FEW])
def test_the_bindings_of_what_was_deleted_do_not_come_back_with_its_name(
    gateway: GatewayProcess, bindings: int
) -> None:
    """However many they are. Those of others, whose names begin alike, stay."""
    alike = ["gone", "gone 2", 'gone", "']
    with channel(gateway) as opened:
        for name in alike:
            opened.queue_declare(name, durable=True)
            for number in range(bindings):
                opened.queue_bind(name, "amq.topic", f"k.{number}", {"n": number})
        opened.queue_delete(alike[0])
    gateway.restart()
    with channel(gateway) as opened:
        opened.queue_declare(alike[0], durable=True)
        opened.basic_publish("amq.topic", f"k.{bindings - 1}", b"1", PERSISTENT)
        assert [taken(opened, 1, queue=name) for name in alike[1:]] == [[1], [1]]
        assert opened.queue_declare(alike[0], durable=True).method.message_count == 0


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


DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


def declare_dying(opened: BlockingChannel, **arguments: Any) -> None:
    """A durable queue "q" whose dead letters go to a durable queue "dead"."""
    said = {name.replace("_", "-"): value for name, value in arguments.items()}
    opened.queue_declare("dead", durable=True)
    opened.queue_declare("q", durable=True, arguments=DEAD | said)


def deaths(opened: BlockingChannel, count: int) -> list[tuple[int, str, int]]:
    """Body, reason and count of the first deaths of the letters in "dead"."""
    found: list[tuple[int, str, int]] = []
    for method, properties, body in opened.consume("dead", inactivity_timeout=20, auto_ack=True):
        assert method is not None, f"only {len(found)} of {count} letters came"
        death = properties.headers["x-death"][0]
        assert (properties.headers["x-first-death-queue"], death["queue"]) == ("q", "q")
        found.append((int(body), death["reason"], death["count"]))
        if len(found) == count:
            break
    opened.cancel()
    return found


def test_arguments_of_queues_and_exchanges_hold_after_a_restart(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.exchange_declare("rest", "fanout", durable=True)
        opened.exchange_declare("first", "direct", durable=True, arguments={"alternate-exchange": "rest"})
        declare_dying(opened, x_max_length=2)
        opened.queue_declare("levels", durable=True, arguments={"x-max-priority": 5})
        opened.queue_bind("levels", "rest")
    gateway.restart()
    with channel(gateway) as opened:
        declare_dying(opened, x_max_length=2)
        opened.exchange_declare("first", "direct", durable=True, arguments={"alternate-exchange": "rest"})
        publish(opened, 4)
        assert deaths(opened, 2) == [(0, "maxlen", 1), (1, "maxlen", 1)]
        for level in (1, 4, 2):
            said = pika.BasicProperties(delivery_mode=2, priority=level)
            opened.basic_publish("first", "unbound", str(level).encode(), said)
        assert taken(opened, 3, queue="levels") == [4, 2, 1]
        with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="406"):
            opened.queue_declare("q", durable=True)


def test_dead_letters_and_their_history_survive_and_their_messages_do_not(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        declare_dying(opened)
        publish(opened, 3)
        for _ in range(3):
            method, _, _ = opened.basic_get("q")
            opened.basic_reject(method.delivery_tag, requeue=False)
        assert opened.queue_declare("dead", passive=True).method.message_count == 3
        opened.queue_declare("unrelated", durable=True)
        publish(opened, 1, queue="unrelated")  # confirmed behind the letters
    gateway.restart()
    with channel(gateway) as opened:
        assert opened.queue_declare("q", passive=True).method.message_count == 0
        assert deaths(opened, 3) == [(number, "rejected", 1) for number in range(3)]


def test_what_expires_while_the_gateway_is_down_becomes_a_dead_letter_when_it_is_back(
    gateway: GatewayProcess,
) -> None:
    with channel(gateway) as opened:
        declare_dying(opened, x_message_ttl=300)
        publish(opened, 5)
    gateway.restart()
    with channel(gateway) as opened:
        assert deaths(opened, 5) == [(number, "expired", 1) for number in range(5)]
        assert opened.queue_declare("q", passive=True).method.message_count == 0


def test_a_committed_transaction_survives_and_an_open_one_does_not(gateway: GatewayProcess) -> None:
    with channel(gateway, confirm=False) as opened:
        opened.queue_declare("q", durable=True)
        opened.tx_select()
        publish(opened, 3)
        opened.tx_commit()
        method, _, _ = opened.basic_get("q")
        opened.basic_ack(method.delivery_tag)
        publish(opened, 1, first=3)
        opened.tx_commit()
        method, _, _ = opened.basic_get("q")
        opened.basic_ack(method.delivery_tag)
        publish(opened, 1, first=4)
        gateway.restart()
    with channel(gateway) as opened:
        assert taken(opened, 3) == [1, 2, 3]
        assert opened.queue_declare("q", durable=True, passive=True).method.message_count == 0


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


@pytest.fixture
def wrong(tmp_path: Path, clock: Clock) -> Iterator[GatewayProcess]:
    """A small gateway that goes by the clock."""
    made = GatewayProcess(tmp_path / "gateway", limits=SMALL)
    made.clock = clock
    with made:
        yield made


HOUR_SECS: Final = 3_600.0
HALF_AN_HOUR_MS: Final = 1_800_000


def test_what_expired_while_the_gateway_was_down_becomes_dead_letters(
    wrong: GatewayProcess, clock: Clock
) -> None:
    """Of the queue that they go to, most waits on disk alone."""
    with channel(wrong) as opened:
        declare_dying(opened, x_max_length=400, x_message_ttl=HALF_AN_HOUR_MS)
        publish(opened, 500)
        wrong.kill()
    clock.advance(HOUR_SECS)
    wrong.start()
    with channel(wrong) as opened:
        assert [number for number, _, _ in deaths(opened, 500)] == list(range(500))


@pytest.mark.parametrize("restart", [False, True])
def test_a_limit_and_a_time_to_live_hold_for_what_waits_on_disk(
    wrong: GatewayProcess, clock: Clock, restart: bool
) -> None:
    with channel(wrong) as opened:
        declare_dying(opened, x_max_length=400, x_message_ttl=HALF_AN_HOUR_MS)
        publish(opened, 500)
        if restart:
            wrong.kill()
    clock.advance(HOUR_SECS)
    if restart:
        wrong.start()
    with channel(wrong) as opened:
        while opened.queue_declare("q", passive=True).method.message_count:
            assert opened.basic_get("q")[0] is None  # which is when it looks at the clock
        found = deaths(opened, 500)
        assert [number for number, _, _ in found] == list(range(500))
        assert {reason for _, reason, _ in found[:100]} == {"maxlen"}
        assert {reason for _, reason, _ in found[100:]} == {"expired"}


def delayed(secs: float, *, mode: int = 2) -> pika.BasicProperties:
    return pika.BasicProperties(delivery_mode=mode, headers={"x-delay": int(secs * 1_000)})


@pytest.mark.parametrize("killed", [False, True])
def test_what_an_exchange_delays_survives_and_comes_when_it_is_due(tmp_path: Path, killed: bool) -> None:
    """A message that was due while the gateway was away comes at once, one that is not due later."""
    time = Clock(tmp_path / "clock")
    gateway = GatewayProcess(tmp_path / "gateway")
    gateway.clock = time

    def restart() -> None:
        if killed:
            gateway.kill()
        else:
            assert gateway.terminate() == 0
        gateway.start()

    with gateway:
        with channel(gateway) as opened:
            opened.exchange_declare(
                "d", "x-delayed-message", durable=True, arguments={"x-delayed-type": "topic"}
            )
            opened.queue_declare("q", durable=True)
            opened.queue_bind("q", "d", "a.*")
            for body, secs in {b"10": 7 * 86_400, b"1": 3_600, b"2": 86_400}.items():
                opened.basic_publish("d", "a.b", body, delayed(secs), mandatory=True)
            opened.basic_publish("d", "a.b", b"0", delayed(600, mode=1))
            opened.queue_purge("q")
            restart()
        with channel(gateway) as opened:
            time.advance(7_200)
            assert taken(opened, 1) == [1]  # while it runs
            opened.queue_declare("later", durable=True)
            publish(opened, 1, queue="later")  # confirmed when the acknowledgement is on disk as well
        time.advance(2 * 86_400)
        restart()
        with channel(gateway) as opened:
            method, properties, body = next(opened.consume("q", inactivity_timeout=20))
            assert (body, method.redelivered) == (b"2", False)
            assert properties.headers == {"x-delay": -86_400_000}
            opened.basic_ack(method.delivery_tag)
            opened.cancel()
            opened.exchange_delete("d")
        time.advance(30 * 86_400)
        restart()
        with channel(gateway) as opened:
            assert opened.queue_declare("q", passive=True).method.message_count == 0
