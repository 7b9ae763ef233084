"""A message of the fourth protocol crosses to MQTT and back, by a mapping file; the client is not ours."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pytest
import stomp
from paho.mqtt.enums import CallbackAPIVersion

from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import ROOT, GatewayProcess
from tests.interop.pahos import leave
from tests.interop.servers import free_ports

PATIENCE_SECS: Final = 20.0
MAPPING: Final = """
version: 1
routes:
  - name: up
    from: {endpoint: stomp, stomp_destination: "plant/{rest...}"}
    to: {endpoint: mqtt, topic: "plant/{rest...}", qos: 1}
  - name: down
    from: {endpoint: mqtt, topic: "command/{rest...}"}
    to: {endpoint: stomp, stomp_destination: "command/{rest...}"}
tests:
  - name: a destination is a topic
    publish: {endpoint: stomp, stomp_destination: plant/v1.2/t, body: "21"}
    expect: [{endpoint: mqtt, topic: plant/v1.2/t, qos: 1}]
"""


class Heard(stomp.ConnectionListener):
    """What a STOMP client is sent."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()
        self.receipts: queue.Queue[Any] = queue.Queue()
        self.errors: queue.Queue[Any] = queue.Queue()

        self.gone = threading.Event()

    def on_disconnected(self) -> None:
        self.gone.set()

    def on_message(self, frame: Any) -> None:
        self.messages.put(frame)

    def on_receipt(self, frame: Any) -> None:
        self.receipts.put(frame.headers["receipt-id"])

    def on_error(self, frame: Any) -> None:
        self.errors.put(frame.headers["message"])


def serving(folder: Path) -> GatewayProcess:
    (folder / "mapping.yaml").write_text(MAPPING)
    one = GatewayProcess(folder, mappings=[str(folder / "mapping.yaml")])
    (port,) = free_ports(1)
    one.configuration["listeners"]["stomp"] = {"protocol": "stomp", "host": LOOPBACK, "port": port}
    one.python_path = (ROOT / "tests/stomp/plugin", ROOT)
    return one


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with serving(tmp_path_factory.mktemp("stomp")) as one:
        yield one


@pytest.fixture
def client(gateway: GatewayProcess) -> Iterator[tuple[Any, Heard]]:
    yield from connected(gateway)


def connected(gateway: GatewayProcess) -> Iterator[tuple[Any, Heard]]:
    connection = stomp.Connection12([(LOOPBACK, gateway.port("stomp"))], heartbeats=(0, 0))
    heard = Heard()
    connection.set_listener("", heard)
    connection.connect(wait=True)
    yield connection, heard
    if connection.is_connected():
        connection.disconnect()


@pytest.fixture
def device(gateway: GatewayProcess) -> Iterator[tuple[paho.Client, queue.Queue[Any]]]:
    found: queue.Queue[Any] = queue.Queue()
    one = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    one.on_message = lambda client, data, message: found.put(message)
    subscribed: queue.Queue[Any] = queue.Queue()
    one.on_subscribe = lambda *given: subscribed.put(given)
    one.connect(LOOPBACK, gateway.port("mqtt"))
    one.loop_start()
    one.subscribe("plant/#", 1)
    subscribed.get(timeout=PATIENCE_SECS)
    yield one, found
    leave(one)


def test_a_message_crosses_to_mqtt_and_is_confirmed(client: Any, device: Any) -> None:
    connection, heard = client
    _, found = device
    connection.send("plant/v1.2/t", "21.5", content_type="text/plain", receipt="r-1", unit="°C: hot")
    message = found.get(timeout=PATIENCE_SECS)
    assert (message.topic, message.payload, message.qos) == ("plant/v1.2/t", b"21.5", 1)
    assert message.properties.ContentType == "text/plain"
    assert ("unit", "°C: hot") in message.properties.UserProperty
    assert heard.receipts.get(timeout=PATIENCE_SECS) == "r-1"


def test_a_message_comes_back_from_mqtt_and_is_acknowledged(client: Any, device: Any) -> None:
    connection, heard = client
    publisher, _ = device
    connection.subscribe("command/press/1", id="7", ack="client-individual", headers={"receipt": "s"})
    assert heard.receipts.get(timeout=PATIENCE_SECS) == "s"
    publisher.publish("command/press/1", b"stop", 1).wait_for_publish(PATIENCE_SECS)
    first = heard.messages.get(timeout=PATIENCE_SECS)
    assert (first.headers["destination"], first.body) == ("command/press/1", "stop")
    connection.nack(first.headers["ack"])
    again = heard.messages.get(timeout=PATIENCE_SECS)
    assert again.headers["message-id"] == first.headers["message-id"]
    connection.ack(again.headers["ack"], receipt="a")
    assert heard.receipts.get(timeout=PATIENCE_SECS) == "a"


def test_two_clients_meet_at_a_destination_that_no_route_names(client: Any) -> None:
    connection, heard = client
    connection.subscribe("home/x", id="1", headers={"receipt": "s"})
    assert heard.receipts.get(timeout=PATIENCE_SECS) == "s"
    connection.send("home/x", "hello")
    assert heard.messages.get(timeout=PATIENCE_SECS).body == "hello"


def test_a_client_that_breaks_the_protocol_is_told_so_and_costs_itself(
    gateway: GatewayProcess, client: Any
) -> None:
    with socket.create_connection((LOOPBACK, gateway.port("stomp"))) as stranger:
        stranger.sendall(b"SEND\ndestination:a\n\n\0")
        answer = b""
        while piece := stranger.recv(4_096):
            answer += piece
    assert answer.startswith(b"ERROR\n")
    connection, heard = client
    connection.send("home/y", "x", receipt="still here")
    assert heard.receipts.get(timeout=PATIENCE_SECS) == "still here"


def test_a_client_goes_when_other_rules_are_in_force(tmp_path: Path) -> None:
    """What it holds nobody knows: it comes back by the rules that are in force then."""
    with serving(tmp_path) as gateway:
        before = connected(gateway)
        _, heard = next(before)
        file = tmp_path / "gateway.yaml"
        file.write_text(file.read_text() + "roles: {reader: {mqtt: {subscribe: a}}}\n")
        assert heard.errors.get(timeout=PATIENCE_SECS) == "the access rules changed"
        assert heard.gone.wait(PATIENCE_SECS)
        after = connected(gateway)
        connection, heard = next(after)
        connection.send("home/y", "x", receipt="again")
        assert heard.receipts.get(timeout=PATIENCE_SECS) == "again"
        before.close()
        after.close()


def test_what_it_does_not_have_is_said(gateway: GatewayProcess, tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("links: {far: {url: 'stomp://broker'}}")
    said = gateway.command("check", "--config", str(tmp_path / "gateway.yaml"))
    assert "the gateway has no links to STOMP brokers" in said
    said = gateway.command("publish", "stomp://broker", "--topic", "a", "-m", "x")
    assert "STOMP needs --stomp-destination" in said


def test_nothing_of_the_gateway_knows_it() -> None:
    """It was registered by an entry point alone."""
    words = ("stomp", "STOMP")
    assert [
        str(path)
        for path in (ROOT / "gateway").rglob("*.py")
        if any(word in path.read_text(encoding="utf-8") for word in words)
    ] == []
