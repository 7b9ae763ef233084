"""Users and permissions that a real RabbitMQ exports: clients get the same answers from both brokers."""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker, ProbableAccessDeniedError

from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.pahos import leave
from tests.interop.servers import PeerMissingError, RabbitMQ

PATIENCE_SECS: Final = 10.0
PASSWORD: Final = "pass é"
USERS: Final[dict[str, list[tuple[str, str, str, str]]]] = {
    "limited": [("/", "^lim", "^(lim|amq\\.topic$|shop$)", "^(lim|shop$|amq\\.topic$)")],
    "reader": [("/", "", "", ".*"), ("tenant", ".*", ".*", ".*")],
    "sender": [("/", "", "^amq\\.default$", "")],
    "nobody": [],
    "device": [("/", "^mqtt-subscription-", ".*", ".*")],
}
TOPICS: Final = [
    ("limited", "/", "amq.topic", "^{username}\\.|^open", "^news\\."),
    ("device", "/", "amq.topic", "^plant\\.{username}", "^plant\\."),
]


class Brokers(NamedTuple):
    """Ports of AMQP and MQTT, RabbitMQ's first."""

    amqp: tuple[int, int]
    mqtt: tuple[int, int]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    folder = tmp_path_factory.mktemp("permissions")
    try:
        rabbit = RabbitMQ(folder / "rabbit", mqtt=True)
    except PeerMissingError as error:
        missing(str(error))
    file = folder / "definitions.json"
    with rabbit:
        rabbit.control("add_vhost", "tenant")
        for user, permissions in USERS.items():
            rabbit.control("add_user", user, PASSWORD)
            for host, *expressions in permissions:
                rabbit.control("set_permissions", "-p", host, user, *expressions)
        for user, host, exchange, write, read in TOPICS:
            rabbit.control("set_topic_permissions", "-p", host, user, exchange, write, read)
        with closing(pika.BlockingConnection(pika.URLParameters(rabbit.url))) as connection:
            channel = connection.channel()
            channel.exchange_declare("shop", "direct", durable=True)
            channel.exchange_declare("hidden", "topic", durable=True)
            for name in ("lim.q", "secret"):
                channel.queue_declare(name, durable=True)
            channel.queue_bind("lim.q", "shop", "k")
        rabbit.control("export_definitions", str(file))
        declare = {"definitions": str(file), "users": True}
        with GatewayProcess(folder / "gateway", declare=declare) as gateway:
            yield Brokers((rabbit.port, gateway.port("amqp091")), (rabbit.mqtt_port, gateway.port("mqtt")))


DLX: Final = "x-dead-letter-exchange"
Answer = tuple[int, str]


MADE_UP: Final = re.compile(r"amq\.gen-[\w-]+")


def asked(port: int, user: str, host: str, action: Callable[[BlockingChannel], Any] | None) -> Answer:
    """The code and text that a program gets; 0 when it is let."""
    credentials = pika.PlainCredentials(user, PASSWORD)
    try:
        connection = pika.BlockingConnection(pika.ConnectionParameters(LOOPBACK, port, host, credentials))
    except ProbableAccessDeniedError as error:
        return 530, str(error)
    except ConnectionClosedByBroker as error:
        return error.reply_code, error.reply_text
    with closing(connection):
        if action is None:
            return 0, ""
        channel = connection.channel()
        channel.confirm_delivery()
        try:
            action(channel)
        except ChannelClosedByBroker as error:
            return error.reply_code, MADE_UP.sub("amq.gen", error.reply_text)
    return 0, ""


def publish(exchange: str, key: str, **headers: Any) -> Callable[[BlockingChannel], Any]:
    properties = pika.BasicProperties(headers=headers or None)
    return lambda channel: channel.basic_publish(exchange, key, b"x", properties)


def declare(name: str, **more: Any) -> Callable[[BlockingChannel], Any]:
    return lambda channel: channel.queue_declare(name, **more)


def exchange(name: str, kind: str = "topic", **more: Any) -> Callable[[BlockingChannel], Any]:
    return lambda channel: channel.exchange_declare(name, kind, **more)


ROWS: Final[list[tuple[str, str, str, Any]]] = [
    ("enter", "limited", "/", None),
    ("enter without permission", "nobody", "/", None),
    ("enter the tenant", "reader", "tenant", None),
    ("enter the tenant without permission", "limited", "tenant", None),
    ("declare", "limited", "/", declare("lim.new")),
    ("declare again", "limited", "/", declare("lim.q", durable=True)),
    ("declare another's", "limited", "/", declare("secret", durable=True)),
    ("declare without a name", "limited", "/", declare("", exclusive=True)),
    ("declare without a name, allowed", "reader", "tenant", declare("", exclusive=True)),
    ("declare nothing that is configured", "reader", "/", declare("any")),
    ("declare passively", "limited", "/", declare("secret", passive=True)),
    ("declare passively what is not", "limited", "/", declare("not", passive=True)),
    ("dead letters", "limited", "/", declare("lim.d", arguments={DLX: "shop"})),
    (
        "dead letters elsewhere",
        "limited",
        "/",
        declare("lim.e", arguments={"x-dead-letter-exchange": "hidden"}),
    ),
    ("exchange", "limited", "/", exchange("lim.x")),
    ("exchange of another", "limited", "/", exchange("other.x")),
    ("exchange passively", "limited", "/", exchange("hidden", passive=True)),
    ("alternate", "limited", "/", exchange("lim.a", arguments={"alternate-exchange": "shop"})),
    ("alternate elsewhere", "limited", "/", exchange("lim.b", arguments={"alternate-exchange": "hidden"})),
    ("delete", "limited", "/", lambda channel: channel.queue_delete("secret")),
    ("delete what is not there", "limited", "/", lambda channel: channel.queue_delete("not")),
    ("delete an exchange", "limited", "/", lambda channel: channel.exchange_delete("hidden")),
    ("delete the default exchange", "limited", "/", lambda channel: channel.exchange_delete("")),
    ("publish", "limited", "/", publish("shop", "k")),
    ("publish to what is hidden", "limited", "/", publish("hidden", "k")),
    ("publish to what is not there", "limited", "/", publish("not", "k")),
    ("publish to what would be", "limited", "/", publish("lim.not", "k")),
    ("publish by the default exchange", "limited", "/", publish("", "lim.q")),
    ("publish by the default exchange, allowed", "sender", "/", publish("", "secret")),
    ("publish a topic", "limited", "/", publish("amq.topic", "limited.x")),
    ("publish an open topic", "limited", "/", publish("amq.topic", "open")),
    ("publish another topic", "limited", "/", publish("amq.topic", "other.x")),
    ("publish without topic permissions", "reader", "tenant", publish("amq.topic", "anything")),
    ("consume", "limited", "/", lambda channel: channel.basic_consume("lim.q", lambda *_: None)),
    ("consume what is secret", "limited", "/", lambda channel: channel.basic_consume("secret", print)),
    ("consume what is not there", "limited", "/", lambda channel: channel.basic_consume("not", print)),
    ("get", "sender", "/", lambda channel: channel.basic_get("secret")),
    ("get as a reader", "reader", "/", lambda channel: channel.basic_get("secret")),
    ("purge", "limited", "/", lambda channel: channel.queue_purge("secret")),
    ("purge as a reader", "reader", "/", lambda channel: channel.queue_purge("lim.q")),
    ("bind", "limited", "/", lambda channel: channel.queue_bind("lim.q", "shop", "l")),
    ("bind what is secret", "limited", "/", lambda channel: channel.queue_bind("secret", "shop", "l")),
    ("bind to what is hidden", "limited", "/", lambda channel: channel.queue_bind("lim.q", "hidden", "l")),
    ("bind to a topic", "limited", "/", lambda channel: channel.queue_bind("lim.q", "amq.topic", "news.#")),
    ("bind to another topic", "limited", "/", lambda channel: channel.queue_bind("lim.q", "amq.topic", "#")),
    ("bind to the default exchange", "limited", "/", lambda channel: channel.queue_bind("lim.q", "", "l")),
    ("unbind", "limited", "/", lambda channel: channel.queue_unbind("lim.q", "shop", "l")),
    ("unbind what is secret", "limited", "/", lambda channel: channel.queue_unbind("secret", "shop", "l")),
    ("bind exchanges", "limited", "/", lambda channel: channel.exchange_bind("shop", "amq.topic", "news.x")),
    ("bind exchanges, refused", "limited", "/", lambda channel: channel.exchange_bind("hidden", "shop", "k")),
]


@pytest.mark.parametrize("name, user, host, action", ROWS, ids=[row[0] for row in ROWS])
def test_amqp_programs_get_the_same_answers(
    brokers: Brokers, name: str, user: str, host: str, action: Any
) -> None:
    theirs, ours = (asked(port, user, host, action) for port in brokers.amqp)
    assert ours == theirs


def heard(port: int, user: str, client_id: str, action: str, name: str) -> str:
    """What an MQTT 3.1.1 client sees: `ok`, `0x80`, `closed` or `refused`."""
    told: queue.Queue[str] = queue.Queue()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv311)
    client.username_pw_set(user, PASSWORD)
    client.on_connect = lambda _c, _u, _f, reason, _p: told.put("refused" if reason.is_failure else "in")
    client.on_publish = lambda *_: told.put("ok")
    client.on_subscribe = lambda _c, _u, _m, reasons, _p: told.put("0x80" if reasons[0].is_failure else "ok")
    client.on_disconnect = lambda *_: told.put("closed")
    client.connect(LOOPBACK, port)
    client.loop_start()
    try:
        first = told.get(timeout=PATIENCE_SECS)
        if first != "in":
            return first
        if action == "publish":
            client.publish(name, b"x", 1)
        elif action == "subscribe":
            client.subscribe(name, 1)
        return told.get(timeout=PATIENCE_SECS)
    finally:
        leave(client)


@pytest.mark.parametrize(
    "user, action, name",
    [
        ("device", "publish", "plant/device/x"),
        ("device", "publish", "plant/other/x"),
        ("device", "publish", "plant"),
        ("device", "subscribe", "plant/#"),
        ("device", "subscribe", "plant/+/x"),
        ("device", "subscribe", "#"),
        ("limited", "publish", "open"),
        ("limited", "subscribe", "news/x"),
        ("nobody", "publish", "plant/x"),
    ],
)
def test_mqtt_clients_get_the_same_answers(brokers: Brokers, user: str, action: str, name: str) -> None:
    theirs, ours = (heard(port, user, f"c-{user}", action, name) for port in brokers.mqtt)
    if action == "subscribe" and theirs == "closed":
        theirs = "0x80"  # which RabbitMQ says from 3.12 on
    assert ours == theirs


def test_a_wrong_password_is_wrong(brokers: Brokers) -> None:
    for port in brokers.amqp:
        parameters = pika.ConnectionParameters(LOOPBACK, port, "/", pika.PlainCredentials("limited", "x"))
        with pytest.raises((ConnectionClosedByBroker, pika.exceptions.ProbableAuthenticationError)):
            pika.BlockingConnection(parameters)
