"""Random and mutated bytes raise nothing but RemoteProtocolError, and break no state machine.

FUZZ_COUNT says how many inputs (default 50 000), FUZZ_SEED where the random numbers begin.
"""

from __future__ import annotations

import os
import random

import pytest

from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.properties import Value, ValueType, string
from gateway.model.spooled_bodies import join_pieces
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_address,
    decode_frame,
    decode_method,
    decode_publish,
    encode_basic_properties,
    encode_content_frames,
    encode_method_frame,
)
from gateway.protocols.amqp091.connection import Connection
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.translate import content_properties, encode_properties, essentials
from tests.fuzz.mutation import mutated, read
from tests.protocols.amqp091.wires import Wire, new_client, open_wire

COUNT = int(os.environ.get("FUZZ_COUNT", "50000"))
pytestmark = pytest.mark.needs("time")  # as many inputs as FUZZ_COUNT says
SEED = int(os.environ.get("FUZZ_SEED", "91"))
TABLE = (
    ("x-gateway-hops", Value(ValueType.INT64, 1 << 60)),
    ("a", Value(ValueType.ARRAY, (string("x"), Value(ValueType.INT8, 1)))),
    ("t", Value(ValueType.TABLE, ())),
)
RAW = encode_basic_properties(
    BasicProperties("a/b", headers=TABLE, delivery_mode=2, expiration="60", type="t")
)
HELD = 1_000
CONTENT = [
    m.BasicPublish("ex", "key", mandatory=True),
    m.BasicDeliver("tag", 1, False, "ex", "key"),
    m.BasicGetOk(1, False, "ex", "key", 1),
    m.BasicReturn(312, "no", "ex", "key"),
]


def seeds() -> list[bytes]:
    """Valid frames of every kind, which mutation starts from."""
    found = [
        encode_method_frame(channel, kind())
        for kind in m.METHODS.values()
        for channel in (0, 1)
        if not kind.content and "close" not in kind.name
    ]
    found.append(encode_method_frame(1, m.QueueDeclare("q", arguments=TABLE)))
    for method in CONTENT:
        for size in (0, 5, 5000):
            found.append(
                encode_method_frame(1, method) + join_pieces(encode_content_frames(1, RAW, bytes(size), 4096))
            )
    return found


def use(event: e.Event) -> None:
    """Do with an event what an application does."""
    if isinstance(event, e.Publishes | e.LargePublish):
        for _, method, raw, body in event.contents if isinstance(event, e.Publishes) else [event.content]:
            read(decode_publish, method)
            translate(raw, body)
    elif isinstance(event, e.Deliveries):
        for *_, address, raw, body in event.contents:
            read(decode_address, address)
            translate(raw, body)


def translate(raw: bytes, body: bytes) -> None:
    found = content_properties(raw)
    try:
        known = essentials(found)
        assert found.properties
        encode_properties(Message(amqp_address("", "q"), body, found, hops=known.hops + 1), 0.0)
    except RemoteProtocolError:
        return


def feed(side: Connection, data: bytes, chance: random.Random) -> None:
    at = 0
    while at < len(data):
        piece = chance.randint(1, len(data))
        for event in side.receive_data(data[at : at + piece], 0.0):
            use(event)
        at += piece
    side.data_to_send()
    assert side._partial >= 0
    if not side.channels:
        assert side._partial == 0


def test_frames_and_methods() -> None:
    chance = random.Random(SEED)
    valid = seeds()
    for number in range(COUNT):
        data = (
            mutated(chance.choice(valid), chance) if number % 4 else chance.randbytes(chance.randint(0, 60))
        )
        try:
            taken = decode_frame(data, 0, 131_072)
        except RemoteProtocolError:
            taken = None
        read(decode_method, data[7:-1] if taken is None else taken[2])
        translate(data[chance.randrange(20) :], b"")


class Sink:
    """Takes a body of so many bytes, no more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data
        assert len(self.data) <= self.size

    def finish(self) -> bytes:
        assert len(self.data) == self.size
        return self.data


def sinking() -> Wire:
    """A connection whose server does not hold the larger bodies."""
    return open_wire(2, held_bytes_max=HELD, sink=Sink)


def test_connections() -> None:
    chance = random.Random(SEED + 1)
    valid = seeds()
    wire = sinking()
    for number in range(COUNT // 5):
        side: Connection = wire.server if number % 2 else wire.client
        if side.closed or 1 not in side.channels:
            wire = sinking()
            side = wire.server if number % 2 else wire.client
        data = b"".join(chance.choices(valid[-12:], k=chance.randint(0, 2)))
        feed(side, data + mutated(chance.choice(valid), chance), chance)


def test_handshakes() -> None:
    chance = random.Random(SEED + 2)
    for number in range(COUNT // 20):
        wire = Wire(client=new_client())
        for _ in range(chance.randint(0, 3)):
            wire.server.receive_data(wire.client.data_to_send(), 0.0)
            if wire.server._state.name == "AUTHENTICATING":
                wire.server.authenticated()
            wire.client.receive_data(wire.server.data_to_send(), 0.0)
        said = wire.client.data_to_send() or wire.server.data_to_send()
        feed(wire.server if number % 2 else wire.client, mutated(said or b"AMQP", chance), chance)
