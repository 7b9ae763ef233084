"""Who may do what, over sockets: identity, protocol, action, address, and the answer in the protocol's words.

MQTT is spoken by paho, AMQP 0-9-1 by pika, AMQP/Fast by the client of these tests.
"""

from __future__ import annotations

import queue
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pika
import pytest
import trio
import yaml
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.subscribeoptions import SubscribeOptions
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError
from pydantic import SecretStr

import gateway as gateway_package
from gateway.app.access import roles_of
from gateway.model.outcome import Outcome
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import ChannelClosed, Closed, Fragment, HandleClosed, Opened, Replies
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.mqtt.packets import Connack, Disconnect, Will
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Settings, StoreSettings, User, load_settings
from gateway.settings.access import DefaultRoles, Role
from gateway.settings.amqpfast import FastVirtualHost, OutOfBand, PeerService
from tests.broker.parts import newest
from tests.files import replace_text
from tests.ingress.amqpfast.client import EMPTY, PEER, QUEUE, TOPIC, Fast
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.pahos import leave
from tests.passwords import hashed

PATIENCE_SECS: Final = 10.0
PASSWORD: Final = "right"
ROLES: Final[dict[str, Any]] = {
    "device": {
        "client_id": "{user}-*",
        "mqtt": {
            "publish": ["plant/{user}/#", "shared/{client_id}"],
            "subscribe": ["command/{user}/#", "news/+"],
            "deny_subscribe": "news/secret",
            "qos_max": 1,
            "retain": False,
            "shared": False,
            "session_expiry_secs_max": 60,
        },
    },
    "erp": {
        "amqp091": {
            "/": {
                "configure": "^(erp|amq\\.gen)",
                "write": "^(erp|amq\\.gen|amq\\.default$|amq\\.topic$)",
                "read": "^(erp|amq\\.gen|amq\\.topic$)",
                "topics": {"amq.topic": {"write": "^erp\\.", "read": "^(erp|news)\\."}},
            }
        },
        "amqpfast": {
            "/": {
                "queues": {"write": "erp.*", "read": "erp.*", "create": "erp.*"},
                "topics": {"read": "news.*", "write": "news.today", "create": "news.*"},
            }
        },
    },
    "all": {
        "mqtt": {"publish": ["#", "$SYS/#"], "subscribe": ["#", "$SYS/#"]},
        "amqp091": {"*": {"configure": ".*", "write": ".*", "read": ".*"}},
        "amqpfast": {
            "*": {
                "queues": {"write": "*", "read": "*", "create": "*"},
                "topics": {"write": "*", "read": "*", "create": "*"},
                "peers": "*",
            }
        },
    },
    "visitor": {"mqtt": {"subscribe": "news/today"}},
}
HASH: Final = hashed(PASSWORD)
USERS: Final = {"ann": ("device",), "bob": ("erp",), "root": ("all",), "eve": ()}


def settings(
    roles: dict[str, Any] = ROLES, users: dict[str, tuple[str, ...]] = USERS, **more: Any
) -> Settings:
    """Of a gateway with these roles and users, who all have the same password."""
    return settings_of(
        roles={name: Role.model_validate(role) for name, role in roles.items()},
        users={name: User(password_hash=SecretStr(HASH), roles=has) for name, has in users.items()},
        default_roles=DefaultRoles(anonymous=tuple({"visitor"} & roles.keys())),
        **more,
    )


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(settings()) as one:
        yield one


# MQTT, by paho


class Paho:
    """A paho client that waits for each answer."""

    def __init__(self, gateway: Running, user: str, client_id: str, *, five: bool = True) -> None:
        self.heard: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5 if five else paho.MQTTv311
        )
        if user:
            self.client.username_pw_set(user, PASSWORD)
        self.client.on_connect = lambda _c, _u, _f, reason, _p: self.heard.put(("connect", reason))
        self.client.on_publish = lambda _c, _u, _m, reason, _p: self.heard.put(("publish", reason))
        self.client.on_subscribe = lambda _c, _u, _m, reasons, _p: self.heard.put(("subscribe", reasons[0]))
        self.client.on_disconnect = lambda _c, _u, _f, reason, _p: self.heard.put(("disconnect", reason))
        self.client.connect(LOOPBACK, gateway.mqtt)
        self.client.loop_start()

    def __enter__(self) -> Paho:
        return self

    def __exit__(self, *_: object) -> None:
        leave(self.client)

    def told(self, *kinds: str) -> tuple[str, int]:
        """The next of these answers, and its code; 256: paho knows that the connection has ended."""
        while True:
            kind, reason = self.heard.get(timeout=PATIENCE_SECS)
            if kind in kinds:
                value = getattr(reason, "value", reason)
                return kind, int(value)


OK: Final = 0
NOBODY: Final = 0x10  # taken, and nobody has subscribed
NOT_AUTHORIZED: Final = 0x87


@pytest.mark.parametrize(
    "user, client_id, action, name, told",
    [
        ("ann", "ann-1", "publish", "plant/ann/x", ("publish", NOBODY)),
        ("ann", "ann-1", "publish", "plant/ann", ("publish", NOBODY)),
        ("ann", "ann-1", "publish", "shared/ann-1", ("publish", NOBODY)),
        ("ann", "ann-2", "publish", "shared/ann-1", ("publish", NOT_AUTHORIZED)),
        ("ann", "ann-1", "publish", "plant/bob/x", ("publish", NOT_AUTHORIZED)),
        ("ann", "ann-1", "publish", "command/ann/x", ("publish", NOT_AUTHORIZED)),
        ("root", "any", "publish", "plant/bob/x", ("publish", NOBODY)),
        ("bob", "b", "connect", "", ("connect", NOT_AUTHORIZED)),
        ("eve", "e", "connect", "", ("connect", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "command/ann/#", ("subscribe", 1)),
        ("ann", "ann-1", "subscribe", "command/ann/+/x", ("subscribe", 1)),
        ("ann", "ann-1", "subscribe", "command/#", ("subscribe", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "#", ("subscribe", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "plant/ann/x", ("subscribe", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "news/today", ("subscribe", 1)),
        ("ann", "ann-1", "subscribe", "news/+", ("subscribe", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "news/secret", ("subscribe", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "$share/g/news/today", ("subscribe", NOT_AUTHORIZED)),
        ("ann", "ann-1", "subscribe", "$SYS/#", ("subscribe", NOT_AUTHORIZED)),
        ("root", "r", "subscribe", "$SYS/#", ("subscribe", 1)),
        ("root", "r", "subscribe", "$share/g/#", ("subscribe", 1)),
        ("", "x", "subscribe", "news/today", ("subscribe", 1)),
        ("", "x", "subscribe", "news/x", ("subscribe", NOT_AUTHORIZED)),
        ("", "x", "publish", "news/today", ("publish", NOT_AUTHORIZED)),
        ("ann", "bob-1", "connect", "", ("connect", ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)),
        ("ann", "ann", "connect", "", ("connect", ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)),
        ("ann", "", "connect", "", ("connect", OK)),
        ("root", "", "connect", "", ("connect", OK)),
    ],
)
def test_mqtt(
    gateway: Running, user: str, client_id: str, action: str, name: str, told: tuple[str, int]
) -> None:
    with Paho(gateway, user, client_id) as client:
        if action == "connect":
            assert client.told("connect") == told
            return
        assert client.told("connect") == ("connect", OK)
        if action == "publish":
            client.client.publish(name, b"x", 1)
        else:
            client.client.subscribe(name, options=SubscribeOptions(1))
        assert client.told(action, "disconnect") == told


@pytest.mark.parametrize("action, name", [("publish", "plant/bob"), ("subscribe", "command/#")])
def test_mqtt_3_says_no_as_it_can(gateway: Running, action: str, name: str) -> None:
    """A message is refused by closing the connection, a subscription by 0x80."""
    with Paho(gateway, "ann", "ann-3", five=False) as client:
        assert client.told("connect") == ("connect", OK)
        if action == "subscribe":
            client.client.subscribe(name, 1)
            assert client.told("subscribe") == ("subscribe", 0x80)
        else:
            client.client.publish(name, b"x", 1)
            assert client.told("publish", "disconnect")[0] == "disconnect"


def ann(gateway: Running, client_id: str = "ann-1", **more: Any) -> tuple[Mqtt, Connack]:
    return connect(gateway, client_id, user=("ann", PASSWORD.encode()), **more)


def test_what_a_role_narrows_is_told_in_the_connack(gateway: Running) -> None:
    client, told = ann(gateway, properties={Property.SESSION_EXPIRY_INTERVAL: 1_000})
    with client:
        assert told.properties[Property.MAXIMUM_QOS] == 1
        assert told.properties[Property.RETAIN_AVAILABLE] == 0
        assert told.properties[Property.SESSION_EXPIRY_INTERVAL] == 60
        assert client.subscribe("command/ann/x", 2) == 1
    for more, reason in (
        ({"qos": 2, "packet_id": 1}, ReasonCode.QOS_NOT_SUPPORTED),
        ({"retain": True}, ReasonCode.RETAIN_NOT_SUPPORTED),
    ):
        client, _ = ann(gateway)
        with client:
            client.machine.publish(b"plant/ann", b"x", **({"qos": 0} | more))
            client.flush()
            assert client.next(Disconnect).reason == reason


def test_a_message_without_acknowledgement_costs_the_connection(gateway: Running) -> None:
    client, _ = ann(gateway)
    with client:
        client.publish("plant/bob", qos=0)
        assert client.next(Disconnect).reason == NOT_AUTHORIZED
    client, _ = ann(gateway)
    with client:  # others that are allowed pass beside one that is not
        for packet_id, topic in (
            (1, b"plant/ann"),
            (2, b"plant/bob"),
            (3, b"plant/ann/x"),
            (4, b"plant/bob"),
        ):
            client.machine.publish(topic, b"x", 1, packet_id=packet_id)
        client.flush()
        said = dict([client.acked(PacketType.PUBACK) for _ in range(4)])
        assert said == {1: NOBODY, 2: NOT_AUTHORIZED, 3: NOBODY, 4: NOT_AUTHORIZED}


@pytest.mark.parametrize(
    "will, reason",
    [
        (Will("plant/ann/gone", b"x", 1, False, {}), OK),
        (Will("plant/bob/gone", b"x", 1, False, {}), NOT_AUTHORIZED),
        (Will("plant/ann/gone", b"x", 2, False, {}), ReasonCode.QOS_NOT_SUPPORTED),
        (Will("plant/ann/gone", b"x", 1, True, {}), ReasonCode.RETAIN_NOT_SUPPORTED),
    ],
)
def test_a_will(gateway: Running, will: Will, reason: int) -> None:
    client, told = ann(gateway, will=will)
    with client:
        assert told.reason == reason


def test_a_session_is_its_users(gateway: Running) -> None:
    keep = {Property.SESSION_EXPIRY_INTERVAL: 30}
    client, _ = connect(gateway, "mine", user=("root", PASSWORD.encode()), properties=keep)
    with client:
        assert client.subscribe("#", 1) == 1
    client, told = connect(gateway, "mine", user=("bob", PASSWORD.encode()), clean=False)
    with client:
        assert told.reason == NOT_AUTHORIZED
    client, told = connect(gateway, "mine", user=("root", PASSWORD.encode()), clean=False)
    with client:
        assert told.session_present


# AMQP 0-9-1, by pika


def amqp(gateway: Running, user: str, host: str = "/") -> pika.BlockingConnection:
    credentials = pika.PlainCredentials(user, PASSWORD)
    return pika.BlockingConnection(
        pika.ConnectionParameters(LOOPBACK, gateway.amqp, host, credentials, connection_attempts=1)
    )


METHODS: Final[dict[str, Any]] = {
    "declare": lambda channel, name: channel.queue_declare(name),
    "declare exclusive": lambda channel, name: channel.queue_declare(name, exclusive=True),
    "delete": lambda channel, name: channel.queue_delete(name),
    "exchange": lambda channel, name: channel.exchange_declare(name, "topic"),
    "exchange delete": lambda channel, name: channel.exchange_delete(name),
    "publish": lambda channel, name: (
        channel.confirm_delivery(),
        channel.basic_publish(*name.split(":", 1), b"x"),
    ),
    "consume": lambda channel, name: channel.basic_consume(name, lambda *_: None),
    "get": lambda channel, name: channel.basic_get(name),
    "purge": lambda channel, name: channel.queue_purge(name),
    "bind": lambda channel, name: channel.queue_bind("erp.q", *name.split(":", 1)),
    "dead letter": lambda channel, name: channel.queue_declare(
        "erp.dead", arguments={"x-dead-letter-exchange": name}
    ),
    "alternate": lambda channel, name: channel.exchange_declare(
        "erp.alternate", "topic", arguments={"alternate-exchange": name}
    ),
    "passive": lambda channel, name: channel.queue_declare(name, passive=True),
}


@pytest.mark.parametrize(
    "user, action, name, allowed",
    [
        ("bob", "declare", "erp.q", True),
        ("bob", "declare", "", True),
        ("bob", "declare", "other", False),
        ("bob", "declare exclusive", "other", False),
        ("bob", "delete", "secret", False),
        ("bob", "delete", "nothing", False),
        ("bob", "exchange", "erp.x", True),
        ("bob", "exchange", "other.x", False),
        ("bob", "exchange delete", "amq.topic", False),
        ("bob", "publish", ":erp.q", True),
        ("bob", "publish", ":secret", True),  # the default exchange is one right, as in RabbitMQ
        ("bob", "publish", "amq.topic:erp.new", True),
        ("bob", "publish", "amq.topic:plant.x", False),
        ("bob", "publish", "amq.fanout:x", False),
        ("bob", "consume", "erp.q", True),
        ("bob", "consume", "secret", False),
        ("bob", "get", "secret", False),
        ("bob", "purge", "secret", False),
        ("bob", "bind", "amq.topic:news.#", True),
        ("bob", "bind", "amq.topic:plant.#", False),
        ("bob", "bind", "amq.fanout:x", False),
        ("bob", "dead letter", "erp.x", True),
        ("bob", "dead letter", "secret.x", False),
        ("bob", "alternate", "secret.x", False),
        ("bob", "passive", "secret", True),  # as in RabbitMQ
        ("root", "get", "secret", True),
        ("root", "declare", "anything", True),
    ],
)
def test_amqp(gateway: Running, user: str, action: str, name: str, allowed: bool) -> None:
    with closing(amqp(gateway, "root")) as root:
        channel = root.channel()
        channel.queue_declare("secret")
        channel.queue_declare("erp.q")
    with closing(amqp(gateway, user)) as connection:
        channel = connection.channel()
        if allowed:
            METHODS[action](channel, name)
            if action.startswith("dead"):
                channel.queue_delete("erp.dead")
        else:
            with pytest.raises(ChannelClosedByBroker) as refused:
                METHODS[action](channel, name)
            assert refused.value.reply_code == 403
            assert f"refused for user '{user}'" in refused.value.reply_text
            connection.channel()  # the connection goes on


@pytest.mark.parametrize("user", ["ann", "eve"])
def test_a_virtual_host_is_refused(gateway: Running, user: str) -> None:
    with pytest.raises((ProbableAccessDeniedError, ConnectionClosedByBroker), match="530|NOT_ALLOWED"):
        amqp(gateway, user)


def test_copies_need_the_right_of_their_keys(gateway: Running) -> None:
    with closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        copies = pika.BasicProperties(headers={"CC": ["plant.secret"]})
        with pytest.raises(ChannelClosedByBroker) as refused:
            channel.basic_publish("amq.topic", "erp.x", b"x", copies)
        assert refused.value.reply_code == 403


# AMQP/Fast


def fast(gateway: Running, user: str, client_name: str = "") -> Fast:
    return Fast(gateway, client_name, user=user, password=PASSWORD)


@pytest.mark.parametrize(
    "user, action, service, name, allowed",
    [
        ("bob", "send", QUEUE, "erp.q", True),
        ("bob", "send", QUEUE, "other", False),
        ("bob", "send", TOPIC, "news.today", True),
        ("bob", "send", TOPIC, "news.old", False),
        ("bob", "consume", QUEUE, "erp.q", True),
        ("bob", "consume", TOPIC, "news.", True),
        ("bob", "consume", TOPIC, "news.sport", True),
        ("bob", "consume", TOPIC, "", False),
        ("bob", "consume", QUEUE, "other", False),
        ("bob", "query", QUEUE, "erp.q", True),
        ("bob", "query", QUEUE, "secret", False),
        ("bob", "open", PEER, "echo", False),
        ("root", "open", PEER, "echo", True),
        ("root", "query", QUEUE, "secret", True),
        ("bob", "temporary", QUEUE, "", False),
        ("root", "temporary", QUEUE, "", True),
    ],
)
def test_amqpfast(gateway: Running, user: str, action: str, service: int, name: str, allowed: bool) -> None:
    with fast(gateway, "root").open() as root:
        root.put(root.handle("secret"), b"x")
    with fast(gateway, user).open() as client:
        if action in ("open", "temporary"):
            number = client.ask_handle(name, service, temporary=action == "temporary")
            if allowed:
                client.reply()
            else:
                assert client.next(HandleClosed).reply_code == 403
            return
        parent = name.rpartition(".")[0]
        number = client.ask_handle(f"{parent}." if parent else "", service)
        rest = name.rpartition(".")[2]
        client.reply()
        if action == "send":
            client.put(number, b"x", name=rest, confirm=allowed)
        elif action == "consume":
            given = m.HandleConsume(number, dest_name=rest, prefetch=1)
            if allowed:
                assert client.ask(given)[3] == 200
            else:
                client.say(given)
        elif allowed:
            client.index(number, dest_name=rest)
        else:
            client.say(m.HandleQuery(number, 0, dest_name=rest))
        if not allowed:
            assert client.next(HandleClosed).reply_code == 403


def test_a_durable_subscription_is_cancelled_by_its_user_alone() -> None:
    """Not by another user with the same client-name, nor without the right to read the topic any more."""
    with running(settings(users={"bob": ("erp",), "root": ("all",)})) as gateway:
        durable = gateway.gateway.fast_hosts["/"].durable
        with fast(gateway, "bob", "c").open() as bob:
            bob.consume(bob.handle("news.today", TOPIC), identifier="sub")
            bob.leave()
        with fast(gateway, "root", "c").open() as root:
            root.put(root.handle("news.today", TOPIC), b"it waits")
            handle = root.handle("news.today", TOPIC)
            root.say(m.HandleCancel(handle, 0, "", "sub"))
            assert root.next(HandleClosed).reply_code == 403
            root.say(m.HandleConsume(root.handle("news.today", TOPIC), identifier="sub", prefetch=1))
            assert root.next(HandleClosed).reply_code == 403
            root.leave()
        assert gateway.ask(lambda: [len(one) for one in durable.values()]) == [1]
        narrower = {**ROLES, "erp": {"amqpfast": {"/": {"topics": {"write": "news.*"}}}}}
        change(gateway, settings(narrower, {"bob": ("erp",)}))
        with fast(gateway, "bob", "c").open() as bob:
            handle = bob.handle("news.today", TOPIC)
            bob.say(m.HandleCancel(handle, 0, "", "sub"))
            assert bob.next(HandleClosed).reply_code == 403
            bob.leave()
        change(gateway, settings(users={"bob": ("erp",)}))
        with fast(gateway, "bob", "c").open() as bob:
            assert bob.ask(m.HandleCancel(bob.handle("news.today", TOPIC), 0, "", "sub"))[3] == 200
        assert gateway.ask(lambda: len(durable)) == 0


def test_amqpfast_virtual_hosts_and_names(gateway: Running) -> None:
    with fast(gateway, "eve") as client:
        assert client.next(Closed).reply_code == 403
    with running(
        settings({"named": {"client_id": "{user}-*", **ROLES["all"]}}, {"bob": ("named",)})
    ) as other:
        for name, right in (("bob-1", True), ("", True), ("ann-1", False)):
            with fast(other, "bob", name) as client:
                if right:
                    client.next(Opened)
                else:
                    assert client.next(Closed).reply_code == 403


def test_a_shared_folder_is_for_whom_it_is(tmp_path: Path) -> None:
    given = settings_of().listeners
    shared = given["amqpfast"].model_copy(update={"out_of_band": OutOfBand(folder=tmp_path)})
    both = settings(listeners={**given, "amqpfast": shared})
    with running(both) as gateway, fast(gateway, "bob") as client:
        client.next(Opened)
        client.machine.open_channel(out_of_band=f"file:{tmp_path}")
        client.flush()
        assert client.next(ChannelClosed).reply_code == 403


FOLDERS = [
    ("ann", True, "ann", 200),
    ("ann", True, "", 403),
    ("ann", True, "bob", 403),
    ("ann", True, "ann.1", 403),
    ("ann.1", True, "ann.1", 200),
    ("ann.1", True, "ann", 403),
    ("ann", False, "ann", 403),
    ("ann", ["{user}", "{user}.*"], "ann", 200),
    ("ann", ["{user}", "{user}.*"], "ann.1", 200),
    ("ann", ["{user}", "{user}.*"], "bob", 403),
    ("ann", "{user}.*", "", 403),
    ("ann", "*", "bob", 200),
    ("ann", "*", "", 403),
    ("a*", ["{user}", "{user}.*"], "ann", 403),
    ("*", True, "ann", 403),
]


def opened_with(client: Fast, folder: str) -> int:
    """Open a channel with a folder. Return the code of the reply, or with which the channel was closed."""
    client.machine.open_channel(out_of_band=folder)
    client.flush()
    while True:
        for event in client.events:
            if isinstance(event, ChannelClosed):
                return event.reply_code
            if isinstance(event, Replies):
                return event.rows[0][3]
        client.hear()


@pytest.mark.parametrize("user, held, name, code", FOLDERS)
def test_a_folder_is_its_users(user: str, held: Any, name: str, code: int, tmp_path: Path) -> None:
    for one in ("ann", "ann.1", "bob"):
        (tmp_path / one).mkdir()
    given = settings_of().listeners
    shared = given["amqpfast"].model_copy(update={"out_of_band": OutOfBand(folder=tmp_path)})
    both = settings(
        {"role": {"amqpfast": {"/": {"out_of_band": held}}}},
        {user: ("role",)},
        listeners={**given, "amqpfast": shared},
    )
    with running(both) as gateway, fast(gateway, user) as client:
        client.next(Opened)
        assert opened_with(client, f"file:{tmp_path}/{name}".rstrip("/")) == code


def test_another_user_reads_no_file_that_a_client_has_left(tmp_path: Path) -> None:
    """A client has written a file, and is disconnected before it sends it."""
    (tmp_path / "bob").mkdir()
    given = settings_of().listeners
    shared = given["amqpfast"].model_copy(update={"out_of_band": OutOfBand(folder=tmp_path)})
    rights = {"queues": {"write": "*", "read": "*", "create": "*"}, "out_of_band": True}
    users = {"bob": ("role",), "eve": ("role",)}
    both = settings({"role": {"amqpfast": {"/": rights}}}, users, listeners={**given, "amqpfast": shared})
    with running(both) as gateway:
        with fast(gateway, "bob").open(out_of_band=f"file:{tmp_path}/bob") as first:
            file = tmp_path / "bob" / f"{first.handle('q')}-1.send"
            file.write_bytes(b"secret")
        with fast(gateway, "eve") as other:
            other.next(Opened)
            assert opened_with(other, f"file:{tmp_path}/bob") == 403
        assert file.read_bytes() == b"secret"


# What is counted and told


def test_refusals_are_counted_by_endpoint_and_action(gateway: Running) -> None:
    def counted(listener: str) -> dict[str, int]:
        return gateway.ask(lambda: dict(gateway.gateway.listeners[listener].stats.denied.counts))

    before = counted("mqtt").get("publish", 0)
    client, _ = ann(gateway)
    with client:
        for packet_id in (1, 2):  # the second is known to be refused
            client.publish("plant/bob", qos=1, packet_id=packet_id)
            assert client.acked(PacketType.PUBACK) == (packet_id, NOT_AUTHORIZED)
    assert counted("mqtt")["publish"] == before + 2
    assert set(counted("amqp091")) <= {"configure", "write", "read", "connect"}


# Rules that change


def change(gateway: Running, given: Settings) -> None:
    """Put other rules into force."""

    trio.from_thread.run(gateway.gateway.rules.use, roles_of(given), trio_token=gateway._token)


def test_a_client_with_an_assigned_identifier_stays_when_the_rules_change() -> None:
    """Rules that bind identifiers to users do not concern the gateway's own, neither at CONNECT nor later."""
    with running(settings()) as gateway:
        client, told = connect(gateway, "", user=("ann", PASSWORD.encode()))
        with client:
            assert told.reason == 0
            change(gateway, settings({**ROLES, "more": {}}))
            assert client.subscribe("news/today", 1) == 1


def test_a_right_that_is_gone_ends_what_was_held_by_it() -> None:
    narrower = {**ROLES, "device": {"mqtt": {"publish": "plant/{user}/#", "subscribe": "news/today"}}}
    narrower["erp"] = {"amqp091": {"/": {"configure": ".*", "read": "^erp\\.two$"}}, "amqpfast": {"/": {}}}
    keep = {Property.SESSION_EXPIRY_INTERVAL: 30}
    with running(settings()) as gateway:
        publisher, _ = ann(gateway, "ann-p")
        away, _ = ann(gateway, "ann-a", properties=keep)
        assert away.subscribe("command/ann/#", 1) == 1
        assert away.subscribe("news/today", 1) == 1
        away.cut()
        gateway.until(lambda: gateway.gateway.mqtt.sessions["ann-a"].outlet is None)
        reader, _ = ann(gateway, "ann-r")
        assert reader.subscribe("command/ann/#") == 0
        with publisher, reader, closing(amqp(gateway, "bob")) as connection, fast(gateway, "bob") as quick:
            publisher.publish("shared/ann-p", qos=1, packet_id=1)
            assert publisher.acked(PacketType.PUBACK) == (1, NOBODY)
            one, two = connection.channel(), connection.channel()
            for channel, name in ((one, "erp.one"), (two, "erp.two")):
                channel.queue_declare(name)
                channel.basic_consume(name, lambda *_: None)
            quick.open()
            handle = quick.handle("erp.fast")
            quick.consume(handle)
            change(gateway, settings(narrower))
            assert reader.next(Disconnect).reason == NOT_AUTHORIZED
            publisher.publish("shared/ann-p", qos=1, packet_id=2)
            assert publisher.acked(PacketType.PUBACK) == (2, NOT_AUTHORIZED)
            publisher.publish("plant/ann/x", qos=1, packet_id=3)
            assert publisher.acked(PacketType.PUBACK) == (3, NOBODY)
            with pytest.raises(ChannelClosedByBroker) as refused:
                one.queue_declare("erp.one", passive=True)
            assert refused.value.reply_code == 403
            two.queue_declare("erp.two", passive=True)
            assert quick.next(HandleClosed).reply_code == 403
            sessions = gateway.gateway.mqtt.sessions
            assert gateway.ask(lambda: list(sessions["ann-a"].subscriptions)) == ["news/today"]
            change(gateway, settings({}, {}))  # none at all: everything is allowed again
            publisher.publish("anything", qos=1, packet_id=4)
            assert publisher.acked(PacketType.PUBACK) == (4, NOBODY)


TUNNEL: Final = {"queues": {"write": "*", "create": "*"}, "peers": ["shell", "echo"], "out_of_band": True}


def talking(target: socket.socket, folder: Path, held: dict[str, Any]) -> Settings:
    """Of a gateway with a peer at this address and a shared folder, where bob holds these rights."""
    peers = {
        "shell": PeerService(host=LOOPBACK, port=target.getsockname()[1]),
        "echo": PeerService(kind="echo"),
    }
    hosts = {"/": FastVirtualHost(peers=peers)}
    given = settings_of().listeners
    more = {"virtual_hosts": hosts, "out_of_band": OutOfBand(folder=folder)}
    listeners = {**given, "amqpfast": given["amqpfast"].model_copy(update=more)}
    return settings({"talker": {"amqpfast": {"/": held}}}, {"bob": ("talker",)}, listeners=listeners)


@pytest.mark.parametrize("left", ["tunnel", "echo", "transaction", "folder"])
def test_a_lost_right_to_a_peer_or_a_folder_ends_what_is_held_by_it(tmp_path: Path, left: str) -> None:
    """Each right is lost in turn; only what was held by it is closed, with 403."""
    shared = tmp_path / "bob"
    shared.mkdir()
    lost: dict[str, dict[str, Any]] = {
        "tunnel": {"peers": "echo"},
        "echo": {"peers": "shell"},
        "transaction": {"peers": "shell"},
        "folder": {"out_of_band": False},
    }
    with socket.create_server((LOOPBACK, 0)) as target:
        target.settimeout(PATIENCE_SECS)
        with (
            running(talking(target, tmp_path, TUNNEL)) as gateway,
            fast(gateway, "bob").open() as client,
        ):
            tunnel = client.handle("shell", PEER)
            stream = Transfer(client.machine, tunnel, EMPTY, 0, streaming=True)
            stream.write(b"hello")
            client.flush()
            there, _ = target.accept()
            there.settimeout(PATIENCE_SECS)
            with there:
                assert there.recv(5, socket.MSG_WAITALL) == b"hello"
                client.channel()
                if left == "echo":
                    echo = client.handle("echo", PEER, channel=2)
                    client.put(echo, b"x")
                transacted = client.channel(transacted=True)
                if left == "transaction":
                    client.put(client.handle("echo", PEER, channel=transacted), b"x")
                folder = client.channel(out_of_band=f"file:{shared}")
                change(gateway, talking(target, tmp_path, TUNNEL | lost[left]))
                if left == "tunnel":
                    assert client.handle_closed() == (tunnel, 403)
                    assert there.recv(1) == b""  # the connection to the address is closed
                    return
                if left == "echo":
                    assert client.handle_closed() == (echo, 403)
                elif left == "transaction":
                    assert client.channel_closed() == (transacted, 403)
                else:
                    assert client.channel_closed() == (folder, 403)
                    change(gateway, talking(target, tmp_path, TUNNEL))
                    client.channel(out_of_band=f"file:{shared}")  # nobody uses the folder any more
                there.sendall(b"more")  # the others are untouched
                found = b""
                while found != b"more":
                    found += client.next(Fragment).data


def test_rules_are_read_again_when_their_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    document: dict[str, Any] = {
        "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": 0}},
        "http": {"enabled": False},
        "store": {"enabled": False},
        "roles": {"anyone": {"mqtt": {"publish": "a/#"}}},
        "default_roles": {"anonymous": "anyone"},
    }

    def write() -> None:
        replace_text(file, yaml.safe_dump(document))

    write()
    but = "users and roles not reloaded, previous ones in force"
    with running(load_settings(file, {}), but=but) as gateway:
        reloads = gateway.gateway.metrics.rule_reloads
        client, _ = connect(gateway, "c")
        with client:
            client.publish("b/x", qos=1, packet_id=1)
            assert client.acked(PacketType.PUBACK) == (1, NOT_AUTHORIZED)
            document["roles"]["anyone"]["mqtt"]["publish"] = "b/#"
            write()
            gateway.until(lambda: reloads["taken"] == 1)
            client.publish("b/x", qos=1, packet_id=2)
            assert client.acked(PacketType.PUBACK) == (2, NOBODY)
            document["roles"]["anyone"]["mqtt"]["publish"] = "b/#/x"
            write()
            gateway.until(lambda: reloads["refused"] == 1)
            client.publish("b/x", qos=1, packet_id=3)
            assert client.acked(PacketType.PUBACK) == (3, NOBODY)


# Limits of roles


def test_a_role_limits_connections_sessions_and_rates() -> None:
    roles = {"few": {**ROLES["all"], "connections_max": 2, "sessions_max": 1, "receive_bytes_per_sec_max": 5}}
    keep = {Property.SESSION_EXPIRY_INTERVAL: 30}
    with running(settings(roles, {"bob": ("few",), "ann": ("few",)})) as gateway:
        user = ("bob", PASSWORD.encode())
        one, _ = connect(gateway, "one", user=user, properties=keep)
        with one:
            connection = next(iter(gateway.gateway.listeners["mqtt"].connections))
            assert connection.stream.rate is not None
            second, told = connect(gateway, "two", user=user)
            with second:
                assert told.reason == ReasonCode.QUOTA_EXCEEDED  # another session
            with closing(amqp(gateway, "bob")):
                with pytest.raises((ProbableAccessDeniedError, ConnectionClosedByBroker)):
                    amqp(gateway, "bob")
                other, told = connect(gateway, "three", user=("ann", PASSWORD.encode()))
                with other:
                    assert told.reason == OK
            gateway.until(lambda: gateway.gateway.authorization.connections["bob"] == 1)
        gateway.until(lambda: not gateway.gateway.authorization.connections)


# Routes that ask for a role


def test_a_route_may_ask_for_a_role(tmp_path: Path) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(
        "version: 1\nroutes:\n"
        "  - name: orders\n    role: erp\n"
        "    from: {endpoint: mqtt, topic: 'orders/{rest...}'}\n"
        "    to: {endpoint: amqp091, exchange: amq.topic, routing_key: '{rest...}'}\n"
    )
    everything = {"all": ROLES["all"], "erp": ROLES["all"] | {"hold": True}}
    given = settings(everything, {"bob": ("erp",), "ann": ("all",)}, mappings=(str(mapping),))
    with running(given) as gateway, closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.queue_bind("q", "amq.topic", "#")
        for user, reason in (("ann", NOT_AUTHORIZED), ("bob", OK)):
            client, _ = connect(gateway, user, user=(user, PASSWORD.encode()))
            with client:
                client.publish("orders/x", user.encode(), qos=1, packet_id=1)
                assert client.acked(PacketType.PUBACK) == (1, reason)
                client.publish("other/x", user.encode(), qos=1, packet_id=2)
                assert client.acked(PacketType.PUBACK) == (2, NOBODY)
        assert channel.basic_get("q", auto_ack=True)[2] == b"bob"
        assert channel.basic_get("q", auto_ack=True)[2] is None


ORDERS: Final = (
    "version: 1\nroutes:\n"
    "  - name: orders\n    role: erp\n"
    "    from: {endpoint: mqtt, topic: 'orders/{rest...}'}\n"
    "    to: {endpoint: amqp091, exchange: amq.topic, routing_key: '{rest...}'}\n"
)
OPEN: Final = ORDERS.replace("    role: erp\n", "")


def crossing(tmp_path: Path, text: str = ORDERS, **more: Any) -> Settings:
    """A gateway with a route that asks for a role, which bob has."""
    mapping = tmp_path / "routes.yaml"
    replace_text(mapping, text)
    everything = {"all": ROLES["all"], "erp": ROLES["all"] | {"hold": True}}
    return settings(everything, {"bob": ("erp",), "ann": ("all",)}, mappings=(str(mapping),), **more)


def crossed(connection: pika.BlockingConnection) -> list[bytes]:
    """What has come out of the route until now, for a message of its own goes last."""
    channel = connection.channel()
    channel.confirm_delivery()
    channel.basic_publish("amq.topic", "last", b"last")
    found = []
    while (body := channel.basic_get("q", auto_ack=True)[2]) != b"last":
        if body is not None:
            found.append(body)
    return found


def bind(connection: pika.BlockingConnection) -> None:
    channel = connection.channel()
    channel.queue_declare("q")
    channel.queue_bind("q", "amq.topic", "#")


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
def test_a_will_that_may_not_cross_is_refused_with_connect(tmp_path: Path, version: Version) -> None:
    with running(crossing(tmp_path)) as gateway, closing(amqp(gateway, "bob")) as connection:
        bind(connection)
        for user, allowed in (("ann", False), ("bob", True)):
            will = Will("orders/x", user.encode(), 1, False, {})
            client, told = connect(gateway, user, user=(user, PASSWORD.encode()), will=will, version=version)
            with client:
                refused = NOT_AUTHORIZED  # as the client's codec names 5 of MQTT 3, too
                assert told.reason == (OK if allowed else refused)
                client.cut()
        gateway.until(lambda: not gateway.gateway.listeners["mqtt"].connections)
        assert crossed(connection) == [b"bob"]


@pytest.mark.parametrize("delay_secs", [0, 1])
def test_a_will_does_not_cross_a_route_that_came_to_ask_for_a_role(tmp_path: Path, delay_secs: int) -> None:
    with running(crossing(tmp_path, OPEN)) as gateway, closing(amqp(gateway, "bob")) as connection:
        bind(connection)
        clients = []
        for user in ("ann", "bob"):
            will = Will("orders/x", user.encode(), 1, False, {Property.WILL_DELAY_INTERVAL: delay_secs})
            properties = {Property.SESSION_EXPIRY_INTERVAL: 30}
            client, told = connect(
                gateway, user, user=(user, PASSWORD.encode()), will=will, properties=properties
            )
            assert told.reason == OK
            clients.append(client)
        crossing(tmp_path)
        assert gateway.await_(gateway.gateway.reload_mappings)
        for client in clients:
            client.cut()
        gateway.until(lambda: not gateway.gateway.listeners["mqtt"].connections)
        gateway.until(lambda: not gateway.gateway.mqtt._wills)
        assert crossed(connection) == [b"bob"]


def test_a_will_that_an_earlier_process_left_does_not_cross(tmp_path: Path) -> None:
    store = StoreSettings(path=tmp_path / "store")
    properties = {Property.SESSION_EXPIRY_INTERVAL: 30}
    with running(crossing(tmp_path, OPEN, store=store)) as gateway:
        for user in ("ann", "bob"):
            will = Will("orders/x", user.encode(), 1, False, {Property.WILL_DELAY_INTERVAL: 20})
            client, told = connect(
                gateway, user, user=(user, PASSWORD.encode()), will=will, properties=properties
            )
            assert told.reason == OK
            client.cut()
        gateway.until(lambda: len(gateway.gateway.mqtt._wills) == 2)
        with closing(amqp(gateway, "bob")) as connection:
            channel = connection.channel()
            channel.queue_declare("q", durable=True)
            channel.queue_bind("q", "amq.topic", "#")
    given = crossing(tmp_path, store=store)
    with running(given) as gateway, closing(amqp(gateway, "bob")) as connection:
        gateway.until(lambda: not gateway.gateway.mqtt._left_wills)
        mqtt = gateway.gateway.mqtt
        assert gateway.ask(lambda: [mqtt._publish_will(one) for one in list(mqtt._wills)]) == [None] * 2
        assert crossed(connection) == [b"bob"]


def test_an_alias_and_a_shared_subscription_do_not_get_around_a_role(tmp_path: Path) -> None:
    with running(crossing(tmp_path)) as gateway, closing(amqp(gateway, "bob")) as connection:
        bind(connection)
        reader, _ = connect(gateway, "reader", user=("bob", PASSWORD.encode()))
        with reader:
            assert reader.subscribe("$share/g/orders/#", 1) == 1
            client, _ = connect(gateway, "ann", user=("ann", PASSWORD.encode()))
            with client:
                alias = encode_list({Property.TOPIC_ALIAS: 1}, PacketType.PUBLISH)
                client.publish("orders/x", b"1", qos=1, packet_id=1, properties=alias)
                assert client.acked(PacketType.PUBACK) == (1, NOT_AUTHORIZED)
                client.publish("", b"2", qos=1, packet_id=2, properties=alias)
                assert client.acked(PacketType.PUBACK) == (2, NOT_AUTHORIZED)
            assert reader.quiet(), "what is refused reaches nobody"
        assert crossed(connection) == []


def test_a_refused_message_is_not_repeated_into_a_route_that_came_to_ask_for_a_role(tmp_path: Path) -> None:
    """An MQTT 3.1.1 client cannot be told: the message is a dead letter, and acknowledged."""
    with running(crossing(tmp_path, OPEN)) as gateway, closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        channel.queue_declare("q", arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
        channel.queue_bind("q", "amq.topic", "#")
        channel.basic_publish("amq.topic", "x", b"full")
        gateway.until(lambda: len(gateway.gateway.hosts["/"].queues["q"]) == 1)
        client, _ = connect(gateway, "ann", user=("ann", PASSWORD.encode()), version=Version.V311)
        with client:
            client.publish("orders/x", b"again", qos=1, packet_id=1)
            route = gateway.gateway.dispatcher.router.routes[0]
            gateway.until(lambda: route.retried > 0)
            crossing(tmp_path)
            assert gateway.await_(gateway.gateway.reload_mappings)
            assert channel.basic_get("q", auto_ack=True)[2] == b"full"
            assert client.acked(PacketType.PUBACK) == (1, OK)
        assert channel.basic_get("q", auto_ack=True)[2] is None
        letters = gateway.gateway.dead_letters
        assert gateway.ask(lambda: sum(letters.counted.values())) == 1


def test_a_letter_that_no_route_has_checked_is_not_redriven_into_a_route_that_asks_for_a_role(
    tmp_path: Path,
) -> None:
    """A user chooses where its queue's dead letters go; without a queue there they are the gateway's."""
    text = (
        "version: 1\nroutes:\n"
        "  - name: sales\n    role: erp\n"
        "    from: {endpoint: amqp091, exchange: orders, binding_key: go}\n"
        "    to: {endpoint: mqtt, topic: 'machine/run'}\n"
    )
    with running(crossing(tmp_path, text)) as gateway, closing(amqp(gateway, "ann")) as connection:
        channel = connection.channel()
        channel.exchange_declare("orders", "direct", durable=True)
        arguments = {
            "x-queue-type": "quorum",
            "x-dead-letter-exchange": "orders",
            "x-dead-letter-routing-key": "go",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        channel.queue_declare("mine", durable=True, arguments=arguments)
        channel.basic_publish("", "mine", b"forged")
        got, _, _ = next(channel.consume("mine"))
        channel.basic_nack(got.delivery_tag, requeue=False)
        letters = gateway.gateway.dead_letters
        gateway.until(lambda: sum(letters.counted.values()) == 1)
        told: list[Outcome] = []
        redrive = gateway.gateway.core.redriving.redrive
        gateway.ask(lambda: redrive(newest(letters), lambda name, outcome: told.append(outcome)))
        gateway.until(lambda: bool(told))
        assert "'sales' requires the role 'erp'" in told[0].text
        assert gateway.ask(lambda: len(letters)) == 1


def held(connection: Any) -> int:
    """Messages that wait for a commit."""
    return sum(len(one.transaction._publishes) for one in connection.channels.values() if one.transaction)


def test_a_transaction_is_not_committed_into_a_route_that_came_to_ask_for_a_role(tmp_path: Path) -> None:
    text = (
        "version: 1\nroutes:\n"
        "  - name: sales\n    role: erp\n"
        "    from: {endpoint: amqp091, exchange: amq.direct, binding_key: x}\n"
        "    to: {endpoint: amqp091, exchange: amq.topic, routing_key: x}\n"
        "  - name: stock\n    role: erp\n"
        "    from: {endpoint: amqpfast, service: topic, destination: x}\n"
        "    to: {endpoint: amqp091, exchange: amq.topic, routing_key: x}\n"
    )
    given = crossing(tmp_path, text.replace("    role: erp\n", ""))
    with running(given) as gateway, closing(amqp(gateway, "bob")) as connection:
        bind(connection)
        channels = []
        with closing(amqp(gateway, "ann")) as other, fast(gateway, "ann") as quick:
            for who in (connection, other):
                channels.append(who.channel())
                channels[-1].tx_select()
                channels[-1].basic_publish("amq.direct", "x", b"amqp")
            quick.next(Opened)
            quick.channel(transacted=True)
            quick.put(quick.handle("x", TOPIC), b"fast", confirm=True)
            gateway.until(lambda: sum(map(held, gateway.gateway.listeners["amqp091"].connections)) == 2)
            crossing(tmp_path, text)
            assert gateway.await_(gateway.gateway.reload_mappings)
            channels[0].tx_commit()
            with pytest.raises(ChannelClosedByBroker) as refused:
                channels[1].tx_commit()
            assert refused.value.reply_code == 406
            quick.say(m.ChannelCommit(1, 0))
            assert quick.next(ChannelClosed).reply_code == 403
        assert crossed(connection) == [b"amqp"]


def test_what_is_published_gets_its_entry_in_one_place_alone() -> None:
    """Whatever a client publishes gets its entry by `publish_permission`, which asks for rights and roles."""
    folder = Path(gateway_package.__file__).parent
    found = re.compile(r"dispatcher\.entry\b|entries\.(?:find|resolve)\b")
    used = {
        path.relative_to(folder).as_posix(): found.findall(text)
        for path in folder.rglob("*.py")
        if path.parts[-3] != "egress"
        and path.parent.name != "egress"  # links need no rights
        and found.search(text := path.read_text(encoding="utf-8"))
    }
    assert used == {
        "broker/operator_publish.py": ["dispatcher.entry"],  # who may do everything
        "broker/publish_permission.py": ["dispatcher.entry", "dispatcher.entry"],
        "ingress/amqpfast/publisher.py": ["dispatcher.entry"],  # passed to it, as is the next
        "ingress/mqtt/ingress.py": ["entries.find"],
        "ingress/mqtt/routing_table.py": ["dispatcher.entry"],
    }, "each look-up stands with the check of rights and roles"


# Topic permissions, names, denials

FAN: Final = {
    "fan": {
        "amqp091": {
            "/": {
                "configure": "^own",
                "write": "^(own|amq\\.topic$|amq\\.default$)",
                "read": "^(own|amq\\.topic$)",
                "topics": {"amq.topic": {"write": "^own\\.", "read": "^own\\."}},
            }
        }
    }
}
WIDE: Final = {
    "fan": {
        "amqp091": {
            "/": {**FAN["fan"]["amqp091"]["/"], "topics": {"amq.topic": {"write": ".*", "read": ".*"}}}
        }
    }
}
LETTERS: Final = "x-dead-letter-exchange"
LETTER_KEY: Final = "x-dead-letter-routing-key"
ONWARD: Final[dict[str, tuple[Callable[[Any], object], bool]]] = {
    "dead letters with a key that is not ours": (
        lambda one: one.queue_declare("own.q", arguments={LETTERS: "amq.topic", LETTER_KEY: "plant.x"}),
        False,
    ),
    "dead letters with our key": (
        lambda one: one.queue_declare("own.q", arguments={LETTERS: "amq.topic", LETTER_KEY: "own.x"}),
        True,
    ),
    "dead letters with whatever key they had": (
        lambda one: one.queue_declare("own.q", arguments={LETTERS: "amq.topic"}),
        False,
    ),
    "dead letters to a queue": (
        lambda one: one.queue_declare("own.q", arguments={LETTERS: "", LETTER_KEY: "own.x"}),
        True,
    ),
    "an exchange that is bound to another": (lambda one: one.exchange_bind("amq.topic", "own.fan"), False),
    "an alternate exchange": (
        lambda one: one.exchange_declare("own.alt", "fanout", arguments={"alternate-exchange": "amq.topic"}),
        False,
    ),
    "an alternate exchange without topics": (
        lambda one: one.exchange_declare("own.alt", "fanout", arguments={"alternate-exchange": "own.fan"}),
        True,
    ),
    "exchanges without topics": (lambda one: one.exchange_bind("own.fan", "amq.topic", "own.x"), True),
}


@pytest.mark.parametrize("how", ONWARD)
@pytest.mark.parametrize("roles", [FAN, WIDE], ids=["some keys", "every key"])
def test_topic_permissions_are_asked_for_wherever_messages_are_led_on(how: str, roles: Any) -> None:
    act, allowed = ONWARD[how]
    with running(settings(roles, {"bob": ("fan",)})) as gateway, closing(amqp(gateway, "bob")) as connection:
        channel = connection.channel()
        channel.exchange_declare("own.fan", "fanout")
        if allowed or roles is WIDE:
            act(channel)
            return
        with pytest.raises(ChannelClosedByBroker) as refused:
            act(channel)
        assert refused.value.reply_code == 403


def test_what_is_checked_is_what_is_bound() -> None:
    """A name of line ends alone means the last queue, which anybody may have declared passively; a binding
    that names neither queue nor key has the queue's name for its key."""
    with running(settings({**FAN, "all": ROLES["all"]}, {"bob": ("fan",), "root": ("all",)})) as gateway:
        with closing(amqp(gateway, "root")) as root, closing(amqp(gateway, "bob")) as bob:
            root.channel().queue_declare("secret")
            for name in ("\n", "\r\n", ""):
                for verb in ("queue_bind", "queue_unbind"):
                    channel = bob.channel()
                    channel.queue_declare("secret", passive=True)
                    with pytest.raises(ChannelClosedByBroker) as refused:
                        getattr(channel, verb)(name, "amq.topic", "own.x")
                    assert refused.value.reply_code == 403
            channel = bob.channel()
            channel.queue_declare("own.q")
            channel.queue_bind("", "amq.topic", "")  # its key is own.q
            channel.queue_declare("ownership")
            with pytest.raises(ChannelClosedByBroker) as refused:
                channel.queue_bind("", "amq.topic", "")
            assert refused.value.reply_code == 403
            root.channel().basic_publish("amq.topic", "own.x", b"x")
        assert gateway.ask(lambda: len(gateway.gateway.hosts["/"].queues["secret"])) == 0


BY_EXCHANGE: Final[dict[str, Callable[[Any, str], object]]] = {
    "exchange.declare": lambda one, name: one.exchange_declare(name, "topic"),
    "exchange.delete": lambda one, name: one.exchange_delete(name),
    "exchange.bind to": lambda one, name: one.exchange_bind(name, "own", "k"),
    "exchange.bind from": lambda one, name: one.exchange_bind("own", name, "k"),
    "exchange.unbind to": lambda one, name: one.exchange_unbind(name, "own", "k"),
    "exchange.unbind from": lambda one, name: one.exchange_unbind("own", name, "k"),
    "queue.bind": lambda one, name: one.queue_bind("own", name, "k"),
    "queue.unbind": lambda one, name: one.queue_unbind("own", name, "k"),
    "an alternate exchange": lambda one, name: one.exchange_declare(
        "own.alt", arguments={"alternate-exchange": name}
    ),
    "a dead-letter exchange": lambda one, name: one.queue_declare(
        "own.dead", arguments={"x-dead-letter-exchange": name}
    ),
    "basic.publish": lambda one, name: one.basic_publish(name, "k", b"x"),
}
OWN: Final = {"own": {"amqp091": {"/": dict.fromkeys(("configure", "write", "read"), "^own(\\.[a-z]+)?$")}}}


@pytest.mark.parametrize("method", BY_EXCHANGE)
def test_line_ends_in_the_name_of_an_exchange_open_nothing(method: str) -> None:
    """They are taken out of names before the check, or the name is that of another exchange."""
    with running(settings({**OWN, "all": ROLES["all"]}, {"bob": ("own",), "root": ("all",)})) as gateway:
        host = gateway.gateway.hosts["/"]
        with closing(amqp(gateway, "root")) as root, closing(amqp(gateway, "bob")) as bob:
            channel = root.channel()
            channel.exchange_declare("secret", "topic")
            channel.queue_declare("seen")
            channel.queue_bind("seen", "secret", "#")
            own = bob.channel()
            own.exchange_declare("own\n", "topic")
            own.queue_declare("own")
            own.queue_bind("own", "ow\nn", "k")
            before = gateway.ask(lambda: (sorted(host.exchanges), host.bindings, sorted(host.queues)))
            assert "own" in before[0]
            assert "own" in before[2]
            for name in ("secret\n", "\nsecret", "sec\r\nret", "secret\r", "\n", "own\nsecret"):
                one = bob.channel()
                one.confirm_delivery()
                with pytest.raises(ChannelClosedByBroker) as refused:
                    BY_EXCHANGE[method](one, name)
                assert refused.value.reply_code in ({403, 404} if method == "basic.publish" else {403}), name
            assert gateway.ask(lambda: (sorted(host.exchanges), host.bindings, sorted(host.queues))) == before
            assert gateway.ask(lambda: len(host.queues["seen"])) == 0
            own.queue_unbind("ow\nn", "own\r", "k")
            assert gateway.ask(lambda: host.bindings) == before[1] - 1


@pytest.mark.parametrize("deny", ["cmd/{user}/#", "cmd/{cn}/#", "cmd/{user}/stop", "cmd/x{user}"])
def test_a_denial_with_a_placeholder_that_does_not_fit_denies(deny: str) -> None:
    roles = {
        "all": {"mqtt": {"publish": "#", "subscribe": "#", "deny_publish": deny, "deny_subscribe": deny}}
    }
    user = "x/y"
    with running(settings(roles, {user: ("all",)})) as gateway:
        client, told = connect(gateway, "c", user=(user, PASSWORD.encode()))
        with client:
            assert told.reason == OK
            for packet_id, topic in enumerate(("cmd/x/y/stop", "cmd/x/y", "cmd/z"), 1):
                client.publish(topic, qos=1, packet_id=packet_id)
                assert client.acked(PacketType.PUBACK) == (packet_id, NOT_AUTHORIZED)
            client.publish("other", qos=1, packet_id=9)
            assert client.acked(PacketType.PUBACK) == (9, NOBODY)
            assert client.subscribe("cmd/+/#") == NOT_AUTHORIZED


def test_names_of_servers_cannot_be_guessed() -> None:
    with running() as gateway, closing(pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))) as one:
        names = {one.channel().queue_declare("").method.queue for _ in range(20)}
        assert len(names) == 20
        assert len({name[: len("amq.gen-") + 6] for name in names}) == 20, "nothing in them goes by time"
