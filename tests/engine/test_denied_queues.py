"""What the cluster denies one client costs the other clients of its replica nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.servers import RabbitMQ

NAMESPACE = "denied"
PATIENT: dict[str, int] = {"consumer_timeout": 1_800_000, "channel_tick_interval": 60_000}
IMPATIENT: dict[str, int] = {"consumer_timeout": 500, "channel_tick_interval": 100}


@pytest.fixture
def full(rabbitmq: RabbitMQ) -> Iterator[Replica]:
    """A replica whose virtual host takes no more queues."""
    one = Replica("full", rabbitmq.url, NAMESPACE)
    with replicas(one):
        rabbitmq.control("set_vhost_limits", '{"max-queues": 1}')
        try:
            yield one
        finally:
            rabbitmq.control("clear_vhost_limits")


@pytest.mark.parametrize("topic_filter", ["denied/x", "$share/group/denied/x"])
def test_a_queue_that_is_not_declared_costs_its_client_alone(
    full: Replica, rabbitmq: RabbitMQ, topic_filter: str
) -> None:
    """Every other client lost messages, and its SUBACK, while the replica connected again and again."""
    connection = full.engine._connection
    with Client(full.mqtt, "other") as other:
        for number in range(3):
            with (
                Client(full.mqtt, "denied") if "$" in topic_filter else lasting(full.mqtt, "denied") as denied
            ):
                if "$" in topic_filter:
                    denied.paho.subscribe(topic_filter, qos=1)
                denied.until(lambda denied=denied: denied.ended)
            other.subscribe(f"denied/{number}", qos=1)
            other.publish(f"denied/{number}", b"x")
            other.until(lambda number=number: other.has_more_than(number))
        assert full.engine._connection is connection
        rabbitmq.control("set_vhost_limits", '{"max-queues": -1}')
        with lasting(full.mqtt, "denied") as accepted:
            accepted.subscribe(topic_filter, qos=1)
            other.publish("denied/x", b"x")
            accepted.until(lambda: accepted.messages)
        assert full.engine._connection is connection


@pytest.fixture
def impatient(rabbitmq: RabbitMQ) -> Iterator[Replica]:
    """A replica over a cluster that does not wait long for acknowledgements."""
    for name, value in IMPATIENT.items():
        rabbitmq.evaluate(f"application:set_env(rabbit, {name}, {value})")
    one = Replica("impatient", rabbitmq.url, NAMESPACE)
    try:
        with replicas(one):
            yield one
    finally:
        for name, value in PATIENT.items():
            rabbitmq.evaluate(f"application:set_env(rabbit, {name}, {value})")


def test_a_client_that_acknowledges_nothing_costs_no_connection(impatient: Replica) -> None:
    """The cluster closes the channel on which the client's queue is consumed, and requeues its message."""
    connection = impatient.engine._connection
    others = [lasting(impatient.mqtt, f"quick-{number}") for number in range(8)]
    with lasting(impatient.mqtt, "slow", ack=False) as slow:
        for one in (*others, slow):
            one.subscribe("denied/slow", qos=1)
        slow.publish("denied/slow", b"x")
        slow.until(lambda: slow.has_more_than(2))
        slow.publish("denied/slow", b"y")
        for one in others:
            one.until(lambda one=one: one.told[-1] == ("denied/slow", b"y"))
            one.leave()
        assert impatient.engine._connection is connection
        slow.acknowledge()
