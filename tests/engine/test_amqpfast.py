"""Clients of AMQP/Fast at a replica: an embedded broker of its own, and routes to the topics of all."""

from __future__ import annotations

from gateway.settings import Settings
from tests.configured import make_listener
from tests.engine.replicas import LOOPBACK, Client, Replica, replicas
from tests.ingress.amqpfast.client import QUEUE, TOPIC, Fast
from tests.interop.servers import RabbitMQ


def listening(settings: Settings) -> Settings:
    """The same with a listener of AMQP/Fast."""
    fast = make_listener(protocol="amqpfast", host=LOOPBACK, port=0, negotiation_pause_secs=0.0)
    return settings.model_copy(update={"listeners": settings.listeners | {"amqpfast": fast}})


def test_each_replica_has_queues_of_its_own_and_routes_to_the_topics_of_all(rabbitmq: RabbitMQ) -> None:
    one, other = (Replica(name, rabbitmq.url, "fast") for name in ("one", "other"))
    for replica in (one, other):
        replica._settings = listening(replica._settings)
    with replicas(one, other), Client(other.mqtt, "subscriber") as subscriber:
        subscriber.subscribe("plant/l1", qos=1)
        with Fast(one).open() as sender, Fast(one).open() as here, Fast(other).open() as elsewhere:
            elsewhere.consume(elsewhere.handle("orders", QUEUE))
            here.consume(here.handle("orders", QUEUE))
            sender.put(sender.handle("orders", QUEUE), b"1", b"2")
            assert [row[4] for row in here.rows(2)] == [b"1", b"2"]
            here.ack(2)
            sender.put(sender.handle("plant.l1", TOPIC), b"3")
            subscriber.until(lambda: subscriber.messages)
            assert subscriber.told == [("plant/l1", b"3")]
            queues = {replica: len(replica.gateway.fast_hosts["/"].queues) for replica in (one, other)}
            assert queues == {one: 1, other: 1}
