"""Two gateways over one RabbitMQ, with clients that nobody here wrote."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from gateway.telemetry.metrics import Metrics
from tests.chaos.proxy import Proxy
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, lasting, replicas
from tests.ingress.clients import eventually
from tests.interop.servers import RabbitMQ

NAMESPACE = "tests"
numbers = itertools.count()


@pytest.fixture(scope="module")
def two(rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Replica]]:
    one, other = (Replica(name, rabbitmq.url, NAMESPACE, queue_type="classic") for name in ("one", "other"))
    with replicas(one, other):
        yield one, other


@pytest.fixture
def topic() -> str:
    """One of this test's own."""
    return f"tests/{next(numbers)}"


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("version", [paho.MQTTv5, paho.MQTTv311])
def test_what_one_takes_the_other_delivers(
    two: tuple[Replica, Replica], topic: str, qos: int, version: int
) -> None:
    with (
        Client(two[0].mqtt, "publisher", version=version) as publisher,
        Client(two[1].mqtt, "subscriber", version=version) as subscriber,
    ):
        subscriber.subscribe(f"{topic}/+/#", qos=2)
        publisher.publish(f"{topic}/v1.2/a*b/%2E", b"\xff\0", qos=qos)
        subscriber.until(lambda: subscriber.messages)
        found = subscriber.messages[0]
        assert (found.topic, found.payload) == (f"{topic}/v1.2/a*b/%2E", b"\xff\0")
        assert (found.qos, found.retain) == (qos, False)


def test_properties_come_whole_and_in_their_order(two: tuple[Replica, Replica], topic: str) -> None:
    said = Properties(PacketTypes.PUBLISH)
    said.ContentType = "text/plain"
    said.ResponseTopic = "reply/to"
    said.CorrelationData = b"\xff\0"
    said.MessageExpiryInterval = 100
    said.UserProperty = [("b", "1"), ("a", "2"), ("b", "3")]
    with Client(two[0].mqtt, "publisher") as publisher, Client(two[1].mqtt, "subscriber") as subscriber:
        subscriber.subscribe(topic, qos=1)
        publisher.publish(topic, b"x", properties=said)
        subscriber.until(lambda: subscriber.messages)
        found = subscriber.messages[0].properties
        assert (found.ContentType, found.ResponseTopic) == ("text/plain", "reply/to")
        assert (found.CorrelationData, found.UserProperty) == (b"\xff\0", said.UserProperty)
        assert 90 <= found.MessageExpiryInterval <= 100


def test_what_a_cluster_would_obey_is_only_a_property(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    """Else a client could publish where it may not, or have the connection of its replica closed."""
    said = Properties(PacketTypes.PUBLISH)
    other = f"{topic}/other".replace("/", ".")
    said.UserProperty = [
        ("CC", other),
        ("CC", other),
        ("BCC", other),
        ("amqp-user-id", "somebody"),
        ("x-stream-offset", "9000"),
        ("x-gateway-engine", "mine"),
        ("gateway-types", '{"x-stream-offset": "int64"}'),
    ]
    with Client(two[0].mqtt, "publisher") as publisher, Client(two[1].mqtt, "subscriber") as subscriber:
        subscriber.subscribe(f"{topic}/#", qos=1)
        for at in range(3):
            publisher.publish(f"{topic}/{at}", b"x", properties=said, retain=True)
        subscriber.until(lambda: len(subscriber.messages) == 3)
        assert [found.topic for found in subscriber.messages] == [f"{topic}/{at}" for at in range(3)]
        assert subscriber.messages[0].properties.UserProperty == said.UserProperty
    assert two[0].gateway.links["engine"].stats.connects == 1


def test_order_is_kept_and_nothing_is_missing(two: tuple[Replica, Replica], topic: str) -> None:
    with Client(two[0].mqtt, "publisher") as publisher, Client(two[1].mqtt, "subscriber") as subscriber:
        subscriber.subscribe(f"{topic}/#", qos=1)
        sent = [f"{topic}/{number % 3}" for number in range(500)]
        infos = [
            publisher.paho.publish(name, b"%d" % at, qos=1, retain=at % 7 == 0)
            for at, name in enumerate(sent)
        ]
        for info in infos:
            info.wait_for_publish(10)
        subscriber.until(lambda: len(subscriber.messages) >= len(sent))
        assert [int(body) for _, body in subscriber.told] == list(range(500))


@pytest.mark.parametrize("begin", [Client, lasting])
@pytest.mark.parametrize("qos", [0, 1])
def test_no_local_holds_over_replicas(
    two: tuple[Replica, Replica], topic: str, qos: int, begin: Callable[[int, str], Client]
) -> None:
    with begin(two[0].mqtt, f"me {topic}") as me, Client(two[1].mqtt, "somebody") as somebody:
        me.paho.subscribe(topic, options=SubscribeOptions(qos=qos, noLocal=True))
        me.until(lambda: me.answers)
        me.publish(topic, b"mine", qos=1)
        somebody.publish(topic, b"yours", qos=1)
        me.until(lambda: me.messages)
        assert me.told == [(topic, b"yours")]


def test_programs_that_speak_amqp_take_part(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    key = topic.replace("/", ".")
    with (
        pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection,
        Client(two[1].mqtt, "subscriber") as subscriber,
    ):
        channel = connection.channel()
        queue = channel.queue_declare("", exclusive=True).method.queue
        channel.queue_bind(queue, "amq.topic", f"{key}.*")
        subscriber.subscribe(f"{topic}/from", qos=1)
        subscriber.publish(f"{topic}/to", b"to", qos=1)
        method, properties, body = next(channel.consume(queue, inactivity_timeout=10))
        assert (method.routing_key, properties.delivery_mode, body) == (f"{key}.to", 2, b"to")
        properties = pika.BasicProperties(delivery_mode=2, content_type="a/b", headers={"n": "v"})
        channel.basic_publish("amq.topic", f"{key}.from", b"from", properties)
        subscriber.until(lambda: subscriber.messages)
        found = subscriber.messages[0]
        assert (found.payload, found.qos, found.properties.ContentType) == (b"from", 1, "a/b")
        assert found.properties.UserProperty == [("n", "v")]


def test_the_same_is_retained_at_every_replica(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    with Client(two[0].mqtt, "publisher") as publisher:
        for name, body in (("a", b"1"), ("b.c", b"2"), ("a", b"3"), ("gone", b"4"), ("gone", b"")):
            publisher.publish(f"{topic}/{name}", body, retain=True)
        acknowledged = time.monotonic()
        for at, replica in enumerate(two):
            with Client(replica.mqtt, f"subscriber {at}") as subscriber:
                subscriber.subscribe(f"{topic}/#", qos=1)
                subscriber.until(lambda one=subscriber: len(one.messages) == 2)
                assert time.monotonic() - acknowledged < 1.0
                assert sorted(subscriber.told) == [(f"{topic}/a", b"3"), (f"{topic}/b.c", b"2")]
                assert all(message.retain for message in subscriber.messages)
    late = Replica("late", rabbitmq.url, NAMESPACE)
    with replicas(late), Client(late.mqtt, "late subscriber") as subscriber:
        subscriber.subscribe(f"{topic}/+", qos=1)
        subscriber.until(lambda: len(subscriber.messages) == 2)
        assert sorted(subscriber.told) == [(f"{topic}/a", b"3"), (f"{topic}/b.c", b"2")]


def test_a_client_is_at_one_replica_only(two: tuple[Replica, Replica], topic: str) -> None:
    with Client(two[0].mqtt, "the same") as first:
        first.subscribe(topic, qos=1)
        with Client(two[1].mqtt, "the same") as second:
            first.until(lambda: first.ended)
            assert first.ended[0].value == 0x8E
            second.subscribe(topic, qos=1)
            second.publish(topic, b"x")
            second.until(lambda: second.messages)
            assert not second.ended
            assert two[0].ask(lambda: two[0].engine.sessions.moved)


def test_wills_are_everybodys(two: tuple[Replica, Replica], topic: str) -> None:
    with Client(two[1].mqtt, "subscriber") as subscriber:
        subscriber.subscribe(topic, qos=1)
        Client(two[0].mqtt, "dying", will=topic).vanish()
        subscriber.until(lambda: subscriber.messages)
        assert subscriber.told == [(topic, b"gone")]


def test_a_topic_that_no_key_can_hold_is_refused(two: tuple[Replica, Replica], topic: str) -> None:
    with Client(two[0].mqtt, "publisher") as publisher:
        answers: list[int] = []
        publisher.paho.on_publish = lambda _, __, ___, reason, ____: answers.append(reason.value)
        publisher.publish(f"{topic}/{'x' * 255}", b"x")
        publisher.publish(topic, b"x")
        assert answers == [0x90, 0]


def test_clean_sessions_cost_no_queue(two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ) -> None:
    clients = [Client(two[0].mqtt, f"many {at}") for at in range(20)]
    try:
        for client in clients:
            client.subscribe(f"{topic}/shared", qos=1)
            client.subscribe(f"{topic}/shared/{id(client)}", qos=1)
        bindings = two[0].ask(lambda: len(two[0].engine.bindings))
        assert bindings >= len(clients) + 1
        named = rabbitmq.queues
        own = f"{NAMESPACE}.replica.one."  # killed replicas of other tests leave theirs for a while
        assert [name for name in named if name.startswith(own)] == [two[0].engine.queue]
    finally:
        for client in clients:
            client.leave()
    two[0].until(lambda: len(two[0].engine.bindings) == bindings - len(clients) - 1)


def test_a_replica_that_does_not_keep_up_stops_nobody_else(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    """What its queue has no room for is counted, by whichever replica."""
    with Proxy(rabbitmq.port) as proxy:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        slow = Replica("slow", url, NAMESPACE, queue_type="classic", queue_bytes_max=1_048_576, prefetch=1)
        with (
            replicas(slow),
            Client(slow.mqtt, f"slow {topic}") as subscriber,
            Client(two[0].mqtt, f"p {topic}") as publisher,
        ):
            subscriber.subscribe(topic, qos=1)
            proxy.stall("down")
            infos = [publisher.paho.publish(topic, bytes(100_000), qos=1) for _ in range(30)]
            for info in infos:
                info.wait_for_publish(10)
            publisher.publish(topic, b"last")

            def dropped() -> int:
                return sum(one.gateway.mqtt.tally.queue_full for one in (*two, slow))

            two[0].until(lambda: dropped() > 0)
            proxy.cut()
            subscriber.until(lambda: (topic, b"last") in subscriber.told)
            two[0].until(lambda: dropped() + len(subscriber.messages) >= 31)
            assert dropped() >= 15


def test_its_metrics_are_there(two: tuple[Replica, Replica], topic: str) -> None:
    metrics: Metrics = two[0].gateway.metrics
    with Client(two[0].mqtt, "publisher") as publisher:
        publisher.publish(topic, b"x", retain=True)
        engine = two[0].engine
        (data, *_), moved = two[0].ask(lambda: (metrics.exposition(""), engine.sessions.moved))
    told = data.decode()
    assert 'gateway_link_up{endpoint="engine",protocol="amqp091"} 1.0' in told
    assert "gateway_engine_bindings 0.0" in told
    assert f"gateway_engine_sessions_moved_total {float(moved)}" in told


def test_while_the_cluster_is_away_publishers_are_held_and_clients_stay(
    rabbitmq: RabbitMQ, topic: str
) -> None:
    with Proxy(rabbitmq.port) as proxy:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        cut = Replica("cut", url, NAMESPACE, queue_type="classic", reconnect_max_secs=0.5)
        with replicas(cut), Client(cut.mqtt, "here") as here:
            here.subscribe(topic, qos=1)
            proxy.shut()
            cut.until(lambda: bool(cut.gateway.readiness.reasons()))
            info = here.paho.publish(topic, b"held", qos=1)
            here.paho.subscribe(f"{topic}/more", qos=1)
            with Client(cut.mqtt, "late") as late:
                assert late.welcome is not None
                assert late.welcome.value == 0x88
            assert not info.is_published()
            assert len(here.answers) == 1
            proxy.open()
            here.until(lambda: len(here.answers) == 2)
            here.until(lambda: here.messages)
            info.wait_for_publish(10)
            assert here.told == [(topic, b"held")]
            assert not here.ended
            cut.until_ready()


def test_a_replica_that_stops_leaves_no_queue(rabbitmq: RabbitMQ) -> None:
    brief = Replica("brief", rabbitmq.url, NAMESPACE, queue_type="classic")
    with replicas(brief):
        assert brief.engine.queue in rabbitmq.queues
    eventually(lambda: brief.engine.queue not in rabbitmq.queues, PATIENCE_SECS)


def test_what_is_sent_again_after_a_lost_connection_comes_once(rabbitmq: RabbitMQ, topic: str) -> None:
    """Confirms are held back until the connection is gone, so that all of it is sent again."""
    with Proxy(rabbitmq.port) as to_one, Proxy(rabbitmq.port) as to_other:
        one, other = (
            Replica(
                name,
                rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port)),
                NAMESPACE,
                queue_type="classic",
                reconnect_max_secs=0.5,
            )
            for name, proxy in (("once", to_one), ("once more", to_other))
        )
        with (
            replicas(one, other),
            Client(one.mqtt, "publisher") as publisher,
            Client(other.mqtt, "subscriber") as subscriber,
        ):
            subscriber.subscribe(f"{topic}/#", qos=2)
            to_one.stall("down")
            infos = [publisher.paho.publish(f"{topic}/{at}", b"%d" % at, qos=2) for at in range(50)]
            subscriber.until(lambda: len(subscriber.messages) == 50 or len(subscriber.messages) >= 20)
            assert not any(info.is_published() for info in infos)
            to_one.cut()
            to_other.cut()
            for info in infos:
                info.wait_for_publish(10)
            publisher.publish(f"{topic}/last", b"last", qos=2)
            subscriber.until(lambda: (f"{topic}/last", b"last") in subscriber.told)
            assert [int(body) for _, body in subscriber.told[:-1]] == list(range(50))
            assert other.ask(lambda: other.engine.stats.duplicates) > 0


def test_clients_are_let_go_when_the_cluster_is_away_for_too_long(rabbitmq: RabbitMQ, topic: str) -> None:
    with Proxy(rabbitmq.port) as proxy:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        cut = Replica("let go", url, NAMESPACE, engine_timeout_secs=0.5, reconnect_max_secs=0.5)
        with replicas(cut), Client(cut.mqtt, "here") as here:
            here.subscribe(topic, qos=1)
            queue_id = cut.engine.queue_id
            proxy.shut()
            here.until(lambda: here.ended)
            assert here.ended[0].value == 0x89
            cut.until(lambda: cut.engine.queue_id != queue_id)
            proxy.open()
            cut.until_ready()
