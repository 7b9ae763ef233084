"""The queue of a session goes with it, whoever is lost or late when the session ends."""

from __future__ import annotations

from collections.abc import Iterator

import pika
import pytest

from gateway.state import sessions
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.engine.test_elections import until
from tests.interop.servers import RabbitMQ


@pytest.fixture
def pair(rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Replica, Proxy]]:
    """Two replicas; the first one reaches the cluster by a proxy."""
    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        two = Replica("one", url, "queues"), Replica("other", rabbitmq.url, "queues")
        with replicas(*two):
            yield *two, way


def queue_of(replica: Replica, client: str) -> str:
    ((queue,),) = replica.stored("session", client, "queue")
    assert isinstance(queue, str)
    return queue


def is_there(rabbitmq: RabbitMQ, queue: str) -> bool:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        try:
            connection.channel().queue_declare(queue, passive=True)
        except pika.exceptions.ChannelClosedByBroker:
            return False
        return True


@pytest.mark.parametrize("how", ["left", "clean"])
def test_it_goes_with_a_session(pair: tuple[Replica, Replica, Proxy], rabbitmq: RabbitMQ, how: str) -> None:
    one, other, _ = pair
    name = f"goes-{how}"
    with lasting(one.mqtt, name, secs=1 if how == "left" else 300) as client:
        client.subscribe("queues/x", qos=1)
        queue = queue_of(one, name)
        assert is_there(rabbitmq, queue)
    if how == "clean":
        Client(other.mqtt, name, clean=True).leave()
    until(lambda: not is_there(rabbitmq, queue))


def test_a_late_owner_does_not_declare_it_again(
    pair: tuple[Replica, Replica, Proxy], rabbitmq: RabbitMQ
) -> None:
    """It hears that its consumer is cancelled, and perhaps only then why."""
    one, other, way = pair
    with lasting(one.mqtt, "late") as client:
        client.subscribe("queues/late", qos=1)
        queue = queue_of(one, "late")
        one.until(lambda: any(it.has_channel for it in one.engine._connection.consumers._consumers.values()))
        way.stall("down")
        Client(other.mqtt, "late", clean=True).leave()
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
            connection.channel().queue_delete(queue)  # as a replica does whose claim to it is later
        consumers = one.ask(lambda: one.engine._connection.consumers)
        (found,) = [it for it in consumers._consumers.values() if it.target.queue == queue]
        one.ask(lambda: consumers._cancelled_by_broker(found.channel, found.name))
        way.resume()
        client.until(lambda: client.ended)
        until(lambda: not is_there(rabbitmq, queue))


def test_others_delete_what_the_one_that_ended_it_has_not(
    pair: tuple[Replica, Replica, Proxy], rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _, _ = pair
    # The first replica claims the queue, too, and fails to delete it: no claim may keep out the second one.
    monkeypatch.setattr(sessions, "CLAIM_SECS", 0.0)
    with lasting(one.mqtt, "lost") as client:
        client.subscribe("queues/lost", qos=1)
        queue = queue_of(one, "lost")
    # It is lost before it comes to that.
    one.ask(lambda: setattr(one.engine, "delete", lambda queue, done=None: None))
    Client(one.mqtt, "lost", clean=True).leave()
    until(lambda: not is_there(rabbitmq, queue))
