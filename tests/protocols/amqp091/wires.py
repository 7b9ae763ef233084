"""A client and a server wired together in memory, and strategies for whatever goes over the wire."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import strategies as st

from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import events as e
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import BasicProperties, encode_response
from gateway.protocols.amqp091.connection import Connection
from gateway.protocols.amqp091.methods import METHODS, Method
from gateway.protocols.amqp091.server import ServerConnection
from gateway.protocols.amqp091.spec import FIXED_FIELDS, PROPERTIES
from tests.protocols.wiring import Wiring

GUEST = encode_response("PLAIN", "guest", "guest")


def new_client(**options: Any) -> ClientConnection:
    return ClientConnection(**{"mechanism": "PLAIN", "response": GUEST, **options})


class Wire(Wiring[ServerConnection, ClientConnection, e.Event]):
    """A server that lets everybody in, and a client."""

    def __init__(
        self, server: ServerConnection | None = None, client: ClientConnection | None = None
    ) -> None:
        super().__init__(server or ServerConnection(), client or new_client())

    def _answer(self, event: e.Event) -> bool:
        if isinstance(event, e.Authenticate | e.SecureResponse):
            self.server.authenticated()
        elif isinstance(event, e.Open):
            self.server.opened()
        return False


def open_wire(channels: int = 1, **options: Any) -> Wire:
    """A connection that is open, with channels 1, 2, ..."""
    both = {name: options[name] for name in ("message_bytes_max", "heartbeat") if name in options}
    wire = Wire(ServerConnection(**options), new_client(**both))
    wire.move()
    for _ in range(channels):
        wire.client.open_channel()
    wire.move()
    assert wire.server.channels == wire.client.channels == list(range(1, channels + 1))
    wire.take()
    return wire


def heard(side: Connection, data: bytes) -> list[e.Event]:
    """All that the bytes say, in as many calls as it takes."""
    events = side.receive_data(data, 0)
    while side.unread:
        events += side.receive_data(b"", 0)
    return events


def bytes_apart(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


short_texts = st.text(max_size=40)
ascii_names = st.text("abcdefghijklmnopqrstuvwxyz0123456789_.", max_size=40)
RANGES = {
    ValueType.INT8: (-(1 << 7), (1 << 7) - 1),
    ValueType.UINT8: (0, (1 << 8) - 1),
    ValueType.INT16: (-(1 << 15), (1 << 15) - 1),
    ValueType.UINT16: (0, (1 << 16) - 1),
    ValueType.INT32: (-(1 << 31), (1 << 31) - 1),
    ValueType.UINT32: (0, (1 << 32) - 1),
    ValueType.INT64: (-(1 << 63), (1 << 63) - 1),
    ValueType.TIMESTAMP: (0, (1 << 64) - 1),
}
decimals = st.builds(
    lambda number, scale: Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale)),
    st.integers(-(1 << 31), (1 << 31) - 1),
    st.integers(0, 255),
)
SCALARS: dict[ValueType, st.SearchStrategy[Any]] = {
    ValueType.VOID: st.none(),
    ValueType.BOOL: st.booleans(),
    ValueType.FLOAT: st.floats(width=32, allow_nan=False),
    ValueType.DOUBLE: st.floats(allow_nan=False),
    ValueType.DECIMAL: decimals,
    ValueType.STRING: st.text(max_size=20) | st.just(b"\xff\xfe"),
    ValueType.BYTES: st.binary(max_size=20),
    **{kind: st.integers(*limits) for kind, limits in RANGES.items()},
}
scalars = st.one_of([st.builds(Value, st.just(kind), values) for kind, values in SCALARS.items()])


def _nested(inner: st.SearchStrategy[Value]) -> st.SearchStrategy[Value]:
    arrays = st.lists(inner, max_size=4).map(tuple)
    tables = st.lists(st.tuples(short_texts, inner), max_size=4).map(tuple)
    return st.builds(Value, st.just(ValueType.ARRAY), arrays) | st.builds(
        Value, st.just(ValueType.TABLE), tables
    )


values = st.recursive(scalars, _nested, max_leaves=8)
headers = st.lists(st.tuples(short_texts, values), max_size=5).map(tuple)
DOMAINS: dict[str, st.SearchStrategy[Any]] = {
    "o": st.integers(0, 0xFF),
    "s": st.integers(0, 0xFFFF),
    "l": st.integers(0, 0xFFFF_FFFF),
    "ll": st.integers(0, (1 << 64) - 1),
    "ss": short_texts,
    "sb": st.binary(max_size=40),
    "ls": st.binary(max_size=80),
    "T": headers,
    "b": st.booleans(),
}


def methods_of(
    kind: type[Method], domains: dict[str, st.SearchStrategy[Any]] = DOMAINS
) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{name: domains[domain] for domain, name in kind.layout if name})


all_methods = st.sampled_from(sorted(METHODS)).flatmap(lambda index: methods_of(METHODS[index]))
all_properties = st.builds(
    BasicProperties, **{name: st.none() | DOMAINS[domain] for name, domain, _ in PROPERTIES}
)
assert {kind for _, kind, _ in FIXED_FIELDS} <= set(SCALARS)
