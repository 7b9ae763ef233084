"""AMQP clients that talk to the cluster through a gateway: what passes, what does not, and how it ends."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import (
    AMQPConnectionError,
    ChannelClosedByBroker,
    ConnectionClosed,
    ConnectionClosedByBroker,
    UnroutableError,
)
from pydantic import SecretStr

from gateway import containment
from gateway.access.authorization import Roles
from gateway.app.clients import connected
from gateway.engine import judging
from gateway.engine.nodes import Nodes
from gateway.engine.relay import RelayedConnection
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.relaying import Relayed, ToClient, ToServer
from gateway.protocols.amqp091.translate import ENGINE_HEADER
from gateway.settings import ListenerTls, Role, User
from gateway.settings.access import HttpAuthorizer
from gateway.settings.endpoints import LinkTls
from gateway.transport.stream import BACKLOG_OCTETS_HIGH
from tests.access.test_authorizer import Server
from tests.chaos.proxy import Proxy
from tests.configured import make_listener
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, replicas
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.interop.servers import RabbitMQ, free_ports
from tests.interop.test_tls import make_certificate
from tests.passwords import hashed

NAMESPACE: Final = "relay"
numbers = itertools.count()


@pytest.fixture(scope="module")
def door(rabbitmq: RabbitMQ) -> Iterator[Replica]:
    """A replica with a listener for MQTT and one for AMQP."""
    one = Replica("door", rabbitmq.url, NAMESPACE, queue_type="classic", amqp={})
    with replicas(one):
        yield one


@pytest.fixture
def queue() -> str:
    """A name of this test's own."""
    return f"relay-{next(numbers)}"


@contextmanager
def through(one: Replica, **more: Any) -> Iterator[pika.BlockingConnection]:
    """A pika connection."""
    parameters = pika.URLParameters(one.amqp_url)
    for name, value in more.items():
        setattr(parameters, name, value)
    connection = pika.BlockingConnection(parameters)
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


@pytest.fixture
def connection(door: Replica) -> Iterator[pika.BlockingConnection]:
    with through(door) as made:
        yield made


@pytest.fixture
def channel(connection: pika.BlockingConnection) -> BlockingChannel:
    return connection.channel()


def relays(one: Replica) -> list[RelayedConnection]:
    """Those of its clients."""
    found = one.gateway.listeners["amqp091"].connections
    return [connection for connection in found if isinstance(connection, RelayedConnection)]


# What passes.


def test_confirms_returns_and_large_bodies_pass(channel: BlockingChannel, queue: str) -> None:
    channel.confirm_delivery()
    channel.queue_declare(queue, exclusive=True)
    sent = [b"", b"x", b"y" * 131_064, b"z" * 131_065, b"l" * 5_000_000]
    for body in sent:
        channel.basic_publish("", queue, body, mandatory=True)
    with pytest.raises(UnroutableError) as returned:
        channel.basic_publish("amq.direct", f"{queue}-nowhere", b"back" * 100_000, mandatory=True)
    assert returned.value.messages[0].body == b"back" * 100_000
    heard = []
    for method, _, body in channel.consume(queue, inactivity_timeout=PATIENCE_SECS):
        heard.append(body)
        channel.basic_ack(method.delivery_tag)
        if len(heard) == len(sent):
            break
    assert heard == sent


def test_transactions_pass(channel: BlockingChannel, queue: str) -> None:
    channel.queue_declare(queue, exclusive=True)
    channel.tx_select()
    channel.basic_publish("", queue, b"1")
    channel.tx_rollback()
    channel.basic_publish("", queue, b"2")
    assert channel.queue_declare(queue, passive=True).method.message_count == 0
    channel.tx_commit()
    assert channel.basic_get(queue, auto_ack=True)[2] == b"2"


@contextmanager
def occupying(one: Replica) -> Iterator[Callable[[float], None]]:
    """What is given says how much memory is used, as a part of its mark."""
    memory = one.gateway.memory
    before = memory._resident

    def look() -> None:
        memory.look()
        one.gateway.writes.flush()

    def use(part: float) -> None:
        memory._resident = lambda: int(part * memory.mark)
        one.ask(look)

    try:
        yield use
    finally:
        memory._resident = before
        one.ask(look)


def test_publishers_are_not_read_while_memory_is_short(door: Replica, queue: str) -> None:
    """Whoever consumes is, until memory is scarce; and all go on when there is some again."""

    def stopped() -> int:
        return [relay.stream.reading for relay in relays(door)].count(False)

    with (
        through(door) as publishing,
        through(door) as consuming,
        through(door) as both,
        occupying(door) as occupy,
    ):
        one, consumer, other = (connection.channel() for connection in (publishing, consuming, both))
        consumer.queue_declare(queue, auto_delete=True)
        for channel in (consumer, other):
            channel.basic_consume(queue, lambda *_: None, auto_ack=True)
        occupy(1.1)
        for channel in (one, other):
            channel.basic_publish("", queue, b"x")
        door.until(lambda: stopped() == 1)
        for channel in (consumer, other):  # these are answered
            assert channel.queue_declare(queue, passive=True).method.consumer_count == 2
        occupy(1.5)
        other.basic_publish("", queue, b"x")
        door.until(lambda: stopped() == 2)
        occupy(0.5)
        assert stopped() == 0
        one.confirm_delivery()
        one.basic_publish("", queue, b"y")


def test_a_fault_costs_its_channel_and_no_other(connection: pika.BlockingConnection, queue: str) -> None:
    other = connection.channel()
    channel = connection.channel()
    with pytest.raises(ChannelClosedByBroker) as closed:
        channel.queue_declare(queue, passive=True)
    assert closed.value.reply_code == 404
    other.queue_declare(queue, exclusive=True)
    again = connection.channel(channel.channel_number)
    again.confirm_delivery()
    again.basic_publish("", queue, b"x")
    assert other.basic_get(queue, auto_ack=True)[2] == b"x"


def test_mqtt_and_amqp_meet_at_the_topic_exchange(
    door: Replica, channel: BlockingChannel, queue: str
) -> None:
    channel.queue_declare(queue, exclusive=True)
    channel.queue_bind(queue, "amq.topic", f"{queue}.#")
    with Client(door.mqtt, "device") as device:
        device.subscribe(f"{queue}/back", qos=1)
        device.publish(f"{queue}/v1.2", b"up")
        got: list[Any] = []
        until(lambda: got.append(channel.basic_get(queue, auto_ack=True)) or got[-1][0] is not None)
        assert (got[-1][0].routing_key, got[-1][2]) == (f"{queue}.v1%2E2", b"up")
        channel.basic_publish("amq.topic", f"{queue}.back", b"down", pika.BasicProperties(delivery_mode=2))
        device.until(lambda: device.messages)
        assert device.told == [(f"{queue}/back", b"down")]
        assert device.messages[0].qos == 1


def test_the_cluster_knows_the_client(door: Replica, rabbitmq: RabbitMQ) -> None:
    said = {"connection_name": "the press", "capabilities": {"consumer_cancel_notify": True}}
    with through(door, client_properties=said):
        listed = rabbitmq.control("list_connections", "client_properties")
    assert "the press guest@127.0.0.1" in listed
    assert "by door" in listed


def test_what_is_connected_is_shown_and_counted(door: Replica, queue: str) -> None:
    def frames(direction: str) -> dict[str, int]:
        found = door.gateway.listeners["amqp091"].stats.frames()
        return {frame: count for (_, way, frame), count in found.items() if way == direction}

    stats = door.gateway.listeners["amqp091"].stats
    before, messages = frames("in"), (stats.messages_in, stats.messages_out)
    with through(door) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, exclusive=True)
        for _ in range(3):
            channel.basic_publish("", queue, b"x")
        for _ in range(3):
            assert channel.basic_get(queue, auto_ack=True)[2] == b"x"
        (shown,) = door.ask(
            lambda: [one for one in connected(door.gateway.listeners) if one.protocol != "mqtt"]
        )
        assert (shown.user, shown.version, shown.virtual_host, shown.channels) == ("guest", "0-9-1", "/", 1)
        told = door.ask(lambda: door.gateway.metrics.exposed(""))[0].decode()
        assert "gateway_engine_relays 1.0" in told
    after = frames("in")
    assert after["basic.publish"] - before.get("basic.publish", 0) == 3
    assert after["basic.get"] - before.get("basic.get", 0) == 3
    assert frames("out")["basic.get-ok"] >= 3
    assert (stats.messages_in - messages[0], stats.messages_out - messages[1]) == (3, 3)
    door.until(lambda: not door.gateway.nodes.joined)  # type: ignore[union-attr]


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_may_be_published_is_decided_once_for_all_with_the_same_rights(
    door: Replica, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided: list[str] = []
    decide = judging.ACTIONS[m.BasicPublish]

    def watched(judge: judging.ClientJudge, channel: Relayed, method: m.BasicPublish) -> None:
        decided.append(method.routing_key)
        decide(judge, channel, method)

    monkeypatch.setitem(judging.ACTIONS, m.BasicPublish, watched)
    for _ in range(2):
        with through(door) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare(queue, exclusive=True)
            for number in range(100):
                channel.basic_publish("", queue, b"%d" % (number // 7))
            assert channel.queue_declare(queue, passive=True).method.message_count == 100
    assert decided == [queue]


# What is the gateways'.

OWN: Final = f"{NAMESPACE}.session.x"
KEPT: Final = f"{NAMESPACE}.kept"
ASKED: Final[dict[str, Callable[[BlockingChannel, str], object]]] = {
    "declare": lambda channel, queue: channel.queue_declare(OWN),
    "declare with a line end": lambda channel, queue: channel.queue_declare(f"{NAMESPACE}\n.session.x"),
    "look at": lambda channel, queue: channel.queue_declare(f"{NAMESPACE}.state", passive=True),
    "delete": lambda channel, queue: channel.queue_delete(f"{NAMESPACE}.state"),
    "purge": lambda channel, queue: channel.queue_purge(f"{NAMESPACE}.dropped"),
    "consume": lambda channel, queue: channel.basic_consume(f"{NAMESPACE}.state", print),
    "get": lambda channel, queue: channel.basic_get(f"{NAMESPACE}.dropped"),
    "bind": lambda channel, queue: channel.queue_bind(OWN, "amq.topic", "#"),
    "bind to": lambda channel, queue: channel.queue_bind(queue, KEPT, ""),
    "bind an exchange": lambda channel, queue: channel.exchange_bind(KEPT, "amq.topic", "#"),
    "delete an exchange": lambda channel, queue: channel.exchange_delete(KEPT),
    "delete all topics": lambda channel, queue: channel.exchange_delete("amq.topic"),
    "look at an exchange": lambda channel, queue: channel.exchange_declare(KEPT, passive=True),
    "publish to the log": lambda channel, queue: publish(channel, KEPT, ""),
    "publish to a session": lambda channel, queue: publish(channel, "", OWN),
    "copy to a session": lambda channel, queue: publish(channel, "", queue, {"CC": ["a", OWN]}),
    "copy blindly": lambda channel, queue: publish(channel, "", queue, {"BCC": [OWN]}),
    "dead letters": lambda channel, queue: declare(channel, {"x-dead-letter-exchange": KEPT}),
    "dead letters by key": lambda channel, queue: declare(
        channel, {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": OWN}
    ),
    "dead letters by their own keys": lambda channel, queue: declare(channel, {"x-dead-letter-exchange": ""}),
    "what nobody wants": lambda channel, queue: channel.exchange_declare(
        f"{queue}-e", arguments={"alternate-exchange": KEPT}
    ),
    "what nobody wants, by its key": lambda channel, queue: channel.exchange_declare(
        f"{queue}-e", arguments={"alternate-exchange": ""}
    ),
}


def publish(channel: BlockingChannel, exchange: str, key: str, headers: dict[str, Any] | None = None) -> None:
    """With a confirm, so that it is answered."""
    channel.confirm_delivery()
    channel.basic_publish(exchange, key, b"forged", pika.BasicProperties(headers=headers))


def declare(channel: BlockingChannel, arguments: dict[str, Any]) -> None:
    channel.queue_declare("", exclusive=True, arguments=arguments)


@pytest.mark.parametrize("word", ASKED)
def test_what_belongs_to_the_gateways_is_nobodys(
    door: Replica, connection: pika.BlockingConnection, queue: str, word: str
) -> None:
    channel = connection.channel()
    channel.queue_declare(queue, exclusive=True)
    position = door.engine.kept.position
    denied = door.gateway.listeners["amqp091"].stats.denied.total
    with pytest.raises(ChannelClosedByBroker) as closed:
        ASKED[word](channel, queue)
    assert closed.value.reply_code == 403
    assert closed.value.reply_text.startswith("ACCESS_REFUSED - ")
    if "own key" not in word and "its key" not in word:
        assert "the gateways keep their state there" in closed.value.reply_text
        assert door.gateway.listeners["amqp091"].stats.denied.total == denied + 1
    assert connection.channel().queue_declare(queue, passive=True).method.message_count == 0
    assert door.engine.kept.position < position + 10


def test_nobody_speaks_as_a_replica(channel: BlockingChannel, queue: str) -> None:
    """Replicas believe what the header says: whose message it is, and its number."""
    channel.queue_declare(queue, exclusive=True)
    said = pika.BasicProperties(headers={"a": 1, ENGINE_HEADER: b"\1\0\0\0\4door", "b": ["x"]}, type="t")
    channel.basic_publish("", queue, b"x", said)
    _, heard, _ = channel.basic_get(queue, auto_ack=True)
    assert heard is not None
    assert (heard.headers, heard.type) == ({"a": 1, "b": ["x"]}, "t")


def test_nobody_speaks_as_another_user(channel: BlockingChannel, queue: str) -> None:
    channel.queue_declare(queue, exclusive=True)
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker) as closed:
        channel.basic_publish("", queue, b"x", pika.BasicProperties(user_id="gateway"))
    assert closed.value.reply_code == 406


# Who may do what.

HASH: Final = SecretStr(hashed("secret"))
ROLE: Final = {
    "amqp091": {
        "/": {
            "configure": "^(mine|amq.gen).*",
            "write": "^(mine|amq.gen|amq.topic|amq.default).*",
            "read": "^(mine|amq.gen|amq.topic).*",
            "topics": {"amq.topic": {"write": "^mine", "read": "^mine"}},
        }
    }
}
DENIED: Final[dict[str, Callable[[BlockingChannel], object]]] = {
    "declare": lambda channel: channel.queue_declare("yours"),
    "exchange": lambda channel: channel.exchange_declare("yours"),
    "consume": lambda channel: channel.basic_consume("yours", print),
    "get": lambda channel: channel.basic_get("yours"),
    "purge": lambda channel: channel.queue_purge("yours"),
    "delete": lambda channel: channel.queue_delete("yours"),
    "bind": lambda channel: channel.queue_bind("yours", "amq.topic", "mine"),
    "bind from": lambda channel: channel.queue_bind("mine", "amq.direct", "x"),
    "bind by key": lambda channel: channel.queue_bind("mine", "amq.topic", "#"),
    "publish": lambda channel: publish(channel, "amq.direct", "x"),
    "publish by key": lambda channel: publish(channel, "amq.topic", "yours"),
    "copy by key": lambda channel: publish(channel, "amq.topic", "mine", {"CC": ["yours"]}),
    "dead letters": lambda channel: declare(channel, {"x-dead-letter-exchange": "amq.direct"}),
}


@pytest.fixture(scope="module")
def guarded(rabbitmq: RabbitMQ) -> Iterator[Replica]:
    """With users and rules."""
    settings = {
        "users": {"device": User(password_hash=HASH, roles=("some",)), "other": User(password_hash=HASH)},
        "roles": {"some": Role.model_validate(ROLE, strict=False)},
    }
    one = Replica("guarded", rabbitmq.url, "guarded", queue_type="classic", amqp={}, settings=settings)
    with replicas(one):
        yield one


def device(name: str = "device", password: str = "secret") -> dict[str, Any]:
    return {"credentials": pika.PlainCredentials(name, password)}


@pytest.mark.parametrize("word", DENIED)
def test_roles_hold_for_what_passes(guarded: Replica, word: str) -> None:
    with through(guarded, **device()) as connection:
        channel = connection.channel()
        channel.queue_declare("mine", exclusive=True)
        with pytest.raises(ChannelClosedByBroker) as closed:
            DENIED[word](channel)
        assert closed.value.reply_code == 403
        assert "refused for user 'device'" in closed.value.reply_text


def test_what_roles_give_passes(guarded: Replica) -> None:
    with through(guarded, **device()) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for name in ("mine", ""):
            made = channel.queue_declare(name, exclusive=True).method.queue
            channel.queue_bind(made, "amq.topic", "mine.#")
        channel.basic_publish("amq.topic", "mine.too", b"x")
        assert channel.basic_get("")[2] == b"x"
        assert channel.basic_get("mine")[2] == b"x"


@pytest.mark.parametrize(
    ("name", "password"), [("device", "wrong"), ("nobody", "secret"), ("other", "secret"), ("guest", "guest")]
)
def test_who_is_not_known_does_not_get_through(guarded: Replica, name: str, password: str) -> None:
    nodes = guarded.gateway.nodes
    assert nodes is not None
    with pytest.raises(AMQPConnectionError), through(guarded, **device(name, password)):
        pass
    assert not nodes.joined


def test_rules_that_change_hold_for_who_is_connected(rabbitmq: RabbitMQ, queue: str) -> None:
    """Who consumes what it may not read any more has to go; publishes are decided anew."""
    settings = {
        "users": {name: User(password_hash=HASH, roles=(name,)) for name in ("reader", "writer")},
        "roles": {name: Role.model_validate(ROLE, strict=False) for name in ("reader", "writer")},
    }
    one = Replica("rules", rabbitmq.url, "rules", queue_type="classic", amqp={}, settings=settings)
    with (
        replicas(one),
        through(one, **device("reader")) as reading,
        through(one, **device("writer")) as writing,
    ):
        consuming, publishing = reading.channel(), writing.channel()
        consuming.queue_declare("mine", exclusive=True)
        consuming.basic_consume("mine", print)
        publish(publishing, "amq.topic", "mine.x")
        given = Role.model_validate(
            {"amqp091": {"/": {"configure": "^mine", "write": "^mine"}}}, strict=False
        )
        users = {"reader": ("new",), "writer": ("new",)}
        one.await_(lambda: one.gateway.rules.use(Roles({"new": given}, users)))
        with pytest.raises(ConnectionClosedByBroker) as closed:
            reading.process_data_events(PATIENCE_SECS)
        assert closed.value.reply_code == 403
        with pytest.raises(ChannelClosedByBroker) as refused:
            publish(publishing, "amq.topic", "mine.x")
        assert refused.value.reply_code == 403


def test_what_is_remembered_of_all_rights_has_one_limit(rabbitmq: RabbitMQ) -> None:
    names = ("one", "two")
    settings = {
        "users": {name: User(password_hash=HASH, roles=(name,)) for name in names},
        "roles": {name: Role.model_validate(ROLE, strict=False) for name in names},
    }
    replica = Replica(
        "remembering", rabbitmq.url, "remembering", queue_type="classic", amqp={}, settings=settings,
        limits={"cache_entries_max": 16},
    )  # fmt: skip
    with replicas(replica):
        for name in names:
            with through(replica, **device(name)) as connection:
                channel = connection.channel()
                channel.confirm_delivery()
                for number in range(15):
                    channel.basic_publish("amq.topic", f"mine.{number}", b"x")
        source = replica.gateway.listeners["amqp091"]._protocol
        until(lambda: sum(map(len, source._allowed.values())) <= 16)


def test_what_no_role_says_is_asked_for(rabbitmq: RabbitMQ, queue: str) -> None:
    """Meanwhile the client is not read, and what it says next is not lost."""
    queue = f"bob-{queue}"
    server = Server()
    try:
        urls = {f"{kind}_url": f"{server.url}/{kind}" for kind in ("vhost", "resource", "topic")}
        settings = {"authorizer": HttpAuthorizer(**urls), "users": {"bob": User(password_hash=HASH)}}
        one = Replica("asking", rabbitmq.url, "asking", queue_type="classic", amqp={}, settings=settings)
        with replicas(one), through(one, **device("bob")) as connection:
            channel = connection.channel()
            channel.queue_declare(queue, exclusive=True)
            channel.queue_bind(queue, "amq.topic", f"bob.{queue}.#")
            for number in range(50):
                headers = {"CC": [f"bob.{number}"]} if number % 5 == 0 else None
                said = pika.BasicProperties(headers=headers)
                channel.basic_publish("amq.topic", f"bob.{queue}.{number % 3}", b"%d" % number, said)
            until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 50)
            found = [int(channel.basic_get(queue, auto_ack=True)[2]) for _ in range(50)]
            assert found == list(range(50))
            with pytest.raises(ChannelClosedByBroker) as closed:
                publish(channel, "amq.topic", "eve.secret")
            assert closed.value.reply_code == 403
        assert {kind for kind, _ in server.asked} == {"vhost", "resource", "topic"}
    finally:
        server.stop()


def test_a_virtual_host_is_the_clusters_of_that_name(rabbitmq: RabbitMQ) -> None:
    """The first one stands for that of the urls."""
    rabbitmq.control("add_vhost", "beside")
    rabbitmq.control("set_permissions", "-p", "beside", "guest", ".*", ".*", ".*")
    listener = {"virtual_hosts": ("plant", "beside", "missing")}
    one = Replica("hosts", rabbitmq.url, "hosts", queue_type="classic", amqp=listener)
    with replicas(one):
        with through(one, virtual_host="beside") as connection:
            connection.channel().queue_declare("only-there", exclusive=True)
            assert "only-there" in rabbitmq.control("list_queues", "-p", "beside", "name")
        with through(one, virtual_host="plant") as connection, pytest.raises(ChannelClosedByBroker) as closed:
            connection.channel().queue_declare("only-there", passive=True)
        assert closed.value.reply_text == "NOT_FOUND - no queue 'only-there' in vhost '/'"
        for name in ("missing", "/"):
            with (
                pytest.raises(AMQPConnectionError, match=rf"\(530\) .*vhost {name} not found"),
                through(one, virtual_host=name),
            ):
                pass


# Limits.


def test_limits_are_kept(rabbitmq: RabbitMQ, queue: str) -> None:
    limits = {
        "amqp_message_bytes_max": 10_000,
        "consumers_max": 2,
        "properties_bytes_max": 2_000,
        "frame_bytes_max": 4_096,
        "channels_max": 3,
    }
    one = Replica("limits", rabbitmq.url, "limits", queue_type="classic", amqp={}, limits=limits)
    with replicas(one), through(one) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, exclusive=True)
        channel.basic_publish("", queue, b"x" * 10_000)
        assert len(channel.basic_get(queue, auto_ack=True)[2]) == 10_000
        for _ in range(2):
            channel.basic_consume(queue, print)
        with pytest.raises(ChannelClosedByBroker) as many:
            channel.basic_consume(queue, print)
        assert "(2) of consumers" in many.value.reply_text
        for body, headers in ((b"x" * 10_001, None), (b"x", {"a": "x" * 2_000})):
            channel = connection.channel()
            with pytest.raises(ChannelClosedByBroker) as large:
                publish_with(channel, queue, body, headers)
            assert large.value.reply_code == 406
        while connection._impl._channels.keys() < {1, 2, 3}:
            connection.channel()
        with pytest.raises(ConnectionClosed) as crowd:
            connection.channel(4)
        assert crowd.value.reply_code == 530


def publish_with(channel: BlockingChannel, queue: str, body: bytes, headers: dict[str, Any] | None) -> None:
    channel.confirm_delivery()
    channel.basic_publish("", queue, body, pika.BasicProperties(headers=headers))


def test_who_does_not_read_stops_its_node_and_fills_no_memory(door: Replica, queue: str) -> None:
    body = b"x" * 1_000_000
    with through(door) as filling:
        channel = filling.channel()
        channel.queue_declare(queue, exclusive=False, auto_delete=True)
        for _ in range(60):
            channel.basic_publish("", queue, body)
        heard: list[int] = []
        with through(door) as idle:
            consuming = idle.channel()
            consuming.basic_consume(queue, lambda *said: heard.append(len(said[3])), auto_ack=True)
            (relay,) = [one for one in relays(door) if one.channels and one._count_consumers()]
            until(lambda: relay.stream.queued > BACKLOG_OCTETS_HIGH)
            door.until(lambda: relay._node is not None and not relay._node.stream.reading)
            assert relay.stream.queued < 4 * BACKLOG_OCTETS_HIGH
            while len(heard) < 60:
                idle.process_data_events(PATIENCE_SECS)
        assert heard == [len(body)] * 60


def test_a_node_that_does_not_read_stops_its_clients(rabbitmq: RabbitMQ, queue: str) -> None:
    with Proxy(rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@{LOOPBACK}:{proxy.port}/%2F"
        one = Replica("slow", url, "slow", queue_type="classic", amqp={})
        with replicas(one), through(one, blocked_connection_timeout=None, heartbeat=0) as connection:
            channel = connection.channel()
            channel.queue_declare(queue, exclusive=True)
            proxy.stall("up")
            body = b"x" * 1_000_000
            sending = threading.Thread(
                target=lambda: [channel.basic_publish("", queue, body) for _ in range(40)]
            )
            sending.start()
            (relay,) = relays(one)
            one.until(lambda: relay._held)
            assert relay._node is not None
            assert relay._node.stream.queued < 4 * BACKLOG_OCTETS_HIGH
            assert sending.is_alive()
            proxy.resume()
            sending.join(PATIENCE_SECS)
            until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 40)


def test_heartbeats_are_each_sides_own(door: Replica, rabbitmq: RabbitMQ, queue: str) -> None:
    """The client wants them every second, and the node after thirty."""
    with through(door, heartbeat=1) as connection:
        channel = connection.channel()
        channel.queue_declare(queue, exclusive=True)
        (relay,) = relays(door)
        sent = door.gateway.listeners["amqp091"].stats.frames
        before = sent().get(("0-9-1", "out", "heartbeat"), 0)
        until(
            lambda: (
                connection.process_data_events(0.1)
                or sent().get(("0-9-1", "out", "heartbeat"), 0) > before + 1
            )
        )
        assert (relay.machine.heartbeat, relay._node and relay._node.machine.heartbeat) == (1, 30)


def test_a_blocked_cluster_is_told_of(door: Replica, rabbitmq: RabbitMQ, queue: str) -> None:
    with through(door) as connection:
        told: list[str] = []
        connection.add_on_connection_blocked_callback(lambda _, frame: told.append("blocked"))
        connection.add_on_connection_unblocked_callback(lambda _, frame: told.append("unblocked"))
        channel = connection.channel()
        rabbitmq.control("set_vm_memory_high_watermark", "0.000001")
        try:
            channel.basic_publish("", queue, b"x")
            until(lambda: connection.process_data_events(0.1) or told == ["blocked"])
        finally:
            rabbitmq.control("set_vm_memory_high_watermark", "0.4")
        until(lambda: connection.process_data_events(0.1) or told == ["blocked", "unblocked"])


# How it ends.


def test_a_node_that_is_lost_costs_its_clients_their_connections_at_once(
    rabbitmq: RabbitMQ, queue: str
) -> None:
    with Proxy(rabbitmq.port) as proxy:
        url = f"amqp://guest:guest@{LOOPBACK}:{proxy.port}/%2F"
        one = Replica("lost", url, "lost", queue_type="classic", amqp={})
        with replicas(one):
            with through(one) as connection:
                connection.channel().queue_declare(queue, exclusive=True)
                (relay,) = relays(one)
                assert relay._node is not None
                one.ask(lambda: relay._node and relay._node.stream.abort("cut off"))
                with pytest.raises(ConnectionClosedByBroker) as closed:
                    connection.process_data_events(PATIENCE_SECS)
                assert closed.value.reply_code == 320
                assert "the node of the cluster" in closed.value.reply_text
            with through(one) as connection:
                connection.channel().queue_declare(queue, exclusive=True)
            assert one.gateway.nodes is not None
            assert one.gateway.nodes.failures.counts == {"node_lost": 1}


def test_a_node_that_lives_is_found(rabbitmq: RabbitMQ, queue: str) -> None:
    """One refuses, one does not answer at all."""
    (closed,) = free_ports(1)
    with closing(socket.socket()) as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen()
        urls = (f"amqp://{LOOPBACK}:{closed}", f"amqp://{LOOPBACK}:{silent.getsockname()[1]}")
        one = Replica(
            "finding", (*urls, rabbitmq.url), "finding", queue_type="classic", amqp={},
            connect_timeout_secs=3.0, reconnect_max_secs=0.5,
        )  # fmt: skip
        with replicas(one):
            for _ in range(3):
                with through(one) as connection:
                    connection.channel().queue_declare(queue, exclusive=True)


def test_without_a_node_a_client_is_told_so(rabbitmq: RabbitMQ) -> None:
    (closed,) = free_ports(1)
    one = Replica("alone", f"amqp://{LOOPBACK}:{closed}", "alone", amqp={})
    with replicas(one, ready=False):
        why = r"\(320\) .*the cluster behind this gateway is away"
        with pytest.raises(AMQPConnectionError, match=why), through(one):
            pass
        assert one.gateway.nodes is not None
        assert one.gateway.nodes.failures.counts == {"cluster_away": 1}


def test_a_gateway_that_stops_says_so_and_what_was_said_arrives(rabbitmq: RabbitMQ, queue: str) -> None:
    one = Replica("stopping", rabbitmq.url, "stopping", queue_type="classic", amqp={})
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as beside:
        looking = beside.channel()
        looking.queue_declare(queue, exclusive=True)
        with replicas(one), through(one) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            looking.queue_bind(queue, "amq.direct", queue)
            channel.basic_publish("amq.direct", queue, b"x" * 3_000_000)
            stopping = threading.Thread(target=one.stop)
            stopping.start()
            with pytest.raises(ConnectionClosedByBroker) as closed:
                connection.process_data_events(PATIENCE_SECS)
            stopping.join(PATIENCE_SECS)
            assert closed.value.reply_code == 320
        assert len(looking.basic_get(queue, auto_ack=True)[2]) == 3_000_000


def test_what_a_client_said_before_it_vanished_arrives(door: Replica, rabbitmq: RabbitMQ, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as beside:
        looking = beside.channel()
        looking.queue_declare(queue, exclusive=False, auto_delete=True)
        with through(door) as connection:
            channel = connection.channel()
            for number in range(100):
                channel.basic_publish("", queue, b"%d" % number)
            connection.process_data_events(0)
            connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)
            with pytest.raises(AMQPConnectionError):
                connection.process_data_events(PATIENCE_SECS)
        until(lambda: looking.queue_declare(queue, passive=True).method.message_count == 100)
        looking.queue_delete(queue)


# What nobody foresaw.


@pytest.mark.parametrize(
    ("place", "name"),
    [(Nodes, "reach"), (ToServer, "taken"), (ToClient, "receive_data"), (judging.ClientJudge, "allows")],
)
def test_a_bug_costs_one_client(
    rabbitmq: RabbitMQ, queue: str, monkeypatch: pytest.MonkeyPatch, place: type, name: str
) -> None:
    one = Replica("bugs", rabbitmq.url, "bugs", queue_type="classic", amqp={})
    with replicas(one, but="internal error, contained"), through(one) as other:
        before = containment.counted["connection"]
        sound = getattr(place, name)
        odd: list[object] = []

        def broken(self: object, *given: Any, **more: Any) -> Any:
            if not odd:
                odd.append(self)
            if odd[0] is self:
                raise RuntimeError(name)
            return sound(self, *given, **more)

        monkeypatch.setattr(place, name, broken)
        with pytest.raises(pika.exceptions.AMQPError), through(one) as connection:
            connection.channel().queue_declare(queue)
        monkeypatch.undo()
        other.channel().queue_declare(queue, exclusive=True)
        with through(one) as connection:
            connection.channel()
        assert containment.counted["connection"] == before + 1


# TLS.


@pytest.mark.parametrize("trusted", [True, False])
def test_nodes_are_reached_through_tls(tmp_path: Path, queue: str, trusted: bool) -> None:
    """Another gateway stands for the node. Its certificate is looked at."""
    make_certificate(tmp_path, "node")
    own = ListenerTls(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    node = make_listener(protocol="amqp091", host=LOOPBACK, port=0, tls=own)
    with running(settings_of(listeners={"amqp091": node})) as behind:
        tls = LinkTls(ca_file=tmp_path / "cert.pem") if trusted else LinkTls()
        url = f"amqps://guest:guest@{LOOPBACK}:{behind.amqp}/%2F"
        front = {"tls": own}
        one = Replica("secure", url, "secure", amqp=front, tls=tls, connect_timeout_secs=5.0)
        with replicas(one, ready=False):
            context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
            options = pika.SSLOptions(context, LOOPBACK)
            if not trusted:
                with pytest.raises(AMQPConnectionError, match="320"), through(one, ssl_options=options):
                    pass
                return
            with through(one, ssl_options=options) as connection:
                channel = connection.channel()
                channel.queue_declare(queue, exclusive=True)
                channel.basic_publish("", queue, b"x" * 2_000_000)
                channel.basic_publish("", queue, b"y")
                bodies = [channel.basic_get(queue, auto_ack=True)[2] for _ in range(2)]
                assert bodies == [b"x" * 2_000_000, b"y"]
