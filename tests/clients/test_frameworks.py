"""Frameworks for AMQP 0-9-1, each in a program of its own that RabbitMQ and the gateway must answer alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pika

from tests.clients.peers import Paho
from tests.clients.programs import HERE, java, on_both, program
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.interop.servers import RabbitMQ


def test_faststream(gateway: Running, rabbitmq: RabbitMQ) -> None:
    """aio-pika underneath: JSON, RPC by direct reply-to, topics, nacks, returns, its own reconnect."""
    on_both([sys.executable, HERE / "python/faststream/main.py"], gateway, rabbitmq)


def test_amqp_connection_manager(gateway: Running, rabbitmq: RabbitMQ) -> None:
    """As NestJS uses it, over amqplib: setups that are done again, and what was kept back meanwhile."""
    on_both(["node", program("amqp-connection-manager") / "main.js"], gateway, rabbitmq)


def test_spring_amqp(gateway: Running, rabbitmq: RabbitMQ) -> None:
    """Listeners, correlated confirms and returns, RPC, retries and dead letters, transactions, recovery."""
    on_both(java("SpringAmqp"), gateway, rabbitmq)


def test_masstransit_names(gateway: Running, rabbitmq: RabbitMQ) -> None:
    """What MassTransit declares, by way of pika: types as exchanges, endpoints, errors, responses."""
    on_both([sys.executable, HERE / "python/masstransit/main.py"], gateway, rabbitmq)


CREATED: Final = "Shop.Contracts:OrderCreated"
BY_TYPE: Final = """
version: 1
routes:
  - name: told
    from: {endpoint: amqp091, exchange: "Shop.Contracts:OrderCreated"}
    to: {endpoint: mqtt, topic: shop/orders/created}
  - name: taken
    from: {endpoint: mqtt, topic: "shop/orders/new/{number}"}
    to: {endpoint: amqp091, exchange: "Shop.Contracts:OrderCreated"}
    headers: {order: "{number}"}
"""


def test_a_message_type_crosses_to_mqtt_and_back(tmp_path: Path) -> None:
    """What a device sends reaches the endpoints of a type; what a service publishes reaches devices."""
    (mapping := tmp_path / "mapping.yaml").write_text(BY_TYPE)
    with (
        running(settings_of(mappings=(str(mapping),))) as gateway,
        pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection,
        Paho(gateway, "5.0") as device,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        for exchange in (CREATED, "order-created"):
            channel.exchange_declare(exchange, "fanout", durable=True)
        channel.exchange_bind("order-created", CREATED)
        channel.queue_declare("order-created", durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_bind("order-created", "order-created", "")
        device.subscribe("shop/orders/created", 1)

        assert device.publish("shop/orders/new/7", b"{}", 2) == 0
        method, said, body = channel.basic_get("order-created", auto_ack=True)
        assert method is not None, "its publisher has been told that it is there"
        assert (method.exchange, method.routing_key, body) == (CREATED, "", b"{}")
        assert (said.delivery_mode, said.headers["order"]) == (2, "7")

        envelope = pika.BasicProperties(content_type="application/vnd.masstransit+json", delivery_mode=2)
        channel.basic_publish(CREATED, "", b'{"message": 8}', envelope)
        message = device.message()
        assert (message.topic, message.payload, message.qos) == ("shop/orders/created", b'{"message": 8}', 1)
        assert message.properties is not None
        assert message.properties.ContentType == "application/vnd.masstransit+json"
        assert device.messages.empty(), "what came from a device does not go back"
        assert channel.basic_get("order-created", auto_ack=True)[2] == b'{"message": 8}'
