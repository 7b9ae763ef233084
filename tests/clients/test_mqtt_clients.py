"""MQTT clients that people use, against the listener: Mosquitto's programs, paho-mqtt, aiomqtt, MQTT.js."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from uuid import uuid4

import aiomqtt
import pika
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.clients.peers import PAHO, PATIENCE_SECS, Paho, node
from tests.conftest import missing
from tests.interop.gateway_fixture import LOOPBACK, Running
from tests.interop.servers import PeerMissingError, program

VERSIONS: Final = ("mqttv31", "mqttv311", "mqttv5")


def mosquitto(name: str, gateway: Running, version: str, *arguments: str) -> list[str]:
    try:
        path = program(name)
    except PeerMissingError as error:
        missing(str(error))
        raise
    return [path, "-h", LOOPBACK, "-p", str(gateway.mqtt), "-V", version, *arguments]


def mosquitto_pub(gateway: Running, version: str, *arguments: str) -> None:
    command = mosquitto("mosquitto_pub", gateway, version, *arguments)
    subprocess.run(command, check=True, timeout=PATIENCE_SECS, capture_output=True)


class Subscriber:
    """mosquitto_sub, waiting for a number of messages."""

    def __init__(
        self, gateway: Running, version: str, count: int, *arguments: str, watched: bool = True
    ) -> None:
        """`watched`: return when it has subscribed; False for one that leaves as soon as it has."""
        # Watched by a name of its own: the count of all also falls, when a reader before this one leaves.
        name = arguments[arguments.index("-i") + 1] if "-i" in arguments else f"reader-{uuid4().hex[:12]}"
        more = ("-C", str(count), "-W", str(int(PATIENCE_SECS)), "-i", name, *arguments)
        self._process = subprocess.Popen(
            mosquitto("mosquitto_sub", gateway, version, *more), stdout=subprocess.PIPE, text=True
        )
        sessions = gateway.gateway.mqtt.sessions
        if watched:
            with self._ended_by_a_fault():
                gateway.until(lambda: name in sessions and bool(sessions[name].subscriptions))

    def lines(self) -> list[str]:
        with self._ended_by_a_fault():
            out, _ = self._process.communicate(timeout=PATIENCE_SECS)
        return out.splitlines()

    @contextmanager
    def _ended_by_a_fault(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_mosquitto_pub_and_sub(gateway: Running, version: str, qos: str) -> None:
    reader = Subscriber(gateway, version, 2, "-q", qos, "-t", "plant/+/t", "-F", "%t %q %p")
    mosquitto_pub(gateway, version, "-q", qos, "-t", "plant/l1/t", "-m", "21.5")
    mosquitto_pub(gateway, version, "-q", qos, "-t", "plant/other", "-m", "passed over")
    mosquitto_pub(gateway, version, "-q", qos, "-t", "plant/é.x/t", "-m", "ü")
    assert reader.lines() == [f"plant/l1/t {qos} 21.5", f"plant/é.x/t {qos} ü"]


@pytest.mark.parametrize("version", VERSIONS)
def test_mosquitto_retained_messages(gateway: Running, version: str) -> None:
    for topic in ("r/1", "r/2"):
        mosquitto_pub(gateway, version, "-q", "1", "-r", "-t", topic, "-m", topic)
    mosquitto_pub(gateway, version, "-q", "1", "-r", "-n", "-t", "r/2")
    reader = Subscriber(gateway, version, 1, "-q", "1", "-t", "r/#", "-F", "%r %p", watched=False)
    assert reader.lines() == ["1 r/1"]


@pytest.mark.parametrize("version", VERSIONS)
def test_mosquitto_will(gateway: Running, version: str) -> None:
    reader = Subscriber(gateway, version, 1, "-t", "will/#", "-v")
    dying = subprocess.Popen(
        mosquitto(
            "mosquitto_sub",
            gateway,
            version,
            "-t",
            "x",
            "-i",
            "dying",
            "--will-topic",
            "will/c",
            "--will-payload",
            "gone",
            "--will-qos",
            "1",
        )
    )
    gateway.until(lambda: "dying" in gateway.gateway.mqtt.sessions)
    dying.kill()
    dying.wait()
    assert reader.lines() == ["will/c gone"]


@pytest.mark.parametrize("version", VERSIONS)
def test_mosquitto_sub_resumes_its_session(gateway: Running, version: str) -> None:
    lasting = ["-c", "-i", "stays", "-q", "2", "-t", "s", *(["-x", "600"] if version == "mqttv5" else [])]
    mosquitto_pub(gateway, version, "-t", "s", "-m", "first", "-q", "2", "-r")
    assert Subscriber(gateway, version, 1, *lasting).lines() == ["first"]
    for body in ("1", "2", "3"):
        mosquitto_pub(gateway, version, "-q", "2", "-t", "s", "-m", body)
    command = mosquitto("mosquitto_sub", gateway, version, "-C", "3", "-W", "20", "-R", *lasting)
    done = subprocess.run(command, check=True, timeout=PATIENCE_SECS, capture_output=True, text=True)
    assert done.stdout.split() == ["1", "2", "3"]


def test_a_long_topic_that_amqp_cannot_carry_is_refused_and_the_client_stays(gateway: Running) -> None:
    """As long as nobody is bound who would get it in AMQP, there is nothing to refuse."""
    with (
        Paho(gateway, "5.0") as client,
        pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection,
    ):
        assert client.publish("a" * 256, b"x", 1) == 0x10
        channel = connection.channel()
        channel.queue_declare("q")
        channel.queue_bind("q", "amq.topic", "#")
        assert client.publish("a" * 256, b"x", 1) == 0x90
        assert client.publish("a" * 255, b"x", 1) == 0x00


@pytest.mark.parametrize("version", list(PAHO))
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_paho(gateway: Running, version: str, qos: int) -> None:
    with Paho(gateway, version) as client:
        assert client.subscribe("a/#", qos) == qos
        for number in range(10):
            client.publish(f"a/{number}", str(number).encode(), qos)
        found = [client.message() for _ in range(10)]
        assert [(one.topic, one.payload, one.qos) for one in found] == [
            (f"a/{number}", str(number).encode(), qos) for number in range(10)
        ]


def test_paho_5_carries_its_properties(gateway: Running) -> None:
    said = Properties(PacketTypes.PUBLISH)
    said.ContentType = "text/plain"
    said.CorrelationData = b"\x00\xff"
    said.ResponseTopic = "answers/here"
    said.PayloadFormatIndicator = 1
    said.MessageExpiryInterval = 100
    said.UserProperty = [("a", "1"), ("b", "2"), ("a", "3")]
    with Paho(gateway, "5.0") as client:
        client.subscribe("a", 1)
        client.publish("a", b"body", 1, properties=said)
        heard = client.message().properties
        assert heard is not None
        found = heard.json()
        assert 98 <= found["MessageExpiryInterval"] <= 100
        assert found | {"MessageExpiryInterval": 100} == said.json()


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_384, 2_097_152, 16 * 1024 * 1024])
def test_paho_binary_bodies_of_any_size(gateway: Running, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with Paho(gateway, "5.0") as client:
        client.subscribe("a", 2)
        assert client.publish("a", body, 2) == 0
        assert client.message().payload == body


def test_paho_hears_that_a_body_is_too_large(gateway: Running) -> None:
    with Paho(gateway, "5.0") as client:
        assert client.publish("a", bytes(16 * 1024 * 1024 + 1), 1) == 0x97
        assert client.publish("a", b"x", 1) == 0x10, "nobody is there"


@pytest.mark.parametrize("version", ["3.1", "3.1.1"])
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("over", [1, 1_000_000])
def test_paho_of_before_5_is_rid_of_a_body_that_is_too_large(
    gateway: Running, version: str, qos: int, over: int
) -> None:
    with Paho(gateway, version) as client:
        assert client.publish("a", bytes(16 * 1024 * 1024 + over), qos) == 0
        assert client.publish("a", b"x", qos) == 0
    assert gateway.ask(lambda: len(gateway.gateway.dead_letters)) == 1
    assert gateway.ask(lambda: gateway.gateway.listeners["mqtt"].stats.accepted) == 1, "it was not cut"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["", "nobody"])
def test_mosquitto_pub_with_a_name_that_is_nobodys(gateway: Running, version: str, name: str) -> None:
    reader = Subscriber(gateway, version, 1, "-u", name, "-P", "secret", "-t", "a", "-F", "%p")
    mosquitto_pub(gateway, version, "-u", name, "-P", "secret", "-t", "a", "-m", "heard")
    assert reader.lines() == ["heard"]


def test_200_levels_and_more_with_mosquitto_pub(gateway: Running) -> None:
    for version in VERSIONS:
        deep = "/".join("a" * 200)
        reader = Subscriber(gateway, version, 1, "-t", deep, "-F", "%p")
        mosquitto_pub(gateway, version, "-q", "1", "-t", f"{deep[:-2]}", "-m", "less")
        mosquitto_pub(gateway, version, "-q", "1", "-t", deep, "-m", "as many")
        assert reader.lines() == ["as many"]


def test_paho_is_told_that_another_took_its_session(gateway: Running) -> None:
    with Paho(gateway, "5.0", "same") as first:
        first.client.on_connect = None
        with Paho(gateway, "5.0", "same"):
            assert first.wait("left").value == 0x8E
            first.client.loop_stop()


async def _aiomqtt(gateway: Running) -> list[tuple[str, bytes, int]]:
    found = []
    async with aiomqtt.Client(LOOPBACK, gateway.mqtt) as client:
        await client.subscribe("a/+", qos=2)
        for number in range(20):
            await client.publish(f"a/{number}", str(number), qos=number % 3)
        async for message in client.messages:
            assert isinstance(message.payload, bytes)
            found.append((str(message.topic), message.payload, message.qos))
            if len(found) == 20:
                return found
    return found


def test_aiomqtt(gateway: Running) -> None:
    found = asyncio.run(asyncio.wait_for(_aiomqtt(gateway), PATIENCE_SECS))
    assert sorted(found) == sorted((f"a/{n}", str(n).encode(), n % 3) for n in range(20))


MQTT_JS = """
const mqtt = require("mqtt");
const [port, version] = [Number(process.argv[1]), Number(process.argv[2])];
const options = {port, protocolVersion: version, protocolId: version === 3 ? "MQIsdp" : "MQTT"};
const client = mqtt.connect("mqtt://127.0.0.1", options);
const heard = [];
client.on("message", (topic, body, packet) => {
  heard.push(`${topic} ${packet.qos} ${body}`);
  if (heard.length === 3) client.end(false, {}, () => console.log(heard.sort().join("\\n")));
});
client.on("error", (error) => { console.error(error); process.exit(1); });
client.on("connect", async () => {
  await client.subscribeAsync("a/#", {qos: 2});
  for (const qos of [0, 1, 2]) await client.publishAsync(`a/${qos}`, `body ${qos}`, {qos});
});
"""


@pytest.mark.parametrize("version", ["3", "4", "5"])
def test_mqtt_js(gateway: Running, version: str) -> None:
    out = node(MQTT_JS, "mqtt", str(gateway.mqtt), version)
    assert out.splitlines() == ["a/0 0 body 0", "a/1 1 body 1", "a/2 2 body 2"]
