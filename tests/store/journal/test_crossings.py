"""What the journal is told of messages that cross: how they came in, whatever became of them on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.journal import JournalRecorder, OpenBatches, RecordingDispatcher
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import Message
from gateway.model.properties import Properties, property_set
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.reader import JournalReader
from tests.broker.parts import SENDER, Answers
from tests.store.journal.samples import whole, writer

ROUTES = """
version: 1
routes:
  - name: plain
    from: {endpoint: mqtt, topic: "up/{rest...}"}
    to: {endpoint: erp, exchange: "", routing_key: "{rest...}"}
  - name: shaped
    from: {endpoint: mqtt, topic: "shaped/{rest...}"}
    to: {endpoint: erp, exchange: "", routing_key: "{rest...}"}
    headers: {by: route}
  - name: twice
    from: {endpoint: mqtt, topic: "up/both/#"}
    to: {endpoint: other, exchange: "", routing_key: both}
  - name: once
    from: {endpoint: mqtt, topic: "once/{rest...}"}
    to: {endpoint: erp, exchange: "", routing_key: "{rest...}"}
    deduplicate: {by: message_id, window: 10m}
"""
BACK = """
  - name: back
    from: {endpoint: erp, queue: answers}
    to: {endpoint: mqtt, topic: "answers"}
  - name: forth
    from: {endpoint: erp, exchange: "", binding_key: "{rest...}"}
    to: {endpoint: mqtt, topic: "up/{rest...}"}
"""
ENDPOINTS = {"mqtt": "mqtt", "erp": "amqp091", "other": "amqp091"}
COLUMNS = ("source_name", "target_name", "route", "hops", "retain", "expires", "slot", "body")


class Link:
    """The target of routes: settles what it gets when it is told to, in two halves."""

    retained = None

    def __init__(self) -> None:
        self.parts: list[SubBatch] = []

    def sinks(self, address: object) -> tuple[Link, ...]:
        return (self,)

    def choose(self, message: Message) -> tuple[Link, ...]:
        return (self,)

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)

    def settle(self, *, halves: bool) -> None:
        for part in self.parts:
            if halves:
                part.settle_at(range(1, len(part.messages), 2))
            part.accept()


class Nowhere:
    """The world that messages come from, in which nobody wants them."""

    retained = None

    def sinks(self, address: object) -> tuple[Link, ...]:
        return ()

    def choose(self, message: Message) -> tuple[Link, ...]:
        return ()


def rows_of(
    folder: Path,
    *messages: Message,
    halves: bool = False,
    back: str = "",
    bursts: list[int] | None = None,
    columns: tuple[str, ...] = COLUMNS,
) -> set[tuple[Any, ...]]:
    """What the journal has of `messages`, which came together; `back` are ways back of the routes. `bursts`:
    so many of them are published together, if they may be; the rest, and without it all, one by one.
    """
    router = Router([parse(ROUTES + back, "t.yaml")], ENDPOINTS)
    made = writer(folder)
    dispatcher = RecordingDispatcher(
        router, DeadLetters(), journaling=JournalRecorder(made, router, all_=True, open_batches=OpenBatches())
    )
    erp, other, own = Link(), Link(), Nowhere()
    dispatcher.namespaces = {"mqtt": own, "erp": erp, "other": other}
    batch = dispatcher.batch(Answers(), Monotonic(time.monotonic()))
    place = 0
    for count in (*(bursts or ()), *[1] * (len(messages) - sum(bursts or ()))):
        some, receipts = list(messages[place : place + count]), list(range(place, place + count))
        entry = dispatcher.entry("mqtt", own, some[0].address)
        if count == 1 or not dispatcher.publish_burst(batch, entry, some, receipts):
            for message, receipt in zip(some, receipts, strict=True):
                assert dispatcher.publish(batch, entry, message, receipt)
        place += count
    batch.send()
    for link in (erp, other):
        link.settle(halves=halves)
    made.close()
    assert not made.failed
    return {tuple(row[name] for name in columns) for row in map(whole, JournalReader(folder).rows("0"))}


def came(topic: str, number: int, **also: Any) -> Message:
    return Message(topic_address(topic), b"%d" % number, sender=SENDER, **also)


MESSAGES = {
    "plain": [came(f"up/{number}", number) for number in range(4)],
    "hops": [came("up/x", 0, hops=3), came("up/y", 1)],
    "retained": [came("up/x", 0), came("up/x", 1, retain=True), came("up/x", 2)],
    "expiring": [came("up/x", 0), came("up/x", 1, expires=5.0)],
    "shaped": [came("up/x", 0), came("shaped/x", 1), came("up/x", 2), came("shaped/y", 3)],
    "fan-out": [came("up/x", 0), came("up/both/y", 1), came("up/z", 2)],
    "deduplicated": [came("once/x", 0), came("once/y", 1), came("up/z", 2)],
}
ROUTE = {"up": "plain", "shaped": "shaped", "once": "once"}


@pytest.mark.parametrize("back", ["", BACK], ids=["one way", "with ways back"])
@pytest.mark.parametrize("halves", [False, True], ids=["together", "in halves"])
@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
async def test_a_row_says_how_its_message_came_in(
    tmp_path: Path, messages: list[Message], halves: bool, back: str
) -> None:
    expected = set()
    for slot, one in enumerate(messages):
        topic = one.address.name
        first, rest = topic.split("/", 1)
        told = (one.hops, one.retain, int(one.expires * 1_000_000) or None, slot, one.body)
        expected.add((topic, rest.replace("/", "."), ROUTE[first], *told))
        if rest.startswith("both"):
            expected.add((topic, "both", "twice", *told))
    assert rows_of(tmp_path, *messages, halves=halves, back=back) == expected


ASKS = property_set(Properties(reply_to="up/the/answer"))
BURSTS: dict[str, dict[str, Any]] = {
    "plain": {"topic": "up/x"},
    "plain, of another crossing": {"topic": "up/x", "hops": 3},
    "too far": {"topic": "up/x", "hops": 8},
    "retained": {"topic": "up/x", "retain": True},
    "expiring": {"topic": "up/x", "expires": 5.0, "assurance": 1, "durable": True},
    "asking": {"topic": "up/x", "property_set": ASKS},
    "shaped": {"topic": "shaped/x"},
    "fan-out": {"topic": "up/both/x"},
    "deduplicated": {"topic": "once/x"},
    "other": {"topic": "up/y/z"},
}


@pytest.mark.parametrize("back", ["", BACK], ids=["one way", "with ways back"])
@pytest.mark.parametrize("halves", [False, True], ids=["together", "in halves"])
@pytest.mark.parametrize("kinds", [*((kind,) for kind in BURSTS), ("plain", "other"), ("plain", "shaped")])
@pytest.mark.parametrize("single", [False, True], ids=["bursts only", "and one more"])
async def test_bursts_are_recorded_as_single_messages_are(
    tmp_path: Path, kinds: tuple[str, ...], halves: bool, back: str, single: bool
) -> None:
    many = 40
    messages = [came(**BURSTS[kind], number=at) for kind in kinds for at in range(many)]
    messages += [came("up/last", many)] * single
    also: dict[str, Any] = {"halves": halves, "back": back, "columns": (*COLUMNS, "client", "assurance")}
    together = rows_of(tmp_path / "together", *messages, bursts=[many] * len(kinds), **also)
    assert together == rows_of(tmp_path / "one by one", *messages, **also)
    assert len(together) >= len(messages)


async def test_only_what_the_address_decides_is_published_together() -> None:
    router = Router([parse(ROUTES + BACK, "t.yaml")], ENDPOINTS)
    dispatcher = Dispatcher(router, DeadLetters())
    erp, other, own = Link(), Link(), Nowhere()
    dispatcher.namespaces = {"mqtt": own, "erp": erp, "other": other}
    taken = set()
    for kind, given in BURSTS.items():
        messages = [came(**given, number=at) for at in range(3)]
        entry = dispatcher.entry("mqtt", own, messages[0].address)
        batch = Batch(Answers(), Monotonic(0.0))
        if dispatcher.publish_burst(batch, entry, messages, [0, 1, 2]):
            batch.send()
            taken.add(kind)
            assert erp.parts.pop().slots == [0, 1, 2]
        else:
            assert not len(batch)
    assert taken == {"plain", "plain, of another crossing", "expiring", "deduplicated", "other"}
    assert {route.name: (route.matched, route.in_flight) for route in router.routes}["plain"] == (12, 12)


async def test_a_row_has_the_reply_address_that_came_in(tmp_path: Path) -> None:
    messages = [came("up/x", 0), came("up/x", 1, property_set=ASKS), came("up/x", 2)]
    rows = rows_of(tmp_path, *messages, back=BACK, columns=("body", "properties", "target_name"))
    said = {body: (properties or "", target) for body, properties, target in rows}
    assert [target for _, target in said.values()] == ["x"] * 3
    assert ["up/the/answer" in said[b"%d" % number][0] for number in range(3)] == [False, True, False]


async def test_what_a_route_refuses_leaves_the_others_as_they_came(tmp_path: Path) -> None:
    too_far = came("up/x", 1, hops=8)
    rows = rows_of(tmp_path, came("up/a", 0), too_far, came("up/b", 2))
    assert {row[:4] for row in rows} == {
        ("up/a", "a", "plain", 0),
        ("up/x", None, "plain", 8),
        ("up/b", "b", "plain", 0),
    }
