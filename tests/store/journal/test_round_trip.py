"""What is recorded is read back: every column, every type, with and without compression."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import RemoteProtocolError
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.column_buffers import RowLabels, SettledMessages
from gateway.store.journal.columns import COLUMNS
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.entries import ENTRIES_MAX, BlockDictionary, bitmap
from gateway.store.journal.format import ColumnKind
from gateway.store.journal.reader import JournalReader, Row
from gateway.store.journal.segments import BlockLocation
from gateway.store.journal.wires import PROPERTIES_BYTES_MAX
from gateway.store.properties import decode_properties
from tests.store.journal.samples import (
    HOME,
    SENDER,
    UP,
    UTC_US,
    bytes_of,
    gathered,
    message,
    whole,
    whole_block,
)

FULL = Properties(
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
    headers=(
        ("x", string("one")),
        ("x", string("two")),
        ("raw", Value(ValueType.STRING, b"\xff")),
        ("n", Value(ValueType.INT64, -(2**63))),
        ("d", Value(ValueType.DECIMAL, Decimal("1.50"))),
        ("f", Value(ValueType.DOUBLE, float("inf"))),
        ("t", Value(ValueType.TABLE, (("in", Value(ValueType.ARRAY, (Value(ValueType.BOOL, True),))),))),
    ),
)


def recorded(folder: Path, *parts: SettledMessages, body_bytes_max: int = 1_000, level: int = 0) -> list[Row]:
    data = bytes_of(Encoder(3).encode(100, gathered(parts, body_bytes_max=body_bytes_max)), level)
    folder.mkdir(exist_ok=True)
    (folder / f"3-{100:020}.gwj").write_bytes(data)
    return [whole(row) for row in JournalReader(folder).rows("3")]


@pytest.mark.parametrize("level", [0, 6])
def test_every_column(tmp_path: Path, level: int) -> None:
    source = Message(
        topic_address("plant/ü"),
        b"body",
        property_set(FULL),
        assurance=2,
        durable=True,
        retain=True,
        expires=1_800_000_000.5,
        hops=3,
        sender=SENDER,
    )
    crossed = Message(fast_address("queue", "erp.in"), b"body", source.property_set, 1, sender=SENDER, hops=4)
    refused = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "larger than it takes")
    (row,) = recorded(
        tmp_path, SettledMessages(UP, [crossed], [source], refused, UTC_US, UTC_US + 7), level=level
    )
    assert decode_properties(row.pop("properties").encode()) == FULL
    assert row == {
        "shard": "3",
        "sequence": 100,
        "received": UTC_US,
        "settled": UTC_US + 7,
        "slot": 0,
        "source_endpoint": "mqtt",
        "client": "press-7",
        "user": "plant",
        "remote_address": "10.0.0.7:40123",
        "source_protocol": "mqtt",
        "source_address": "plant/ü",
        "source_scope": None,
        "source_name": "plant/ü",
        "route": "up",
        "mapping_version": "7f3a",
        "target_endpoint": "erp",
        "target_protocol": "amqpfast",
        "target_address": "queue:erp.in",
        "target_scope": "queue",
        "target_name": "erp.in",
        "outcome": "rejected",
        "reason": "too_large",
        "reason_text": "larger than it takes",
        "assurance": 2,
        "durable": True,
        "retain": True,
        "hops": 3,
        "delivered_assurance": 1,
        "delivered_durable": False,
        "delivered_retain": False,
        "expires": 1_800_000_000_500_000,
        "body_size": 4,
        "message_id": "id-1",
        "correlation_id": None,  # it is not UTF-8
        "content_type": "text/plain",
        "body": b"body",
    }


def test_every_column_has_been_named() -> None:
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)
    assert {column.kind for column in COLUMNS} >= {
        ColumnKind.TIME,
        ColumnKind.UINT8,
        ColumnKind.UINT32,
        ColumnKind.CODED,
    }


ADDRESSES = [
    (topic_address("a/b"), "a/b", None, "a/b"),
    (amqp_address("amq.topic", "a.b"), "amq.topic:a.b", "amq.topic", "a.b"),
    (amqp_address("", "queue"), ":queue", "", "queue"),
    (fast_address("topic", "x"), "topic:x", "topic", "x"),
]


@pytest.mark.parametrize("address, text, scope, name", ADDRESSES)
def test_addresses(tmp_path: Path, address: Any, text: str, scope: str | None, name: str) -> None:
    (row,) = recorded(tmp_path, SettledMessages(HOME, [Message(address, b"")], None, ACCEPTED, 0, 0))
    for side in ("source", "target"):
        assert (row[f"{side}_address"], row[f"{side}_scope"], row[f"{side}_name"]) == (text, scope, name)
    assert row["source_protocol"] == address.protocol


def test_wires_of_two_protocols_may_be_equal(tmp_path: Path) -> None:
    amqp = amqp_address("e", "k")
    mqtt = topic_address(amqp.wire.decode(), amqp.wire)
    parts = [SettledMessages(HOME, [Message(one, b"")], None, ACCEPTED, 0, 0) for one in (amqp, mqtt, amqp)]
    assert [row["source_name"] for row in recorded(tmp_path, *parts)] == ["k", mqtt.name, "k"]


def test_a_refused_message_went_nowhere(tmp_path: Path) -> None:
    sources = [message(1, retain=True), message(2)]
    refused = Outcome(Verdict.REJECTED, Reason.HOPS, "a loop?")
    rows = recorded(
        tmp_path,
        SettledMessages(UP, None, sources, refused, 0, 0),
        SettledMessages(HOME, sources, None, ACCEPTED, 0, 0),
    )
    assert [row["target_address"] for row in rows] == [None, None, "plant/1", "plant/2"]
    assert [row["source_address"] for row in rows] == ["plant/1", "plant/2"] * 2
    assert [row["delivered_retain"] for row in rows] == [True, False] * 2
    assert [row["reason"] for row in rows] == ["hops", "hops", "none", "none"]


BODIES = [
    (0, [b"", b"a"], [None, None]),
    (3, [b"", b"abc", b"abcd"], [b"", b"abc", None]),
    (3, [b"abcd"] * 9, [None] * 9),
    (3, [b"ab"] * 9, [b"ab"] * 9),
    (9, [b"", b""], [b"", b""]),
    (9_000, [bytes(5_000)] * 3, [bytes(5_000)] * 3),
]


@pytest.mark.parametrize("most, bodies, expected", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("level", [0, 1])
def test_bodies(
    tmp_path: Path, most: int, bodies: list[bytes], expected: list[bytes | None], level: int
) -> None:
    messages = [Message(topic_address("t"), body) for body in bodies]
    part = SettledMessages(HOME, messages, None, ACCEPTED, 0, 0)
    rows = recorded(tmp_path, part, body_bytes_max=most, level=level)
    assert [row["body"] for row in rows] == expected
    assert [row["body_size"] for row in rows] == list(map(len, bodies))


def malformed(_: bytes) -> Properties:
    raise RemoteProtocolError("no", reason=1)


SETS = [
    (property_set(Properties()), "{}", None),
    (property_set(Properties(message_id="")), '{"message_id":""}', ""),
    (property_set(Properties(message_id="\udc80")), '{"message_id":"\\udc80"}', "\\udc80"),
    (PropertySet("mqtt", b"\xff", malformed), '{"malformed":true}', None),
    (property_set(Properties(type="x" * PROPERTIES_BYTES_MAX)), '{"omitted":65547}', None),
]


@pytest.mark.parametrize("found, text, name", SETS, ids=range(len(SETS)))
def test_property_sets(tmp_path: Path, found: PropertySet, text: str, name: str | None) -> None:
    others = [Message(topic_address("t"), b"", property_set(Properties(priority=n))) for n in range(2)]
    for folder, before in (("alone", []), ("among", others)):
        messages = [*before, Message(topic_address("t"), b"", found)]
        row = recorded(tmp_path / folder, SettledMessages(HOME, messages, None, ACCEPTED, 0, 0))[-1]
        assert (row["properties"], row["message_id"]) == (text, name)


def test_what_peers_may_claim_does_not_break_a_block(tmp_path: Path) -> None:
    odd = Message(
        topic_address("t"),
        b"",
        hops=1_000_000,
        expires=1e300,
        sender=Sender("mqtt", "\ud800", "", ""),
    )
    (row,) = recorded(
        tmp_path,
        SettledMessages(
            RowLabels("r", "", "", ""), [odd], None, Outcome(Verdict.REJECTED, Reason.NONE, "\ud800"), 0, 0
        ),
    )
    assert (row["hops"], row["expires"], row["client"]) == (255, 9 * 10**18, "\\ud800")
    assert row["reason_text"] == "\\ud800"


def test_expiry_of_some(tmp_path: Path) -> None:
    messages = [message(place, expires=float(place % 3)) for place in range(20)]
    rows = recorded(tmp_path, SettledMessages(HOME, messages, None, ACCEPTED, 0, 0))
    assert [row["expires"] for row in rows] == [
        place % 3 * 1_000_000 if place % 3 else None for place in range(20)
    ]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_a_bitmap_has_a_bit_for_each(present: list[bool]) -> None:
    found = bitmap(present)
    assert len(found) == (len(present) + 7) // 8
    assert [bool(found[at >> 3] >> (at & 7) & 1) for at in range(len(present))] == present


SENDERS = [Sender("mqtt", f"c{number}") for number in range(4)]
MQTT = [topic_address(f"t/{number}") for number in range(5)]
AMQP = [amqp_address("e", f"k{number}") for number in range(5)]
PROPERTY_SETS = [property_set(Properties(message_id=f"m{number}")) for number in range(3)]
FACTS = [RowLabels(f"r{number}", "", "t", "amqp091") for number in range(2)]
one_message = st.builds(
    Message,
    st.sampled_from(MQTT),
    st.binary(max_size=6),
    st.sampled_from(PROPERTY_SETS),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 5.0]),
    st.integers(0, 300),
    st.sampled_from(SENDERS),
)


@st.composite
def parts(draw: st.DrawFn) -> SettledMessages:
    heads = draw(st.lists(one_message, min_size=1, max_size=40))
    labels = draw(st.sampled_from(FACTS))
    times = draw(st.integers(0, 10)), draw(st.integers(0, 10))
    shape = draw(st.sampled_from(["home", "crossed", "plain", "refused"]))
    if shape == "plain":
        origins = [head.address for head in heads]
        return SettledMessages(labels, list(map(crossed, heads)), None, ACCEPTED, *times, None, origins)
    tails = [Message(AMQP[place % 5], head.body, head.property_set) for place, head in enumerate(heads)]
    messages = {"home": heads, "crossed": tails, "refused": None}[shape]
    return SettledMessages(labels, messages, None if shape == "home" else heads, ACCEPTED, *times)


def crossed(head: Message) -> Message:
    """At another address, and one hop on, within what an byte holds."""
    head.hops = min(head.hops, 254)
    return Message(
        AMQP[head.hops % 5],
        head.body,
        head.property_set,
        head.assurance,
        head.durable,
        head.retain,
        head.expires,
        head.hops + 1,
        head.sender,
    )


def expected_rows(part: SettledMessages) -> Iterator[tuple[Any, ...]]:
    heads = part.sources or part.messages or []
    origins = part.origins or [head.address for head in heads]
    hop = part.origins is not None
    for origin, head, tail in zip(origins, heads, part.messages or repeat(None, len(heads)), strict=True):
        target = None
        if tail is not None:
            address = tail.address
            target = address.name if address.scope else origin.name
        yield (
            part.labels.route,
            part.received_us,
            origin.name,
            target,
            head.sender.client,
            head.properties.message_id,
            head.assurance,
            head.retain,
            (tail or head).durable,
            min(head.hops - hop, 255),
            head.body if len(head.body) < 5 else None,
        )


READ = (
    *("route", "received", "source_name", "target_name", "client", "message_id", "assurance", "retain"),
    *("delivered_durable", "hops", "body"),
)


@pytest.mark.needs("time")
@settings(max_examples=60)
@given(st.lists(st.lists(parts(), min_size=1, max_size=4), min_size=1, max_size=4), st.sampled_from([0, 1]))
def test_blocks_of_any_traffic(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[SettledMessages]], level: int
) -> None:
    """The encoder remembers dictionaries from block to block; each block must stand for itself."""
    folder = tmp_path_factory.mktemp("journal")
    encoder = Encoder(0)
    base = 0
    with (folder / f"0-{0:020}.gwj").open("wb") as file:
        for block in blocks:
            draft = encoder.encode(base, gathered(block, body_bytes_max=4))
            file.write(bytes_of(draft, level))
            base = draft.header.next
    rows = [whole(row) for row in JournalReader(folder).rows("0")]
    expected = [row for block in blocks for part in block for row in expected_rows(part)]
    assert [tuple(row[name] for name in READ) for row in rows] == expected
    assert [row["sequence"] for row in rows] == list(range(base))


def test_arrow_finds_its_buffers(tmp_path: Path) -> None:
    """Column starts are aligned, sizes are as Arrow wants them, and what is shared lies there once."""
    recorded(tmp_path, SettledMessages(HOME, [message(place) for place in range(9)], None, ACCEPTED, 5, 6))
    reader = JournalReader(tmp_path)
    (at,) = reader.index("3")
    assert isinstance(at, BlockLocation)
    block = reader.read("3", at)
    assert all(offset % 8 == 0 for offset, _, _ in block.places)
    assert block.buffers("received")[1].cast("q").tolist() == [5] * 9
    indices, valid, offsets, data = block.buffers("source_address")
    assert (len(indices), len(valid), len(offsets)) == (36, 0, 16)
    assert bytes(data) == b"plant/0plant/1plant/2"
    place = {name: block.places[block.columns[name].buffers[0]] for name in ("source_address", "target_name")}
    assert place["source_address"] == place["target_name"]
    assert block.places[block.columns["body"].buffers[0]] == (0, 0, 0)


def test_dictionaries_forget(tmp_path: Path) -> None:
    entries = BlockDictionary(1)
    entries.begin(10)
    for number in range(10):
        entries.add_all([[b"%d" % number]])
    entries.end(10)
    assert not entries.begin(10), "all of it was in use"
    for number in range(9):
        entries.add_all([[b"x%d" % number]])
    entries.end(10)
    assert entries.begin(10), "traffic that does not repeat itself"
    for _ in range(ENTRIES_MAX + 1):
        entries.add_all([[b""]])
    entries.end(ENTRIES_MAX)
    assert entries.begin(ENTRIES_MAX), "too many"
    entries.add_all([[b"x" * (4 * 1_048_576 + 1)]])
    entries.end(1)
    assert entries.begin(1), "too long"


def test_a_small_block_does_not_carry_a_large_dictionary() -> None:
    encoder = Encoder(0)
    many = [Message(topic_address(f"topic/{number}"), b"") for number in range(1_000)]
    encoder.encode(0, gathered([SettledMessages(HOME, many, None, ACCEPTED, 0, 0)]))
    draft = encoder.encode(1_000, gathered([SettledMessages(HOME, many[:1], None, ACCEPTED, 0, 0)]))
    assert len(bytes_of(draft)) < 4_096


def test_a_block_may_be_skipped_by_its_dictionaries(tmp_path: Path) -> None:
    recorded(tmp_path, SettledMessages(UP, [message(1)], None, ACCEPTED, 0, 0))
    block = whole_block(next(JournalReader(tmp_path).blocks("3")))
    assert block.may_hold({"route": {"up", "other"}})
    assert not block.may_hold({"route": {"other"}})
    assert not block.may_hold({"route": {"up"}, "source_protocol": {"amqp091"}})
    assert block.may_hold({"unknown_column": {"x"}})
