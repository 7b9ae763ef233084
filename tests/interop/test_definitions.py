"""What a real RabbitMQ exports of itself is declared here, and messages find their way as they did there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import PeerMissingError, RabbitMQ

QUEUES: Final[dict[str, dict[str, Any]]] = {
    "orders": {"x-queue-type": "quorum", "x-delivery-limit": 3},
    "late": {"x-message-ttl": 60_000, "x-dead-letter-exchange": "dead", "x-max-priority": 5},
    "dead: é/1": {"x-max-length": 10, "x-overflow": "reject-publish", "x-queue-mode": "lazy"},
    "marked": {},
    "noted": {"of-mine": [1, "two", None, {"deep": True}]},
}
EXCHANGES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "shop": ("topic", {"alternate-exchange": "dead"}),
    "dead": ("fanout", {}),
    "marks": ("headers", {}),
}
BINDINGS: Final = [
    ("shop", "orders", "order.#", {}),
    ("amq.topic", "late", "*.late", {}),
    ("dead", "dead: é/1", "", {}),
    ("marks", "marked", "", {"x-match": "any", "kind": "x", "number": 7}),
]


def declare_all(channel: BlockingChannel) -> None:
    for name, (kind, arguments) in EXCHANGES.items():
        channel.exchange_declare(name, kind, durable=True, arguments=arguments)
    for name, arguments in QUEUES.items():
        channel.queue_declare(name, durable=True, arguments=arguments)
    for exchange, queue, key, arguments in BINDINGS:
        channel.queue_bind(queue, exchange, key, arguments)
    channel.exchange_bind("shop", "amq.topic", "order.*")
    channel.queue_declare("passing", exclusive=True)
    channel.queue_bind("passing", "amq.topic", "#")


def test_what_rabbitmq_exports_is_declared_here(tmp_path: Path) -> None:
    try:
        rabbit = RabbitMQ(tmp_path / "rabbit")
    except PeerMissingError as error:
        missing(str(error))
    file = tmp_path / "definitions.json"
    with rabbit:
        rabbit.control("add_vhost", "elsewhere")
        rabbit.control("set_policy", "short", ".*", '{"max-length": 5}')
        with pika.BlockingConnection(pika.URLParameters(rabbit.url)) as connection:
            declare_all(connection.channel())
            rabbit.control("export_definitions", str(file))  # while there is a queue that is not exported
    exported = json.loads(file.read_text())
    assert {queue["name"] for queue in exported["queues"]} == QUEUES.keys()
    with GatewayProcess(tmp_path / "gateway", declare={"definitions": str(file)}) as gateway:
        for _ in range(2):
            assert "ignored" in gateway.log
            with pika.BlockingConnection(
                pika.ConnectionParameters(LOOPBACK, gateway.port("amqp091"))
            ) as connection:
                channel = connection.channel()
                declare_all(channel)  # what programs declare is what is there
                channel.confirm_delivery()
                for exchange, key, headers, queue in (
                    ("shop", "order.new", {}, "orders"),
                    ("amq.topic", "order.again", {}, "orders"),
                    ("amq.topic", "x.late", {}, "late"),
                    ("shop", "nobody's", {}, "dead: é/1"),
                    ("marks", "", {"number": 7}, "marked"),
                    ("", "noted", {}, "noted"),
                ):
                    body = f"{exchange} {key}".encode()
                    properties = pika.BasicProperties(headers=headers)
                    channel.basic_publish(exchange, key, body, properties, mandatory=True)
                    assert channel.basic_get(queue, auto_ack=True)[2] == body
                with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="inequivalent arg"):
                    channel.queue_declare("late", durable=True, arguments={"x-message-ttl": 1})
            gateway.restart()
    checked = gateway.command("check", "--config", str(gateway.folder / "gateway.yaml"))
    assert f"{file}: note: ignored, because the gateway does not support it: " in checked
    assert all(word in checked for word in ("users (1)", "permissions (1)", "policies (1)"))
    assert "bindings whose exchange or queue is not in the export (1)" in checked
    assert ": error: " not in checked
