"""Selectors that take longer than a pass of the event loop may: nothing is lost, overtaken or asked twice."""

from __future__ import annotations

import math

import pytest

from gateway.broker.amqpfast.destinations import PUT_OFF_MAX, Interest, TopicSubscription
from gateway.broker.amqpfast.selection import selection
from gateway.broker.amqpfast.selector import SelectorRefused
from gateway.broker.pressure import FULL, FullQueues
from gateway.broker.priorities import PriorityQueue
from gateway.broker.scheduler import CallScheduler
from gateway.broker.selection_work import SelectionWork
from gateway.mapping.conditions import Condition
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.protocols.amqpfast.dialect import fast_address
from tests.broker.parts import Answers, Taker, publish

ONE_A_PASS = 1e-9  # seconds: the first selector of a pass uses them up


class Passes:
    """The passes of an event loop: each evaluates one selector."""

    def __init__(self) -> None:
        self.alarms = CallScheduler()
        self.work = SelectionWork(self.alarms, ONE_A_PASS)

    def one(self) -> bool:
        """Make a pass; False: nothing was put off."""
        if not len(self.alarms):
            return False
        self.alarms.run_due(math.inf)
        return True

    def all(self) -> int:
        """Make passes until nothing is put off; returns how many."""
        count = 0
        while self.one():
            count += 1
            assert count < 10_000
        return count


class Asked:
    """A selector that counts how often it is asked; it selects even bodies."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, message: Message) -> bool:
        self.bodies.append(bytes(message.body))
        return int(message.body) % 2 == 0


@pytest.fixture
def passes() -> Passes:
    return Passes()


def messages(*numbers: int) -> list[Message]:
    return [Message(fast_address("topic", "t"), b"%d" % number) for number in numbers]


def subscription(passes: Passes, selects: Asked, *, may_hold: bool = True) -> TopicSubscription:
    return TopicSubscription(
        Interest("t", prefix=False, selector=b"x", selects=selects),
        messages_max=10_000,
        bytes_max=1 << 20,
        full_queues=FullQueues(lambda user: may_hold),
        work=passes.work,
    )


def test_a_subscription_goes_on_in_later_passes_in_order(passes: Passes) -> None:
    one, taker = subscription(passes, Asked()), Taker()
    one.add(taker)
    answers = publish(one, messages(0, 1, 2, 3))
    assert taker.bodies == [b"0"]
    assert [receipt for receipt, _ in answers.told] == [0]
    publish(one, messages(4, 5, 6), answers)  # waits behind
    assert taker.bodies == [b"0"]
    assert passes.all() >= 6
    assert taker.bodies == [b"0", b"2", b"4", b"6"]
    assert answers.outcomes == [ACCEPTED] * 7


def test_each_message_is_evaluated_once(passes: Passes) -> None:
    asked = Asked()
    one = subscription(passes, asked)
    publish(one, messages(*range(20)))
    passes.all()
    assert asked.bodies == [b"%d" % number for number in range(20)]
    assert len(one) == 10


def test_two_subscriptions_take_turns(passes: Passes) -> None:
    one, other = subscription(passes, Asked()), subscription(passes, Asked())
    publish(one, messages(*range(10)))
    publish(other, messages(*range(10)))
    passes.all()
    assert (len(one), len(other)) == (5, 5)


def test_a_subscription_that_ends_accepts_what_was_put_off(passes: Passes) -> None:
    one = subscription(passes, Asked())
    answers = publish(one, messages(0, 2, 4))
    one.delete()
    assert answers.outcomes == [ACCEPTED] * 3
    assert passes.all() < 3
    assert len(one) == 0


def test_publishers_are_held_while_much_is_put_off_and_then_go_on(passes: Passes) -> None:
    one, answers = subscription(passes, Asked()), Answers()
    publish(one, messages(*range(PUT_OFF_MAX + 2)), answers)
    assert not answers.held
    publish(one, messages(1), answers)
    assert len(answers.held) == 1
    passes.all()
    assert answers.released == 1
    assert len(answers.told) == PUT_OFF_MAX + 3


def test_who_cannot_be_held_is_refused_at_twice_as_much(passes: Passes) -> None:
    one, answers = subscription(passes, Asked()), Answers()
    publish(one, messages(*range(2 * PUT_OFF_MAX + 2)), answers)
    late = publish(one, messages(0))
    assert late.outcomes == [FULL]


def test_a_user_without_the_right_to_hold_loses_its_own_copies(passes: Passes) -> None:
    one = subscription(passes, Asked(), may_hold=False)
    publish(one, messages(*range(PUT_OFF_MAX + 2)))
    answers = publish(one, messages(0))
    assert answers.outcomes == [ACCEPTED]
    assert not answers.held
    passes.all()
    assert len(one) == PUT_OFF_MAX // 2 + 1


def test_what_a_client_published_itself_is_passed_over_in_later_passes_too(passes: Passes) -> None:
    one = subscription(passes, Asked())
    one.local = Sender("me", "me")
    own = Message(fast_address("topic", "t"), b"2", sender=one.local)
    publish(one, [*messages(0), own, *messages(4)])
    passes.all()
    assert len(one) == 2


# Queues.


def queue(passes: Passes) -> PriorityQueue:
    return PriorityQueue("q", lambda message: 0, work=passes.work)


def test_a_consumer_with_a_wish_gets_all_of_it_in_order(passes: Passes) -> None:
    one, asked, choosy = queue(passes), Asked(), Taker(100)
    one.add(choosy, asked)
    publish(one, messages(*range(10)))
    passes.all()
    assert choosy.bodies == [b"0", b"2", b"4", b"6", b"8"]
    assert asked.bodies == [b"%d" % number for number in range(10)]


def test_a_consumer_that_joins_a_long_queue_is_served_in_passes(passes: Passes) -> None:
    one, choosy = queue(passes), Taker(3)
    publish(one, messages(*range(20)))
    one.add(choosy, Asked())
    assert choosy.bodies == []
    passes.all()
    assert choosy.bodies == [b"0", b"2", b"4"]
    choosy.credit = 100
    one.dispatch()
    passes.all()
    assert len(choosy.bodies) == 10


def test_others_are_served_while_a_wish_is_put_off(passes: Passes) -> None:
    one, choosy, plain = queue(passes), Taker(100), Taker(100)
    one.add(choosy, Asked())
    one.add(plain)
    publish(one, messages(*range(10)))
    passes.all()
    assert sorted(choosy.bodies + plain.bodies) == [b"%d" % number for number in range(10)]
    assert all(int(body) % 2 == 0 for body in choosy.bodies)


def test_a_wish_is_not_asked_while_its_consumer_has_no_room(passes: Passes) -> None:
    one, asked, choosy, plain = queue(passes), Asked(), Taker(0), Taker(10_000)
    one.add(choosy, asked)
    one.add(plain)
    for _ in range(10):
        publish(one, messages(*range(1_000)))
    assert not asked.bodies
    assert len(plain.bodies) == 10_000
    assert len(one._selector_results[choosy].unseen) < 3_000  # what others have taken is forgotten


def test_a_purged_queue_asks_nothing(passes: Passes) -> None:
    one, asked, choosy = queue(passes), Asked(), Taker(100)
    one.add(choosy, asked)
    publish(one, messages(*range(10)))
    one.purge()
    before = len(asked.bodies)
    passes.all()
    assert len(asked.bodies) == before
    publish(one, messages(2))
    passes.all()
    assert choosy.bodies[-1] == b"2"


# Conditions as selectors.


def test_a_condition_of_a_client_may_take_less_than_one_of_the_operator() -> None:
    text = "[1,1,1,1,1,1,1].all(x, " * 4 + "true" + ")" * 4  # some 30 000 steps
    assert Condition(text, ())
    with pytest.raises(SelectorRefused, match="too many steps"):
        selection("application/cel", text.encode())


# Equal selectors.


def test_equal_selectors_are_one_and_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.broker.selection_work.REMEMBERED_SECS", 0.0)
    text = b"name LIKE '%a%b%'"
    found = selection("", text)
    assert found is not None
    assert selection("application/JMS", text) is found
    asked, work = Asked(), SelectionWork(CallScheduler())
    (message,) = messages(2)
    assert [work.selects(asked, message) for _ in range(300)] == [True] * 300
    assert len(asked.bodies) == 1
    assert work.selects(asked, messages(3)[0]) is False
