"""In which order a connection asks for consumers of queues, and for their end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gateway import clock
from gateway.engine.consumers import CHECKS_MAX, LOOKS_MIN, REMOVING_MAX, Consumers
from gateway.model.properties import Value, ValueType
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import encode_short_string


class Machine:
    """Writes down what is asked on which channel."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, m.Method]] = []
        self.nacked: list[tuple[int, int]] = []

    def send_method(self, channel: int, method: m.Method) -> None:
        self.asked.append((channel, method))

    def nack(self, channel: int, tag: int, *, requeue: bool) -> None:
        assert requeue
        self.nacked.append((channel, tag))

    def of(self, kind: type[m.Method]) -> list[tuple[int, m.Method]]:
        return [one for one in self.asked if isinstance(one[1], kind)]


class Asking:
    """A connection whose cluster answers when the test says so."""

    def __init__(self) -> None:
        self.written = Machine()
        self.machine = cast(ClientConnection, self.written)
        self.channels = 0
        self.ready: list[Any] = []  # whose queues replies need not wait for any more
        self.asked: list[m.Method] = []  # of declarations

    def wake(self) -> None:
        pass

    def declare(self, method: m.Method, done: Any = None, consumer: Any = None) -> None:
        self.asked.append(method)
        if done is not None:
            done()

    def open_channel(self) -> int:
        self.channels += 1
        return self.channels

    def handle_queue_ready(self, target: Any) -> None:
        self.ready.append(target)


class Queue:
    """One that is there."""

    queue = "q"
    prefetch = 10
    arguments = ()
    fresh = False
    keys = ()

    needs_queue = True
    is_awaited = False
    keeps_order = True

    def __init__(self) -> None:
        self.unbound: dict[str, Any] = {}
        self.confirming: list[Any] = []

    def confirm(self, done: Any) -> None:
        self.confirming.append(done)

    def deliver(self, *_: Any) -> None:
        pass

    def set_backlog(self, count: int) -> None:
        pass

    def unreachable(self) -> None:
        pass


@pytest.fixture(autouse=True)
def passing(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed."""
    passed = [0.0]
    monkeypatch.setattr(clock, "now", lambda: Monotonic(passed[0]))
    return passed


@pytest.fixture
def asking() -> Asking:
    return Asking()


@pytest.fixture
def consumers(asking: Asking) -> Consumers:
    made = Consumers(asking, "x")
    made.open()
    return made


def consumed(consumers: Consumers, asking: Asking) -> tuple[Queue, int, str]:
    """A queue that is asked for, with the channel and the name of its consumer."""
    queue = Queue()
    consumers.begin(queue)
    checking, _ = asking.written.of(m.QueueDeclare)[0]
    consumers.process_method(checking, m.QueueDeclareOk("q"))
    ((channel, method),) = asking.written.of(m.BasicConsume)
    assert isinstance(method, m.BasicConsume)
    return queue, channel, method.consumer_tag


def test_it_is_not_cancelled_before_the_cluster_consumes(consumers: Consumers, asking: Asking) -> None:
    """RabbitMQ 3.10 ends the connection over that (541)."""
    queue, channel, name = consumed(consumers, asking)
    freed: list[str] = []
    consumers.end(queue, lambda given_back: freed.append(f"then {len(given_back)}"))
    assert not asking.written.of(m.BasicCancel)
    consumers.process_method(channel, m.BasicConsumeOk(name))
    assert asking.written.of(m.BasicCancel) == [(channel, m.BasicCancel(name))]
    assert not freed
    consumers.process_method(channel, m.BasicCancelOk(name))
    assert freed == ["then 0"]
    assert not consumers.consumes(queue)


def test_nor_when_it_is_to_be_consumed_with_other_credit(consumers: Consumers, asking: Asking) -> None:
    queue, channel, name = consumed(consumers, asking)
    queue.prefetch = 20
    consumers.renew(queue)
    queue.prefetch = 30
    consumers.renew(queue)
    assert not asking.written.of(m.BasicCancel)
    names = [method.consumer_tag for _, method in asking.written.of(m.BasicConsume)]  # type: ignore[attr-defined]
    assert len(set(names)) == 3
    for one in names:
        consumers.process_method(channel, m.BasicConsumeOk(one))
    cancelled = [method.consumer_tag for _, method in asking.written.of(m.BasicCancel)]  # type: ignore[attr-defined]
    assert cancelled == names[:2]
    assert name == names[0]


def test_a_queue_is_not_free_while_something_may_still_come(consumers: Consumers, asking: Asking) -> None:
    """No credit, then no client: what was on its way meanwhile was nobody's until the connection ended."""
    queue, channel, name = consumed(consumers, asking)
    consumers.process_method(channel, m.BasicConsumeOk(name))
    queue.prefetch = 0
    consumers.renew(queue)
    freed: list[str] = []
    consumers.end(queue, lambda given_back: freed.append(f"then {len(given_back)}"))
    consumers.end(queue, lambda count: freed.append("and then"))
    consumers.delivered(channel, encode_short_string(name), 7, False, (b"", b"", b"late"))
    assert not freed
    assert not asking.written.nacked
    consumers.process_method(channel, m.BasicCancelOk(name))
    checking, _ = asking.written.of(m.QueueDeclare)[-1]
    consumers.process_method(checking, m.QueueDeclareOk("q", 0, 0))
    assert asking.written.nacked == [(channel, 7)]
    assert not freed  # until the queue has it again
    looks(consumers, checking, 1)
    assert freed == ["then 1", "and then"]


def looks(consumers: Consumers, checking: int, count: int) -> None:
    """The queue is looked at as often as it takes, and has so many messages."""
    for _ in range(LOOKS_MIN):
        consumers.process_method(checking, m.QueueDeclareOk("q", count, 0))


def returning(consumers: Consumers, asking: Asking, ready: int, held: int) -> tuple[list[str], int, int, str]:
    """A consumer is over that held so many messages, while others were ready in the queue: who hears of it,
    the channel on which the queue is looked at, and where it was consumed, under which name."""
    queue, channel, name = consumed(consumers, asking)
    consumers.process_method(channel, m.BasicConsumeOk(name))
    for tag in range(1, held + 1):
        consumers.delivered(channel, encode_short_string(name), tag, False, (b"", b"", b"x"))
    freed: list[str] = []
    consumers.end(queue, lambda given_back: freed.append(f"then {len(given_back)}"))
    consumers.process_method(channel, m.BasicCancelOk(name))
    checking, _ = asking.written.of(m.QueueDeclare)[-1]
    consumers.process_method(checking, m.QueueDeclareOk("q", ready, 0))
    assert len(asking.written.nacked) == min(held, 16)
    return freed, checking, channel, name


def test_a_queue_is_given_back_as_many_at_a_time_as_it_keeps_in_order(
    consumers: Consumers, asking: Asking
) -> None:
    freed, checking, channel, name = returning(consumers, asking, ready=3, held=35)
    looks(consumers, checking, 18)
    assert len(asking.written.nacked) == 16
    consumers.process_method(checking, m.QueueDeclareOk("q", 19, 0))
    assert len(asking.written.nacked) == 32
    consumers.process_method(checking, m.QueueDeclareOk("q", 55, 0))
    assert len(asking.written.nacked) == 32, "others may have published as many"
    consumers.delivered(channel, encode_short_string(name), 36, False, (b"", b"", b"late"))
    assert len(asking.written.nacked) == 32, "what is late goes back behind the rest"
    looks(consumers, checking, 55)
    assert [tag for _, tag in asking.written.nacked] == list(range(1, 37))
    assert not freed
    looks(consumers, checking, 59)
    assert freed == ["then 36"]
    consumers.delivered(channel, encode_short_string(name), 37, False, (b"", b"", b"later"))
    assert asking.written.nacked[-1] == (channel, 37)


def test_a_shared_queue_is_given_back_all_at_once(consumers: Consumers, asking: Asking) -> None:
    """Other consumers of it change the count: while they are busy the rest would never go back."""
    queue, channel, name = consumed(consumers, asking)
    queue.keeps_order = False
    tags = list(range(1, 41))
    for tag in tags:
        consumers.delivered(channel, encode_short_string(name), tag, False, (b"", b"", b""))
    told: list[Any] = []
    consumers.end(cast(Any, queue), told.append)
    consumers.process_method(channel, m.BasicCancelOk(name))
    assert asking.written.nacked == [(channel, tag) for tag in tags]
    assert len(told) == 1
    assert not consumers.consumes(cast(Any, queue))


def test_one_that_takes_none_is_given_all(consumers: Consumers, asking: Asking, passing: list[float]) -> None:
    freed, checking, _, _ = returning(consumers, asking, ready=3, held=35)
    for _ in range(200):
        consumers.process_method(checking, m.QueueDeclareOk("q", 3, 0))
    passing[0] += 2.1
    consumers.process_method(checking, m.QueueDeclareOk("q", 3, 0))
    assert len(asking.written.nacked) == 35
    assert freed == ["then 35"]


def test_a_queue_that_takes_its_time_is_waited_for(
    consumers: Consumers, asking: Asking, passing: list[float]
) -> None:
    """However often it has been looked at: what it does not have yet another owner would take to be over."""
    freed, checking, _, _ = returning(consumers, asking, ready=84, held=16)
    for count in (84, 97):
        for _ in range(500):
            consumers.process_method(checking, m.QueueDeclareOk("q", count, 0))
        passing[0] += 1.9
        consumers.process_method(checking, m.QueueDeclareOk("q", count, 0))
        assert not freed
    looks(consumers, checking, 100)
    assert freed == ["then 16"]


def test_one_that_has_no_room_is_not_waited_for(
    consumers: Consumers, asking: Asking, passing: list[float]
) -> None:
    freed, checking, _, _ = returning(consumers, asking, ready=84, held=16)
    for _ in range(200):
        consumers.process_method(checking, m.QueueDeclareOk("q", 90, 0))
    passing[0] += 2.1
    consumers.process_method(checking, m.QueueDeclareOk("q", 90, 0))
    assert freed == ["then 16"]


def test_nor_is_one_that_is_full(
    consumers: Consumers, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (("x-max-length", Value(ValueType.INT64, 86)),)
    monkeypatch.setattr(Queue, "arguments", arguments)
    freed, checking, _, _ = returning(consumers, asking, ready=84, held=16)
    assert not freed
    looks(consumers, checking, 86)
    assert freed == ["then 16"]


def test_what_comes_for_nobody_goes_back(consumers: Consumers, asking: Asking) -> None:
    _, channel, _ = consumed(consumers, asking)
    consumers.delivered(channel, encode_short_string("another"), 7, False, (b"", b"", b"x"))
    assert asking.written.nacked == [(channel, 7)]


def test_what_the_cluster_cancels_itself_is_not_cancelled(consumers: Consumers, asking: Asking) -> None:
    queue, channel, name = consumed(consumers, asking)
    freed: list[str] = []
    consumers.end(queue, lambda given_back: freed.append(f"then {len(given_back)}"))
    consumers.process_method(channel, m.BasicCancel(name))
    assert freed == ["then 0"]
    consumers.process_method(channel, m.BasicConsumeOk(name))
    assert not asking.written.of(m.BasicCancel)
    assert freed == ["then 0"]


def missing(consumers: Consumers, asking: Asking) -> Queue:
    """A queue that is not there when it is looked for."""
    queue = Queue()
    consumers.begin(queue)
    ((checking, _),) = asking.written.of(m.QueueDeclare)
    assert consumers.handle_channel_closed(checking, "NOT_FOUND - no queue 'q'")
    return queue


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_missing_queue_is_declared_if_the_session_is_still_ours(
    consumers: Consumers, asking: Asking, is_ours: bool
) -> None:
    """Another owner may have deleted it, and its notice be on its way."""
    queue = missing(consumers, asking)
    assert not [one for one in asking.asked if isinstance(one, m.QueueDeclare)]
    queue.unbound["a.b"] = (True, lambda: None)
    consumers.bind(queue, "a.b")
    assert not [one for one in asking.asked if isinstance(one, m.QueueBind)], "it is not there"
    (confirm,) = queue.confirming
    confirm(is_ours)
    declared = [one for one in asking.asked if isinstance(one, m.QueueDeclare) and not one.passive]
    bound = [one for one in asking.asked if isinstance(one, m.QueueBind)]
    assert (len(declared), len(bound)) == ((1, 1) if is_ours else (0, 0))
    assert consumers.consumes(queue) is is_ours


@pytest.mark.parametrize("how", ["deleted", "deleted after it was checked", "refused", "ended"])
def test_replies_wait_until_a_shared_queue_is_consumed_again(
    consumers: Consumers, asking: Asking, how: str
) -> None:
    """A queue with a consumer is not deleted by other replicas, and what is published then is in it."""
    queue = Queue()
    queue.is_awaited = True
    consumers.begin(queue)
    checked = m.QueueDeclareOk("q", 0, 0)
    ((checking, _),) = asking.written.of(m.QueueDeclare)
    consumers.process_method(checking, checked)
    ((channel, consume),) = asking.written.of(m.BasicConsume)
    assert isinstance(consume, m.BasicConsume)
    assert consumers.is_pending(queue)
    consumers.process_method(channel, m.BasicConsumeOk(consume.consumer_tag))
    assert not consumers.is_pending(queue)
    consumers.process_method(channel, m.BasicCancel(consume.consumer_tag))
    assert consumers.is_pending(queue)
    asking.ready.clear()
    if how == "deleted":
        assert consumers.handle_channel_closed(checking, "NOT_FOUND - no queue 'q'")
        (confirm,) = queue.confirming
        confirm(True)
    else:
        consumers.process_method(checking, checked)
    consumer = consumers._consumers[queue]
    assert consumers.is_pending(queue)
    if how == "deleted after it was checked":
        (*_, (channel, _)) = asking.written.of(m.BasicConsume)
        assert consumers.handle_channel_closed(channel, "NOT_FOUND - no queue 'q'")
        assert consumers.is_pending(queue)
        consumers.process_method(checking, checked)
        assert consumers.is_pending(queue)
    elif how == "refused":
        queue.refuse = lambda why: None  # type: ignore[attr-defined]
        consumers.refuse(consumer, "ACCESS_REFUSED")
    elif how == "ended":
        consumers.end(queue, None)
    if how != "refused":
        (*_, (channel, consume)) = asking.written.of(m.BasicConsume)
        assert isinstance(consume, m.BasicConsume)
        consumers.process_method(channel, m.BasicConsumeOk(consume.consumer_tag))
    assert not consumers.is_pending(queue)
    assert asking.ready == [queue]


@pytest.mark.parametrize("what", ["ended", "lost"])
def test_nothing_is_declared_for_who_has_gone_meanwhile(
    consumers: Consumers, asking: Asking, what: str
) -> None:
    queue = missing(consumers, asking)
    freed: list[str] = []
    if what == "ended":
        consumers.end(queue, lambda given_back: freed.append("freed"))
    else:
        consumers.drop_all()
    (confirm,) = queue.confirming
    confirm(True)
    assert not [one for one in asking.asked if isinstance(one, m.QueueDeclare) and not one.passive]
    assert freed == (["freed"] if what == "ended" else [])
    assert not consumers.consumes(queue)


def test_a_queue_that_cannot_be_deleted_costs_a_channel(consumers: Consumers, asking: Asking) -> None:
    """RabbitMQ closes the channel over a classic queue whose node is lost; others are deleted anyway."""
    gone: list[str] = []
    for name in ("lost", "there"):
        consumers.delete(name, lambda name=name: gone.append(name))  # type: ignore[misc]
    checking, _ = asking.written.of(m.QueueDelete)[0]
    assert consumers.handle_channel_closed(
        checking, "NOT_FOUND - home node of durable queue is down or inaccessible"
    )
    consumers.use_channel(asking.channels)
    assert asking.written.of(m.QueueDelete)[-1] == (asking.channels, m.QueueDelete("there"))
    consumers.process_method(asking.channels, m.QueueDeleteOk(0))
    assert gone == ["there"]


@pytest.mark.parametrize("state", ["consuming", "cancelling", "returning"])
def test_a_channel_that_the_cluster_closes_is_replaced(
    consumers: Consumers, asking: Asking, state: str
) -> None:
    """It does so over a message that is not acknowledged for long, and has requeued all of the channel."""
    queue, channel, name = consumed(consumers, asking)
    consumers.process_method(channel, m.BasicConsumeOk(name))
    consumers.delivered(channel, encode_short_string(name), 7, False, (b"", b"", b"x"))
    freed: list[str] = []
    if state != "consuming":
        consumers.end(queue, lambda given_back: freed.append(f"then {len(given_back)}"))
    if state == "returning":
        consumers.process_method(channel, m.BasicCancelOk(name))
    consumers.acknowledge(channel, 8)
    assert consumers.handle_channel_closed(
        channel, "PRECONDITION_FAILED - delivery acknowledgement timed out"
    )
    assert freed == ([] if state == "consuming" else ["then 1"])
    checking, _ = asking.written.of(m.QueueDeclare)[0]
    consumers.process_method(checking, m.QueueDeclareOk("q", 1, 0))
    consumers.flush()  # the number of the channel may be another's by now
    assert not asking.written.nacked
    again = [at for at, _ in asking.written.of(m.BasicConsume)[1:]]
    assert len(again) == (state == "consuming")
    assert not {channel, asking.channels} & {*again}
    assert consumers.use_channel(asking.channels)


def test_some_queues_are_looked_for_at_a_time(consumers: Consumers, asking: Asking) -> None:
    """Behind one that is missing, all that were sent are sent again."""
    queues = [Queue() for _ in range(2 * CHECKS_MAX)]
    for queue in queues:
        consumers.begin(queue)
    for _ in queues:
        checking, _ = asking.written.of(m.QueueDeclare)[-1]
        assert consumers.handle_channel_closed(checking, "NOT_FOUND - no queue 'q'")
        consumers.use_channel(asking.channels)
    assert len(asking.written.of(m.QueueDeclare)) <= (2 * len(queues) + 1) * CHECKS_MAX
    assert all(queue.confirming for queue in queues)


@pytest.mark.parametrize("begins", ["before", "after", "never"])
def test_an_unused_queue_that_is_consumed_meanwhile_is_not_deleted(
    consumers: Consumers, asking: Asking, begins: str
) -> None:
    """The deletion would end the connection (541), or the consumer after its client was answered."""
    target = cast(Any, Queue())
    checking = asking.written.asked
    consumers.remove("q")
    if begins == "before":
        consumers.begin(target)
    channel = checking[0][0]
    consumers.process_method(channel, m.QueueDeclareOk("q", 0, 0))
    deleted = len(asking.written.of(m.QueueDelete))
    if begins == "after":  # behind the deletion on the same channel, so it is not found, and declared
        consumers.begin(target)
        kinds = [type(method) for number, method in asking.written.asked if number == channel]
        assert kinds == [m.QueueDeclare, m.QueueDelete, m.QueueDeclare]
    assert deleted == (begins != "before")


def test_some_queues_are_deleted_at_a_time(consumers: Consumers, asking: Asking) -> None:
    """Behind one that cannot be deleted, all that were sent are sent again."""
    gone: list[int] = []
    for number in range(REMOVING_MAX + 5):
        consumers.delete(str(number), lambda number=number: gone.append(number))  # type: ignore[misc]
    assert len(asking.written.of(m.QueueDelete)) == REMOVING_MAX
    for _ in range(REMOVING_MAX + 5):
        checking, _ = asking.written.of(m.QueueDelete)[-1]
        consumers.process_method(checking, m.QueueDeleteOk(0))
    assert gone == list(range(REMOVING_MAX + 5))
