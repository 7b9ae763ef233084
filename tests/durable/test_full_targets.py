"""A target queue of a real RabbitMQ that is full (`x-overflow: reject-publish`): nothing is lost or a dead
letter, and all of it arrives when there is room, once and in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pika
import pytest

from tests.durable.outboxes.test_outbox import channel, status, until
from tests.durable.test_dead_letters import listed
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import RabbitMQ, free_ports

COUNT: Final = 3_000
ROOM: Final = 100
ROUTE: Final = """
version: 1
routes:
  - name: across
    from: {endpoint: from, queue: full.source}
    to: {endpoint: to, queue: full.target}
"""
PERSISTENT: Final = pika.BasicProperties(delivery_mode=2)


@contextmanager
def bridge(rabbitmq: RabbitMQ, folder: Path, mapping: str) -> Iterator[GatewayProcess]:
    (folder / "mapping.yaml").write_text(mapping)
    (http,) = free_ports(1)
    link = {"url": rabbitmq.url, "reconnect_min_secs": 0.1, "reconnect_max_secs": 0.5}
    with GatewayProcess(
        folder,
        listeners={},
        links={"from": link, "to": link},
        mappings=[str(folder / "mapping.yaml")],
        http={"host": LOOPBACK, "port": http},
        drain_timeout_secs=2,
    ) as started:
        yield started


@pytest.fixture
def queues(rabbitmq: RabbitMQ) -> Iterator[None]:
    """The source with all messages, and the target, which is empty."""
    with channel(rabbitmq.url) as opened:
        opened.queue_declare("full.source", durable=True)
        opened.queue_declare(
            "full.target", durable=True, arguments={"x-max-length": ROOM, "x-overflow": "reject-publish"}
        )
        for number in range(COUNT):
            opened.basic_publish("", "full.source", b"%d" % number, PERSISTENT)
    yield
    with channel(rabbitmq.url) as opened:
        opened.queue_delete("full.source")
        opened.queue_delete("full.target")


def count(rabbitmq: RabbitMQ, queue: str) -> int:
    with channel(rabbitmq.url) as opened:
        found: int = opened.queue_declare(queue, passive=True).method.message_count
        return found


def consumed(rabbitmq: RabbitMQ, most: int) -> list[int]:
    """What comes out of the target, until so many messages have."""
    found: list[int] = []
    with channel(rabbitmq.url) as opened:
        opened.basic_qos(prefetch_count=200)
        for method, _, body in opened.consume("full.target", inactivity_timeout=60):
            if method is None:
                break
            found.append(int(body))
            opened.basic_ack(method.delivery_tag)
            if len(found) >= most:
                break
    return found


def retried(gateway: GatewayProcess) -> int:
    (route,) = status(gateway)["routes"]
    found: int = route["retried"]
    return found


@pytest.mark.parametrize("more", ["", "    on_reject: retry\n", "    settle: stored\n"])
def test_a_full_target_costs_no_message(rabbitmq: RabbitMQ, tmp_path: Path, queues: None, more: str) -> None:
    with bridge(rabbitmq, tmp_path, ROUTE + more) as gateway:
        until(lambda: retried(gateway) >= 3)
        assert count(rabbitmq, "full.target") == ROOM
        assert listed(gateway) == []
        gateway.restart()
        until(lambda: retried(gateway) >= 3)
        found = consumed(rabbitmq, COUNT)
        assert sorted(set(found)) == list(range(COUNT))
        assert len(found) == COUNT, "each once"
        assert found[: 2 * ROOM] == list(range(2 * ROOM)), "in order"
        late = max(abs(number - at) for at, number in enumerate(found))
        assert late < ROOM, "what was on its way with a refused message may be accepted before it"
        until(lambda: count(rabbitmq, "full.source") == 0)
        assert listed(gateway) == []
        assert count(rabbitmq, "full.target") == 0
