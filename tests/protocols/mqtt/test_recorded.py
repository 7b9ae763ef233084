"""What real programs say: conversations of mosquitto_pub, mosquitto_sub and paho-mqtt with Mosquitto 2.0.11.

`recorded.json` holds the bytes of both directions, once recorded through a proxy. They must decode, encode
to the very same bytes again, and drive both machines from beginning to end.
"""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.codec import decode
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.packets import Connack, Connect, Disconnect, Packet
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.protocols.mqtt.writers import encode

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
ROWS = [(row["name"], bytes.fromhex(row["client"]), bytes.fromhex(row["server"])) for row in RECORDED]
IDS = [row[0] for row in ROWS]


def decoded(data: bytes, version: Version) -> list[tuple[Packet, bytes]]:
    found = []
    at = 0
    while at < len(data):
        answer = decode(data, at, version=version)
        assert answer is not None
        packet, stop = answer
        found.append((packet, data[at:stop]))
        at = stop
    return found


def counted(packets: list[tuple[Packet, bytes]]) -> list[int]:
    counts = [0] * 16
    for packet, _ in packets:
        counts[packet.kind] += 1
    return counts


@pytest.mark.parametrize("name, client, server", ROWS, ids=IDS)
def test_the_same_bytes_again(name: str, client: bytes, server: bytes) -> None:
    connect = decode(client)
    assert connect is not None
    assert isinstance(connect[0], Connect)
    version = connect[0].version
    for packet, data in decoded(client, version) + decoded(server, version):
        again = encode(packet, version)
        if again != data:  # a reason or an empty property list that might have been left out
            assert packet.kind >= PacketType.PUBACK
            assert decode(again, version=version) == (packet, len(again))
            assert len(data) - len(again) <= 2


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("name, client, server", ROWS, ids=IDS)
def test_they_drive_the_server(name: str, client: bytes, server: bytes, step: int) -> None:
    connection = ServerConnection(packet_bytes_max=1 << 20, topic_alias_max=10)
    events: list[Any] = []
    for at in range(0, len(client), step):
        events += connection.receive_data(client[at : at + step], 1.0)
        if connection.state is State.CONNECTING:
            connection.send_connack()
            events += connection.receive_data(b"", 1.0)
    assert isinstance(events[0], Connect)
    assert connection.received == counted(decoded(client, connection.version))
    assert connection.state is (State.CLOSED if isinstance(events[-1], Disconnect) else State.OPEN)
    assert not connection.pending


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("name, client, server", ROWS, ids=IDS)
def test_they_drive_the_client(name: str, client: bytes, server: bytes, step: int) -> None:
    connect = decode(client)
    assert connect is not None
    assert isinstance(connect[0], Connect)
    connection = ClientConnection(packet_bytes_max=1 << 20)
    connection.connect(connect[0], 0.0)
    assert connection.data_to_send() == client[: connect[1]]
    events: list[Any] = []
    for at in range(0, len(server), step):
        events += connection.receive_data(server[at : at + step], 1.0)
    assert isinstance(events[0], Connack)
    assert connection.received == counted(decoded(server, connection.version))
    assert connection.state is State.OPEN


def paho_bytes(version: Version, call: Any) -> bytes:
    """What paho-mqtt would write for `call(client)`."""
    client = paho.Client(CallbackAPIVersion.VERSION2, "p", protocol=MQTTProtocolVersion(version))
    said: list[bytes] = []

    def queue(command: int, packet: bytes, mid: int, qos: int, info: Any = None) -> Any:
        said.append(bytes(packet))
        return paho.MQTT_ERR_SUCCESS

    with socket.socket() as unconnected:
        client._sock = unconnected  # it only wants to know that there is one
        client._packet_queue = queue  # type: ignore[method-assign, assignment]
        call(client)
        client._sock = None
    return b"".join(said)


@pytest.mark.parametrize("version", [Version.V31, Version.V311, Version.V5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("size", [0, 1, 100, 128, 16_383, 16_384, 2_097_152])
def test_publish_as_paho_writes_it(version: Version, qos: int, size: int) -> None:
    body = b"x" * size
    properties = None
    raw = b""
    if version is Version.V5:
        properties = PahoProperties(PacketTypes.PUBLISH)
        properties.UserProperty = [("a", "1"), ("a", "2")]
        properties.ContentType = "text/plain"
        raw = encode_list(
            {Property.CONTENT_TYPE: "text/plain", Property.USER_PROPERTY: (("a", "1"), ("a", "2"))},
            PacketType.PUBLISH,
        )

    def call(client: paho.Client) -> None:
        client._send_publish(5, b"a/b", body, qos, True, qos > 0, None, properties)

    theirs = paho_bytes(version, call)
    connection = ServerConnection(packet_bytes_max=1 << 24)
    connection.receive_data(encode(Connect("c", version), version), 0.0)
    connection.send_connack()
    connection.data_to_send()
    assert connection.publish(b"a/b", body, qos, True, qos > 0, 5, raw)
    ours = connection.data_to_send()
    assert sorted(ours) == sorted(theirs)  # paho may order properties otherwise
    events = connection.receive_data(theirs, 0.0)
    if version is not Version.V5:
        assert ours == theirs
    assert isinstance(events[0], Publishes)
    flags, topic, number, _, found = events[0].rows[0]
    assert (flags, topic, number) == (8 * (qos > 0) | qos << 1 | 1, b"a/b", 5 if qos else 0)
    assert found == body


def test_acknowledgements_as_paho_writes_them() -> None:
    def call(client: paho.Client) -> None:
        for number in (1, 258, 65_535):
            client._send_puback(number)

    theirs = paho_bytes(Version.V311, call)
    connection = ServerConnection(packet_bytes_max=1 << 20)
    connection.receive_data(encode(Connect("c", Version.V311), Version.V311), 0.0)
    connection.send_connack()
    connection.data_to_send()
    connection.acknowledge(PacketType.PUBACK, [1, 258, 65_535])
    assert connection.data_to_send() == theirs
    assert connection.receive_data(theirs, 0.0) == [Acks(PacketType.PUBACK, [(1, 0), (258, 0), (65_535, 0)])]
