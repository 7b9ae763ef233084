"""Quorum queues after the gateway was killed or stopped: their messages, and how often they came back."""

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

COUNT = "x-delivery-count"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path) as started:
        yield started


@contextmanager
def channel(gateway: GatewayProcess, **arguments: Any) -> Iterator[BlockingChannel]:
    """A channel with confirms, and the queue `q`."""
    connection = pika.BlockingConnection(pika.ConnectionParameters(LOOPBACK, gateway.ports["amqp091"]))
    opened = connection.channel()
    opened.confirm_delivery()
    said = {name.replace("_", "-"): value for name, value in arguments.items()}
    opened.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum", **said})
    yield opened
    with suppress(pika.exceptions.AMQPError):  # the gateway may have been killed meanwhile
        connection.close()


def got(opened: BlockingChannel) -> tuple[int, bytes, int]:
    """The next message: its tag, its body, how often it came back."""
    method, properties, body = opened.basic_get("q")
    assert method is not None
    return method.delivery_tag, body, properties.headers[COUNT]


@pytest.mark.parametrize("kill", [False, True])
def test_counts_of_deliveries_survive(gateway: GatewayProcess, kill: bool) -> None:
    with channel(gateway, x_delivery_limit=2) as opened:
        for body in (b"often", b"never"):
            opened.basic_publish("", "q", body, pika.BasicProperties(delivery_mode=1))
        for returns in (0, 1):
            tag, body, count = got(opened)
            assert (body, count) == (b"often", returns)
            opened.basic_reject(tag, requeue=True)
        opened.basic_publish("", "q", b"last")  # what was said before is on disk when this is confirmed
        if kill:
            gateway.restart()
        else:
            assert gateway.terminate() == 0
            gateway.start()
    with channel(gateway, x_delivery_limit=2) as opened:
        tag, body, count = got(opened)
        assert (body, count) == (b"often", 2)
        opened.basic_reject(tag, requeue=True)  # once too often
        assert [got(opened)[1:] for _ in range(2)] == [(b"never", 0), (b"last", 0)]
        assert opened.basic_get("q")[0] is None


def test_counts_go_with_their_messages_and_queues(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.basic_publish("", "q", b"x")
        opened.basic_reject(got(opened)[0], requeue=True)
        opened.queue_delete("q")
        opened.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
        opened.basic_publish("", "q", b"other")
        assert got(opened)[2] == 0
        gateway.restart()
    with channel(gateway) as opened:
        assert got(opened)[1:] == (b"other", 0)


def test_counts_go_when_the_queue_is_purged_after_a_restart(gateway: GatewayProcess) -> None:
    """Positions begin again in an empty queue: a new message must not get the count of an old one."""
    with channel(gateway, x_delivery_limit=2) as opened:
        opened.basic_publish("", "q", b"old")
        for _ in range(2):
            opened.basic_reject(got(opened)[0], requeue=True)
        assert gateway.terminate() == 0
    gateway.start()
    with channel(gateway, x_delivery_limit=2) as opened:
        opened.queue_purge("q")
        assert gateway.terminate() == 0
    gateway.start()
    with channel(gateway, x_delivery_limit=2) as opened:
        opened.basic_publish("", "q", b"new")
        for returns in range(2):
            tag, body, count = got(opened)
            assert (body, count) == (b"new", returns)
            opened.basic_reject(tag, requeue=True)
