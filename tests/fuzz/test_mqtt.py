"""Random and mutated bytes raise nothing but RemoteProtocolError, in any version and at either end.

`FUZZ_COUNT` sets how many strings (default 50 000); the seed is fixed, so a failure repeats.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.codec import decode
from gateway.protocols.mqtt.connection import Connection, State
from gateway.protocols.mqtt.data_types import decode_topic
from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import Version
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.protocols.mqtt.writers import encode

COUNT = int(os.environ.get("FUZZ_COUNT", "50000"))
pytestmark = pytest.mark.needs("time")  # as many inputs as FUZZ_COUNT says
RECORDED = json.loads((Path(__file__).parent.parent / "protocols" / "mqtt" / "recorded.json").read_text())


def seeds() -> list[tuple[Version, bytes]]:
    """The packets of the recorded conversations, one by one, with their version."""
    found = []
    for row in RECORDED:
        client = bytes.fromhex(row["client"])
        connect = decode(client)
        assert connect is not None
        assert isinstance(connect[0], Connect)
        version = connect[0].version
        for stream in (client, bytes.fromhex(row["server"])):
            at = 0
            while at < len(stream):
                answer = decode(stream, at, version=version)
                assert answer is not None
                found.append((version, stream[at : answer[1]]))
                at = answer[1]
    return found


def mutated(chance: random.Random, packet: bytes) -> bytes:
    """`packet` with a few bytes changed, cut, repeated or put in."""
    data = bytearray(packet)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0 if at < len(data):
                data[at] = chance.randrange(256)
            case 1 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 2:
                del data[at : at + chance.randint(1, 3)]
            case 3:
                data[at:at] = chance.randbytes(chance.randint(1, 3))
            case _:
                data += data[: chance.randint(0, 20)]
    return bytes(data)


def with_length(chance: random.Random, data: bytes) -> bytes:
    """Often the right remaining length, so that what is behind it gets read."""
    if len(data) > 2 and chance.random() < 0.6:
        return data[:1] + bytes((min(len(data) - 2, 127),)) + data[2:]
    return data


def server(version: Version) -> Connection:
    connection = ServerConnection(packet_bytes_max=1 << 16, topic_alias_max=3)
    connection.receive_data(encode(Connect("c", version), version), 0.0)
    connection.send_connack()
    return connection


def client(version: Version) -> Connection:
    connection = ClientConnection(packet_bytes_max=1 << 16)
    connection.connect(Connect("c", version), 0.0)
    connection.receive_data(encode(Connack(), version), 0.0)
    return connection


def fresh(version: Version) -> Connection:
    return ServerConnection(packet_bytes_max=1 << 16)


def feed(connection: Connection, data: bytes, chance: random.Random) -> bool:
    """Whether the connection took `data`, in one or two pieces, without complaint."""
    cut = chance.randint(0, len(data))
    try:
        events = connection.receive_data(data[:cut], 0.0) + connection.receive_data(data[cut:], 0.0)
        for event in events:
            if isinstance(event, Publishes):
                for _, topic, _, properties, _ in event.rows:
                    decode_topic(topic)
                    assert publish_essentials(properties).properties is not None
        if connection.pending:
            connection.receive_data(b"", 0.0)
    except RemoteProtocolError as error:
        if not 0x80 <= error.reason <= 0xA2:
            raise AssertionError(f"reason {error.reason}") from error
        if isinstance(connection, ServerConnection):
            connection.fail(error)
            connection.data_to_send()
        return False
    return True


def test_random_and_mutated_bytes() -> None:
    chance = random.Random(20_05)
    known = seeds()
    ends: list[Callable[[Version], Connection]] = [server, client, fresh]
    lives: dict[tuple[int, Version], Connection] = {}
    taken = 0
    for number in range(COUNT):
        version, packet = chance.choice(known)
        raw = chance.randbytes(chance.randint(1, 40)) if number % 4 == 0 else mutated(chance, packet)
        data = with_length(chance, raw)
        at = chance.randrange(len(ends))
        connection = lives.pop((at, version), None) or ends[at](version)
        took = feed(connection, data, chance)
        taken += took
        if took and connection.state is State.OPEN and not connection._buffer:
            connection.data_to_send()
            lives[at, version] = connection
    assert 0 < taken < COUNT
