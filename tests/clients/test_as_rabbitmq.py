"""What programs written for RabbitMQ meet: the same program against it and against the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pika
import pytest

from gateway import __version__
from tests.clients.peers import PATIENCE_SECS
from tests.configured import make_listener
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import RabbitMQ


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


def said_by(url: str) -> dict[str, Any]:
    """The server-properties."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        said: dict[str, Any] = connection._impl.server_properties
        return said


def test_the_listener_says_what_programs_look_for(gateway: Running, rabbitmq: RabbitMQ) -> None:
    ours, theirs = said_by(gateway.amqp_url), said_by(rabbitmq.url)
    for name in ("product", "capabilities"):
        assert ours[name] == theirs[name]
    assert ours["version"].split(".")[:2] == theirs["version"].split(".")[:2]
    assert "gateway" in ours["information"]


def test_the_listener_says_its_own_name_when_asked_to() -> None:
    settings = settings_of(
        listeners={"amqp091": make_listener(protocol="amqp091", host=LOOPBACK, port=0, announce="gateway")}
    )
    with running(settings) as gateway:
        said = said_by(gateway.amqp_url)
    assert (said["product"], said["version"]) == ("gateway", __version__)
    assert said["capabilities"]["per_consumer_qos"]


def test_a_message_that_always_fails_leaves_its_quorum_queue(url: str) -> None:
    """As the frameworks declare it: dead letters behind a delivery limit, arguments of one's own beside."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.queue_declare("poison", durable=True, arguments={"x-queue-type": "quorum"})
        arguments = {
            "x-queue-type": "quorum",
            "x-delivery-limit": 3,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "poison",
            "x-framework-version": "7.1",
        }
        channel.queue_declare("work", durable=True, arguments=arguments)
        channel.confirm_delivery()
        channel.basic_publish("", "work", b"fails")
        counts: list[object] = []

        def fail(_: object, method: pika.spec.Basic.Deliver, said: pika.BasicProperties, body: bytes) -> None:
            counts.append((said.headers or {}).get("x-delivery-count"))
            channel.basic_nack(method.delivery_tag, requeue=True)

        channel.basic_consume("work", fail)
        dead = next(connection.channel().consume("poison", auto_ack=True, inactivity_timeout=PATIENCE_SECS))
        assert counts == [None, 1, 2, 3]
        assert dead[1].headers["x-first-death-reason"] == "delivery_limit"
        assert dead[2] == b"fails"
        for queue in ("work", "poison"):
            channel.queue_delete(queue)
