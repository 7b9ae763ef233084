"""Properties and addresses are kept as the bytes that came: their columns say what they would have said had
the gateway written them as texts at once, whatever it was, and however the block has them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import Headers, Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols import DIALECTS
from gateway.protocols.amqp091 import translate as amqp091_translate
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast import translate as amqpfast_translate
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt import translate as mqtt_translate
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal import wires
from gateway.store.journal.column_buffers import RowLabels, SettledMessages
from gateway.store.journal.columns import SET
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.format import DamageError
from gateway.store.journal.reader import Block, JournalReader, Row
from gateway.store.journal.wires import (
    APART_FROM,
    PROPERTIES_BYTES_MAX,
    ROWS_APART,
    framed,
    id_dictionary,
    recorded_texts,
    set_dictionaries,
    words_of,
)
from tests.store.journal.samples import HOME, bytes_of, gathered

HEADERS: Final[dict[str, Headers]] = {
    "none": (),
    "a text": (("a", string("1")),),
    "texts": tuple((f"property-{at}", string(f"its value {at}")) for at in range(5)),
    "empty texts": (("", string("")), ("b", string(""))),
    "a name twice": (("a", string("1")), ("a", string("2"))),
    "a name twice with another between": (("a", string("1")), ("b", string("2")), ("a", string("3"))),
    "letters to escape": (("a", string('"\\\n\x01\x7f')), ("ü", string("ä€\U0001f600"))),
    "bytes that are no text": (
        ("a", Value(ValueType.STRING, b"\xff\x00")),
        ("b", Value(ValueType.BYTES, b"\xfe")),
    ),
    "long": (("n" * 255, string("v" * 300)), ("m" * 256, string("x"))),
    "numbers": tuple(
        (kind.value, Value(kind, number))
        for kind, number in (
            (ValueType.INT8, -(2**7)),
            (ValueType.UINT8, 2**8 - 1),
            (ValueType.INT16, -(2**15)),
            (ValueType.UINT16, 2**16 - 1),
            (ValueType.INT32, -(2**31)),
            (ValueType.UINT32, 2**32 - 1),
            (ValueType.INT64, -(2**63)),
            (ValueType.TIMESTAMP, 2**63),
            (ValueType.FLOAT, 0.5),
            (ValueType.DOUBLE, float("-inf")),
            (ValueType.DECIMAL, Decimal("1.50")),
        )
    ),
    "others": (
        ("void", Value(ValueType.VOID, None)),
        ("bool", Value(ValueType.BOOL, True)),
        ("array", Value(ValueType.ARRAY, (string("1"), Value(ValueType.INT32, 2)))),
        ("table", Value(ValueType.TABLE, (("in", Value(ValueType.ARRAY, (Value(ValueType.BOOL, True),))),))),
    ),
}
SAID: Final = {name: Properties(headers=headers) for name, headers in HEADERS.items()} | {
    "fields": Properties(
        content_type="text/plain",
        content_encoding="gzip",
        utf8=True,
        correlation=b"\x00\xff",
        reply_to="replies/ä",
        priority=9,
        timestamp=1_700_000_000,
        message_id="id-1",
        type="t",
        app_id="a",
        user_id="u",
        headers=HEADERS["a text"],
    ),
    "an empty message id": Properties(message_id=""),
    "a message id of other letters": Properties(message_id="ü\U0001f600"),
    "more JSON than is written, of fewer bytes": Properties(headers=(("a", string("\x01" * 30_000)),)),
    "more than is written": Properties(
        message_id="kept", headers=tuple((f"n{at}", string("x" * 30_000)) for at in range(3))
    ),
}


def wire_of(protocol: str, said: Properties) -> bytes:
    """What a protocol writes of them; of a set that crosses for the first time."""
    message = Message(topic_address("t"), b"", property_set(said), hops=1, retain=True, expires=2e9)
    if protocol == "mqtt":
        return mqtt_translate.encode_properties(message, 1.9e9)
    if protocol == "amqp091":
        return amqp091_translate.encode_properties(message, 1.9e9)
    return amqpfast_translate.encode_properties(message)


ODD: Final = {
    "amqp091": {
        "nothing": b"\0\0",
        "cut short": b"\x20\0\0\0\0\x09\1aS",
        "a table that is none": b"\x20\0\0\0\0\x05\1aS\0\0",
        "a type that there is none of": b"\x20\0\0\0\0\x04\1a?\0",
        "an expiration that is no number": b"\x01\0\1x",
        "a message id that is no UTF-8": b"\0\x80\1\xff",
        "flags that there are none of": b"\0\2",
        "an id in a header": b"\x20\0\0\0\0\x13\x0cx-message-idS\0\0\0\1h",
        "an id in a header, and one of its own": b"\x20\x80\0\0\0\x13\x0cx-message-idS\0\0\0\1h\1i",
        "an id behind all else": b"\xff\x80\1c\1e\0\0\0\0\2\5\1k\1r\0011\2id",
        "an id that is cut short": b"\0\x80\5i",
        "an empty id": b"\0\x80\0",
        "no id, cut short": b"\x80\0\5c",
    },
    "amqpfast": {"nothing": b"\0" * 7, "cut short": b"\0"},
    "mqtt": {
        "an expiry and an identifier": b"\x02\0\0\0\5\x0b\7\x26\0\1a\0\1b",
        "types that are none": b"\x26\0\x0dgateway-types\0\1{",
        "what looks like an id within a value": (
            b"\x09\0\x15\x26\0\x0famqp-message-id\0\1x" + b"\x26\0\x0famqp-message-id\0\1b"
        ),
        "what looks like an id and is none": b"\x09\0\x15\x26\0\x0famqp-message-id\0\1x",
        "an id behind all else": (
            b"\x01\1\x02\0\0\0\5\x03\0\1c\x08\0\1r\x09\0\2\xff\0" + b"\x26\0\x0famqp-message-id\0\1z"
        ),
        "an id with other letters": b"\x26\0\x0famqp-message-id\0\2\xc3\xa4",
        "a message id twice": (b"\x26\0\x0famqp-message-id\0\1a" + b"\x26\0\x0famqp-message-id\0\1b"),
    },
}
CASES: Final = [
    *((protocol, wire_of(protocol, said)) for protocol in DIALECTS for said in SAID.values()),
    *((protocol, raw) for protocol, given in ODD.items() for raw in given.values()),
]
NAMES: Final = [
    *(f"{protocol}, {name}" for protocol in DIALECTS for name in SAID),
    *(f"{protocol}, {name}" for protocol, given in ODD.items() for name in given),
]


def blocks_of(folder: Path, *blocks: Sequence[SettledMessages]) -> list[Block]:
    """What a gateway writes of these, in one file."""
    encoder, base = Encoder(0), 0
    with (folder / f"0-{0:020}.gwj").open("wb") as file:
        for parts in blocks:
            draft = encoder.encode(base, gathered(parts, apart=encoder.unshared_columns))
            base = draft.header.next
            file.write(bytes_of(draft))
    found = list(JournalReader(folder).blocks("0"))
    assert all(isinstance(block, Block) for block in found)
    return [block for block in found if isinstance(block, Block)]


def part_of(*messages: Message, labels: RowLabels = HOME, **also: Any) -> SettledMessages:
    return SettledMessages(labels, list(messages), None, ACCEPTED, 5, 6, **also)


def said_of(row: Row) -> tuple[str | None, ...]:
    return tuple(row[name] for name in SET)


def told(found: PropertySet) -> tuple[str | None, ...]:
    """What would have been written at once."""
    return tuple(None if text is None else text.decode() for text in recorded_texts(found))


@pytest.mark.parametrize("protocol, raw", CASES, ids=NAMES)
def test_properties_say_what_would_have_been_written(tmp_path: Path, protocol: str, raw: bytes) -> None:
    dialect = DIALECTS[protocol]
    found = dialect.property_set(raw)
    (block,) = blocks_of(tmp_path, [part_of(Message(topic_address("t"), b"", found))])
    (row,) = block.rows()
    # As an object would say it that nobody has looked at, without short cuts.
    plain = PropertySet(protocol, raw, found._decode, found._properties)
    assert said_of(row) == told(found) == told(plain)
    kept = bytes(block.entries("properties").data)
    assert (kept == raw) == (0 < len(raw) <= PROPERTIES_BYTES_MAX)


def test_a_set_that_no_protocol_has_written_is_kept_as_texts(tmp_path: Path) -> None:
    """What rules have taken something out of is such a set: its bytes must not be there."""
    for name, said in SAID.items():
        (tmp_path / name).mkdir()
        found = property_set(replace(said, app_id="\udc80"))
        (block,) = blocks_of(tmp_path / name, [part_of(Message(topic_address("t"), b"", found))])
        (row,) = block.rows()
        assert said_of(row) == told(found)
        assert bytes(block.entries("properties").forms) == b"\0"


ADDRESSES: Final = [
    topic_address("a/ü"),
    amqp_address("amq.topic", "a.b"),
    amqp_address("", "queue"),
    amqp_address("a:b%", "ü:c"),
    amqp_address("e" * 255, ""),
    fast_address("topic", "x:y"),
    fast_address("queue", "ä"),
]


def texts(row: Row, side: str) -> list[str | None]:
    return [row[f"{side}_{name}"] for name in ("address", "scope", "name")]


@pytest.mark.parametrize("address", ADDRESSES, ids=repr)
def test_addresses_say_what_would_have_been_written(tmp_path: Path, address: Any) -> None:
    crossed = part_of(Message(address, b"", hops=1), origins=[ADDRESSES[0]])
    (block,) = blocks_of(tmp_path, [part_of(Message(address, b"")), crossed])
    stayed, gone = block.rows()
    wanted = [None if text is None else text.decode() for text in words_of(address)]
    assert texts(stayed, "source") == texts(stayed, "target") == texts(gone, "target") == wanted
    assert texts(gone, "source") == ["a/ü", None, "a/ü"]


def messages_that_differ(first: int, count: int) -> list[Message]:
    """A trace in each, as AMQP and MQTT say it, of addresses that differ, too."""
    found = []
    for at in range(first, first + count):
        protocol = "mqtt" if at % 2 else "amqp091"
        said = Properties(
            headers=(("trace", string(f"{at:08d}")),), message_id=f"id {at}" if at % 3 else None
        )
        sets = DIALECTS[protocol].property_set(wire_of(protocol, said))
        address = topic_address(f"t/{at}")
        found.append(Message(address, b"", sets if at % 5 else property_set(said)))
    return found


def test_where_each_row_says_something_new_nothing_is_looked_for(tmp_path: Path) -> None:
    """The rows are the same, first and last ones included: those that are looked for once more."""
    rows = 4_096
    messages = messages_that_differ(0, rows)
    found = blocks_of(tmp_path, *[[part_of(*messages)]] * (ROWS_APART // rows + 3))
    apart = [not block.entries("properties").indices for block in found]
    assert apart == [False, *[True] * (ROWS_APART // rows), False, True]
    assert apart == [not block.entries("source_name").indices for block in found]
    for block in found[:2] + found[-2:]:
        assert [said_of(row) for row in block.rows()] == [told(one.property_set) for one in messages]
        assert [row["source_address"] for row in block.rows()] == [one.address.name for one in messages]


def test_what_repeats_itself_again_is_numbered_again(tmp_path: Path) -> None:
    few = messages_that_differ(0, APART_FROM - 1)
    blocks = blocks_of(tmp_path, *[[part_of(*few)]] * 3)
    assert [bool(block.entries("properties").indices) for block in blocks] == [True] * 3
    differ, same = messages_that_differ(0, APART_FROM), messages_that_differ(1, 2)
    *_, block = blocks_of(tmp_path, [part_of(*differ)], *[[part_of(*same * 4_096)]] * 10)
    assert len(block.entries("properties").forms) == 2
    assert [said_of(row) for row in block.rows()] == [told(one.property_set) for one in same] * 4_096


def test_parts_that_went_nowhere_stand_among_those_that_differ(tmp_path: Path) -> None:
    differ = messages_that_differ(0, 200)
    refused = SettledMessages(HOME, None, differ[:3], ACCEPTED, 5, 6)
    *_, block = blocks_of(tmp_path, *[[part_of(*differ), refused, part_of(*differ[:9])]] * 3)
    gone = [row["target_name"] for row in block.rows()]
    assert gone == [
        *(one.address.name for one in differ),
        *[None] * 3,
        *(one.address.name for one in differ[:9]),
    ]


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.lists(st.tuples(names, names), max_size=6), st.sampled_from(["mqtt", "amqp091", "amqpfast"]))
def test_whatever_texts_there_are(pairs: list[tuple[str, str]], protocol: str) -> None:
    raw = wire_of(protocol, Properties(headers=tuple((name, string(value)) for name, value in pairs)))
    found = DIALECTS[protocol].property_set(raw)
    assert told(found) == told(PropertySet(protocol, raw, found._decode, found._properties))


@pytest.mark.parametrize("read", [id_dictionary, set_dictionaries])
def test_a_form_that_there_is_none_of_is_damage(read: Any) -> None:
    view = memoryview
    with pytest.raises(DamageError, match="the unknown format 4"):
        read(view(b"\4"), view(b"\0\0\0\0\1\0\0\0"), view(b"x"))


STATED: Final = (
    (b"order 7", "text/plain", "order 7"),
    ("ü".encode(), "text/ü", "ü"),
    (b"", "", ""),
    (b"\xff\0", "a/b", None),  # Not UTF-8: MQTT's correlation data may be any bytes.
    (None, None, None),
)


@pytest.mark.parametrize("protocol", [*DIALECTS, "model"])
@pytest.mark.parametrize("correlation, kind, column", STATED, ids=repr)
def test_correlation_and_content_type_are_columns(
    tmp_path: Path, protocol: str, correlation: bytes | None, kind: str | None, column: str | None
) -> None:
    said = Properties(correlation=correlation, content_type=kind, message_id="m")
    found = (
        property_set(said)
        if protocol == "model"
        else DIALECTS[protocol].property_set(wire_of(protocol, said))
    )
    (block,) = blocks_of(tmp_path, [part_of(Message(topic_address("t"), b"", found))])
    stated = found.properties  # a protocol may not tell "" from nothing
    written = None if stated.correlation is None else column
    assert block.values("correlation_id") == [written]
    assert block.values("content_type") == [stated.content_type]
    assert stated.correlation in (correlation, None)


@pytest.mark.interpreted
def test_each_property_set_is_decoded_once_for_all_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = messages_that_differ(0, 200)
    (block,) = blocks_of(tmp_path, [part_of(*messages)])
    decoded: list[bytes] = []
    for name in ("mqtt", "amqp091"):
        dialect = type(DIALECTS[name])
        before = dialect.unread_set

        def unread(self: Any, data: bytes, before: Any = before) -> PropertySet:
            decoded.append(data)
            return before(self, data)

        monkeypatch.setattr(dialect, "unread_set", unread)
        monkeypatch.setattr(dialect, "message_id", lambda *_: pytest.fail("a second decoding"))
    wires._known_set.cache_clear()
    for name in SET:
        block.values(name)
    assert len(decoded) == len(set(decoded)) == 160  # every fifth has no bytes of a protocol


def test_texts_of_the_first_gateways_lack_two() -> None:
    entry = framed((b"{}", b"id"))
    starts = memoryview(struct.pack("<2i", 0, len(entry)))
    found = set_dictionaries(memoryview(b"\0"), starts, memoryview(entry))
    assert [bytes(texts) for _, _, texts in found] == [b"{}", b"id", b"", b""]
    assert [bytes(valid) for valid, _, _ in found] == [b"", b"", b"\0", b"\0"]


def test_the_numbers_of_forms_are_for_ever() -> None:
    """They stand in journals, and in the reference."""
    assert {name: dialect.wire_form for name, dialect in DIALECTS.items()} == {
        "mqtt": 1,
        "amqp091": 2,
        "amqpfast": 3,
    }
