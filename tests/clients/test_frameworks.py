"""Frameworks for AMQP 0-9-1, each in a program of its own that RabbitMQ and the gateway must answer alike."""

from __future__ import annotations

import sys

from tests.clients.programs import HERE, java, on_both, program
from tests.interop.gateway_fixture import Running
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
