"""A route that deduplicates: a repeat is accepted and goes no further, also after the gateway was killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from tests.durable.outboxes.test_outbox import (
    channel,
    declare,
    fetch,
    gateway_to,
    nowhere,
    route,
    until,
    url_of,
)
from tests.durable.outboxes.test_outbox import status as status_of
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import RabbitMQ

QUEUE = "once"


@pytest.fixture(params=["confirmed", "stored"])
def gateway(request: pytest.FixtureRequest, rabbitmq: RabbitMQ, tmp_path: Path) -> Iterator[GatewayProcess]:
    declare(rabbitmq, QUEUE)
    mapping = route(settle=request.param, more="\n    deduplicate: {by: message_id, window: 10m}")
    with gateway_to(rabbitmq, tmp_path, mapping) as started:
        yield started


def publish(gateway: GatewayProcess, *numbers: int) -> None:
    """Each with its number as its id; confirmed when this returns."""
    with channel(url_of(gateway)) as opened:
        for number in numbers:
            said = pika.BasicProperties(delivery_mode=2, message_id=str(number))
            opened.basic_publish("amq.topic", f"out.{QUEUE}", str(number).encode(), said)


def test_repeats_are_known_after_a_crash(gateway: GatewayProcess, rabbitmq: RabbitMQ) -> None:
    publish(gateway, 1, 2, 2, 1)
    until(lambda: not any(one["messages"] for one in status_of(gateway)["outboxes"]))
    gateway.restart()
    publish(gateway, 2, 3, 1)
    assert fetch(rabbitmq, QUEUE, 3) == [1, 2, 3]
    (counted,) = status_of(gateway)["routes"]
    assert counted["duplicates"] == 2


def test_ids_and_messages_in_an_outbox_survive_together(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    declare(rabbitmq, QUEUE)
    mapping = route(more="\n    deduplicate: {window: 10m}")
    with gateway_to(rabbitmq, tmp_path, mapping, url=nowhere()) as gateway:
        publish(gateway, *range(50))
        gateway.restart()
        publish(gateway, *range(25, 75))
        gateway.configuration["links"]["erp"]["url"] = rabbitmq.url
        gateway.restart()
        assert fetch(rabbitmq, QUEUE, 75) == list(range(75))
