"""Shared subscriptions: their members are at any replica, connected or away."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import pytest

from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.engine import shares
from gateway.engine.consumers import ClusterConsumer, Consumers
from gateway.engine.shares import SharedQueue
from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, lasting, replicas
from tests.ingress.clients import eventually
from tests.interop.servers import RabbitMQ

NAMESPACE = "shares"
numbers = itertools.count()

SLOW_SECS: Final = 60.0  # each call of rabbitmqctl takes some


@pytest.fixture(scope="module")
def two(rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Replica]]:
    one, other = (Replica(name, rabbitmq.url, NAMESPACE, queue_type="classic") for name in ("one", "other"))
    with replicas(one, other):
        yield one, other


@pytest.fixture
def topic() -> str:
    """One of this test's own."""
    return f"shares/{next(numbers)}"


def until(clients: list[Client], bodies: list[bytes]) -> None:
    """All of it has come, once, to one or another of them."""
    deadline = time.monotonic() + PATIENCE_SECS
    while len([one for client in clients for one in client.messages]) < len(bodies):
        assert time.monotonic() < deadline, [client.told for client in clients]
        time.sleep(0.02)
    assert sorted(body for client in clients for _, body in client.told) == sorted(bodies)


def test_members_at_all_replicas_share(two: tuple[Replica, Replica], topic: str) -> None:
    names = [f"m{at} {topic}" for at in range(4)]
    clients = [Client(two[at % 2].mqtt, name) for at, name in enumerate(names)]
    with Client(two[0].mqtt, f"p {topic}") as publisher, Client(two[1].mqtt, f"all {topic}") as everything:
        try:
            everything.subscribe(f"{topic}/#", qos=1)
            for at, client in enumerate(clients):
                assert client.subscribe(f"$share/g {topic[-1]}/{topic}/+", qos=at % 3) == [
                    f"Granted QoS {min(at % 3, 1)}"
                ]
            bodies = [b"%d" % at for at in range(200)]
            for body in bodies:
                publisher.publish(f"{topic}/x", body, qos=int(body) % 3)
            everything.until(lambda: len(everything.messages) == len(bodies))
            until(clients, bodies)
            counts = [len(client.messages) for client in clients]
            assert min(counts) >= 20, counts
            assert not any(message.dup for client in clients for message in client.messages)
        finally:
            for client in clients:
                client.leave()


def test_what_a_lost_member_had_goes_to_another_one(two: tuple[Replica, Replica], topic: str) -> None:
    shared = f"$share/lost/{topic}"
    with (
        Client(two[0].mqtt, f"p {topic}") as publisher,
        Client(two[1].mqtt, f"stays {topic}") as stays,
        Client(two[0].mqtt, f"lost {topic}", ack=False) as lost,
    ):
        lost.subscribe(shared, qos=1)
        bodies = [b"%d" % at for at in range(10)]
        for body in bodies:
            publisher.publish(topic, body)
        lost.until(lambda: len(lost.messages) == 10)
        stays.subscribe(shared, qos=1)
        lost.vanish()
        stays.until(lambda: len(stays.messages) >= 10)
        assert sorted(body for _, body in stays.told) == bodies


def test_the_queue_waits_for_sessions_that_are_away(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    """It is there as long as one of them is, and goes with the last one."""
    shared, name = f"$share/away/{topic}", f"away {topic}"
    with lasting(two[0].mqtt, name) as member:
        member.subscribe(shared, qos=1)
    queue = shares.queue_of(two[0].engine.names.shares, shared)
    with Client(two[0].mqtt, f"p {topic}") as publisher:
        publisher.publish(topic, b"1")
        with lasting(two[1].mqtt, name) as member:
            assert member.present
            publisher.publish(topic, b"2")
            member.until(lambda: len(member.messages) >= 2)
            assert member.told == [(topic, b"1"), (topic, b"2")]
            assert queue in rabbitmq.queues
            member.paho.unsubscribe(shared)
            eventually(lambda: queue not in rabbitmq.queues, SLOW_SECS)


def test_a_quorum_queue_goes_with_its_last_member(topic: str, rabbitmq: RabbitMQ) -> None:
    """RabbitMQ closes the connection over a conditional deletion of such a queue."""
    one = Replica("one", rabbitmq.url, "quorumshares")
    shared = f"$share/last/{topic}"
    with replicas(one):
        with Client(one.mqtt, f"goes {topic}") as goes:
            goes.subscribe(shared, qos=1)
            queue = shares.queue_of(one.engine.names.shares, shared)
            assert queue in rabbitmq.queues
        eventually(lambda: queue not in rabbitmq.queues, SLOW_SECS)
        assert one.gateway.links["engine"].stats.connects == 1


def test_a_queue_that_others_consume_stays(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    shared = f"$share/stay/{topic}"
    queue = shares.queue_of(two[0].engine.names.shares, shared)
    with Client(two[0].mqtt, f"p {topic}") as publisher, Client(two[1].mqtt, f"s {topic}") as stays:
        stays.subscribe(shared, qos=1)
        with Client(two[0].mqtt, f"goes {topic}") as goes:
            goes.subscribe(shared, qos=1)
        before = two[0].gateway.links["engine"].stats.connects
        namespace = two[0].gateway.mqtt
        two[0].until(lambda: not namespace._unused)
        publisher.publish(topic, b"x")
        stays.until(lambda: stays.messages)
        assert stays.told == [(topic, b"x")]
        assert two[0].gateway.links["engine"].stats.connects == before
        assert queue in rabbitmq.queues
    eventually(lambda: queue not in rabbitmq.queues, SLOW_SECS)


def test_a_queue_stays_while_the_replica_of_its_members_is_cut_off(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    """Their sessions end with their connections, which last: for a moment no replica consumes the queue."""
    shared = f"$share/cut/{topic}"
    queue = shares.queue_of(two[0].engine.names.shares, shared)
    with Proxy(rabbitmq.port) as proxy, Client(two[0].mqtt, f"p {topic}") as publisher:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        cut = Replica("cut", url, NAMESPACE, queue_type="classic", reconnect_max_secs=0.5)
        with replicas(cut), Client(cut.mqtt, f"m {topic}") as member:
            member.subscribe(shared, qos=1)
            with Client(two[0].mqtt, f"goes {topic}") as goes:
                goes.subscribe(shared, qos=1)
                proxy.cut()
                proxy.shut()
                cut.until(lambda: bool(cut.gateway.readiness.reasons()))
            publisher.publish(topic, b"x")
            two[0].until(lambda: not two[0].gateway.mqtt._unused)
            with Client(two[0].mqtt, f"once more {topic}") as goes:  # its check follows the deletion
                goes.subscribe(f"{shared}/more", qos=1)
            assert queue in rabbitmq.queues
            proxy.open()
            member.until(lambda: member.messages)
            assert member.told == [(topic, b"x")]
    eventually(lambda: queue not in rabbitmq.queues, SLOW_SECS)


def test_members_that_have_gone_for_good_leave_no_queue(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the latest by the next list of all shared filters, if the session ends too late for the first."""
    monkeypatch.setattr("gateway.engine.namespace.LIST_SECS", 3.0)
    shared, name = f"$share/ended/{topic}", f"ended {topic}"
    queue = shares.queue_of(two[0].engine.names.shares, shared)
    with lasting(two[0].mqtt, name, secs=1) as member:
        member.subscribe(shared, qos=1)
        assert queue in rabbitmq.queues
    eventually(lambda: queue not in rabbitmq.queues, SLOW_SECS)


def test_who_subscribes_while_the_cluster_is_away_is_answered_when_the_queue_is_there(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    with Proxy(rabbitmq.port) as proxy, Client(two[1].mqtt, f"p {topic}") as publisher:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        cut = Replica("cut", url, NAMESPACE, queue_type="classic", reconnect_max_secs=0.5)
        with replicas(cut), Client(cut.mqtt, f"m {topic}") as member:
            proxy.cut()
            proxy.shut()
            cut.until(lambda: bool(cut.gateway.readiness.reasons()))
            member.paho.subscribe(f"$share/g/{topic}", qos=1)
            proxy.delay(0.1)
            proxy.open()
            member.until(lambda: member.answers)
            publisher.publish(topic, b"x")
            member.until(lambda: member.messages)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What goes on to consume the first shared queue, which is not consumed until it is called."""
    consume, calls = Consumers._consume, list[Callable[[], None]]()

    def hold(self: Consumers, consumer: ClusterConsumer) -> None:
        if isinstance(consumer.target, SharedQueue) and not calls:
            calls.append(partial(consume, self, consumer))
        else:
            consume(self, consumer)

    monkeypatch.setattr(Consumers, "_consume", hold)
    return calls


@pytest.mark.interpreted
def test_only_members_wait_for_a_queue_that_cannot_be_consumed(
    rabbitmq: RabbitMQ, held: list[Callable[[], None]]
) -> None:
    """Else one user's shared subscriptions would hold up the responses to all clients of the replica."""
    one = Replica("one", rabbitmq.url, "sharesheld")
    with replicas(one), lasting(one.mqtt, "member") as member, lasting(one.mqtt, "other") as other:
        member.paho.subscribe("$share/g/held", qos=1)
        one.until(lambda: held)
        assert other.subscribe("t", qos=1) == ["Granted QoS 1"]
        assert other.subscribe("$share/h/t", qos=1) == ["Granted QoS 1"]
        member.paho.subscribe("u", qos=1)
        assert other.subscribe("v", qos=1) == ["Granted QoS 1"]
        assert not member.answers
        one.ask(held[0])
        member.until(lambda: len(member.answers) == 2)


@pytest.mark.interpreted
def test_retained_messages_do_not_wait_for_the_shared_queue_of_another_client(
    rabbitmq: RabbitMQ, held: list[Callable[[], None]]
) -> None:
    """A SUBSCRIBE with many filters takes several turns, in which other clients may subscribe."""
    one = Replica("one", rabbitmq.url, "sharesretained")
    with replicas(one), lasting(one.mqtt, "member") as member, lasting(one.mqtt, "other") as other:
        other.publish("kept", b"retained", retain=True)
        member.paho.subscribe("$share/g/held", qos=1)
        one.until(lambda: held)

        def subscribe() -> None:
            namespace = one.engine.clients
            session = namespace.sessions["other"]
            namespace.subscribe(session, "kept", SubscriptionOptions(1))
            namespace.after_recorded(namespace.sessions["member"], lambda outcome: None)
            namespace.after_recorded(session, lambda outcome: session.outlet.send_due_retained())

        one.ask(subscribe)
        other.until(lambda: other.messages)
        assert not member.answers
        one.ask(held[0])
        member.until(lambda: member.answers)
