"""A client and a server wired together in memory, and strategies for whatever goes over the wire."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from gateway.model.properties import Value, ValueType
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast import events as e
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import Head, encode_credentials, encode_head_properties
from gateway.protocols.amqpfast.server import ServerConnection
from tests.protocols.wiring import Wiring

GUEST = encode_credentials("guest", "guest")
HEAD = encode_head_properties(Head())
NAMED = encode_head_properties(Head(True, 4, identifier="id1"))


def new_client(**options: Any) -> ClientConnection:
    return ClientConnection(**{"mechanism": "PLAIN", "responses": GUEST, **options})


class Wire(Wiring[ServerConnection, ClientConnection, e.Event]):
    """A server that lets everybody in, and a client."""

    def __init__(
        self, server: ServerConnection | None = None, client: ClientConnection | None = None
    ) -> None:
        super().__init__(server or ServerConnection(), client or new_client())
        self.replies = True  # whether the server replies to commands by itself

    def _answer(self, event: e.Event) -> bool:
        server = self.server
        if isinstance(event, e.Authenticate):
            server.tune()
        elif isinstance(event, e.Open):
            server.opened()
        elif self.replies and isinstance(event, e.CommandReceived):
            command = event.command
            if isinstance(command, m.ChannelCommand):
                server.reply_channel(command.channel_id, getattr(command, "tag", 0))
            elif isinstance(command, m.HandleCommand) and command.direction == m.TO_SERVER:
                server.reply(command.handle_id, getattr(command, "tag", 0))
        return isinstance(event, e.Authenticate | e.Open)


def open_wire(**options: Any) -> Wire:
    """A connection that is open, without channels."""
    both = {
        name: options[name] for name in ("message_bytes_max", "heartbeat", "frame_max") if name in options
    }
    wire = Wire(ServerConnection(**options), new_client(**both))
    wire.move()
    wire.take()
    return wire


def queue_wire(count: int = 1, *, service: int = 1, channel: Any = None, **options: Any) -> Wire:
    """A connection with channel 1 and on it handles 1, 2, ..., with every right that the service knows."""
    wire = open_wire(**options)
    wire.client.open_channel(**(channel or {}))
    rights = service != 3
    for _ in range(count):
        wire.client.open_handle(
            m.HandleOpen(1, 0, service, 0, True, rights, rights, dest_name="q", mime_type="a/b")
        )
    wire.move()
    wire.take()
    assert wire.server.handles == wire.client.handles == list(range(1, count + 1))
    return wire


def bytes_apart(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


no_zero = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
short_texts = st.text(no_zero, max_size=40)
names = st.from_regex(r"\A[A-Za-z$#][A-Za-z0-9_$#]{0,20}\Z")
decimals = st.builds(
    lambda number, places: Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -places)),
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(0, 255),
)
NATIVE: dict[ValueType, st.SearchStrategy[Any]] = {
    ValueType.STRING: st.text(max_size=20) | st.just(b"\xff\xfe"),
    ValueType.INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    ValueType.DECIMAL: decimals,
    ValueType.TIMESTAMP: st.integers(0, (1 << 32) - 1),
}
native_values = st.one_of([st.builds(Value, st.just(kind), content) for kind, content in NATIVE.items()])
tables = st.lists(st.tuples(names, native_values), max_size=5, unique_by=lambda pair: pair[0]).map(tuple)
RANGES = {
    ValueType.INT8: (-(1 << 7), (1 << 7) - 1),
    ValueType.UINT8: (0, (1 << 8) - 1),
    ValueType.INT16: (-(1 << 15), (1 << 15) - 1),
    ValueType.UINT16: (0, (1 << 16) - 1),
    ValueType.UINT32: (0, (1 << 32) - 1),
    ValueType.INT64: (-(1 << 63), (1 << 63) - 1),
    ValueType.TIMESTAMP: (0, (1 << 64) - 1),
}
SCALARS = {
    **NATIVE,
    ValueType.VOID: st.none(),
    ValueType.BOOL: st.booleans(),
    ValueType.FLOAT: st.floats(width=32, allow_nan=False),
    ValueType.DOUBLE: st.floats(allow_nan=False),
    ValueType.BYTES: st.binary(max_size=20),
    **{kind: st.integers(*limits) for kind, limits in RANGES.items()},
}
scalars = st.one_of([st.builds(Value, st.just(kind), content) for kind, content in SCALARS.items()])


def _nested(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    arrays = st.lists(inner, max_size=4).map(tuple)
    found = st.lists(st.tuples(st.text(max_size=20), inner), max_size=4).map(tuple)
    return st.builds(Value, st.just(ValueType.ARRAY), arrays) | st.builds(
        Value, st.just(ValueType.TABLE), found
    )


values = st.recursive(scalars, _nested, max_leaves=8)
headers = st.lists(st.tuples(st.text(max_size=20), values), max_size=5).map(tuple)
DOMAINS: dict[str, st.SearchStrategy[Any]] = {
    "o": st.integers(0, 0xFF),
    "s": st.integers(0, 0xFFFF),
    "l": st.integers(0, 0xFFFF_FFFF),
    "ss": short_texts,
    "sb": st.binary(max_size=40),
    "ls": st.binary(max_size=80),
    "T": tables,
    "b": st.booleans(),
}


def commands_of(kind: type[m.Command]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: DOMAINS[domain] for domain, name in kind.layout})


all_commands = st.sampled_from(sorted(m.COMMANDS)).flatmap(lambda kind: commands_of(m.COMMANDS[kind]))
all_heads = st.builds(
    Head,
    st.booleans(),
    st.integers(0, 255),
    st.integers(0, (1 << 32) - 1),
    short_texts,
    short_texts,
    short_texts,
    tables,
)
