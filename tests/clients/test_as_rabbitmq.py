"""What programs written for RabbitMQ meet: the same program against it and against the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pika
import pytest

from tests.clients.peers import PATIENCE_SECS
from tests.interop.gateway_fixture import running


@pytest.fixture(params=["gateway", "rabbitmq"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the program connects to."""
    if request.param == "rabbitmq":
        yield request.getfixturevalue("rabbitmq").url
        return
    with running() as gateway:
        yield gateway.amqp_url


@pytest.mark.parametrize("acknowledging", ["each", "all together"])
def test_prefetch_for_the_channel_serves_every_queue(url: str, acknowledging: str) -> None:
    queues = [f"shared-{number}" for number in range(3)]
    heard: dict[str, int] = dict.fromkeys(queues, 0)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for queue in queues:
            channel.queue_declare(queue, exclusive=True)
            for number in range(30):
                channel.basic_publish("", queue, str(number).encode())
        channel.basic_qos(prefetch_count=10, global_qos=True)
        for queue in queues:

            def take(_: object, method: pika.spec.Basic.Deliver, *said: object, queue: str = queue) -> None:
                heard[queue] += 1
                if acknowledging == "each":
                    channel.basic_ack(method.delivery_tag)
                elif sum(heard.values()) % 10 == 0:
                    channel.basic_ack(method.delivery_tag, multiple=True)

            channel.basic_consume(queue, take)
        deadline = time.monotonic() + PATIENCE_SECS
        while sum(heard.values()) < 90 and time.monotonic() < deadline:
            connection.process_data_events(1.0)
    assert heard == dict.fromkeys(queues, 30)
