"""What a batch remembers for the journal, and what its recipients tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway import clock
from gateway.broker.journal import RecipientRecorder, RecordedBatch, open_journal
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.address import Address
from gateway.model.batch import Recipient
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.settings.journal import Journal
from gateway.store.journal.column_buffers import RowLabels
from gateway.store.journal.reader import Gap, JournalReader
from tests.model.test_batch import Answers, Kept, message

FACTS = RowLabels("r", "v", "e", "p")


class Noted:
    """A journal's writer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, list[int] | None]] = []

    def record(
        self,
        labels: RowLabels,
        messages: list[Message],
        outcome: object,
        received: float,
        sources: list[Message] | list[Address] | None = None,
        slots: list[int] | None = None,
        bursts: object = None,
    ) -> None:
        assert (labels, outcome) == (FACTS, ACCEPTED)
        self.told.append((sources, slots))


@pytest.mark.interpreted
def test_a_message_is_known_by_its_slot_in_the_batch_that_came() -> None:
    """Also when another batch has passed it on, whose own slots are others."""
    noted, sink = Noted(), Kept()
    recipient = Recipient(sink, RecipientRecorder(noted, FACTS))  # type: ignore[arg-type]
    first = RecordedBatch(Answers(), Monotonic(7.0))
    for receipt in range(12):
        first.open(receipt, 1)
        first.record_source(message(b"%d" % receipt))
    onward = first.forwarded_batch(Answers())
    for origin in (4, 9, 11):
        onward.add_from(origin, None, [(recipient, message())])
    onward.send()
    sink.parts[-1].settle_at((0, 2))
    sink.parts[-1].accept()
    came = first.sources
    assert noted.told == [([came[4], came[11]], [4, 11]), ([came[9]], [9])]


@pytest.mark.interpreted
def test_a_whole_part_is_told_without_slots() -> None:
    noted, sink = Noted(), Kept()
    recipient = Recipient(sink, RecipientRecorder(noted, FACTS))  # type: ignore[arg-type]
    batch = RecordedBatch(Answers(), Monotonic(7.0))
    for receipt in range(3):
        batch.add_only(receipt, recipient, message())
    batch.send()
    sink.parts[-1].accept()
    assert noted.told == [(None, None)]


class Deaf:
    """A source that needs no answers."""

    def settle(self, receipts: object, refused: object, received: object) -> None:
        """It does not listen."""


async def test_the_journal_is_complete_up_to_the_oldest_message_that_is_open(tmp_path: Path) -> None:
    """What is written meanwhile is newer: its low-water mark says what may still come."""
    routes = "version: 1\nroutes: [{name: r, from: {endpoint: a, topic: '#'}, to: {endpoint: a, topic: b}}]"
    router = Router([parse(routes, "t.yaml")], {"a": "mqtt"})
    journaling = open_journal(Journal(enabled=True), tmp_path, router)
    held, gone = Kept(), Kept()
    marks = []
    now = clock.now()
    for ago, sink in ((3.0, held), (2.0, gone), (1.0, gone)):
        recipient = Recipient(sink, journaling.recorder(None, "a"))
        batch = RecordedBatch(Deaf(), Monotonic(now - ago), journaling.open_batches)
        batch.add_only(0, recipient, message())
        batch.record_source(message())
        batch.send()
        if sink is gone:
            sink.parts[-1].accept()
        marks.append(journaling.open_batches.oldest())
    assert marks == [now - 3.0] * 3
    journaling.writer.close()
    reader = JournalReader(tmp_path)
    first, second = (row["received"] for row in reader.rows("0") if not isinstance(row, Gap))
    mark = reader.low_water("0")
    assert mark is not None
    assert mark < first < second
