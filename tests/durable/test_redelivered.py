"""What is called redelivered after a restart: as at RabbitMQ, what was delivered before, or may have been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess

PERSISTENT = pika.BasicProperties(delivery_mode=2)


class Broker(NamedTuple):
    """Where it is now, and how it is stopped, politely or not, and started again."""

    port: Callable[[], int]
    restart: Callable[[bool], None]


@pytest.fixture(params=["gateway", "rabbitmq"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    if request.param == "rabbitmq":
        theirs: Any = request.getfixturevalue("rabbitmq")

        def again(kill: bool) -> None:
            theirs.stop(kill)
            theirs.start()

        yield Broker(lambda: theirs.port, again)
        return
    with GatewayProcess(tmp_path) as ours:

        def restart(kill: bool) -> None:
            if kill:
                ours.kill()
            else:
                assert ours.terminate() == 0
            ours.start()

        yield Broker(lambda: ours.ports["amqp091"], restart)


@contextmanager
def channel(broker: Broker) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.ConnectionParameters(LOOPBACK, broker.port()))
    opened = connection.channel()
    opened.confirm_delivery()
    yield opened
    with suppress(pika.exceptions.AMQPError):  # the broker has been stopped meanwhile, perhaps
        connection.close()


def flags(opened: BlockingChannel, queue: str, count: int) -> list[tuple[bytes, bool]]:
    """What is in the queue, and whether it is redelivered; taken by a consumer, as many messages together."""
    found: list[tuple[bytes, bool]] = []
    for method, _, body in opened.consume(queue, inactivity_timeout=20):
        assert method is not None, found
        found.append((body, method.redelivered))
        if len(found) == count:
            opened.cancel()
            return found
    raise AssertionError(found)


@pytest.mark.parametrize("arguments", [{}, {"x-max-priority": 3}], ids=["plain", "with priorities"])
def test_what_nobody_was_handed_is_not(broker: Broker, arguments: dict[str, Any]) -> None:
    queue = f"touched-{len(arguments)}"
    first = b"b" if arguments else b"a"
    with channel(broker) as opened:
        opened.queue_declare(queue, durable=True, arguments=arguments)
        for priority, body in ((1, b"a"), (3, b"b"), (1, b"c"), (1, b"d")):
            said = pika.BasicProperties(delivery_mode=2, priority=priority)
            opened.basic_publish("", queue, body, said)
        assert opened.basic_get(queue)[2] == first
        broker.restart(False)
    with channel(broker) as opened:
        expected = [(first, True)] + [(body, False) for body in (b"a", b"b", b"c", b"d") if body != first]
        assert flags(opened, queue, 4) == expected


def test_it_stays_so_over_several_restarts(broker: Broker) -> None:
    with channel(broker) as opened:
        opened.queue_declare("often", durable=True)
        for body in (b"a", b"b"):
            opened.basic_publish("", "often", body, PERSISTENT)
        broker.restart(False)
    with channel(broker) as opened:
        opened.basic_publish("", "often", b"c", PERSISTENT)
        assert opened.basic_get("often")[0].redelivered is False
        broker.restart(False)
    with channel(broker) as opened:
        assert flags(opened, "often", 3) == [(b"a", True), (b"b", False), (b"c", False)]


def test_after_a_kill_nobody_knows(broker: Broker) -> None:
    with channel(broker) as opened:
        opened.queue_declare("killed", durable=True)
        opened.basic_publish("", "killed", b"a", PERSISTENT)
        broker.restart(False)  # what was noted then holds no longer
    with channel(broker) as opened:
        opened.basic_get("killed")
        broker.restart(True)
    with channel(broker) as opened:
        assert opened.basic_get("killed")[0].redelivered is True
        opened.queue_delete("killed")
