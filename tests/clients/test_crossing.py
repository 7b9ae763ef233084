"""A message crosses between MQTT and AMQP by the default mapping: address, body, properties, guarantees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pika
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from pika.adapters.blocking_connection import BlockingChannel

from gateway.protocols.mqtt.packets import Will
from tests.clients.peers import Paho
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running

MEGABYTE: Final = 1_048_576


@pytest.fixture
def channel(gateway: Running) -> Iterator[BlockingChannel]:
    """A channel with confirms and a queue that takes all that crosses."""
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        made = connection.channel()
        made.confirm_delivery()
        made.queue_declare("all")
        made.queue_bind("all", "amq.topic", "#")
        yield made


def got(channel: BlockingChannel) -> tuple[str, pika.BasicProperties, bytes]:
    """The next message: it is there when its publisher has been told so."""
    method, properties, body = channel.basic_get("all", auto_ack=True)
    assert method is not None
    return method.routing_key, properties, body


def said(**properties: Any) -> Properties:
    made = Properties(PacketTypes.PUBLISH)
    for name, value in properties.items():
        setattr(made, name, value)
    return made


NAMES = [
    ("plant/line/t", "plant.line.t"),
    ("plant/v1.2/t", "plant.v1%2E2.t"),
    ("a", "a"),
    ("/", "."),
    ("/a//b/", ".a..b."),
    ("50%/x", "50%.x"),
    ("a%2Eb/c", "a%252Eb.c"),
    ("é/日本/🦉", "é.日本.🦉"),
    ("a b/c", "a b.c"),
]


@pytest.mark.parametrize("topic, key", NAMES)
def test_names_cross_and_come_back(gateway: Running, channel: BlockingChannel, topic: str, key: str) -> None:
    with Paho(gateway, "5.0") as client:
        client.publish(topic, b"up", 1)
        assert got(channel)[0] == key
        client.subscribe("#", 1)
        channel.basic_publish("amq.topic", key, b"down")
        message = client.message()
        assert (message.topic, message.payload) == (topic, b"down")


@pytest.mark.parametrize("word", ["*", "#", "a*b", "x#"])
def test_wildcards_of_the_other_side_are_only_text(
    gateway: Running, channel: BlockingChannel, word: str
) -> None:
    """In a routing key `*` and `#` are letters; in a topic `#` is forbidden, so it crosses encoded."""
    with Paho(gateway, "5.0") as client:
        client.subscribe("#", 1)
        channel.basic_publish("amq.topic", f"a.{word}", b"x")
        topic = client.message().topic
        assert not {"#", "+"} & set(topic)
        client.publish(topic, b"y", 1)
        keys = [got(channel)[0], got(channel)[0]]
        assert keys[0] == f"a.{word}"
        assert keys[1] in (f"a.{word}", f"a.{word.replace('*', '%2A').replace('#', '%23')}")


def test_properties_cross_up(gateway: Running, channel: BlockingChannel) -> None:
    properties = said(
        ContentType="application/json", CorrelationData=b"order-7", MessageExpiryInterval=60,
        PayloadFormatIndicator=1, UserProperty=[("line", "l1"), ("tag", "x"), ("tag", "y")],
    )  # fmt: skip
    with Paho(gateway, "5.0") as client:
        client.publish("a/b", b"{}", 1, properties=properties, retain=True)
    _, heard, body = got(channel)
    assert (body, heard.content_type, heard.correlation_id) == (b"{}", "application/json", "order-7")
    assert heard.delivery_mode == 2
    assert 58_000 <= int(heard.expiration) <= 60_000
    headers = dict(heard.headers)
    assert (headers["line"], headers["tag"], headers["x-mqtt-retain"]) == ("l1", ["x", "y"], True)


def test_properties_cross_up_and_back_unchanged(gateway: Running, channel: BlockingChannel) -> None:
    properties = said(
        ContentType="text/plain", CorrelationData=b"\x00\xff", ResponseTopic="answers/me",
        UserProperty=[("b", "1"), ("a", "2"), ("b", "3")],
    )  # fmt: skip
    with Paho(gateway, "5.0") as client:
        client.publish("up", b"body", 1, properties=properties)
        _, heard, body = got(channel)
        client.subscribe("down", 1)
        channel.basic_publish("amq.topic", "down", body, heard)
        back = client.message()
    assert back.properties is not None
    found = back.properties.json()
    assert (found["ContentType"], found["CorrelationData"]) == ("text/plain", "00ff")
    pairs = [pair for pair in found["UserProperty"] if not pair[0].startswith("gateway-")]
    assert sorted(map(tuple, pairs)) == [("a", "2"), ("b", "1"), ("b", "3")]


def test_properties_cross_down(gateway: Running, channel: BlockingChannel) -> None:
    properties = pika.BasicProperties(
        content_type="text/plain", correlation_id="c-1", delivery_mode=2, expiration="30000",
        headers={"n": 5, "s": "text", "x-mqtt-retain": True},
    )  # fmt: skip
    with Paho(gateway, "5.0") as client:
        client.subscribe("a/b", 1)
        channel.basic_publish("amq.topic", "a.b", b"body", properties)
        message = client.message()
        assert message.qos == 1
        assert message.properties is not None
        found = message.properties.json()
        assert (found["ContentType"], found["CorrelationData"]) == ("text/plain", b"c-1".hex())
        assert 28 <= found["MessageExpiryInterval"] <= 30
        assert dict(found["UserProperty"]) | {"n": "5", "s": "text"} == dict(found["UserProperty"])
        client.subscribe("#", 1)
        again = client.message()
        assert (again.payload, again.retain) == (b"body", True)


@pytest.mark.parametrize("qos, mode", [(0, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("version", ["3.1", "3.1.1", "5.0"])
def test_guarantees_cross_up(
    gateway: Running, channel: BlockingChannel, version: str, qos: int, mode: int
) -> None:
    with Paho(gateway, version) as client:
        client.publish("a", b"x", qos)
        client.publish("last", b"", 1)  # behind it, so that it has been taken
    assert (got(channel)[1].delivery_mode or 1) == mode


@pytest.mark.parametrize("version", ["3.1", "3.1.1", "5.0"])
def test_a_body_of_the_largest_size_crosses_both_ways(
    gateway: Running, channel: BlockingChannel, version: str
) -> None:
    body = bytes(range(256)) * (16 * MEGABYTE // 256)
    with Paho(gateway, version) as client:
        client.publish("up", body, 1)
        assert got(channel)[2] == body
        client.subscribe("down", 1)
        channel.basic_publish("amq.topic", "down", body)
        assert client.message().payload == body


def test_a_topic_without_a_key_is_refused_to_its_publisher_alone(
    gateway: Running, channel: BlockingChannel
) -> None:
    with Paho(gateway, "5.0") as client:
        assert client.publish("é" * 128, b"x", 1) == 0x90
        assert client.publish("é" * 127 + "a", b"x", 1) == 0
    assert got(channel)[2] == b"x"
    assert channel.basic_get("all")[0] is None


def test_an_empty_key_has_no_topic_and_crosses_no_route(gateway: Running, channel: BlockingChannel) -> None:
    with Paho(gateway, "5.0") as client:
        client.subscribe("#", 1)
        channel.basic_publish("amq.topic", "", b"x")
        channel.basic_publish("amq.topic", "a", b"y")
        assert client.message().payload == b"y"


def test_a_will_crosses(gateway: Running, channel: BlockingChannel) -> None:
    dying, _ = connect(gateway, "dying", will=Will("will/c", b"gone", 1))
    with Paho(gateway, "5.0") as other:
        other.subscribe("will/#", 1)
        dying.cut()
        assert other.message().payload == b"gone"
    assert got(channel)[2] == b"gone"


def test_two_worlds_do_not_loop(gateway: Running, channel: BlockingChannel) -> None:
    with Paho(gateway, "5.0") as client:
        client.subscribe("#", 1)
        client.publish("a", b"once", 1)
        channel.basic_publish("amq.topic", "b", b"also once")
        assert {client.message().payload, client.message().payload} == {b"once", b"also once"}
        client.publish("end", b"end", 1)
        assert client.message().payload == b"end"
    assert [got(channel)[2] for _ in range(3)] == [b"once", b"also once", b"end"]
    assert channel.basic_get("all")[0] is None
