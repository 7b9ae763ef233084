"""Blocks whose rows are alike, and runs of one sender or address, are encoded by other ways than single rows:
the rows must be the same."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import Properties, property_set
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.column_buffers import TOGETHER, SettledMessages, UnsharedColumns
from gateway.store.journal.encoder import ROWS_USUAL, Encoder
from gateway.store.journal.reader import JournalReader, Row
from gateway.store.journal.runs import RUN, RUN_ALIKE, Runs, alike_in, chained, runs_of
from tests.store.journal.samples import HOME, UP, bytes_of, gathered, whole

SENDERS = [Sender("mqtt", f"press-{number}") for number in range(3)]
ADDRESSES = [topic_address(f"plant/{number}") for number in range(3)]
FACTS = (
    "address",
    "assurance",
    "durable",
    "expires",
    "hops",
    "byte_count",
    "property_set",
    "retain",
    "sender",
)


def written(folder: Path, *blocks: list[SettledMessages], apart: UnsharedColumns = TOGETHER) -> list[Row]:
    """The rows of these blocks, without their sequence numbers."""
    folder.mkdir()
    encoder = Encoder(0)
    base = 0
    with (folder / f"0-{0:020}.gwj").open("wb") as file:
        for block in blocks:
            draft = encoder.encode(base, gathered(block, apart=apart))
            file.write(bytes_of(draft))
            base = draft.header.next
    rows = [whole(row) for row in JournalReader(folder).rows("0")]
    for row in rows:
        del row["sequence"]
    return rows


def one_by_one(part: SettledMessages) -> list[list[SettledMessages]]:
    """The same rows, each in a block of its own."""
    count = len(part.sources or part.messages or [])
    return [
        [
            part._replace(
                messages=part.messages and part.messages[at : at + 1],
                sources=part.sources and part.sources[at : at + 1],
                slots=[at],
            )
        ]
        for at in range(count)
    ]


ALIKE: list[dict[str, Any]] = [
    {},
    {"expires": 7.5},
    {"expires": 1e300},
    {"hops": 1_000_000},
    {"assurance": 2, "durable": True, "retain": True},
    {"property_set": property_set(Properties(message_id="a"))},
]


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("odd", [None, 0, 20, 99])
@pytest.mark.parametrize("given", ALIKE, ids=range(len(ALIKE)))
def test_rows_that_are_alike_and_those_with_one_that_is_not(
    tmp_path: Path, given: dict[str, Any], odd: int | None, crossed: bool
) -> None:
    heads = [
        Message(ADDRESSES[at // 40], b"%d" % at, sender=SENDERS[at // 33 % 3], **given) for at in range(100)
    ]
    if odd is not None:
        heads[odd] = Message(ADDRESSES[1], b"odd", assurance=1, expires=3.0, hops=2, sender=SENDERS[2])
    tails = [Message(amqp_address("", str(at // 50)), b"") for at in range(100)]
    part = (
        SettledMessages(UP, tails, heads, ACCEPTED, 5, 6)
        if crossed
        else SettledMessages(HOME, heads, None, ACCEPTED, 5, 6)
    )
    assert written(tmp_path / "together", [part]) == written(tmp_path / "alone", *one_by_one(part))


APART = [UnsharedColumns(*kinds) for kinds in product((False, True), repeat=3)]


def saying(at: int, **also: Any) -> Message:
    """A message whose properties no other has."""
    said = property_set(Properties(message_id=f"id {at}"))
    return Message(ADDRESSES[at % 3], b"%d" % at, said, sender=SENDERS[at // 20 % 2], **also)


@pytest.mark.parametrize("odd", [None, 0, 20, 99])
@pytest.mark.parametrize("apart", [TOGETHER, UnsharedColumns(sets=True)])
@pytest.mark.parametrize("given", ALIKE[1:5], ids=range(4))
def test_rows_that_are_alike_but_for_their_properties(
    tmp_path: Path, given: dict[str, Any], apart: UnsharedColumns, odd: int | None
) -> None:
    heads = [saying(at, **given) for at in range(100)]
    if odd is not None:
        heads[odd] = saying(odd, assurance=1, expires=3.0, hops=2)
    part = SettledMessages(HOME, heads, None, ACCEPTED, 5, 6)
    together = written(tmp_path / "together", [part], apart=apart)
    assert together == written(tmp_path / "alone", *one_by_one(part))
    assert [row["message_id"] for row in together] == [f"id {at}" for at in range(100)]


def in_bursts(*lengths: int) -> SettledMessages:
    """As when each of so many messages came together."""
    bursts, messages = Bursts(), []
    for place, length in enumerate(lengths):
        some = [
            Message(ADDRESSES[place], b"%d" % at, saying(place).property_set, sender=SENDERS[0])
            for at in range(length)
        ]
        bursts.add(some, amqp_address("", "burst"))
        messages += some
    origins = [one.address for one in messages]
    return SettledMessages(UP, messages, None, ACCEPTED, 5, 6, origins=origins, bursts=bursts)


def crossing(first: int) -> SettledMessages:
    """Only their addresses change."""
    heads = [saying(at) for at in range(first, first + 30)]
    gone = [one.with_crossing(amqp_address("", str(at % 7))) for at, one in enumerate(heads)]
    return SettledMessages(UP, gone, None, ACCEPTED, 5, 6, origins=[one.address for one in heads])


PARTS = {
    "staying": SettledMessages(HOME, [saying(at) for at in range(40)], None, ACCEPTED, 5, 6),
    "alike": SettledMessages(HOME, [saying(1)] * 40, None, ACCEPTED, 5, 6),
    "crossing": crossing(40),
    "changed": SettledMessages(
        UP, [saying(at, assurance=2) for at in range(9)], [saying(at) for at in range(9)], ACCEPTED, 5, 6
    ),
    "refused": SettledMessages(UP, None, [saying(at) for at in range(30, 40)], ACCEPTED, 5, 6),
    "bursts": in_bursts(2, 30, 1),
    "one": SettledMessages(HOME, [saying(0)], None, ACCEPTED, 5, 6),
}


@pytest.mark.parametrize("apart", APART, ids=str)
@pytest.mark.parametrize(
    "names",
    [
        [*PARTS],
        [*reversed(PARTS)],
        ["staying", "one"],
        ["staying", "crossing"],
        ["crossing", "staying"],
        ["crossing", "crossing"],
        ["refused"],
        ["bursts"],
        ["one"],
    ],
    ids=str,
)
def test_what_is_written_apart_says_the_same(
    tmp_path: Path, names: list[str], apart: UnsharedColumns
) -> None:
    parts = [PARTS[name] for name in names]
    found = written(tmp_path / "apart", parts, apart=apart)
    assert found == written(tmp_path / "together", parts)
    assert [row["body"] for row in found] == [one.body for part in parts for one in part.heads]


@pytest.mark.parametrize("count", [ROWS_USUAL, ROWS_USUAL + 1])
def test_places_of_long_parts(tmp_path: Path, count: int) -> None:
    part = SettledMessages(HOME, [Message(ADDRESSES[0], b"")] * count, None, ACCEPTED, 0, 0)
    assert [row["slot"] for row in written(tmp_path / "one", [part])] == list(range(count))


lengths = st.one_of(st.integers(1, 3), st.integers(1, 300))


def spread(runs: Runs[Any]) -> list[Any]:
    """The objects as they stand in the rows."""
    if runs.lengths is None:
        return list(runs.objects)
    return [one for one, length in zip(*runs, strict=True) for _ in range(length)]


@given(st.lists(st.tuples(st.integers(0, 2), lengths), min_size=1, max_size=30))
def test_runs_are_those_of_the_objects(runs: list[tuple[int, int]]) -> None:
    objects = [ADDRESSES[place] for place, length in runs for _ in range(length)]
    assert spread(runs_of(objects)) == objects


@pytest.mark.parametrize("length, pays", [(1, False), (RUN // 4, False), (2 * RUN, True), (500, True)])
def test_runs_are_looked_for_where_it_pays(length: int, pays: bool) -> None:
    objects = [one for _ in range(20) for one in ADDRESSES for _ in range(length)]
    found = runs_of(objects)
    assert (found.lengths is not None) == pays
    if pays:
        assert len(found.objects) <= 2 * len(objects) // length


def test_equal_objects_are_as_good_as_the_same(tmp_path: Path) -> None:
    """As when a client publishes to an address that is no longer remembered."""
    heads = [Message(topic_address("t"), b"", sender=SENDERS[0]) for _ in range(200)]
    for at in range(90, 100):
        heads[at] = Message(topic_address("other"), b"", sender=Sender(*SENDERS[0]))
    rows = written(tmp_path / "one", [SettledMessages(HOME, heads, None, ACCEPTED, 0, 0)])
    assert [row["source_name"] for row in rows] == ["t"] * 90 + ["other"] * 10 + ["t"] * 100


def of_kind(kind: int) -> Message:
    """A message that differs in one thing from those of every other kind."""
    other: list[dict[str, Any]] = [*ALIKE, {"assurance": 1}, {"durable": True}, {"retain": True}]
    if kind < len(other):
        return Message(ADDRESSES[0], b"", sender=SENDERS[0], **other[kind])
    return Message(ADDRESSES[kind % 2], b"", sender=SENDERS[1 + kind % 2])


def facts_of(message: Message) -> tuple[Any, ...]:
    return tuple(getattr(message, name) for name in FACTS)


@given(st.lists(st.tuples(st.integers(0, 11), lengths), min_size=1, max_size=12), st.integers(0, 2_000))
def test_messages_of_a_run_differ_in_nothing_but_their_bodies(runs: list[tuple[int, int]], cut: int) -> None:
    messages = [of_kind(kind) for kind, length in runs for _ in range(length)]
    wanted = list(map(facts_of, messages))
    assert list(map(facts_of, spread(alike_in(messages)))) == wanted
    parts = [part for part in (messages[:cut], messages[cut:]) if part]
    assert list(map(facts_of, spread(chained([alike_in(part) for part in parts])))) == wanted


@pytest.mark.parametrize("length, pays", [(1, False), (RUN_ALIKE // 2, False), (2 * RUN_ALIKE, True)])
def test_messages_are_compared_where_it_pays(length: int, pays: bool) -> None:
    messages = [one for at in range(50) for one in [of_kind(at % 3)] * length]
    found = alike_in(messages)
    assert (found.lengths is not None) == pays
    assert len(found.objects) == (50 if pays else len(messages))


@pytest.mark.parametrize("count", [2, 9, 60])
def test_few_messages_that_all_differ_are_no_runs(count: int) -> None:
    assert alike_in([of_kind(at % 3) for at in range(count)]).lengths is None
