"""The join of a batch: a message is answered once, when its last recipient has settled, with its worst
outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.batch import Batch, Recipient, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict, worse_outcome
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address

ADDRESS: Final = topic_address("a/b")
RELEASED: Final = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN)
REJECTED: Final = Outcome(Verdict.REJECTED, Reason.NO_ROUTE)


class Answers:
    """A source that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, Outcome]] = []
        self.calls = 0

    def settle(self, receipts: list[object], refused: dict[int, Outcome] | None, received: float) -> None:
        assert received == 7.0
        assert refused is None or refused
        self.calls += 1
        for at, receipt in enumerate(receipts):
            self.told.append((receipt, (refused or {}).get(at, ACCEPTED)))

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        return []


class Kept:
    """A sink that keeps its parts for the test to settle."""

    def __init__(self) -> None:
        self.parts: list[SubBatch] = []

    def publish(self, part: SubBatch) -> None:
        self.parts.append(part)


def message(body: bytes = b"") -> Message:
    return Message(ADDRESS, body)


def sent(recipients: list[list[int]], sinks: list[Kept]) -> Answers:
    """Send a batch whose message n takes the sinks numbered in recipients[n]; receipts are the numbers n."""
    source = Answers()
    batch = Batch(source, Monotonic(7.0))
    named = [Recipient(sink) for sink in sinks]
    for receipt, numbers in enumerate(recipients):
        one = message(str(receipt).encode())
        if len(numbers) == 1:
            batch.add_only(receipt, named[numbers[0]], one)
            continue
        batch.add(receipt, [(named[number], one) for number in numbers])
    assert len(batch) == len(recipients)
    batch.send()
    return source


def test_a_part_is_accepted_whole_with_one_answer() -> None:
    sink = Kept()
    source = sent([[0], [0], [0]], [sink])
    (part,) = sink.parts
    assert [each.body for each in part.messages] == [b"0", b"1", b"2"]
    part.accept()
    assert source.told == [(0, ACCEPTED), (1, ACCEPTED), (2, ACCEPTED)]
    assert source.calls == 1


def test_a_message_waits_for_its_last_lane() -> None:
    sinks = [Kept(), Kept()]
    source = sent([[0, 1], [0]], sinks)
    sinks[0].parts[0].accept()
    assert source.told == [(1, ACCEPTED)]
    sinks[1].parts[0].accept()
    assert source.told == [(1, ACCEPTED), (0, ACCEPTED)]


@pytest.mark.parametrize("first", [ACCEPTED, RELEASED, REJECTED])
@pytest.mark.parametrize("second", [ACCEPTED, RELEASED, REJECTED])
def test_the_worst_outcome_wins(first: Outcome, second: Outcome) -> None:
    sinks = [Kept(), Kept()]
    source = sent([[0, 1]], sinks)
    sinks[0].parts[0].settle(first)
    sinks[1].parts[0].settle(second)
    assert source.told == [(0, max(first, second, key=lambda outcome: outcome.verdict))]


def test_of_two_equally_bad_outcomes_the_first_is_told() -> None:
    other = Outcome(Verdict.REJECTED, Reason.TOO_LARGE)
    assert worse_outcome(REJECTED, other) is REJECTED
    assert worse_outcome(other, REJECTED) is other


def test_a_part_settles_each_message_once_whatever_is_said_later() -> None:
    sink = Kept()
    source = sent([[0], [0], [0], [0]], [sink])
    part = sink.parts[0]
    part.settle_at([2, 0], RELEASED)
    part.settle_at([0, 1])
    part.settle(REJECTED)
    part.settle(ACCEPTED)
    part.settle_at([3])
    assert source.told == [(2, RELEASED), (0, RELEASED), (1, ACCEPTED), (3, REJECTED)]


def test_a_batch_that_is_settled_too_often_is_a_bug_that_shows() -> None:
    batch = Batch(Answers(), Monotonic(7.0))
    slot = batch.open("receipt", 1)
    batch.settle([slot])
    with pytest.raises(AssertionError, match="more often"):
        batch.settle([slot])


class Softening(Recipient):
    """A recipient that turns refusals into acceptance, as a route with dead letters does."""

    def __init__(self, sink: Kept) -> None:
        super().__init__(sink)
        self.on_its_way = 0
        self.seen: list[tuple[int, Outcome]] = []

    def count_sent(self, count: int) -> None:
        self.on_its_way += count

    def settle(self, part: SubBatch, messages: list[Message], slots: list[int], outcome: Outcome) -> None:
        self.on_its_way -= len(messages)
        self.seen.append((len(messages), outcome))
        part.batch.settle(slots, ACCEPTED)


@pytest.mark.interpreted
def test_a_lane_decides_what_the_source_hears() -> None:
    source, sink = Answers(), Kept()
    recipient = Softening(sink)
    batch = Batch(source, Monotonic(7.0))
    for receipt in range(3):
        batch.add_only(receipt, recipient, message())
    batch.send()
    assert recipient.on_its_way == 3
    sink.parts[0].settle_at([1], REJECTED)
    sink.parts[0].accept()
    assert recipient.on_its_way == 0
    assert recipient.seen == [(1, REJECTED), (2, ACCEPTED)]
    assert [outcome for _, outcome in source.told] == [ACCEPTED] * 3


def test_parts_go_out_in_the_order_in_which_lanes_were_named() -> None:
    order: list[int] = []

    class Noting(Kept):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def publish(self, part: SubBatch) -> None:
            order.append(self.number)

    sent([[2, 0], [1]], [Noting(0), Noting(1), Noting(2)])
    assert order == [2, 0, 1]


@given(
    recipients=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), min_size=1, max_size=12
    ),
    data=st.data(),
)
def test_every_receipt_comes_back_once_with_its_worst_outcome(
    recipients: list[list[int]], data: st.DataObject
) -> None:
    sinks = [Kept() for _ in range(4)]
    source = sent(recipients, sinks)
    outcomes = (ACCEPTED, RELEASED, REJECTED)
    expected: dict[int, Verdict] = {}
    left = [(sink, at) for sink in sinks for part in sink.parts for at in range(len(part.messages))]
    for sink, at in data.draw(st.permutations(left)):
        outcome = data.draw(st.sampled_from(outcomes))
        part = sink.parts[0]
        receipt = int(part.messages[at].body)
        expected[receipt] = max(expected.get(receipt, Verdict.ACCEPTED), outcome.verdict)
        part.settle_at([at], outcome)
    assert len(source.told) == len(recipients)
    assert {receipt: outcome.verdict for receipt, outcome in source.told} == expected


def test_a_message_is_doubted_that_was_refused_or_survives_no_restart() -> None:
    sinks = [Kept(), Kept()]
    sent([[0, 1], [0, 1], [0], [0, 1], [0, 1]], sinks)
    first, second = sinks[0].parts[0], sinks[1].parts[0]
    batch = first.batch
    assert batch.unaccepted_slots == []
    first.settle_at([0], REJECTED)
    batch.store_until_restart([1, 2, 3, 4])
    second.settle_at([1])  # in memory
    batch.store_until_restart([3])
    assert sorted(batch.unaccepted_slots) == [0, 1, 2, 3]
    batch.mark_refused([4])
    assert sorted(batch.unaccepted_slots) == [0, 1, 2, 3, 4]
