"""A gateway between AMQP programs and a real Mosquitto: what crosses, and what an outage does to it."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Self

import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

from gateway.app.operations import pause, resume
from gateway.egress.mqtt.session import MqttLinkSession
from tests.chaos.proxy import Proxy
from tests.configured import make_link
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.pahos import leave
from tests.interop.servers import Mosquitto, free_ports, program

WAIT_SECS: Final = 20.0
MAPPING: Final = """
version: 1
routes:
  - name: down
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "down.{rest...}"}
    to: {endpoint: plant, topic: "down/{rest...}"}
  - name: up
    from: {endpoint: plant, topic: "up/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "up.{rest...}"}
  - name: state
    from: {endpoint: plant, topic: "state/{rest...}"}
    to: {endpoint: mqtt, topic: "state/{rest...}"}
  - name: once
    from: {endpoint: mqtt, topic: "once/{rest...}"}
    to: {endpoint: plant, topic: "once/{rest...}"}
  - name: there
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "both.{rest...}"}
    to: {endpoint: plant, topic: "both/{rest...}"}
  - name: back
    from: {endpoint: plant, topic: "both/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "both.{rest...}"}
"""


@contextmanager
def linked(port: int, folder: Path, **link: Any) -> Iterator[Running]:
    """A gateway whose link `plant` to the broker on `port` has subscribed to what the routes need."""
    mapping = folder / "mapping.yaml"
    mapping.write_text(MAPPING)
    link.setdefault("url", f"mqtt://{LOOPBACK}:{port}")
    plant = make_link(
        reconnect_min_secs=0.1,
        reconnect_max_secs=0.5,
        client_id=folder.name,  # the sessions of one test are not those of another
        **link,
    )
    with running(settings_of(links={"plant": plant}, mappings=(str(mapping),))) as gateway:
        subscribed(gateway)
        yield gateway


def conversation(gateway: Running) -> MqttLinkSession:
    found = gateway.gateway.links["plant"].session
    assert isinstance(found, MqttLinkSession)
    return found


def subscribed(gateway: Running, connects: int = 1) -> None:
    """Wait until the link has come up `connects` times and its subscriptions are granted."""
    stats, filters = conversation(gateway).stats, conversation(gateway).filters
    gateway.until(
        lambda: (
            stats.up and stats.connects >= connects and len(filters.granted) == len(filters.topic_filters)
        ),
        WAIT_SECS,
    )


class Subscriber:
    """An MQTT 5 client with a thread of its own; what it hears is fetched in order."""

    def __init__(self, port: int, topic: str, *, client_id: str = "", keep: bool = False) -> None:
        self._heard: SimpleQueue[paho.MQTTMessage] = SimpleQueue()
        self._ready = threading.Event()
        self._topic = topic
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv5
        )
        self._client.on_message = lambda client, data, message: self._heard.put(message)
        self._client.on_connect = self._subscribe
        self._client.on_subscribe = lambda *_: self._ready.set()
        properties = Properties(PacketTypes.CONNECT)
        properties.SessionExpiryInterval = 600 if keep else 0
        self._client.connect(LOOPBACK, port, clean_start=not keep, properties=properties)

    def _subscribe(self, *_: object) -> None:
        self._client.subscribe(self._topic, options=SubscribeOptions(qos=2, retainAsPublished=True))

    def __enter__(self) -> Self:
        self._client.loop_start()
        assert self._ready.wait(WAIT_SECS)
        return self

    def __exit__(self, *_: object) -> None:
        leave(self._client)
        # The client closes its own pair of sockets when nobody refers to it any more.
        self._client.on_connect = self._client.on_message = self._client.on_subscribe = None

    def next(self) -> paho.MQTTMessage:
        return self._heard.get(timeout=WAIT_SECS)

    def quiet(self, topic: str = "the/end") -> bool:
        """Nothing has come until now that was published before."""
        before = self._heard.qsize()
        self._client.subscribe(topic)
        self._client.publish(topic, b"", 0)
        found = self.next()
        return before == 0 and found.topic == topic


def publish(port: int, topic: str, body: bytes | None, qos: int = 1, *arguments: str) -> None:
    """mosquitto_pub, MQTT 5; None is an empty body."""
    how = "-n" if body is None else "-s"
    command = [program("mosquitto_pub"), "-h", LOOPBACK, "-p", str(port), "-V", "mqttv5", "-q", str(qos)]
    subprocess.run([*command, "-t", topic, how, *arguments], input=body, check=True, timeout=30)


@contextmanager
def channel(gateway: Running) -> Iterator[Any]:
    """A pika channel with confirms."""
    parameters = pika.URLParameters(gateway.amqp_url)
    with pika.BlockingConnection(parameters) as connection:
        opened = connection.channel()
        opened.confirm_delivery()
        yield opened


def queue_of(opened: Any, key: str) -> str:
    """A queue that is bound to amq.topic by `key`."""
    name = str(opened.queue_declare("", exclusive=True).method.queue)
    opened.queue_bind(name, "amq.topic", key)
    return name


def fetch(opened: Any, queue: str, count: int) -> list[tuple[Any, Any, bytes]]:
    """`count` messages: delivery, properties, body. What has come beyond them goes back to the queue."""
    found: list[tuple[Any, Any, bytes]] = []
    for got in opened.consume(queue, inactivity_timeout=WAIT_SECS):
        assert got[0] is not None, f"{len(found)} of {count} messages came"
        opened.basic_ack(got[0].delivery_tag)
        found.append(got)
        if len(found) == count:
            break
    opened.cancel()
    return found


def mqtt(**headers: Any) -> pika.BasicProperties:
    return pika.BasicProperties(delivery_mode=2, content_type="text/plain", headers=headers)


@pytest.mark.parametrize("version", ["5.0", "3.1.1", "3.1"])
def test_an_amqp_publish_reaches_an_mqtt_subscriber(
    mosquitto: Mosquitto, tmp_path: Path, version: str
) -> None:
    with (
        linked(mosquitto.port, tmp_path, version=version) as gateway,
        Subscriber(mosquitto.port, "down/#") as subscriber,
        channel(gateway) as amqp,
    ):
        amqp.basic_publish("amq.topic", "down.v1%2E2.t", b"\x00\xff", mqtt(k="v", n=7))
        amqp.basic_publish("amq.topic", "down.x", b"confirmed")
        amqp.basic_publish("amq.topic", "down.x", b"by its alias")  # Mosquitto allows ten in MQTT 5
        first, second, third = subscriber.next(), subscriber.next(), subscriber.next()
        assert (third.topic, third.payload) == ("down/x", b"by its alias")
        assert (first.topic, first.payload, first.qos) == ("down/v1.2/t", b"\x00\xff", 1)
        assert (second.topic, second.payload, second.qos) == ("down/x", b"confirmed", 1)
        if version == "5.0":
            properties: Any = first.properties
            assert properties.ContentType == "text/plain"
            assert {("k", "v"), ("n", "7"), ("gateway-hops", "1")} <= set(properties.UserProperty)


@pytest.mark.parametrize("version", ["5.0", "3.1.1", "3.1"])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_an_mqtt_publish_reaches_an_amqp_consumer(
    mosquitto: Mosquitto, tmp_path: Path, version: str, qos: int
) -> None:
    with linked(mosquitto.port, tmp_path, version=version, qos=2) as gateway, channel(gateway) as amqp:
        queue = queue_of(amqp, "up.#")
        said = ("-D", "publish", "user-property", "k", "v", "-D", "publish", "content-type", "text/plain")
        publish(mosquitto.port, "up/v1.2/t", b"\x00\xff", qos, *said)
        ((delivery, properties, body),) = fetch(amqp, queue, 1)
        assert (delivery.routing_key, body) == ("up.v1%2E2.t", b"\x00\xff")
        assert (properties.delivery_mode == 2) is (qos > 0)
        if version == "5.0":
            assert properties.content_type == "text/plain"
            assert properties.headers["k"] == "v"
        gateway.until(lambda: conversation(gateway).idle)


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_retained_messages_cross_both_ways(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    place = f"retained-{version[0]}"
    publish(mosquitto.port, f"state/{place}", b"before", 1, "-r")
    try:
        with linked(mosquitto.port, tmp_path, version=version) as gateway, channel(gateway) as amqp:
            gateway.until(lambda: f"state/{place}" in gateway.gateway.mqtt.retained)
            with Subscriber(gateway.mqtt, f"state/{place}") as subscriber:
                message = subscriber.next()
                assert (message.payload, message.retain) == (b"before", True)
            queue = queue_of(amqp, "up.#")
            publish(mosquitto.port, f"up/{place}", b"live", 1, "-r")
            ((_, properties, body),) = fetch(amqp, queue, 1)
            # MQTT 3.1.1 forwards the flag to no subscriber that is there already (3: 3.3.1.3).
            assert (body, "x-mqtt-retain" in (properties.headers or {})) == (b"live", version == "5.0")
            amqp.basic_publish("amq.topic", f"down.{place}", b"state", mqtt(**{"x-mqtt-retain": True}))
            with Subscriber(mosquitto.port, f"down/{place}") as subscriber:
                message = subscriber.next()
                assert (message.payload, message.retain) == (b"state", True)
                amqp.basic_publish("amq.topic", f"down.{place}", b"", mqtt(**{"x-mqtt-retain": True}))
                assert subscriber.next().payload == b""
    finally:
        for topic in (f"state/{place}", f"up/{place}"):
            publish(mosquitto.port, topic, None, 1, "-r")


@pytest.mark.parametrize("version, bridge", [("5.0", False), ("3.1.1", True), ("3.1", True)])
def test_what_a_link_publishes_does_not_come_back_and_retain_is_kept(
    mosquitto: Mosquitto, tmp_path: Path, version: str, bridge: bool
) -> None:
    place = f"both/{version[-1]}"
    try:
        with (
            linked(mosquitto.port, tmp_path, version=version, bridge=bridge) as gateway,
            channel(gateway) as amqp,
        ):
            queue = queue_of(amqp, "both.#")
            amqp.basic_publish("amq.topic", "both.x", b"once", mqtt())
            publish(mosquitto.port, place, b"last", 1, "-r")
            (_, _, first), (_, properties, second) = fetch(amqp, queue, 2)
            assert (first, second) == (b"once", b"last")
            assert properties.headers["x-mqtt-retain"] is True
            assert conversation(gateway).stats.messages_in == 1
    finally:
        publish(mosquitto.port, place, None, 1, "-r")


def test_an_outage_loses_nothing_and_keeps_the_order(tmp_path: Path) -> None:
    """Mosquitto keeps its sessions over a restart, so the link resumes what was in flight; and it disconnects
    whoever sends more than its Receive Maximum."""
    kept = ("persistence true", f"persistence_location {tmp_path}/", "max_queued_messages 0")
    lines = (*kept, "max_inflight_messages 5")
    with Mosquitto(tmp_path / "broker", lines) as broker:
        with Subscriber(broker.port, "down/#", client_id="sub", keep=True):
            pass
        with linked(broker.port, tmp_path) as gateway, channel(gateway) as amqp:
            confirmed: list[int] = []
            bodies = [b"%d" % number for number in range(300)]
            publisher = threading.Thread(target=publish_all, args=(gateway, bodies, confirmed))
            amqp.basic_publish("amq.topic", "down.x", b"before", mqtt())
            broker.stop(kill=False)
            gateway.until(lambda: not conversation(gateway).stats.up)
            publisher.start()
            gateway.until(lambda: conversation(gateway).publisher.waiting_messages == len(bodies), WAIT_SECS)
            assert confirmed == []
            broker.start()
            publisher.join(WAIT_SECS)
            assert confirmed == [len(bodies)]
            subscribed(gateway, 2)
            queue = queue_of(amqp, "up.#")
            publish(broker.port, "up/x", b"after")
            assert [body for _, _, body in fetch(amqp, queue, 1)] == [b"after"]
            with Subscriber(broker.port, "down/#", client_id="sub", keep=True) as subscriber:
                heard = [subscriber.next().payload for _ in range(len(bodies) + 1)]
            assert heard == [b"before", *bodies]
            assert conversation(gateway).stats.connects == 2


def test_a_paused_link_loses_nothing_of_either_direction(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with (
        linked(mosquitto.port, tmp_path) as gateway,
        channel(gateway) as opened,
        Subscriber(mosquitto.port, "down/#") as subscriber,
    ):
        queue = queue_of(opened, "up.#")
        link = gateway.gateway.links["plant"]
        gateway.ask(lambda: pause(gateway.gateway, "link", "plant"))
        gateway.until(lambda: not link.is_up)
        publish(mosquitto.port, "up/x", b"kept by the broker")
        sent = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
        for body in (b"1", b"2"):
            sent.channel().basic_publish("amq.topic", "down.x", body, mqtt())
        gateway.until(lambda: link.session.unconfirmed == 2)
        assert subscriber.quiet()
        assert (link.is_up, link.down_reason) == (False, "an operator has paused the link")
        gateway.ask(lambda: resume(gateway.gateway, "link", "plant"))
        assert [subscriber.next().payload for _ in range(2)] == [b"1", b"2"]
        assert fetch(opened, queue, 1)[0][2] == b"kept by the broker"
        sent.close()


def publish_all(gateway: Running, bodies: list[bytes], confirmed: list[int]) -> None:
    """Publish without waiting for each confirm, then wait for all; notes their number."""
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        opened = connection.channel()
        acked = [0]

        def noted(frame: Any) -> None:
            acked[0] = frame.method.delivery_tag

        opened._impl.confirm_delivery(ack_nack_callback=noted)
        connection.process_data_events(0.1)
        for body in bodies:
            opened._impl.basic_publish("amq.topic", "down.x", body, mqtt())
        while acked[0] < len(bodies):
            connection.process_data_events(0.1)
        confirmed.append(acked[0])


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_qos_2_arrives_once_and_in_order_however_often_the_link_is_cut(
    mosquitto: Mosquitto, tmp_path: Path, version: str
) -> None:
    bodies = [b"%d" % number for number in range(400)]
    place = f"once/{tmp_path.name}"
    with (
        Proxy(mosquitto.port) as wire,
        linked(wire.port, tmp_path, version=version) as gateway,
        Subscriber(mosquitto.port, place) as subscriber,
    ):
        publisher = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        publisher.connect(LOOPBACK, gateway.mqtt)
        publisher.loop_start()
        try:
            told = [publisher.publish(place, body, 2) for body in bodies]
            heard: list[bytes] = []
            for quarter in range(1, 5):
                while len(heard) < quarter * len(bodies) // 5:
                    heard.append(bytes(subscriber.next().payload))
                wire.cut()
                subscribed(gateway, quarter + 1)
            for one in told:
                one.wait_for_publish(WAIT_SECS)
            while len(heard) < len(bodies):
                heard.append(bytes(subscriber.next().payload))
        finally:
            leave(publisher)
        publish(mosquitto.port, place, b"the last")
        assert [*heard, subscriber.next().payload] == [*bodies, b"the last"]


def test_a_broker_that_forgot_everything_is_subscribed_to_again(mosquitto: Mosquitto, tmp_path: Path) -> None:
    with linked(mosquitto.port, tmp_path) as gateway, channel(gateway) as amqp:
        queue = queue_of(amqp, "up.#")
        mosquitto.stop(kill=True)
        gateway.until(lambda: not conversation(gateway).stats.up)
        mosquitto.start()
        subscribed(gateway, 2)
        publish(mosquitto.port, "up/x", b"again")
        assert [body for _, _, body in fetch(amqp, queue, 1)] == [b"again"]


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_the_broker_keeps_messages_while_the_gateway_is_away(
    mosquitto: Mosquitto, tmp_path: Path, version: str
) -> None:
    with linked(mosquitto.port, tmp_path, version=version):
        pass
    publish(mosquitto.port, "up/away", b"kept", 1)
    publish(mosquitto.port, "up/away", b"kept too", 2)
    with linked(mosquitto.port, tmp_path, version=version) as gateway:
        gateway.until(lambda: conversation(gateway).stats.messages_in == 2)
        gateway.until(lambda: conversation(gateway).idle)


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
def test_a_clean_session_is_owed_nothing(mosquitto: Mosquitto, tmp_path: Path, version: str) -> None:
    with linked(mosquitto.port, tmp_path, version=version):
        pass
    publish(mosquitto.port, "up/away", b"to the session that the link kept before")
    for _ in range(2):
        with (
            linked(mosquitto.port, tmp_path, version=version, session_expiry_secs=0) as gateway,
            channel(gateway) as amqp,
        ):
            queue = queue_of(amqp, "up.#")
            publish(mosquitto.port, "up/x", b"live")
            assert [body for _, _, body in fetch(amqp, queue, 1)] == [b"live"]
            assert conversation(gateway).stats.messages_in == 1
        publish(mosquitto.port, "up/away", b"to nobody")


@pytest.mark.parametrize(
    "version, line",
    [
        pytest.param("5.0", "max_packet_size 2000", id="announced"),
        pytest.param("5.0", "message_size_limit 2000", id="answered"),
        pytest.param("3.1.1", "max_packet_size 2000", id="hung-up-on"),
    ],
)
def test_a_message_that_is_too_large_for_the_broker_does_not_keep_the_others(
    tmp_path: Path, version: str, line: str
) -> None:
    with (
        Mosquitto(tmp_path / "broker", (line,)) as broker,
        linked(broker.port, tmp_path, version=version) as gateway,
        Subscriber(broker.port, "down/#") as subscriber,
        channel(gateway) as amqp,
    ):
        with pytest.raises(pika.exceptions.NackError):
            amqp.basic_publish("amq.topic", "down.x", b"x" * 5_000, mqtt())
        amqp.basic_publish("amq.topic", "down.x", b"small", mqtt())
        assert subscriber.next().payload == b"small"


class OldBroker:
    """Passes connections on to a broker, but knows no MQTT 5: `answer` is all that such a CONNECT gets."""

    def __init__(self, port: int, answer: bytes) -> None:
        self.port = free_ports(1)[0]
        self.refused = 0
        self._answer = answer
        self._behind = port
        self._listening = socket.create_server((LOOPBACK, self.port))
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listening, *self._open):
            _shut(one)

    def cut(self) -> None:
        """End the connections that there are."""
        for one in self._open:
            _shut(one)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            connect = client.recv(4_096)
            if b"MQTT\x05" in connect:
                self.refused += 1
                client.sendall(self._answer)
                client.close()
                continue
            behind = socket.create_connection((LOOPBACK, self._behind))
            behind.sendall(connect)
            self._open += (client, behind)
            for here, there in ((client, behind), (behind, client)):
                threading.Thread(target=_carry, args=(here, there), daemon=True).start()


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it was not connected any more
    finally:
        one.close()


def _carry(here: socket.socket, there: socket.socket) -> None:
    try:
        while data := here.recv(65_536):
            there.sendall(data)
    except OSError:
        pass  # one side has gone; so goes the other
    _shut(there)


@pytest.mark.parametrize(
    "answer, refused",
    [pytest.param(b"\x20\x02\x00\x01", 1, id="refusal"), pytest.param(b"", 2, id="silence")],
)
def test_a_broker_without_mqtt_5_is_spoken_to_in_3_1_1(
    mosquitto: Mosquitto, tmp_path: Path, answer: bytes, refused: int
) -> None:
    with (
        OldBroker(mosquitto.port, answer) as old,
        linked(old.port, tmp_path) as gateway,
        channel(gateway) as amqp,
    ):
        queue = queue_of(amqp, "up.#")
        publish(mosquitto.port, "up/x", b"one")
        assert [body for _, _, body in fetch(amqp, queue, 1)] == [b"one"]
        old.cut()
        subscribed(gateway, 2)
        assert old.refused == refused
        publish(mosquitto.port, "up/x", b"two")
        found = [body for _, _, body in fetch(amqp, queue, 1)]
        if found == [b"one"]:  # it was cut before the acknowledgement went out: at least once
            found = [body for _, _, body in fetch(amqp, queue, 1)]
        assert found == [b"two"]
