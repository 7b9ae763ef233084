"""Messages and properties as bytes: round trips of every field, damage, and what is shared."""

from __future__ import annotations

from decimal import Decimal
from itertools import chain
from math import isnan
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import StoreError
from gateway.model.address import Address
from gateway.model.message import NOBODY, Message, Sender
from gateway.model.properties import (
    NO_PROPERTIES,
    Properties,
    PropertySet,
    Value,
    ValueType,
    property_set,
    string,
)
from gateway.model.spooled_bodies import OpenBody, Spooled
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.translate import content_properties
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.translate import publish_essentials
from gateway.store.messages import MESSAGES_MAX, MessageReader, encode_message, encode_messages
from gateway.store.properties import decode_properties, encode_properties, encode_texts

V = ValueType

EVERY_TYPE: Final = (
    Value(V.VOID, None),
    Value(V.BOOL, True),
    Value(V.INT8, -128),
    Value(V.UINT8, 255),
    Value(V.INT16, -32_768),
    Value(V.UINT16, 65_535),
    Value(V.INT32, -(2**31)),
    Value(V.UINT32, 2**32 - 1),
    Value(V.INT64, -(2**63)),
    Value(V.FLOAT, 0.5),
    Value(V.FLOAT, 3.0),
    Value(V.DOUBLE, 1e300),
    Value(V.DOUBLE, float("inf")),
    Value(V.DOUBLE, float("-inf")),
    Value(V.DECIMAL, Decimal("-12.340")),
    string("text \u00e9 \ud800 \0"),
    Value(V.STRING, b"\xff\x00"),
    Value(V.BYTES, b"\x00\xff"),
    Value(V.TIMESTAMP, 2**40),
    Value(
        V.ARRAY, (string("a"), Value(V.INT8, 1), Value(V.ARRAY, ()), Value(V.TABLE, (("n", string("v")),)))
    ),
    Value(V.TABLE, (("n", Value(V.BYTES, b"\xff")), ("n", string("again")), ("t", Value(V.TABLE, ())))),
)

PROPERTIES: Final = (
    Properties(),
    Properties(content_type="", utf8=False, correlation=b""),
    Properties(
        "a/b", "gzip", True, b"\x00\xff", "reply/to", 9, 2**40, "id", "type", "app", "user",
        (("one", string("1")), ("two", Value(V.BOOL, False)), ("one", string("again"))),
    ),
    *(Properties(headers=(("h", value),)) for value in EVERY_TYPE),
)  # fmt: skip


def test_every_type_of_a_value_has_a_row() -> None:
    assert {value.type for value in EVERY_TYPE} == set(ValueType)


@pytest.mark.parametrize("properties", PROPERTIES, ids=repr)
def test_properties_survive(properties: Properties) -> None:
    data = encode_properties(properties)
    data.decode("ascii")
    again = decode_properties(data)
    assert again == properties
    assert [value.type for _, value in again.headers] == [value.type for _, value in properties.headers]


def test_a_number_that_is_none_survives() -> None:
    data = encode_properties(Properties(headers=(("h", Value(V.DOUBLE, float("nan"))),)))
    assert isnan(decode_properties(data).headers[0][1].value)


ADDRESSES: Final[tuple[Address, ...]] = (
    topic_address("a/b"),
    topic_address("/"),
    topic_address("\u00e9/\U0001f600"),
    amqp_address("", "queue"),
    amqp_address("amq.topic", ""),
    amqp_address("x" * 255, "\u00e9" * 127),
    fast_address("queue", "a.b"),
    fast_address("topic", "with:colon"),
)
SETS: Final = (
    NO_PROPERTIES,
    property_set(Properties(content_type="x", headers=(("a", string("b")),))),
    publish_essentials(b""),
    publish_essentials(b"\x01\x01"),
    publish_essentials(b"\x03\x00\x01x" + b"\x26\x00\x01a\x00\x01b" * 500),
    content_properties(b"\x00\x00"),
    content_properties(b"\x90\x00\x01x\x02"),
)
SENDERS: Final = (NOBODY, Sender("mqtt", "c1", "user", "10.0.0.1:1"), Sender("m", "\u00e9\0", "", "\ud800"))

some_messages = st.builds(
    Message,
    st.sampled_from(ADDRESSES),
    st.one_of(st.binary(max_size=8), st.just(b"x" * 1000)),
    st.sampled_from(SETS),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.one_of(st.just(0.0), st.floats(1.0, 1e12)),
    st.one_of(st.just(0), st.integers(0, 1_000_000)),
    st.sampled_from(SENDERS),
)


def facts(message: Message) -> tuple[object, ...]:
    names = ("address", "body", "assurance", "durable", "retain", "expires", "hops", "sender")
    one = message.property_set
    return one.protocol, one.raw, one.properties, *(getattr(message, name) for name in names)


@given(st.lists(some_messages, min_size=1, max_size=30))
def test_messages_survive(run: list[Message]) -> None:
    offsets, again = MessageReader().decode(encode_messages(run))
    assert list(offsets) == list(range(len(run)))
    assert list(map(facts, again)) == list(map(facts, run))


@given(some_messages)
def test_one_message_survives(message: Message) -> None:
    assert facts(MessageReader().decode_one(encode_message(message))) == facts(message)


@pytest.mark.parametrize(
    "offsets", [[0], [5], [0, 2], [1, 2, 3], [0, 65_535], list(range(1000)), list(range(0, 1000, 2))]
)
def test_offsets_survive(offsets: list[int]) -> None:
    run = [Message(ADDRESSES[0], b"%d" % at) for at in offsets]
    again, found = MessageReader().decode(encode_messages(run, offsets))
    assert list(again) == offsets
    assert [message.body for message in found] == [message.body for message in run]


@pytest.mark.needs("time")
def test_the_longest_run() -> None:
    run = [Message(topic_address(str(at)), b"") for at in range(MESSAGES_MAX)]
    _, found = MessageReader().decode(encode_messages(run))
    assert [message.address for message in found] == [message.address for message in run]


def test_equal_bytes_are_one_object() -> None:
    reader = MessageReader()
    data = [
        encode_message(
            Message(topic_address("a"), b"", PropertySet("mqtt", b"\x01\x01"), sender=Sender("m", "c"))
        )
        for _ in range(2)
    ]
    one, other = map(reader.decode_one, data)
    assert one.address is other.address
    assert one.property_set is other.property_set
    assert one.property_set is publish_essentials(b"\x01\x01")
    assert one.sender is other.sender
    assert reader.decode_one(encode_message(Message(topic_address("a"), b""))).property_set is NO_PROPERTIES


def test_an_byte_changed_anywhere_is_damage() -> None:
    data = encode_messages([Message(one, b"body", SETS[1]) for one in ADDRESSES[:3]])
    reader = MessageReader()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(StoreError, match="checksum"):
            reader.decode(bytes(damaged))


def test_bytes_cut_short_are_damage() -> None:
    data = encode_message(Message(ADDRESSES[0], b"body"))
    for length in range(len(data)):
        with pytest.raises(StoreError):
            MessageReader().decode(data[:length])


def test_a_form_of_a_newer_gateway_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("gateway.store.messages.VERSION", 3)
        data = encode_message(Message(ADDRESSES[0], b""))
    with pytest.raises(StoreError, match="have format 3, but this gateway reads 1 and 2"):
        MessageReader().decode(data)


def test_a_protocol_that_nobody_reads_is_an_error() -> None:
    data = encode_message(Message(ADDRESSES[0], b"", PropertySet("spoken-once", b"\x01")))
    with pytest.raises(StoreError, match="spoken-once"):
        MessageReader().decode(data)


def test_a_body_in_a_file_is_stored_by_its_name() -> None:
    file = NamedFile("f.body")
    message = Message(ADDRESSES[0], Spooled(file, 5_000_000_000), durable=True)
    data = encode_message(message)
    assert len(data) < 200
    reader = MessageReader()
    with pytest.raises(StoreError, match=r"f\.body"):
        reader.decode_one(data)
    reader.make_body = lambda name, size: Spooled(NamedFile(name), size)
    found = reader.decode_one(data)
    assert found.body == message.body
    assert len(found.body) == 5_000_000_000
    assert found.durable


class NamedFile:
    """A file that is never read."""

    checked = b""

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, at: int, count: int) -> bytes:
        raise AssertionError

    def open_file(self) -> OpenBody:
        raise AssertionError

    def preserve(self) -> None:
        raise AssertionError


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=6))
@example([])
@example([("a", "it's plain ~ {}[]:,")])
@example([("a", 'quo"te'), ("", "")])
@example([("a", "back\\slash")])
@example([("a", "\x7f")])
def test_texts_are_written_as_their_meaning_is(pairs: list[tuple[str, str]]) -> None:
    headers = tuple((name, string(value)) for name, value in pairs)

    def read(raw: bytes, before: bytes, between: bytes, bare: bool) -> list[bytes]:
        assert bare
        return [one for name, value in pairs for one in (before, name.encode(), between, value.encode())]

    straight = encode_texts(read, b"")
    letters = "".join(chain.from_iterable(pairs))
    if pairs and all(" " <= one <= "~" and one not in '"\\' for one in letters):
        assert straight == encode_properties(Properties(headers=headers))
    else:
        assert straight is None
