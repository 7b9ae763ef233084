"""Sessions that outlive their connections: a client comes back to any replica, and finds what it is owed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from gateway.ingress.mqtt import ingress
from gateway.protocols.mqtt.packets import Connack, Connect, Disconnect
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode
from gateway.state.interface import INCOMING
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.ingress.clients import Mqtt, connect, eventually
from tests.interop.servers import RabbitMQ

NAMESPACE = "sessions"
numbers = itertools.count()

KEPT: Final = {Property.SESSION_EXPIRY_INTERVAL: 300}
SLOW_SECS: Final = 60.0  # each call of rabbitmqctl takes some


@pytest.fixture(scope="module")
def two(rabbitmq: RabbitMQ) -> Iterator[tuple[Replica, Replica]]:
    one, other = (Replica(name, rabbitmq.url, NAMESPACE, queue_type="classic") for name in ("one", "other"))
    with replicas(one, other):
        yield one, other


@pytest.fixture
def topic() -> str:
    """One of this test's own."""
    return f"sessions/{next(numbers)}"


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("version", [paho.MQTTv5, paho.MQTTv311])
def test_what_came_meanwhile_is_at_another_replica(
    two: tuple[Replica, Replica], topic: str, qos: int, version: int
) -> None:
    name = f"away {topic}"
    with lasting(two[0].mqtt, name, version=version) as before:
        assert not before.present
        before.subscribe(f"{topic}/+", qos=2)
    with Client(two[0].mqtt, f"publisher {topic}") as publisher:
        for at in range(50):
            publisher.publish(f"{topic}/{at % 3}", b"%d" % at, qos=qos)
        with lasting(two[1].mqtt, name, version=version) as after:
            assert after.present
            after.until(lambda: len(after.messages) >= 50)
            publisher.publish(f"{topic}/live", b"50", qos=qos)
            after.until(lambda: len(after.messages) >= 51)
            assert [int(body) for _, body in after.told] == list(range(51))
            assert {message.qos for message in after.messages} == {qos}
    with lasting(two[0].mqtt, name, version=version) as again:
        assert again.present
        again.publish(f"{topic}/last", b"last", qos=qos)
        again.until(lambda: again.messages)
        assert again.told == [(f"{topic}/last", b"last")]


@contextmanager
def unacknowledged(
    two: tuple[Replica, Replica], name: str, topic: str, *, qos: int, count: int
) -> Iterator[tuple[Mqtt, Client, list[int]]]:
    """A client of the first replica that has so many messages, a publisher of the other, and their ids."""
    client, _ = connect(two[0], name, properties=KEPT)
    with client, Client(two[1].mqtt, f"p {topic}") as publisher:
        client.subscribe(topic, qos=qos)
        for at in range(count):
            publisher.publish(topic, b"%d" % at, qos=qos)
        yield client, publisher, [client.row()[2] for _ in range(count)]


@contextmanager
def moving(two: tuple[Replica, Replica], name: str) -> Iterator[Mqtt]:
    """It comes to the other replica; the first has heard of it, and awaits its goodbye."""
    moved = two[0].engine.sessions.moved
    with Mqtt(two[1].mqtt) as again:
        again.say(Connect(name, clean_start=False, properties=KEPT))
        two[0].until(lambda: two[0].engine.sessions.moved > moved)
        yield again


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A goodbye is awaited for as long as the test takes."""
    monkeypatch.setattr(ingress, "GRACE_SECS", SLOW_SECS)


@pytest.mark.usefixtures("patient")
def test_what_was_acknowledged_counts_though_the_client_is_elsewhere_before_its_goodbye_comes(
    two: tuple[Replica, Replica], topic: str
) -> None:
    name = f"hasty {topic}"
    with (
        unacknowledged(two, name, topic, qos=1, count=3) as (client, publisher, ids),
        moving(two, name) as again,
    ):
        for packet_id in ids[:2]:
            client.ack(PacketType.PUBACK, packet_id)
        client.machine.disconnect()
        client.flush()
        assert again.next(Connack).session_present
        publisher.publish(topic, b"3")
        assert [again.row()[4] for _ in range(2)] == [b"2", b"3"]


@pytest.mark.usefixtures("patient")
def test_what_a_client_publishes_at_qos_2_where_it_is_no_longer_counts_when_it_says_it_again(
    two: tuple[Replica, Replica], topic: str
) -> None:
    """The log would not know its id. The old connection ends without an answer, as if that had been lost."""
    name = f"twice there {topic}"
    with (
        Client(two[1].mqtt, f"watcher {topic}") as watcher,
        unacknowledged(two, name, topic, qos=1, count=1) as (client, _, ids),
        moving(two, name) as again,
    ):
        watcher.subscribe(f"{topic}/out", qos=2)
        client.publish(f"{topic}/out", b"once", 2, 7)
        assert client.next(Disconnect).reason == ReasonCode.SESSION_TAKEN_OVER
        assert client.closed()
        assert again.next(Connack).session_present
        assert again.row()[4] == b"0", ids
        for body, packet_id in ((b"once", 7), (b"last", 8)):
            again.publish(f"{topic}/out", body, 2, packet_id, dup=body == b"once")
            assert again.acked(PacketType.PUBREC) == (packet_id, 0)
            again.ack(PacketType.PUBREL, packet_id)
            assert again.acked(PacketType.PUBCOMP) == (packet_id, 0)
        watcher.until(lambda: (f"{topic}/out", b"last") in watcher.told)
        assert [body for _, body in watcher.told] == [b"once", b"last"]


def test_who_says_nothing_more_when_its_client_is_elsewhere_is_let_go(
    two: tuple[Replica, Replica], topic: str
) -> None:
    name = f"gone {topic}"
    with unacknowledged(two, name, topic, qos=1, count=1) as (client, _, _):
        again, connack = connect(two[1], name, clean=False, properties=KEPT)
        with again:
            assert connack.session_present
            assert again.body() == b"0"
            assert client.next(Disconnect).reason == ReasonCode.SESSION_TAKEN_OVER
            assert client.closed()


def test_what_was_not_acknowledged_comes_again(two: tuple[Replica, Replica], topic: str) -> None:
    name = f"slow {topic}"
    with lasting(two[0].mqtt, name, ack=False) as before, Client(two[0].mqtt, f"p {topic}") as publisher:
        before.subscribe(topic, qos=1)
        for at in range(10):
            publisher.publish(topic, b"%d" % at)
        before.until(lambda: len(before.messages) == 10)
        before.vanish()
        for at in range(10, 20):
            publisher.publish(topic, b"%d" % at)
        with lasting(two[1].mqtt, name) as after:
            after.until(lambda: len(after.messages) >= 20)
            assert [int(body) for _, body in after.told] == list(range(20))
            assert [message.dup for message in after.messages] == [True] * 10 + [False] * 10


def test_what_a_client_is_sent_for_the_second_time_at_qos_2_has_its_old_id(
    two: tuple[Replica, Replica], topic: str
) -> None:
    """By that a client that has it already knows it again; what it has said to have is not sent again."""
    name = f"twice {topic}"
    with unacknowledged(two, name, topic, qos=2, count=4) as (client, publisher, ids):
        client.ack(PacketType.PUBREC, ids[0])
        client.ack(PacketType.PUBREC, ids[1])
        assert client.acked(PacketType.PUBREL) == (ids[0], 0)
        assert client.acked(PacketType.PUBREL) == (ids[1], 0)
        client.ack(PacketType.PUBCOMP, ids[0])
        client.ping()
        client.cut()
        again, connack = connect(two[1], name, clean=False, properties=KEPT)
        with again:
            assert connack.session_present
            assert again.acked(PacketType.PUBREL) == (ids[1], 0)
            publisher.publish(topic, b"4", qos=2)
            rows = [again.row() for _ in range(3)]
            assert [row[4] for row in rows] == [b"2", b"3", b"4"]
            assert [row[0] & 8 for row in rows] == [8, 8, 0]
            assert [row[2] for row in rows[:2]] == ids[2:]
            assert rows[2][2] not in ids[1:]
            again.ack(PacketType.PUBCOMP, ids[1])
            for row in rows:
                again.ack(PacketType.PUBREC, row[2])
                assert again.acked(PacketType.PUBREL) == (row[2], 0)
                again.ack(PacketType.PUBCOMP, row[2])
            again.ping()
        with lasting(two[0].mqtt, name) as last:
            last.publish(topic, b"5", qos=2)
            last.until(lambda: last.messages)
            assert last.told == [(topic, b"5")]
            two[0].until(lambda: not two[0].stored("packet", name))  # PUBCOMP may come behind the message


def test_a_client_publishes_at_qos_2_again_where_it_comes_back(
    two: tuple[Replica, Replica], topic: str
) -> None:
    """Its replica has published it, but could not say so: subscribers get it once."""
    name = f"once {topic}"
    client, _ = connect(two[0], name, properties=KEPT)
    with client, Client(two[1].mqtt, f"s {topic}") as subscriber:
        subscriber.subscribe(topic, qos=2)
        client.publish(topic, b"first", 2, 1)
        assert client.acked(PacketType.PUBREC) == (1, 0)
        client.ack(PacketType.PUBREL, 1)
        assert client.acked(PacketType.PUBCOMP) == (1, 0)
        client.publish(topic, b"second", 2, 1)
        subscriber.until(lambda: len(subscriber.messages) == 2)
        client.cut()  # whether PUBREC was said or not, it has not been heard
        again, connack = connect(two[1], name, clean=False, properties=KEPT)
        with again:
            assert connack.session_present
            again.publish(topic, b"second", 2, 1, dup=True)
            assert again.acked(PacketType.PUBREC) == (1, 0)
            again.ack(PacketType.PUBREL, 1)
            assert again.acked(PacketType.PUBCOMP) == (1, 0)
            again.publish(topic, b"third", 2, 1)
            assert again.acked(PacketType.PUBREC) == (1, 0)
            subscriber.until(lambda: (topic, b"third") in subscriber.told)
            assert [body for _, body in subscriber.told] == [b"first", b"second", b"third"]
            assert two[0].stored("packet", name, "direction, packet_id") == [(INCOMING, 1)]


def test_subscriptions_have_their_options_and_end(two: tuple[Replica, Replica], topic: str) -> None:
    name = f"options {topic}"
    with lasting(two[0].mqtt, name) as client:
        said = Properties(PacketTypes.SUBSCRIBE)
        said.SubscriptionIdentifier = 7
        options = SubscribeOptions(qos=1, noLocal=True, retainAsPublished=True)
        client.paho.subscribe(f"{topic}/a", options=options, properties=said)
        client.until(lambda: client.answers)
        client.subscribe(f"{topic}/b", qos=1)
        client.subscribe(f"{topic}/c", qos=0)
        client.subscribe(f"{topic}/d", qos=1)
        client.subscribe(f"{topic}/d", qos=0)
        client.paho.unsubscribe(f"{topic}/b")
        client.publish(f"{topic}/barrier", b"")
    with lasting(two[1].mqtt, name) as client, Client(two[0].mqtt, f"p {topic}") as publisher:
        client.publish(f"{topic}/a", b"mine")
        for level in "abcd":
            publisher.publish(f"{topic}/{level}", level.encode(), retain=True)
        client.until(lambda: len(client.messages) >= 3)
        publisher.publish(f"{topic}/a", b"end", retain=True)
        client.until(lambda: (f"{topic}/a", b"end") in client.told)
        found = {message.payload: message for message in client.messages}
        assert set(found) == {b"a", b"c", b"d", b"end"}
        assert (found[b"a"].retain, found[b"a"].qos) == (True, 1)
        assert found[b"a"].properties.SubscriptionIdentifier == [7]
        assert (found[b"c"].retain, found[b"c"].qos, found[b"d"].qos) == (False, 0, 0)


def test_qos_0_is_for_clients_that_are_here(two: tuple[Replica, Replica], topic: str) -> None:
    name = f"zero {topic}"
    with lasting(two[0].mqtt, name) as client:
        client.subscribe(f"{topic}/#", qos=1)
    with Client(two[0].mqtt, f"p {topic}") as publisher:
        publisher.publish(f"{topic}/0", b"0", qos=0)
        publisher.publish(f"{topic}/1", b"1", qos=1)
        with lasting(two[1].mqtt, name) as client:
            client.until(lambda: client.messages)
            publisher.publish(f"{topic}/0", b"2", qos=0)
            client.until(lambda: len(client.messages) >= 2)
            assert client.told == [(f"{topic}/1", b"1"), (f"{topic}/0", b"2")]


def test_a_client_takes_its_session_with_it(two: tuple[Replica, Replica], topic: str) -> None:
    """While it is connected: the first connection ends, and what it has not acknowledged comes again."""
    name = f"mover {topic}"
    with lasting(two[0].mqtt, name, ack=False) as first, Client(two[0].mqtt, f"p {topic}") as publisher:
        first.subscribe(topic, qos=1)
        for at in range(5):
            publisher.publish(topic, b"%d" % at)
        first.until(lambda: len(first.messages) == 5)
        with lasting(two[1].mqtt, name) as second:
            first.until(lambda: first.ended)
            assert first.ended[0].value == 0x8E
            assert second.present
            publisher.publish(topic, b"5")
            second.until(lambda: len(second.messages) >= 6)
            assert [int(body) for _, body in second.told] == list(range(6))
            second.publish(f"{topic}/behind", b"")  # its acknowledgements have been read
            with lasting(two[1].mqtt, name) as third:
                second.until(lambda: second.ended)
                assert second.ended[0].value == 0x8E
                publisher.publish(topic, b"6")
                third.until(lambda: third.messages)
                assert third.told == [(topic, b"6")]


def test_a_clean_start_ends_it_everywhere(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    name = f"clean {topic}"
    with lasting(two[0].mqtt, name) as client:
        client.subscribe(topic, qos=1)
    with Client(two[0].mqtt, f"p {topic}") as publisher:
        publisher.publish(topic, b"old")
        with Client(two[1].mqtt, name, clean=True) as client:
            assert not client.present
        two[0].until(lambda: all(queue == "" for (queue,) in two[0].stored("session", name, "queue")))
        until_gone(two[1], rabbitmq, name)
        with lasting(two[0].mqtt, name) as client:
            assert not client.present
            publisher.publish(topic, b"new")
            client.subscribe(topic, qos=1)
            publisher.publish(topic, b"newer")
            client.until(lambda: client.messages)
            assert client.told == [(topic, b"newer")]


def test_it_expires(two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ) -> None:
    name = f"brief {topic}"
    with lasting(two[0].mqtt, name, secs=1) as client:
        client.subscribe(topic, qos=1)
        assert any(name in queue for queue in rabbitmq.queues)
    for replica in two:
        replica.until(lambda one=replica: not one.stored("session", name))
    until_gone(two[0], rabbitmq, name)
    with lasting(two[1].mqtt, name) as client:
        assert not client.present


def test_a_client_that_says_so_ends_it(two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ) -> None:
    name = f"said {topic}"
    client = lasting(two[0].mqtt, name)
    client.subscribe(topic, qos=1)
    said = Properties(PacketTypes.DISCONNECT)
    said.SessionExpiryInterval = 0
    client.paho.disconnect(properties=said)
    client.until(lambda: client.ended)
    client.leave()
    two[1].until(lambda: not two[1].stored("session", name))
    until_gone(two[0], rabbitmq, name)


def test_clients_stay_while_the_cluster_is_away_and_lose_nothing(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    with Proxy(rabbitmq.port) as proxy, Client(two[1].mqtt, f"p {topic}") as publisher:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        cut = Replica("cut", url, NAMESPACE, queue_type="classic", reconnect_max_secs=0.5)
        with replicas(cut), lasting(cut.mqtt, f"here {topic}", ack=False) as here:
            here.subscribe(f"{topic}/#", qos=2)
            for at in range(6):
                publisher.publish(f"{topic}/{at % 2}", b"%d" % at, qos=1 + at % 2)
            here.until(lambda: len(here.messages) == 6)
            proxy.cut()
            proxy.shut()
            cut.until(lambda: bool(cut.gateway.readiness.reasons()))
            here.acknowledge()
            here.paho.subscribe(f"more/{topic}", qos=1)
            publisher.publish(f"{topic}/0", b"6", qos=2)
            proxy.open()
            here.until(lambda: len(here.answers) == 2)
            publisher.publish(f"more/{topic}", b"7", qos=1)
            here.until(lambda: {(f"more/{topic}", b"7"), (f"{topic}/0", b"6")} <= set(here.told))
            twice = [message.payload for message in here.messages if message.qos == 2]
            assert twice == [b"1", b"3", b"5", b"6"]
            assert {body for _, body in here.told} == {b"%d" % at for at in range(8)}
            assert not here.ended


def test_all_of_it_is_there_after_all_replicas_have_been_stopped(
    rabbitmq: RabbitMQ, topic: str, tmp_path: Path
) -> None:
    name, namespace = f"kept {topic}", "restarts"
    first = Replica("first", rabbitmq.url, namespace, tmp_path / "first", queue_type="classic")
    with replicas(first), lasting(first.mqtt, name) as client:
        client.subscribe(topic, qos=1)
    with replicas(Replica("another", rabbitmq.url, namespace, queue_type="classic")) as _:
        pass
    for folder in (tmp_path / "first", None):  # one that goes on in the log, and one that reads all of it
        again = Replica("again", rabbitmq.url, namespace, folder, queue_type="classic")
        with replicas(again), Client(again.mqtt, f"p {topic}") as publisher:
            publisher.publish(topic, b"x")
            with lasting(again.mqtt, name) as client:
                assert client.present
                client.until(lambda one=client: one.messages)
                assert client.told == [(topic, b"x")]


def test_a_client_that_is_away_for_too_much_loses_the_oldest_and_that_is_counted(
    rabbitmq: RabbitMQ, topic: str
) -> None:
    small = Replica("small", rabbitmq.url, "small", queue_type="classic", limits={"queue_messages_max": 10})
    with replicas(small), Client(small.mqtt, "publisher") as publisher:
        with lasting(small.mqtt, "forgetful") as client:
            client.subscribe(topic, qos=1)
        for at in range(25):
            publisher.publish(topic, b"%d" % at)
        small.until(lambda: small.gateway.mqtt.tally.queue_full == 15)
        with lasting(small.mqtt, "forgetful") as client:
            client.until(lambda: len(client.messages) == 10)
            assert [int(body) for _, body in client.told] == list(range(15, 25))


def test_a_queue_that_somebody_has_deleted_is_declared_again(
    two: tuple[Replica, Replica], topic: str, rabbitmq: RabbitMQ
) -> None:
    name = f"robbed {topic}"
    with lasting(two[0].mqtt, name) as client:
        client.subscribe(topic, qos=1)
    ((queue,),) = two[0].stored("session", name, "queue")
    rabbitmq.control("delete_queue", queue)
    with lasting(two[1].mqtt, name) as client, Client(two[0].mqtt, f"p {topic}") as publisher:
        assert client.present
        eventually(lambda: queue in rabbitmq.queues, SLOW_SECS)
        eventually(lambda: any(name in one for one in rabbitmq.bound), SLOW_SECS)
        publisher.publish(topic, b"x")
        client.until(lambda: client.messages)
        rabbitmq.control("delete_queue", queue)  # while it is consumed
        eventually(lambda: queue in rabbitmq.queues, SLOW_SECS)
        eventually(lambda: any(name in one for one in rabbitmq.bound), SLOW_SECS)
        publisher.publish(topic, b"y")
        client.until(lambda: (topic, b"y") in client.told)


def until_gone(replica: Replica, rabbitmq: RabbitMQ, name: str) -> None:
    eventually(lambda: not any(f".session.{name}." in queue for queue in rabbitmq.queues), SLOW_SECS)


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_a_client_leaves_unacknowledged_stays_before_what_waits(
    rabbitmq: RabbitMQ, topic: str, qos: int, queue_type: str
) -> None:
    """Some of it has been sent, more of it has been fetched, and most of it has not left the queue."""
    one, other = (
        Replica(name, rabbitmq.url, queue_type, queue_type=queue_type, limits={"inflight_max": 40})
        for name in ("one", "other")
    )
    with replicas(one, other), Client(other.mqtt, f"p {topic}") as publisher:
        before, _ = connect(one, "slow", properties=KEPT | {Property.RECEIVE_MAXIMUM: 35})
        with before:
            before.subscribe(topic, qos)
            for at in range(100):
                publisher.publish(topic, b"%d" % at, qos=qos)
            assert [int(before.row()[4]) for _ in range(35)] == list(range(35))
            before.cut()
        with lasting(other.mqtt, "slow") as after:
            after.until(lambda: len(after.messages) == 100)
            assert [int(body) for _, body in after.told] == list(range(100))
