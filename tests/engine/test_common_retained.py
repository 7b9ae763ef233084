"""Retained messages of two replicas over PostgreSQL and RabbitMQ."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Final

import httpx
import paho.mqtt.client as paho
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from pydantic import SecretStr

from gateway.protocols.mqtt.runs import Acks
from gateway.settings import Http, User
from gateway.settings.access import Role
from tests.access.test_doors import HASH, PASSWORD
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.servers import PostgreSQL, RabbitMQ
from tests.operator import bearer

MANY: Final = 3_000
QUOTA: Final = 0x97
CLIENTS_MAX: Final = 16  # that subscribe while messages are published; each gets all of them


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A namespace of the test."""
    readable = re.sub(r"\W+", "_", request.node.name.removeprefix("test_"))
    return f"{readable[:30]}_{blake2b(readable.encode(), digest_size=4).hexdigest()}"


@pytest.fixture
def two(rabbitmq: RabbitMQ, name: str) -> Iterator[tuple[Replica, Replica]]:
    pair = Replica("one", rabbitmq.url, name), Replica("two", rabbitmq.url, name)
    with replicas(*pair):
        yield pair


def found(replica: Replica, topic_filter: str, count: int, *, qos: int = 1) -> list[tuple[str, bytes]]:
    """Return what a new subscriber gets, and nothing more before a message that it sends itself."""
    with Client(replica.mqtt, f"finds {time.monotonic()}") as client:
        client.subscribe(topic_filter, qos=qos)
        client.until(lambda: len(client.messages) >= count)
        client.subscribe("marker", qos=1)
        client.publish("marker", b"")
        client.until(lambda: ("marker", b"") in client.told)
        return [one for one in client.told if one[0] != "marker"]


def said(**properties: Any) -> Properties:
    """Properties of a PUBLISH."""
    given = Properties(PacketTypes.PUBLISH)
    for word, value in properties.items():
        setattr(given, word, value)
    return given


def answers(client: Client) -> list[int]:
    """The reasons of PUBACKs from now on."""
    reasons: list[int] = []
    client.paho.on_publish = lambda _, __, ___, reason, ____: reasons.append(reason.value)
    return reasons


def test_restarts_of_one_and_of_both(rabbitmq: RabbitMQ, name: str) -> None:
    """Nothing is kept by the processes, with and without a disk."""
    given = said(UserProperty=[("a", "1"), ("a", "2")], ContentType="a/b", MessageExpiryInterval=600)
    with replicas(Replica("one", rabbitmq.url, name)):
        two = Replica("two", rabbitmq.url, name)
        with replicas(two), Client(two.mqtt, "sets") as client:
            for at in range(20):
                client.publish(f"r/{at}", b"%d" % at, qos=at % 3, retain=True, properties=given)
            client.publish("r/3", b"", retain=True)
        two = Replica("two", rabbitmq.url, name)
        with replicas(two):
            assert len(found(two, "r/+", 19)) == 19
    again = Replica("one", rabbitmq.url, name)
    with replicas(again), Client(again.mqtt, "finds") as client:
        client.subscribe("r/#", qos=2)
        client.until(lambda: len(client.messages) == 19)
        assert dict(client.told) == {f"r/{at}": b"%d" % at for at in range(20) if at != 3}
        assert {one.topic: one.qos for one in client.messages} == {
            f"r/{at}": at % 3 for at in range(20) if at != 3
        }
        for one in client.messages:
            assert one.retain
            assert one.properties.UserProperty == given.UserProperty
            assert one.properties.ContentType == "a/b"
            assert 500 < one.properties.MessageExpiryInterval <= 600


def test_what_expires_is_gone_everywhere(two: tuple[Replica, Replica]) -> None:
    with Client(two[0].mqtt, "sets") as client:
        client.publish("r/short", b"1", retain=True, properties=said(MessageExpiryInterval=1))
        client.publish("r/long", b"2", retain=True, properties=said(MessageExpiryInterval=600))
        for one in two:
            deadline = time.monotonic() + 20
            while found(one, "r/+", 1) != [("r/long", b"2")]:
                assert time.monotonic() < deadline


def test_a_clear_at_one_is_a_clear_at_the_other(two: tuple[Replica, Replica]) -> None:
    with Client(two[0].mqtt, "sets") as client, Client(two[1].mqtt, "clears") as other:
        for at in range(3):
            client.publish("r/a", b"%d" % at, retain=True)
            other.publish("r/a", b"", retain=True)
            client.publish("r/b", b"%d" % at, retain=True)
            for one in two:
                assert found(one, "r/#", 1) == [("r/b", b"%d" % at)]


@pytest.mark.parametrize("topic_filter", ["many/#", "many/+/+", "+/+/7"])
def test_a_wildcard_over_many_topics(two: tuple[Replica, Replica], topic_filter: str) -> None:
    """In pages, each message once, while others publish, and are served."""
    levels = [(at // 100, at % 100) for at in range(MANY)]
    wanted = [one for one in levels if topic_filter != "+/+/7" or one[1] == 7]
    with Client(two[0].mqtt, "sets", window=1_000) as client:
        infos = [client.paho.publish(f"many/{a}/{b}", b"%d" % b, qos=1, retain=True) for a, b in levels]
        for info in infos:
            info.wait_for_publish(60)
        for one in two:
            assert sorted(found(one, topic_filter, len(wanted), qos=2)) == sorted(
                (f"many/{a}/{b}", b"%d" % b) for a, b in wanted
            )


def test_many_subscriptions_of_one_client(two: tuple[Replica, Replica]) -> None:
    """More than walks go on at once; some find nothing."""
    with Client(two[0].mqtt, "sets") as client, Client(two[1].mqtt, "finds") as other:
        for at in range(0, 60, 2):
            client.publish(f"r/{at}", b"x", retain=True)
        other.paho.subscribe([(f"r/{at}", 1) for at in range(60)])
        other.until(lambda: len(other.messages) == 30)
        assert sorted(topic for topic, _ in other.told) == sorted(f"r/{at}" for at in range(0, 60, 2))


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_publisher_s_order_holds(two: tuple[Replica, Replica], qos: int) -> None:
    """With RETAIN and without, over several topics and over one; the last one is retained."""
    with Client(two[0].mqtt, "sets", window=100) as client, Client(two[1].mqtt, "hears") as other:
        other.subscribe("r/#", qos=qos)
        infos = [
            client.paho.publish(f"r/{at % 3}", b"%d" % at, qos=qos, retain=at % 5 != 0) for at in range(600)
        ]
        for info in infos:
            info.wait_for_publish(30)
        other.until(lambda: len(other.messages) >= 600)
        assert [int(body) for _, body in other.told] == list(range(600))
        for one in two:
            assert sorted(found(one, "r/+", 3)) == [("r/0", b"597"), ("r/1", b"598"), ("r/2", b"599")]


@pytest.mark.parametrize("qos", [0, 1])
def test_the_last_message_of_a_topic_comes_last(two: tuple[Replica, Replica], qos: int) -> None:
    """Whoever subscribes while somebody publishes has what is retained in the end."""
    done = threading.Event()

    def publish() -> None:
        with Client(two[0].mqtt, "sets", window=20) as client:
            infos = [client.paho.publish("r/a", b"%d" % at, qos=1, retain=True) for at in range(500)]
            for info in infos:
                info.wait_for_publish(60)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    clients: list[Client] = []
    while not done.is_set() and len(clients) < CLIENTS_MAX:
        client = Client(two[len(clients) % 2].mqtt, f"hears {len(clients)}")
        clients.append(client)
        client.subscribe("r/+", qos=qos)
    thread.join()
    for client in clients:
        client.until(lambda one=client: one.messages and one.told[-1] == ("r/a", b"499"))
        live = [int(one.payload) for one in client.messages if not one.retain]
        assert live == sorted(live)
        client.leave()


@pytest.mark.parametrize("kind", [Client, lasting])
def test_quality_2_comes_once_live_or_retained(two: tuple[Replica, Replica], kind: Any) -> None:
    """Whoever subscribes while others publish gets each message once, and the last of each topic last."""
    topics, rounds = 20, 30
    done = threading.Event()

    def publish() -> None:
        with Client(two[0].mqtt, "sets", window=50) as client:
            infos = [
                client.paho.publish(f"r/{topic}", b"%d" % at, qos=2, retain=True)
                for at in range(rounds)
                for topic in range(topics)
            ]
            for info in infos:
                info.wait_for_publish(60)
        done.set()

    thread = threading.Thread(target=publish)
    thread.start()
    clients: list[Client] = []
    at = 0
    while not done.is_set() and len(clients) < CLIENTS_MAX:
        client = kind(two[at % 2].mqtt, f"finds {at}")
        clients.append(client)
        client.subscribe("r/+", qos=2)
        at += 1
    thread.join()
    assert len(clients) > 2
    last = {f"r/{topic}": b"%d" % (rounds - 1) for topic in range(topics)}
    for client in clients:
        client.until(lambda one=client: dict(one.told) == last)
        assert len(set(client.told)) == len(client.told)
        for topic in last:
            numbers = [int(body) for name, body in client.told if name == topic]
            assert numbers == sorted(numbers)
        client.leave()


@pytest.mark.parametrize("kind", [Client, lasting])
def test_who_subscribes_again_gets_what_is_retained_again(two: tuple[Replica, Replica], kind: Any) -> None:
    """Though it came live, or as retained, a moment before."""
    with kind(two[0].mqtt, "hears") as client, Client(two[1].mqtt, "sets") as other:
        client.subscribe("r/+", qos=2)
        other.publish("r/a", b"1", qos=2, retain=True)
        client.until(lambda: len(client.messages) == 1)
        for count in (2, 3):
            client.subscribe("r/+", qos=2)
            client.until(lambda count=count: len(client.messages) == count)
        assert [one.retain for one in client.messages] == [False, True, True]
        other.publish("r/a", b"2", qos=2, retain=True)
        client.until(lambda: client.told[-1] == ("r/a", b"2"))
        assert len(client.messages) == 4


def test_what_a_replica_was_late_to_store_replaces_nothing_newer(two: tuple[Replica, Replica]) -> None:
    """A replica was frozen with a message of a client that has gone on at the other one since."""
    late = two[0].gateway.mqtt.retained
    submitted: list[Any] = []
    retain = late.retain
    late.retain = lambda *given, **more: submitted.append((given, more))
    with Client(two[0].mqtt, "sets") as client:
        client.paho.publish("r/a", b"old", qos=1, retain=True)
        two[0].until(lambda: len(submitted) == 1)
    with Client(two[1].mqtt, "sets") as client:
        client.publish("r/a", b"new", retain=True)
    with Client(two[1].mqtt, "hears") as hears:
        hears.subscribe("r/#", qos=1)
        ((given, more),) = submitted
        two[0].ask(lambda: retain(*given, **more))
        two[0].until(lambda: not len(two[0].engine.publisher.retain_queue))
        assert found(two[0], "r/+", 1) == [("r/a", b"new")]
        assert hears.told == [("r/a", b"new")]


@contextmanager
def own_database(
    rabbitmq: RabbitMQ, name: str, **limits: Any
) -> Iterator[tuple[PostgreSQL, Replica, Replica]]:
    """Two replicas, and a database that may be stopped."""
    with PostgreSQL() as server:
        more: dict[str, Any] = {"postgresql": {"url": server.url}}
        pair = [Replica(one, rabbitmq.url, name, **more) for one in ("one", "two")]
        with replicas(*pair):
            yield server, pair[0], pair[1]


def test_while_the_database_is_away_publishers_wait_and_are_refused(
    rabbitmq: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are served; who subscribes gets what is retained when the database is back."""
    monkeypatch.setattr("gateway.engine.retain_queue.WAIT_SECS", 6.0)
    with own_database(rabbitmq, name) as (server, one, two):
        with Client(one.mqtt, "sets") as client, Client(one.mqtt, "plain") as plain:
            client.publish("r/a", b"before", retain=True)
            plain.subscribe("other", qos=1)  # then all that its connection has changed is stored
            server.stop()
            reasons = answers(client)
            info = client.paho.publish("r/a", b"refused", qos=1, retain=True)
            behind = client.paho.publish("r/b", b"behind", qos=1)
            plain.subscribe("r/#", qos=1)
            plain.publish("r/c", b"plain")  # it waits for nothing
            plain.until(lambda: ("r/c", b"plain") in plain.told)
            assert not info.is_published()
            waiting = one.gateway.metrics.sources.gauges["gateway_engine_retaining_messages"]
            one.until(lambda: waiting() == 2)
            assert ("r/b", b"behind") not in plain.told  # the client's messages keep their order
            info.wait_for_publish(30)
            behind.wait_for_publish(30)
            assert reasons[0] >= 0x80
            assert reasons[1] < 0x80
            plain.until(lambda: ("r/b", b"behind") in plain.told)
            short = client.paho.publish("r/a", b"after", qos=1, retain=True)
            server.start()
            short.wait_for_publish(30)
            assert reasons[2] < 0x80
            plain.until(lambda: ("r/a", b"after") in plain.told)
            assert ("r/a", b"refused") not in plain.told
        for replica in (one, two):
            replica.until_ready()
            assert found(replica, "r/+", 1) == [("r/a", b"after")]


def test_limits_hold_for_all_replicas(rabbitmq: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic beyond them is refused, published all the same, and has room when another one is cleared."""
    monkeypatch.setattr("gateway.engine.retained.WEIGH_SECS", 1.0)
    monkeypatch.setattr("gateway.engine.retained.RESTS", 1)  # however slow this machine is
    pair = [Replica(one, rabbitmq.url, name, limits={"retained_messages_max": 3}) for one in ("one", "two")]
    with (
        replicas(*pair),
        Client(pair[0].mqtt, "a") as a,
        Client(pair[1].mqtt, "b") as b,
        Client(pair[1].mqtt, "hears") as hears,
    ):
        hears.subscribe("r/#", qos=1)
        of_a, of_b = answers(a), answers(b)
        for topic in ("r/1", "r/2", "r/3", "r/4"):
            a.publish(topic, b"a", retain=True)
        assert of_a == [0, 0, 0, QUOTA]
        pair[1].until(lambda: len(pair[1].gateway.mqtt.retained) == 3)
        b.publish("r/5", b"b", retain=True)
        b.publish("r/3", b"b", retain=True)  # in place of another one
        assert of_b == [QUOTA, 0]
        hears.until(lambda: len(hears.messages) == 6)
        assert [topic for topic, _ in hears.told] == ["r/1", "r/2", "r/3", "r/4", "r/5", "r/3"]
        assert sorted(found(pair[0], "r/#", 3)) == [("r/1", b"a"), ("r/2", b"a"), ("r/3", b"b")]
        b.publish("r/1", b"", retain=True)
        pair[0].until(lambda: len(pair[0].gateway.mqtt.retained) == 2)
        a.publish("r/4", b"a", retain=True)
        assert of_a[-1] == 0
        assert [topic for topic, _ in sorted(found(pair[1], "r/#", 3))] == ["r/2", "r/3", "r/4"]
        assert pair[0].gateway.mqtt.retained.refused == 1
        assert pair[0].ask(lambda: len(pair[0].gateway.mqtt.retained)) >= 3


def test_a_user_has_a_share_of_all_replicas(
    rabbitmq: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.engine.retained.WEIGH_SECS", 1.0)
    monkeypatch.setattr("gateway.engine.retained.RESTS", 1)  # however slow this machine is
    users = {
        "roles": {"all": Role.model_validate({"mqtt": {"publish": "#", "subscribe": "#"}})},
        "users": {user: User(password_hash=SecretStr(HASH), roles=("all",)) for user in ("greedy", "modest")},
    }
    limits = {"retained_messages_max": 10, "user_share": 0.5}
    one, two = (Replica(which, rabbitmq.url, name, limits=limits, settings=users) for which in ("one", "two"))

    def retains(replica: Replica, user: str, *topics: str) -> list[int]:
        client, _ = connect(replica, f"{user} {time.monotonic()}", user=(user, PASSWORD.encode()))
        reasons = []
        with client:
            for at, topic in enumerate(topics, start=1):
                client.publish(topic, b"x", 1, at, retain=True)
                reasons.append(int(client.next(Acks).rows[0][1]))
        return reasons

    with replicas(one, two):
        assert retains(one, "greedy", *[f"g/{at}" for at in range(6)]) == [0] * 5 + [QUOTA]
        two.until(lambda: len(two.gateway.mqtt.retained) == 5)
        assert retains(two, "greedy", "g/7", "g/0") == [QUOTA, 0]
        assert retains(two, "modest", "m/0", "m/1") == [0, 0]


def test_an_older_client_waits_until_the_database_is_back(
    rabbitmq: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MQTT 3.1.1 has no word for a refusal: the message is tried again."""
    monkeypatch.setattr("gateway.engine.retain_queue.WAIT_SECS", 1.0)
    with own_database(rabbitmq, name) as (server, one, two):
        with Client(one.mqtt, "sets", version=paho.MQTTv311) as client:
            server.stop()
            info = client.paho.publish("r/a", b"x", qos=1, retain=True)
            one.until(lambda: bool(one.gateway.listeners["mqtt"].stats._refused_messages), 30)
            assert not info.is_published()
            server.start()
            info.wait_for_publish(30)
            assert info.is_published()
        two.until_ready()
        assert found(two, "r/+", 1) == [("r/a", b"x")]


def test_quality_2_of_a_publisher_that_leaves_while_the_database_is_away(
    rabbitmq: RabbitMQ, name: str
) -> None:
    """And says it again at another replica, which lets it in when the database is back."""
    with own_database(rabbitmq, name) as (server, one, two), Client(two.mqtt, "hears") as hears:
        hears.subscribe("r/+", qos=2)
        with lasting(one.mqtt, "sets") as client:
            client.publish("r/first", b"1", qos=2, retain=True)
            server.stop()
            infos = [client.paho.publish(f"r/{at}", b"%d" % at, qos=2, retain=True) for at in range(5)]
            one.until(lambda: one.engine.sessions.pending)  # the ids of what it publishes wait
            client.goes_on(two.mqtt)
            client.paho.socket().shutdown(socket.SHUT_RDWR)
            client.until(lambda: client.ended)
            server.start()
            client.until(lambda: client.welcome is not None and not client.welcome.is_failure)
            for info in infos:
                info.wait_for_publish(30)
                assert info.is_published()
        wanted = [("r/first", b"1"), *((f"r/{at}", b"%d" % at) for at in range(5))]
        hears.until(lambda: len(hears.messages) >= len(wanted))
        for replica in (one, two):
            replica.until_ready()
            assert sorted(found(replica, "r/+", len(wanted), qos=2)) == sorted(wanted)
        assert sorted(hears.told) == sorted(wanted)


def test_an_operator_lists_and_clears_those_of_all_replicas(rabbitmq: RabbitMQ, name: str) -> None:
    http = {"http": Http(host=LOOPBACK, port=0)}
    one, two = (Replica(which, rabbitmq.url, name, settings=http) for which in ("one", "two"))
    with replicas(one, two):
        with Client(one.mqtt, "sets", window=1_000) as client:
            infos = [
                client.paho.publish(f"r/{at:04}", b"x" * (at % 7), qos=1, retain=True) for at in range(1_500)
            ]
            for info in infos:
                info.wait_for_publish(30)
            given = said(MessageExpiryInterval=600)
            client.publish("r/last", b"xy", qos=2, retain=True, properties=given)
        there = [f"r/{at:04}" for at in range(1_500) if at % 7] + ["r/last"]
        port = two.gateway.http_port
        with httpx.Client(
            base_url=f"http://{LOOPBACK}:{port}/api/v1", headers=bearer(port), trust_env=False, timeout=30
        ) as api:
            listed: list[str] = []
            after: str | None = ""
            while after is not None:
                wanted = {"topic": "r/#", "count": 500, "after": after}
                page = api.get("retained", params=wanted).json()
                assert page["total"] == len(there)
                listed += [row["topic"] for row in page["items"]]
                after = page["next"]
            assert listed == there
            (row,) = api.get("retained", params={"topic": "r/last", "exact": "true"}).json()["items"]
            assert (row["qos"], row["body_bytes"], row["client"]) == (2, 2, "sets")
            assert row["expires"] is not None
            assert api.post("retained/remove", json={"topic": "r/00+0"}).status_code == 400
            removed = api.post("retained/remove", json={"topic": "r/0001", "exact": True}).json()
            assert removed == {"removed": 1}
            assert api.post("retained/remove", json={"topic": "r/none"}).json() == {"removed": 0}
            assert found(one, "r/0001", 0) == []
            assert api.post("retained/remove", json={"client": "se*"}).json() == {"removed": len(there) - 1}
            assert api.get("retained").json() == {"total": 0, "items": [], "next": None}
        assert found(one, "r/#", 0) == []


def test_an_operator_is_told_when_the_database_is_away(
    rabbitmq: RabbitMQ, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.state.lanes.READ_TIMES", 0.2)
    with PostgreSQL() as server:
        http = {"http": Http(host=LOOPBACK, port=0)}
        one = Replica("one", rabbitmq.url, name, settings=http, postgresql={"url": server.url})
        with replicas(one), Client(one.mqtt, "sets") as client:
            client.publish("r/a", b"x", retain=True)
            port = one.gateway.http_port
            with httpx.Client(
                base_url=f"http://{LOOPBACK}:{port}/api/v1", headers=bearer(port), trust_env=False, timeout=60
            ) as api:
                server.stop()
                assert api.get("retained").status_code == 503
                assert api.post("retained/remove", json={"topic": "#"}).status_code == 503
                server.start()
                one.until_ready()
                assert api.post("retained/remove", json={"topic": "#"}).json() == {"removed": 1}
