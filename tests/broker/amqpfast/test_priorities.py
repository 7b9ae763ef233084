"""The queue with priorities and wishes, against a plain list that is sorted anew each time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Queue
from gateway.model.message import Message, weight_of
from gateway.model.properties import Properties, property_set
from gateway.protocols.amqpfast.dialect import fast_address
from tests.idle import idle_report

SETS = {level: property_set(Properties(priority=level)) for level in range(10)}


def message(level: int, body: bytes = b"x", *, expires: float = 0.0) -> Message:
    return Message(fast_address("queue", "q"), body, SETS[level], expires=expires)


def queue() -> PriorityQueue:
    return PriorityQueue("q", lambda one: one.properties.priority or 0)


class Taker:
    """A consumer with credit, and what it got: (position, body, redelivered)."""

    def __init__(self, credit: int = 0) -> None:
        self.credit = credit
        self.got: list[tuple[int, bytes, bool]] = []
        self.taken: list[tuple[int, Message]] = []
        self.runs = 0

    def capacity(self) -> int:
        return self.credit

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        self.runs += 1
        self.credit -= len(messages)
        for at, one in enumerate(messages, position):
            self.got.append((at, one.body, redelivered))
            self.taken.append((at, one))

    def handle_error(self, error: Exception) -> None:
        raise error

    def cancelled(self, queue: Queue) -> None:
        self.credit = 0

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body, _ in self.got]


def fill(to: PriorityQueue, *levels: int) -> None:
    for number, level in enumerate(levels):
        to.put([message(level, b"%d" % number)])
    to.dispatch()


def test_one_priority_is_handed_out_in_runs() -> None:
    one, taker = queue(), Taker(100)
    one.put([message(7) for _ in range(100)])
    one.add(taker)
    assert (taker.runs, len(taker.got)) == (1, 100)
    one.put([message(3)])  # the queue is empty: another one priority
    taker.credit = 10
    one.dispatch()
    assert taker.got[-1][0] == 100


def test_higher_first_and_in_order_of_arrival() -> None:
    one, taker = queue(), Taker(100)
    fill(one, 0, 5, 9, 5, 0, 9)
    assert len(one) == 6
    one.add(taker)
    assert taker.bodies == [b"2", b"5", b"1", b"3", b"0", b"4"]
    assert [position for position, _, _ in taker.got] == [2, 5, 1, 3, 0, 4]
    assert (len(one), one.byte_count, one.unacknowledged) == (0, 0, 6)


def test_what_returns_is_in_its_place_again() -> None:
    one, taker = queue(), Taker(3)
    fill(one, 0, 5, 0, 9)
    one.add(taker)
    assert taker.bodies == [b"3", b"1", b"0"]
    one.requeue(taker.taken)
    taker.got.clear()
    taker.credit = 4
    one.dispatch()
    assert taker.got == [(3, b"3", True), (1, b"1", True), (0, b"0", True), (2, b"2", False)]


def test_a_wish_takes_from_the_middle_and_leaves_the_order() -> None:
    one, choosy, other = queue(), Taker(10), Taker()
    one.add(other)
    one.add(choosy, lambda found: int(found.body) % 2 == 1)
    fill(one, 0, 0, 0, 5, 0)
    assert choosy.bodies == [b"3", b"1"]
    other.credit = 10
    one.dispatch()
    assert other.bodies == [b"0", b"2", b"4"]
    one.remove(choosy)
    one.put([message(0, b"9")])
    one.dispatch()
    assert other.bodies[-1] == b"9"


def test_what_was_given_back_goes_to_somebody_else_if_there_is_one() -> None:
    one, first, second = queue(), Taker(1), Taker()
    one.add(first)
    one.add(second)
    fill(one, 0)
    one.return_unfit(*first.taken[0], first)
    first.credit = 5
    one.dispatch()
    assert first.bodies == [b"0"]  # it waits for the other
    second.credit = 1
    one.dispatch()
    assert second.got == [(0, b"0", True)]
    one.return_unfit(*second.taken[0], second)
    one.dispatch()
    assert first.got[-1] == (0, b"0", True)
    one.return_unfit(*first.taken[-1], first)
    one.remove(second)
    assert len(first.got) == 3


def test_purge_withdraw_take_and_browse() -> None:
    one = queue()
    fill(one, 0, 5, 0)
    assert [body for _, body in [(at, found.body) for at, found in one.browse()]] == [b"1", b"0", b"2"]
    found = one.peek(2)
    assert found is not None
    assert found.body == b"2"
    one.remove_refused(2, 1)
    assert one.peek(2) is None
    assert (len(one), one.byte_count) == (2, weight_of(found for _, found in one.browse()))
    taken = one.take()
    assert taken is not None
    assert (taken[0], taken[1].body, taken[2]) == (1, b"1", False)
    assert one.purge() == 1
    assert (len(one), one.byte_count, one.take()) == (0, 0, None)


@pytest.mark.parametrize("levels", [(0, 0, 0, 0), (0, 5, 0, 0)])
def test_a_queue_may_change_while_it_is_browsed(levels: tuple[int, ...]) -> None:
    one = queue()
    fill(one, *levels)
    browsing = one.browse()
    position, found = next(browsing)
    assert found.body == (b"1" if any(levels) else b"0")
    one.remove_refused(position, 1)
    one.put([message(9, b"new")])
    assert [found.body for _, found in browsing] == [b"0" if any(levels) else b"1", b"2", b"3"]


def test_what_a_choosy_consumer_returned_is_browsed_once() -> None:
    one, choosy = queue(), Taker(10)
    one.add(choosy, lambda found: int(found.body) % 2 == 1)
    fill(one, 0, 0, 5, 0)
    assert choosy.bodies == [b"1", b"3"]
    one.requeue(choosy.taken)
    assert [found.body for _, found in one.browse()] == [b"2", b"0", b"1", b"3"]


def test_expired_messages_are_dropped_wherever_they_wait() -> None:
    one, taker = queue(), Taker(10)
    one.put([message(0, b"a"), message(5, b"b", expires=1.0), message(0, b"c", expires=1.0)])
    assert [found.body for _, found in one.browse()] == [b"a"]
    one.add(taker)
    assert taker.bodies == [b"a"]
    assert (len(one), one.byte_count) == (0, 0)


WISHES: list[Callable[[Message], bool] | None] = [None, lambda one: one.body[-1] % 2 == 0]


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_operations_loses_and_doubles_nothing(seed: int) -> None:
    chance = random.Random(seed)
    one = queue()
    takers = [Taker(), Taker(), Taker()]
    for taker in takers:
        one.add(taker, chance.choice(WISHES))
    sent: list[bytes] = []
    done: list[bytes] = []
    for _ in range(300):
        step = chance.randrange(4)
        taker = chance.choice(takers)
        if step == 0:
            level = chance.choice((0, 0, 0, 4, 9))
            batch = [message(level, b"%d" % (len(sent) + at)) for at in range(chance.randrange(1, 4))]
            sent += [found.body for found in batch]
            one.put(batch)
        elif step == 1:
            taker.credit = chance.randrange(4)
        elif step == 2 and taker.taken:
            one.requeue([taker.taken.pop(chance.randrange(len(taker.taken)))])
        elif step == 3 and taker.taken:
            position, found = taker.taken.pop(chance.randrange(len(taker.taken)))
            if chance.random() < 0.3:
                one.return_unfit(position, found, taker)
            else:
                one.acknowledged([position])
                done.append(found.body)
        one.dispatch()
        held = [found.body for each in takers for _, found in each.taken]
        waiting = [found for _, found in one.browse()]
        waits = [found.body for found in waiting]
        assert sorted(done + held + waits) == sorted(sent)
        assert idle_report(one) == []
        assert (len(one), one.unacknowledged) == (len(waits), len(held))
        assert one.byte_count == weight_of(waiting)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_what_is_set_aside_is_browsed_and_looked_at(is_sorted: bool) -> None:
    """One client's frames are too small for it; another may read it."""
    one, taker = queue(), Taker(1)
    one.put([message(0, b"large")])
    one.add(taker, (lambda found: True) if is_sorted else None)
    one.set_aside(taker, *taker.taken[0], False)
    ((position, browsed),) = one.browse()
    assert one.peek(position) is browsed
