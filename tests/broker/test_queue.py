"""The queue: order, credit, requeueing in place, fairness, expiry, limits."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.broker.pressure import FULL, FullQueues
from gateway.broker.queue import DISPATCH_BYTES_MAX, DISPATCH_MESSAGES_MAX, Queue
from gateway.model.message import MESSAGE_BYTES, NEVER, Message, weight_of
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import PropertySet
from gateway.protocols.amqp091.dialect import amqp_address
from tests.broker.parts import SENDER, Answers, Taker, amqp, publish
from tests.idle import idle_report

MODEL_MAX = 4
PAST, FUTURE = time.time() - 60.0, time.time() + 3_600.0


def numbered(count: int, first: int = 0) -> list[Message]:
    """Bodies that say their number, and properties of various sizes."""
    return [
        Message(
            amqp_address("", "key"), b"%d" % number, PropertySet("amqp091", bytes(number % 7)), sender=SENDER
        )
        for number in range(first, first + count)
    ]


def filled(count: int) -> Queue:
    queue = Queue("q")
    publish(queue, numbered(count))
    return queue


def bodies(messages: list[tuple[int, Message, bool]]) -> list[bytes]:
    return [message.body for _, message, _ in messages]


def drained(queue: Queue) -> list[bytes]:
    found = []
    while (taken := queue.take()) is not None:
        found.append(taken[1].body)
    return found


def test_messages_are_accepted_at_once_and_wait_in_order() -> None:
    queue = Queue("q")
    assert publish(queue, numbered(3)).outcomes == [ACCEPTED] * 3
    publish(queue, numbered(2, 3))
    assert (len(queue), queue.byte_count) == (5, weight_of(numbered(5)))
    assert drained(queue) == [b"0", b"1", b"2", b"3", b"4"]
    assert (len(queue), queue.byte_count, queue.unacknowledged) == (0, 0, 5)
    queue.acknowledged(range(5))
    assert queue.unacknowledged == 0


def test_a_consumer_gets_what_waits_and_what_comes_as_far_as_its_credit_goes() -> None:
    queue, taker = filled(3), Taker(credit=4)
    queue.add(taker)
    publish(queue, numbered(3, 3))
    assert taker.bodies == [b"0", b"1", b"2", b"3"]
    assert [position for position, _, _ in taker.taken] == [0, 1, 2, 3]
    taker.credit = 1
    queue.dispatch()
    assert taker.bodies[-1] == b"4"
    assert len(queue) == 1


@pytest.mark.interpreted
def test_messages_that_are_set_aside_are_not_examined_before_the_first_expires() -> None:
    examined: list[int] = []

    class Examined(Queue):
        """One that notes which messages may have expired."""

        def _drop_expired(self, position: int, message: Message, utc: float) -> bool:
            examined.append(position)
            return super()._drop_expired(position, message, utc)

    queue, taker = Examined("q"), Taker(credit=9)
    lives = (FUTURE, NEVER, FUTURE - 60.0, FUTURE)
    publish(queue, [Message(amqp_address("", "key"), b"x", expires=one, sender=SENDER) for one in lives])
    queue.add(taker)
    for position, message, _ in taker.taken:
        queue.set_aside(taker, position, message, False)
    examined.clear()
    assert queue.take_aside(lambda message: False) is None
    assert (examined, len(queue)) == ([], 4)
    with patch("gateway.clock.utc", lambda: FUTURE - 30.0):
        assert queue.take_aside(lambda message: False) is None
        assert (examined, len(queue)) == ([0, 1, 2, 3], 3)
        assert queue.take_aside(lambda message: False) is None
        assert len(examined) == 4
    with patch("gateway.clock.utc", lambda: FUTURE + 30.0):
        queue.take_aside(lambda message: False)
        assert len(queue) == 1


def test_what_returns_comes_first_in_its_old_place_and_is_redelivered() -> None:
    queue = filled(6)
    taken = [queue.take() for _ in range(4)]
    back = [one for one in (taken[3], taken[1]) if one is not None]
    queue.requeue((position, message) for position, message, _ in back)
    taker = Taker()
    queue.add(taker)
    assert taker.bodies == [b"1", b"3", b"4", b"5"]
    assert [redelivered for _, _, redelivered in taker.taken] == [True, True, False, False]
    assert queue.unacknowledged == 6


def test_consumers_take_turns_one_message_each() -> None:
    queue = Queue("q")
    takers = [Taker(), Taker(), Taker()]
    for taker in takers:
        queue.add(taker)
    publish(queue, numbered(9))
    assert [len(taker.taken) for taker in takers] == [3, 3, 3]
    assert sorted(body for taker in takers for body in taker.bodies) == [str(n).encode() for n in range(9)]


def test_a_consumer_without_credit_loses_no_turn_to_the_others() -> None:
    queue = Queue("q")
    empty, hungry = Taker(credit=0), Taker()
    queue.add(empty)
    queue.add(hungry)
    publish(queue, numbered(5))
    assert (len(empty.taken), len(hungry.taken)) == (0, 5)


def test_one_consumer_is_given_a_bounded_run_at_a_time() -> None:
    queue, taker = filled(DISPATCH_MESSAGES_MAX + 5), Taker()
    queue.add(taker)
    assert taker.runs == [DISPATCH_MESSAGES_MAX, 5]


def test_a_run_is_bounded_in_bytes_too_and_nothing_is_lost_or_moved() -> None:
    queue, taker = Queue("q"), Taker()
    half = b"x" * (DISPATCH_BYTES_MAX // 2)
    messages = [amqp(half + bytes((n,))) for n in range(4)] + [amqp(half * 3), *numbered(2)]
    publish(queue, messages)
    queue.add(taker)
    assert taker.runs == [1, 1, 1, 1, 1, 2]
    assert taker.bodies == [message.body for message in messages]
    assert [position for position, _, _ in taker.taken] == list(range(7))
    assert queue.byte_count == 0


@pytest.mark.parametrize(
    "lives, kept",
    [
        ([PAST], []),
        ([PAST, FUTURE], [1]),
        ([FUTURE, PAST, FUTURE], [0, 2]),
        ([PAST, FUTURE, PAST, PAST, 0.0, PAST], [1, 4]),
        ([0.0, FUTURE], [0, 1]),
    ],
)
def test_what_has_expired_is_never_delivered(lives: list[float], kept: list[int]) -> None:
    gone: list[Message] = []
    queue, taker = Queue("q", expired=gone.append), Taker()
    publish(queue, [amqp(bytes((at,)), expires=expires) for at, expires in enumerate(lives)])
    queue.add(taker)
    assert taker.bodies == [bytes((at,)) for at in kept]
    assert len({position for position, _, _ in taker.taken}) == len(kept)
    assert len(gone) == len(lives) - len(kept)
    assert (len(queue), queue.byte_count, queue.unacknowledged) == (0, 0, len(kept))
    assert [position for position, _, _ in taker.taken] == kept  # where each was published


def test_take_passes_over_what_has_expired() -> None:
    queue = Queue("q")
    publish(queue, [amqp(b"old", expires=PAST), amqp(b"new")])
    assert drained(queue) == [b"new"]
    assert (queue.byte_count, queue.unacknowledged) == (0, 1)


def test_purge_drops_what_is_ready_and_nothing_else() -> None:
    queue = filled(4)
    taken = queue.take()
    assert taken is not None
    assert queue.purge() == 3
    assert (len(queue), queue.byte_count, queue.unacknowledged) == (0, 0, 1)
    queue.requeue([(taken[0], taken[1])])
    publish(queue, numbered(1, 9))
    assert drained(queue) == [b"0", b"9"]


def test_deleting_tells_the_consumers() -> None:
    queue, taker = filled(0), Taker(credit=0)
    queue.add(taker)
    publish(queue, numbered(2))
    assert queue.delete() == 2
    assert queue.deleted
    assert taker.gone == [queue]
    assert queue.consumers == []


def test_a_full_queue_holds_its_sources_then_refuses_and_lets_go_when_half_empty() -> None:
    full_queues = FullQueues()
    queue = Queue("q", messages_max=4, full_queues=full_queues)
    source = Answers()
    publish(queue, numbered(4), source)
    assert source.held == []
    publish(queue, numbered(4, 4), source)
    assert len(source.held) == 1
    assert source.outcomes == [ACCEPTED] * 8
    publish(queue, numbered(1, 8), source)
    assert source.outcomes[-1] is FULL
    assert (len(queue), full_queues.refused) == (8, 1)
    for _ in range(5):
        queue.take()
    assert source.released == 0
    queue.take()
    assert source.released == 1


def test_bytes_fill_a_queue_too() -> None:
    queue = Queue("q", bytes_max=10 + MESSAGE_BYTES)
    source = publish(queue, [amqp(b"x" * (20 + MESSAGE_BYTES))])
    assert publish(queue, [amqp(b"x")], source).outcomes == [ACCEPTED, FULL]


class QueueModel(RuleBasedStateMachine):
    """Whatever is done to a queue, messages keep their order and their number, and nothing waits for nothing.

    One consumer stays; it has no credit at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue("q", messages_max=MODEL_MAX)
        self.stays = Taker(0)
        self.queue.add(self.stays)
        self.ready: list[int] = []
        self.out: dict[int, tuple[int, Message]] = {}
        self.next = 0

    def teardown(self) -> None:
        """When all has been consumed and acknowledged nothing is left, and no publisher is held."""
        self.queue.requeue(list(self.out.values()))
        self.grant(1_000)
        self.queue.acknowledged([position for position, _, _ in self.stays.taken])
        assert idle_report(self.queue) == []
        assert (len(self.queue), self.queue.unacknowledged, bool(self.queue._pressure)) == (0, 0, False)

    @precondition(lambda self: len(self.ready) < 2 * MODEL_MAX)  # then the queue refuses
    @rule(count=st.integers(1, MODEL_MAX))
    def publish(self, count: int) -> None:
        publish(self.queue, numbered(count, self.next))
        self.ready += range(self.next, self.next + count)
        self.next += count

    @rule()
    def take(self) -> None:
        taken = self.queue.take()
        if not self.ready:
            assert taken is None
            return
        assert taken is not None
        number = int(taken[1].body)
        assert number == self.ready.pop(0)
        self.out[number] = (taken[0], taken[1])

    @rule(credit=st.integers(1, 4))
    def grant(self, credit: int) -> None:
        self.stays.credit += credit
        self.queue.dispatch()

    @rule(credit=st.integers(1, 4))
    def consume(self, credit: int) -> None:
        taker = Taker(credit)
        self.queue.add(taker)
        self.queue.remove(taker)
        for position, message, _ in taker.taken:
            assert int(message.body) == self.ready.pop(0)
            self.out[int(message.body)] = (position, message)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.out)))
        self.queue.requeue([self.out.pop(number)])
        self.queue.dispatch()
        self.ready = sorted([*self.ready, number])

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        position, _ = self.out.pop(data.draw(st.sampled_from(sorted(self.out))))
        self.queue.acknowledged((position,))

    @invariant()
    def counts_are_right_and_nothing_waits(self) -> None:
        for position, message, _ in self.stays.taken:
            assert int(message.body) == self.ready.pop(0)
            self.out[int(message.body)] = (position, message)
        self.stays.taken.clear()
        assert idle_report(self.queue) == []
        assert len(self.queue) == len(self.ready)
        assert self.queue.unacknowledged == len(self.out)
        assert self.queue.byte_count == weight_of(numbered(1, number)[0] for number in self.ready)


TestQueueModel = QueueModel.TestCase
TestQueueModel.settings = settings(max_examples=60, stateful_step_count=30)
