"""A durable queue against a model: order, counts, paging, and what is there after a crash."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.broker import storage
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.amqp091.dialect import amqp_address
from tests.broker.parts import SENDER, Answers, Taker, publish
from tests.store.parts import Disk, Opened

MEMORY_MAX = 5
PIECE_MAX = 3


class KeptQueueModel(RuleBasedStateMachine):
    """Bodies are numbers; `ready` holds those that the queue must hand out, in order.

    A crash loses what the last wake-up has not flushed: so messages that were not accepted may be there or
    not, and so may messages whose acknowledgement was not flushed. Everything else is certain.
    """

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._pieces = patch.object(storage, "PIECE_MESSAGES_MAX", PIECE_MAX)
        self._pieces.start()
        self.next = 0
        self.ready: list[int] = []
        self.out: dict[int, tuple[int, Message]] = {}
        self.durable: set[int] = set()
        self.answers: list[tuple[list[int], Answers]] = []
        self.acked_lately: set[int] = set()
        self.touched: set[int] = set()  # those that were handed out, or may have been
        self.open()

    def open(self) -> None:
        self.one = Opened(Path(self._folder.name))
        self.queue = Queue("q")
        log = self.one.store.log("queue", "q")
        QueueStorage(self.queue, self.one.store, log, MemoryLimits(MEMORY_MAX, 1 << 20))

    def teardown(self) -> None:
        try:
            self.one.until_idle(self.queue)
        finally:
            self.one.store.close()
            self._pieces.stop()
            self._folder.cleanup()

    @property
    def accepted(self) -> set[int]:
        return {
            numbers[receipt]
            for numbers, answers in self.answers
            for receipt, outcome in answers.told
            if outcome is ACCEPTED and isinstance(receipt, int)
        }

    @rule(on=st.booleans())
    def restrain(self, on: bool) -> None:
        self.queue.restrain(on)

    @rule(durable=st.lists(st.booleans(), min_size=1, max_size=6))
    def publish(self, durable: list[bool]) -> None:
        numbers = list(range(self.next, self.next + len(durable)))
        messages = [
            Message(amqp_address("", "q"), b"%d" % number, durable=one, sender=SENDER)
            for number, one in zip(numbers, durable, strict=True)
        ]
        self.next += len(durable)
        self.durable |= {number for number, one in zip(numbers, durable, strict=True) if one}
        self.ready += numbers
        self.answers.append((numbers, publish(self.queue, messages)))

    @rule()
    def take(self) -> None:
        while self.queue.loading:
            loaded: list[bool] = []
            assert self.queue.storage is not None
            self.queue.storage.when_loaded(partial(loaded.append, True))
            self.one.until(loaded.__len__)
        taken = self.queue.take()
        if not self.ready:
            assert taken is None
            return
        assert taken is not None
        number = int(taken[1].body)
        assert number == self.ready.pop(0)
        self.hand_out(taken)

    @rule(credit=st.integers(1, 9))
    def consume(self, credit: int) -> None:
        taker = Taker(credit)
        self.queue.add(taker)
        wanted = min(credit, len(self.ready))
        self.one.until(lambda: len(taker.taken) >= wanted)
        self.queue.remove(taker)
        for taken in taker.taken:
            assert int(taken[1].body) == self.ready.pop(0)
            self.hand_out(taken)

    def hand_out(self, taken: tuple[int, Message, bool]) -> None:
        position, message, redelivered = taken
        number = int(message.body)
        assert redelivered == (number in self.touched)
        self.touched.add(number)
        self.out[number] = (position, message)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.out)))
        self.queue.requeue([self.out.pop(number)])
        self.ready = sorted([*self.ready, number])

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.out)))
        position, _ = self.out.pop(number)
        self.queue.acknowledged((position,))
        self.acked_lately.add(number)

    @rule()
    def purge(self) -> None:
        assert self.queue.purge() == len(self.ready)
        self.acked_lately |= set(self.ready)
        self.ready.clear()

    @rule()
    def commit(self) -> None:
        told: list[Outcome] = []
        self.one.store.after_commit(told.append)
        self.one.until(lambda: told)
        assert told == [ACCEPTED]
        self.acked_lately.clear()
        assert self.durable & set(self.ready) <= self.accepted

    @rule()
    def crash(self) -> None:
        self.one.store._calls.clear()
        self.one.store.close()
        certain = sorted((set(self.ready) | set(self.out)) & self.durable & self.accepted)
        possible = set(self.ready) | set(self.out) | self.acked_lately
        self.open()
        self.touched |= possible
        found = self.take_all()
        assert found == sorted(found)
        assert set(certain) <= set(found) <= possible & self.durable

    @rule(times=st.integers(1, 3))
    def stop(self, times: int) -> None:
        """The end that is no crash: all is written, and what nobody was handed is known."""
        for _ in range(times):
            assert self.queue.storage is not None
            noted = self.queue.storage.undelivered_ranges()
            self.one.store.close()
            self.open()
            self.queue.storage.set_undelivered(noted)
        expected = sorted((set(self.ready) | set(self.out)) & self.durable)
        assert self.take_all() == expected

    def take_all(self) -> list[int]:
        """Hand out what an earlier process has left."""
        taker = Taker()
        self.queue.add(taker)
        while self.queue.loading:
            before = len(taker.taken)
            self.one.until(lambda: len(taker.taken) > before or not self.queue.loading)  # noqa: B023
        told: list[Outcome] = []
        self.one.store.after_commit(told.append)
        self.one.until(lambda: told)  # what has been read ahead is there, too
        self.queue.remove(taker)
        self.out = {}
        for taken in taker.taken:
            self.hand_out(taken)
        found = [int(message.body) for _, message, _ in taker.taken]
        self.ready = []
        self.acked_lately.clear()
        self.answers = [(found, _accepted(len(found)))]
        return found

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.queue) == len(self.ready)
        assert self.queue.unacknowledged == len(self.out)
        assert self.queue.byte_count == sum(len(str(number)) + MESSAGE_BYTES for number in self.ready)


def _accepted(count: int) -> Answers:
    answers = Answers()
    answers.told = [(receipt, ACCEPTED) for receipt in range(count)]
    return answers


TestKeptQueue = pytest.mark.needs("time")(KeptQueueModel.TestCase)
TestKeptQueue.settings = settings(max_examples=40, stateful_step_count=30)


@pytest.mark.parametrize("memory_messages_max", [0, 1, 10])
def test_a_purge_forgets_what_the_disk_refuses_afterwards(tmp_path: Path, memory_messages_max: int) -> None:
    """Once: the messages on disk alone, too."""
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        queue = Queue("q")
        log = one.store.log("queue", "q")
        limits = MemoryLimits(memory_messages_max, 1 << 20)
        QueueStorage(queue, one.store, log, limits)
        disk.fault = "disk is full"
        source = publish(queue, [_durable(b"purged")] * 3)
        assert queue.purge() == 3
        behind = publish(queue, [_durable(b"behind")])
        assert one.commit() is not ACCEPTED
        assert ACCEPTED not in (*source.outcomes, *behind.outcomes)
        assert (len(queue), queue.byte_count) == (0, 0)
        disk.fault = ""
        one.until_healthy(True)


def test_messages_that_were_read_while_the_disk_failed_are_loaded(tmp_path: Path) -> None:
    """Nothing else would read them for a `get`, which would wait for ever."""
    with Opened(tmp_path) as one:
        queue = Queue("q")
        log = one.store.log("queue", "q")
        kept = QueueStorage(queue, one.store, log, MemoryLimits(0, 1 << 20))
        publish(queue, [_durable(b"kept")])
        assert one.commit() is ACCEPTED
        one.store.gate.close()
        loaded: list[bool] = []
        kept.when_loaded(lambda: loaded.append(True))
        one.until(lambda: loaded)
        assert queue.loading  # not dispatched
        kept.when_loaded(lambda: loaded.append(True))
        assert loaded == [True, True]
        one.store.gate.open()
        taken = queue.take()
        assert taken is not None
        assert taken[1].body == b"kept"


@pytest.mark.parametrize("memory_messages_max", [1, 10])
@pytest.mark.parametrize("is_restrained", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_transient_message_on_disk_alone_is_accepted_with_its_commit(
    tmp_path: Path, memory_messages_max: int, is_restrained: bool, fails: bool
) -> None:
    """Nobody else has it: what the disk refuses is refused to its publisher."""
    disk = Disk()
    with Opened(tmp_path, factory=disk.factory()) as one:
        queue = Queue("q")
        log = one.store.log("queue", "q")
        limits = MemoryLimits(memory_messages_max, 1 << 20)
        kept = QueueStorage(queue, one.store, log, limits)
        assert one.commit() is ACCEPTED
        answers = publish(queue, [_transient(b"first")])
        assert answers.outcomes == [ACCEPTED]
        kept.restrained = is_restrained
        disk.fault = "disk is full" if fails else ""
        answers = publish(queue, [_transient(b"1"), _durable(b"2"), _transient(b"3")])
        in_memory = memory_messages_max > 1 and not is_restrained
        assert [receipt for receipt, _ in answers.told] == ([0, 2] if in_memory else [])
        one.commit()
        accepted = {receipt for receipt, outcome in answers.told if outcome is ACCEPTED}
        assert len(answers.told) == 3
        disk.fault = ""
        one.until(lambda: one.store.healthy)
        taker = Taker()
        queue.add(taker)
        one.until_idle(queue)
        assert {int(body) for body in taker.bodies[1:]} == {receipt + 1 for receipt in accepted}
        assert len(accepted) == (3 if not fails else 2 if in_memory else 0)


def _transient(body: bytes) -> Message:
    return Message(amqp_address("", "q"), body, durable=False, sender=SENDER)


def _durable(body: bytes) -> Message:
    return Message(amqp_address("", "q"), body, durable=True, sender=SENDER)


def test_a_message_keeps_its_position_behind_messages_that_the_disk_has_refused(tmp_path: Path) -> None:
    """Otherwise its acknowledgement settles another position, and it is delivered again after a restart."""
    disk = Disk()
    limits = MemoryLimits(2, 1 << 20)
    with Opened(tmp_path, factory=disk.factory()) as one:
        queue = Queue("q")
        kept = QueueStorage(queue, one.store, one.store.log("queue", "q"), limits)
        publish(queue, [_durable(b"0"), _durable(b"1")])
        publish(queue, [_durable(b"on disk alone")])
        assert one.commit() is ACCEPTED
        disk.fault = "disk is full"
        publish(queue, [_durable(b"refused")])
        assert one.commit() is not ACCEPTED
        disk.fault = ""
        one.until_healthy(True)
        taken = [queue.take(), queue.take()]
        loaded: list[bool] = []
        kept.when_loaded(lambda: loaded.append(True))
        one.until(lambda: loaded)
        publish(queue, [_durable(b"new")])
        assert one.commit() is ACCEPTED
        taken.append(queue.take())
        if queue.loading:
            loaded.clear()
            kept.when_loaded(lambda: loaded.append(True))
            one.until(lambda: loaded)
        taken.append(queue.take())
        rows = [row for row in taken if row is not None]
        assert [row[1].body for row in rows] == [b"0", b"1", b"on disk alone", b"new"]
        queue.acknowledged([row[0] for row in rows])
        assert one.commit() is ACCEPTED
    with Opened(tmp_path) as one:
        queue = Queue("q")
        QueueStorage(queue, one.store, one.store.log("queue", "q"), limits)
        assert len(queue) == 0
