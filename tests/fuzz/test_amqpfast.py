"""Random and mutated bytes raise nothing but RemoteProtocolError, and break no state machine.

FUZZ_COUNT says how many inputs (default 50 000), FUZZ_SEED where the random numbers begin.
"""

from __future__ import annotations

import os
import random
from decimal import Decimal

import pytest

from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.codec import (
    Head,
    decode_command,
    decode_frame,
    decode_message_list,
    encode_command,
    encode_head_properties,
)
from gateway.protocols.amqpfast.connection import Connection
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.amqpfast.translate import encode_properties, essentials, fill_defaults, head_properties
from tests.fuzz.mutation import mutated, read
from tests.protocols.amqpfast.heads import decode_head, encode_head
from tests.protocols.amqpfast.wires import Wire, new_client, queue_wire

COUNT = int(os.environ.get("FUZZ_COUNT", "50000"))
pytestmark = pytest.mark.needs("time")  # as many inputs as FUZZ_COUNT says
SEED = int(os.environ.get("FUZZ_SEED", "6"))
TABLE = (
    ("HOPS", Value(ValueType.INT32, 1 << 30)),
    ("GATEWAY_TYPES", string('{"a":"repeated","#_x_2d":"table"}')),
    ("a", string('[["int8",1],["array",[["bytes",{"base64":"AA=="}]]]]')),
    ("#_x_2d", string('[["n",["decimal","1.5"]]]')),
    ("D", Value(ValueType.DECIMAL, Decimal("-1.5"))),
    ("T", Value(ValueType.TIMESTAMP, 5)),
)
HEADS = [Head(), Head(True, 4, 99, "text/plain", "utf-8", "id", TABLE)]
ROOM = 60_000


def with_fragment(command: m.Command, size: int, head: Head | None, chance: random.Random) -> bytes:
    fragment = bytes(size) if head is None else encode_head(size, head) + bytes(size)
    command.fragment_size = len(fragment)  # type: ignore[attr-defined]
    for bit in ("partial", "recovery", "streaming", "out_of_band"):
        if hasattr(command, bit) and not chance.randrange(6):
            setattr(command, bit, True)
    return encode_command(command) + fragment


def seeds(chance: random.Random) -> list[bytes]:
    """Valid commands of every kind, which mutation starts from."""
    found = []
    for kind in m.COMMANDS.values():
        for number in (0, 1, 2):
            fields = {name for _, name in kind.layout}
            numbers = {name: number for name in ("channel_id", "handle_id", "tag") if name in fields}
            if not kind.fragment:
                if not kind.name.endswith("close"):
                    found.append(encode_command(kind(**numbers)))
                continue
            for head in (*HEADS, None):
                for size in (0, 5, 3000):
                    found.append(with_fragment(kind(**numbers), size, head, chance))
    return found


def translate(raw: bytes) -> None:
    found = head_properties(raw)
    try:
        known = essentials(found)
        assert found.properties
        fill_defaults(raw, "a/b", "c")
        encode_properties(Message(fast_address("queue", "q"), b"", found, hops=known.hops + 1))
    except RemoteProtocolError:
        return


def use(event: e.Event, side: Connection, chance: random.Random) -> None:
    """Do with an event what an application does."""
    if isinstance(event, e.Sends):
        for _, _, head, _, _ in event.rows:
            translate(head)
        if chance.randrange(3):
            side.reply_many([row[:2] for row in event.rows])  # type: ignore[attr-defined]
    elif isinstance(event, e.Notifies):
        for row in event.rows:
            translate(row[3])
    elif isinstance(event, e.Prepared):
        if chance.randrange(2):
            side.ready(event.handle, chance.randint(0, event.body_size))
    elif isinstance(event, e.Fragment):
        assert event.size <= side.frame_max or event.bits & 2
    elif isinstance(event, e.CommandReceived) and isinstance(event.command, m.HandleOpen | m.HandleBrowse):
        if chance.randrange(2):
            side.reply(event.command.handle_id, event.command.tag)  # type: ignore[attr-defined]
        else:
            side.close_handle(event.command.handle_id, chance.choice((200, 404)))


def feed(side: Connection, data: bytes, now: float, chance: random.Random) -> None:
    at = 0
    while at < len(data):
        piece = chance.randint(1, len(data))
        for event in side.receive_data(data[at : at + piece], now):
            use(event, side, chance)
        at += piece
        assert side.begun_bytes <= ROOM
    side.data_to_send()
    side.tick(now)
    for handle in side._handles.values():
        assert side._channels[handle.channel.number] is handle.channel
        assert handle.channel.handles[handle.number] is handle
    for channel in side._channels.values():
        assert not set(channel.early_replies) - set(channel.reply_keys)
        assert channel.incoming is None or channel.incoming.handle.number in side._handles


def test_frames_and_commands() -> None:
    chance = random.Random(SEED)
    valid = seeds(chance)
    for number in range(COUNT):
        data = (
            mutated(chance.choice(valid), chance) if number % 4 else chance.randbytes(chance.randint(3, 60))
        )
        try:
            taken = decode_frame(data, 0, 131_072)
        except RemoteProtocolError:
            taken = None
        content = data[2:-1] if taken is None else data[taken[0] : taken[1]]
        if content:
            read(decode_command, content)
        read(decode_head, data[chance.randrange(20) :])
        read(decode_message_list, data)


def test_heads() -> None:
    chance = random.Random(SEED + 3)
    raw = [encode_head_properties(head) for head in HEADS]
    for _ in range(COUNT // 5):
        data = mutated(chance.choice(raw), chance)
        if len(data) >= 11:
            translate(data)


def new_wire() -> Wire:
    return queue_wire(2, channel={"restartable": True, "transacted": True}, frame_max=50_000)


def test_connections() -> None:
    chance = random.Random(SEED + 1)
    valid = seeds(chance)
    wire = new_wire()
    now = 0.0
    for number in range(COUNT // 5):
        side: Connection = wire.server if number % 2 else wire.client
        if side.state.name != "ACTIVE" or 1 not in side.channels:
            wire = new_wire()
            side = wire.server if number % 2 else wire.client
            now = 0.0
        now += chance.random()
        data = b"".join(chance.choices(valid, k=chance.randint(0, 3)))
        feed(side, data + mutated(chance.choice(valid), chance), now, chance)


def test_negotiations() -> None:
    chance = random.Random(SEED + 2)
    for number in range(COUNT // 20):
        wire = Wire(client=new_client())
        for _ in range(chance.randint(0, 3)):
            wire.server.receive_data(wire.client.data_to_send(), 0.0)
            if wire.server.state.name == "AUTHENTICATING":
                wire.server.tune()
            wire.client.receive_data(wire.server.data_to_send(), 0.0)
        said = wire.client.data_to_send() or wire.server.data_to_send()
        feed(wire.server if number % 2 else wire.client, mutated(said or b"\x80\1", chance), 0.0, chance)
