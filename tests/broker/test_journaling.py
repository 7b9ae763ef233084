"""What a batch remembers for the journal, and what its recipients tell."""

from __future__ import annotations

from typing import Any

from gateway.broker.journaling import RecipientRecorder, RecordedBatch
from gateway.model.address import Address
from gateway.model.batch import Recipient
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.store.journal.gathering import RowLabels
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


def test_a_message_is_known_by_its_slot_in_the_batch_that_came() -> None:
    """Also when another batch has passed it on, whose own slots are others."""
    noted, sink = Noted(), Kept()
    recipient = Recipient(sink, RecipientRecorder(noted, FACTS))  # type: ignore[arg-type]
    first = RecordedBatch(Answers(), 7.0)
    for receipt in range(12):
        first.open(receipt, 1)
        first.came(message(b"%d" % receipt))
    onward = first.onward(Answers())
    for origin in (4, 9, 11):
        onward.add_from(origin, None, [(recipient, message())])
    onward.send()
    sink.parts[-1].settle_at((0, 2))
    sink.parts[-1].accept()
    came = first.sources
    assert noted.told == [([came[4], came[11]], [4, 11]), ([came[9]], [9])]


def test_a_whole_part_is_told_without_slots() -> None:
    noted, sink = Noted(), Kept()
    recipient = Recipient(sink, RecipientRecorder(noted, FACTS))  # type: ignore[arg-type]
    batch = RecordedBatch(Answers(), 7.0)
    for receipt in range(3):
        batch.add_only(receipt, recipient, message())
    batch.send()
    sink.parts[-1].accept()
    assert noted.told == [(None, None)]
