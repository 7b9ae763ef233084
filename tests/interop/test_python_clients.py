"""paho-mqtt, aiomqtt, pika and aio-pika against the listeners, each in the way that its users do."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from typing import Any

import aio_pika
import aiomqtt
import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.interop.gateway_fixture import LOOPBACK, Running, running

WAIT = 10.0


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as started:
        yield started


class Paho:
    """A connected paho client whose messages wait in a queue."""

    def __init__(self, gateway: Running, client_id: str, protocol: int = paho.MQTTv5, **connect: Any) -> None:
        self.got: queue.Queue[paho.MQTTMessage] = queue.Queue()
        self.acks: queue.Queue[Any] = queue.Queue()
        self.flags: queue.Queue[Any] = queue.Queue()
        more = {} if protocol == paho.MQTTv5 else {"clean_session": connect.pop("clean_session", True)}
        version = paho.CallbackAPIVersion.VERSION2
        self.client = paho.Client(version, client_id, protocol=protocol, **more)
        self.client.on_message = lambda _c, _u, message: self.got.put(message)
        self.client.on_publish = lambda _c, _u, _mid, reason, _p: self.acks.put(reason)
        self.client.on_connect = lambda _c, _u, flags, reason, _p: self.flags.put((flags, reason))
        subscribed: queue.Queue[Any] = queue.Queue()
        self.client.on_subscribe = lambda _c, _u, _mid, reasons, _p: subscribed.put(reasons)
        self._subscribed = subscribed
        self.client.connect(LOOPBACK, gateway.mqtt, **connect)
        self.client.loop_start()
        self.session_present = self.flags.get(timeout=WAIT)[0].session_present

    def subscribe(self, topic: str, qos: int = 1) -> Any:
        self.client.subscribe(topic, qos)
        return self._subscribed.get(timeout=WAIT)

    def publish(self, topic: str, body: bytes, qos: int = 1, **more: Any) -> Any:
        self.client.publish(topic, body, qos, **more)
        return self.acks.get(timeout=WAIT)

    def message(self) -> paho.MQTTMessage:
        return self.got.get(timeout=WAIT)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()


@pytest.mark.parametrize("protocol", [paho.MQTTv31, paho.MQTTv311, paho.MQTTv5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_paho_in_every_version(gateway: Running, protocol: int, qos: int) -> None:
    one = Paho(gateway, f"paho-{protocol}-{qos}", protocol)
    one.subscribe(f"paho/{protocol}/#", 2)
    one.publish(f"paho/{protocol}/{qos}", b"hello", qos)
    found = one.message()
    assert (found.topic, found.payload, found.qos) == (f"paho/{protocol}/{qos}", b"hello", qos)
    one.close()


@pytest.mark.parametrize("protocol", [paho.MQTTv311, paho.MQTTv5])
def test_a_session_keeps_what_its_client_missed(gateway: Running, protocol: int) -> None:
    persistent: dict[str, Any] = {"clean_session": False}
    if protocol == paho.MQTTv5:
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 300
        persistent = {"clean_start": False, "properties": properties}
    away = Paho(gateway, f"away-{protocol}", protocol, **dict(persistent))
    assert not away.session_present
    away.subscribe(f"away/{protocol}", 1)
    away.close()
    other = Paho(gateway, f"other-{protocol}", protocol)
    for number in range(50):
        other.publish(f"away/{protocol}", b"%d" % number)
    back = Paho(gateway, f"away-{protocol}", protocol, **dict(persistent))
    assert back.session_present
    assert [int(back.message().payload) for _ in range(50)] == list(range(50))
    back.close()
    other.close()


def channel_of(gateway: Running) -> Any:
    return pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)).channel()


def next_of(channel: Any, name: str) -> tuple[Any, Any, bytes]:
    found: tuple[Any, Any, bytes] = next(channel.consume(name, auto_ack=True, inactivity_timeout=WAIT))
    channel.cancel()
    return found


def test_properties_cross_to_amqp_and_back(gateway: Running) -> None:
    channel = channel_of(gateway)
    name = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(name, "amq.topic", "props.#")
    one = Paho(gateway, "props")
    properties = Properties(PacketTypes.PUBLISH)
    properties.ContentType = "application/json"
    properties.CorrelationData = b"\x00\xff"
    properties.MessageExpiryInterval = 60
    properties.UserProperty = [("a", "1"), ("b", "2"), ("a", "3")]
    one.publish("props/x", b"{}", properties=properties, retain=True)
    method, found, body = next_of(channel, name)
    assert (method.routing_key, body, found.content_type) == ("props.x", b"{}", "application/json")
    assert found.headers["a"] == ["1", "3"]
    assert found.headers["b"] == "2"
    assert found.headers["x-mqtt-retain"] is True
    assert 0 < int(found.expiration) <= 60_000
    one.subscribe("returned/#", 1)
    again = pika.BasicProperties(
        content_type=found.content_type,
        headers=found.headers | {"n": 7},
        correlation_id=found.correlation_id,
        delivery_mode=2,
    )
    channel.basic_publish("amq.topic", "returned.x", b"back", again)
    message = one.message()
    assert message.properties.CorrelationData == b"\x00\xff"
    assert message.properties.ContentType == "application/json"
    users = message.properties.UserProperty
    assert [value for key, value in users if key == "a"] == ["1", "3"]
    assert ("n", "7") in users
    one.close()
    channel.connection.close()


@pytest.mark.parametrize(
    "topic, key",
    [
        ("odd/v1.2/t", "odd.v1%2E2.t"),
        ("odd//x/", "odd..x."),
        ("odd/50%/*", "odd.50%.%2A"),
        ("odd/é/中", "odd.é.中"),
    ],
)
def test_topics_become_keys_and_come_back(gateway: Running, topic: str, key: str) -> None:
    channel = channel_of(gateway)
    name = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(name, "amq.topic", "odd.#")
    one = Paho(gateway, "odd")
    one.publish(topic, b"x")
    assert next_of(channel, name)[0].routing_key == key
    one.subscribe("odd/#")
    channel.basic_publish("amq.topic", key, b"y")
    assert one.message().topic == topic
    one.close()
    channel.connection.close()


def test_a_key_that_is_too_long_is_refused_in_mqtt_5_words(gateway: Running) -> None:
    one = Paho(gateway, "long")
    assert one.publish("x" * 256, b"").value == 0x90
    assert one.publish("short", b"").value < 0x80  # the connection has survived
    one.close()


def test_a_large_body_crosses(gateway: Running) -> None:
    channel = channel_of(gateway)
    name = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(name, "amq.topic", "large")
    body = bytes(range(256)) * (16 * 1024 * 4)  # 16 MiB, message_bytes_max
    one = Paho(gateway, "large")
    one.publish("large", body)
    assert next_of(channel, name)[2] == body
    assert one.publish("large", body + b"!").value == 0x97
    one.close()
    channel.connection.close()


def test_aiomqtt_and_aio_pika(gateway: Running) -> None:
    async def main() -> tuple[str, bytes, str, bytes]:
        async with aiomqtt.Client(LOOPBACK, gateway.mqtt, identifier="aio") as client:
            await client.subscribe("aio/back", qos=1)
            connection = await aio_pika.connect_robust(gateway.amqp_url)
            async with connection:
                channel = await connection.channel(publisher_confirms=True)
                await channel.set_qos(prefetch_count=10)
                found = await channel.declare_queue("aio", auto_delete=True)
                exchange = await channel.get_exchange("amq.topic")
                await found.bind(exchange, "aio.to")
                await client.publish("aio/to", b"there", qos=1)
                async with found.iterator(timeout=WAIT) as messages:
                    message = await anext(messages)
                    await message.ack()
                reply = aio_pika.Message(b"back", delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await exchange.publish(reply, "aio.back")
                received = await anext(aiter(client.messages))
                payload = received.payload
                assert isinstance(payload, bytes)
                return message.routing_key or "", message.body, received.topic.value, payload

    got = asyncio.run(asyncio.wait_for(main(), 20))
    assert got == ("aio.to", b"there", "aio/back", b"back")


class TestPika:
    """What back ends do with RabbitMQ through pika."""

    def test_exchange_types(self, gateway: Running) -> None:
        channel = channel_of(gateway)
        channel.confirm_delivery()
        rows = [
            ("direct", "k", None, "k", {}),
            ("fanout", "", None, "any", {}),
            ("topic", "a.*.c", None, "a.b.c", {}),
        ]
        rows.append(("headers", "", {"x-match": "all", "n": 1}, "", {"n": 1}))
        for kind, binding, arguments, key, headers in rows:
            channel.exchange_declare(f"test-{kind}", kind, auto_delete=True)
            name = channel.queue_declare("", exclusive=True).method.queue
            channel.queue_bind(name, f"test-{kind}", binding, arguments)
            properties = pika.BasicProperties(headers=headers)
            channel.basic_publish(f"test-{kind}", key, kind.encode(), properties, mandatory=True)
            method, _, body = channel.basic_get(name, auto_ack=True)
            assert (method.exchange, method.routing_key, body) == (f"test-{kind}", key, kind.encode())
            channel.queue_unbind(name, f"test-{kind}", binding, arguments)  # which deletes the exchange
            channel.exchange_declare(f"test-{kind}", kind, auto_delete=True)
            with pytest.raises(pika.exceptions.UnroutableError):
                channel.basic_publish(f"test-{kind}", key, b"", properties, mandatory=True)
            channel.exchange_delete(f"test-{kind}")
        channel.connection.close()

    def test_prefetch_requeue_and_order(self, gateway: Running) -> None:
        channel = channel_of(gateway)
        name = channel.queue_declare("", exclusive=True).method.queue
        for number in range(10):
            channel.basic_publish("", name, b"%d" % number)
        channel.basic_qos(prefetch_count=3)
        got: list[tuple[int, bytes, bool]] = []
        channel.basic_consume(name, lambda _c, m, _p, body: got.append((m.delivery_tag, body, m.redelivered)))
        channel.connection.process_data_events(0.5)
        assert [body for _, body, _ in got] == [b"0", b"1", b"2"]
        channel.basic_nack(got[0][0], requeue=True)
        channel.basic_reject(got[1][0], requeue=False)
        channel.basic_ack(got[2][0])
        while len(got) < 6:
            channel.connection.process_data_events(WAIT)
        assert got[3][1:] == (b"0", True)
        assert [body for _, body, _ in got[4:6]] == [b"3", b"4"]
        channel.connection.close()

    @pytest.mark.parametrize(
        "act, code",
        [
            (lambda channel: channel.queue_declare("absent", passive=True), 404),
            (lambda channel: channel.exchange_declare("amq.topic", "direct"), 406),
            (lambda channel: channel.exchange_declare("amq.mine", "direct"), 403),
            (lambda channel: channel.queue_declare("q", arguments={"x-nonsense": 1}), 406),
            (lambda channel: channel.basic_consume("absent", print), 404),
            (lambda channel: channel.queue_bind("absent", "amq.topic", "k"), 404),
        ],
    )
    def test_soft_errors_close_the_channel_only(self, gateway: Running, act: Any, code: int) -> None:
        channel = channel_of(gateway)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            act(channel)
        assert closed.value.reply_code == code
        other = channel.connection.channel()
        assert other.queue_declare("", exclusive=True).method.message_count == 0
        channel.connection.close()

    def test_unknown_delivery_tag(self, gateway: Running) -> None:
        channel = channel_of(gateway)
        channel.basic_ack(99)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker) as closed:
            channel.queue_declare("", exclusive=True)
        assert closed.value.reply_code == 406
        channel.connection.close()

    def test_a_wrong_password_is_refused(self, gateway: Running) -> None:
        parameters = pika.ConnectionParameters(
            LOOPBACK, gateway.amqp, credentials=pika.PlainCredentials("guest", "wrong")
        )
        with pytest.raises(pika.exceptions.ProbableAuthenticationError):
            pika.BlockingConnection(parameters)
