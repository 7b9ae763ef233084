"""What a session makes of what comes twice from its queue."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, cast

import pytest

from gateway import clock
from gateway.broker.mqtt.session import (
    Grant,
    OutgoingPublish,
    SessionLimits,
    SessionTally,
    SubscriptionOptions,
)
from gateway.engine.client_session import SPARE, ClientSession, ClusterOrigin, SessionChange
from gateway.engine.consumers import ClusterConsumer, Consumers, Content
from gateway.engine.envelope import ENGINE, ENGINE_OTHER, Number
from gateway.engine.requeue_order import fingerprint_of
from gateway.engine.stored_values import encode_options
from gateway.engine.walks import SentRetained
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.times import Monotonic
from gateway.protocols.mqtt.dialect import topic_address
from gateway.state.interface import OUTGOING, Contents, Owner, Packet
from tests.engine.messages import message_of

LIFE: Final = b"12345678"
OWNER: Final = Owner("replica", 1)


class Engine:
    """Stores everything at once. A message's content is its body, with its number."""

    recent_chunks = 64

    def change(self, session: ClientSession) -> SessionChange:
        return SessionChange()

    def after_stored(self, session: ClientSession, done: Callable[[Outcome], None]) -> None:
        done(ACCEPTED)

    def pump(self, session: ClientSession) -> None:
        session.pump()

    def read(self, content: Content) -> tuple[Message, Number | None]:
        body = bytes(cast(bytes, content[2]))
        return message_of(body, qos=2), (LIFE, int(body))


class Acknowledged:
    """What a broker hears of a consumer."""

    def __init__(self) -> None:
        self.tags: list[int] = []

    def acknowledge(self, channel: int, tag: int) -> None:
        self.tags.append(tag)


class Outlet:
    """A client that takes everything."""

    congested = False

    def __init__(self) -> None:
        self.rows: list[OutgoingPublish] = []
        self.released: list[int] = []

    def send(self, rows: list[OutgoingPublish]) -> list[OutgoingPublish]:
        self.rows += rows
        return []

    def send_release(self, packet_id: int) -> None:
        self.released.append(packet_id)

    @property
    def bodies(self) -> list[int]:
        return [int(row.message.body) for row in self.rows]


class Queue:
    """A session's queue over one connection to the cluster after the other."""

    def __init__(self, receive_max: int, sent: dict[int, Number | None] | None = None) -> None:
        """`sent`: packet ids under which an earlier owner has sent messages."""
        limits = SessionLimits(1000, 10**6, 100, 1000, 10**6, False, 60.0)
        self.session = ClientSession("c", limits, SessionTally(), cast(Any, Engine()), OWNER)
        packets = {(OUTGOING, at): Packet(number) for at, number in (sent or {}).items()}
        self.session.begin(Contents(packets=packets), "queue", ())
        options = SubscriptionOptions(2)
        self.session.subscriptions["a/b"] = options
        self.outlet = Outlet()
        self.session.attach(cast(Any, self.outlet), receive_max)
        self.connect()

    def connect(self) -> None:
        self.acknowledged = Acknowledged()
        self.consumer = ClusterConsumer(cast(Any, self.acknowledged), self.session, "1")
        self._tags = itertools.count(1)

    def bring(self, *numbers: int, redelivered: bool = False) -> None:
        for number in numbers:
            tag = next(self._tags)
            content = (b"", b"", b"%d" % number)
            self.consumer.take(tag, content)
            self.session.deliver(self.consumer, tag, redelivered, content)

    def answer(self) -> None:
        """The client has all that it was sent."""
        for row in list(self.outlet.rows):
            if row.packet_id in self.session.in_flight:
                assert self.session.handle_pubrec(row.packet_id)
                assert self.session.complete_delivery(row.packet_id)
                self.session.pump()


def test_all_that_a_replica_had_on_its_way_is_sent_once_though_it_is_published_again() -> None:
    queue = Queue(100)
    queue.bring(*range(1, 3_001))
    for _ in range(30):
        queue.answer()
    assert queue.outlet.bodies == list(range(1, 3_001))
    queue.bring(*range(1, 3_003))
    queue.answer()
    assert queue.outlet.bodies[3_000:] == [3_001, 3_002]
    assert len(queue.acknowledged.tags) == 6_002


@pytest.mark.parametrize(("endpoint", "count"), [(ENGINE, 0), (ENGINE_OTHER, 1)])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_no_local_is_about_the_client_and_not_its_namesakes(endpoint: str, count: int, qos: int) -> None:
    queue = Queue(100)
    queue.session.limits.listeners = frozenset({ENGINE})
    message = Message(topic_address("a/b"), b"1", assurance=qos, sender=Sender(endpoint, "c"))
    grant = Grant(queue.session, [SubscriptionOptions(2, no_local=True)])
    queue.session.queue_message(message, grant, ClusterOrigin(queue.consumer, 1, None, is_resend=False))
    assert len(queue.outlet.rows) == count


@pytest.mark.parametrize("answers", ["handle_pubrec", "complete_delivery"])
@pytest.mark.parametrize("redelivered", [True, False])
def test_who_acknowledges_what_was_not_sent_again_has_no_more_credit(
    passed: list[float], answers: str, redelivered: bool
) -> None:
    """A client may acknowledge over its next connection what it was sent over the one before."""
    queue = Queue(1, {packet_id: (LIFE, packet_id) for packet_id in (1, 2)})
    if redelivered:
        queue.bring(1, 2, redelivered=True)
    for packet_id in (2, 1):
        assert getattr(queue.session, answers)(packet_id)
        if answers == "handle_pubrec":
            assert queue.session.complete_delivery(packet_id)
    queue.bring(3, 4, 5)
    assert queue.outlet.bodies == ([1, 3] if redelivered else [3])


def prints(*numbers: int) -> list[int]:
    """Of messages as `bring` brings them."""
    return [fingerprint_of((b"", b"", b"%d" % number)) for number in numbers]


def test_what_an_owner_gave_back_comes_first_and_in_its_order() -> None:
    queue = Queue(100)
    queue.session.expect(prints(1, 2, 2, 3))
    queue.bring(2, redelivered=True)
    queue.bring(9, 10)
    queue.bring(7, redelivered=True)
    queue.bring(3, 1, redelivered=True)
    assert queue.outlet.bodies == []
    queue.bring(2, redelivered=True)
    queue.bring(11, 4)
    queue.session.pump()
    assert queue.outlet.bodies == [1, 2, 3, 9, 10, 7, 11, 4]


def test_nobody_waits_for_what_does_not_come() -> None:
    """It has expired, or the queue had no room for it."""
    queue = Queue(100)
    queue.session.expect(prints(1, 2))
    queue.bring(7)
    queue.bring(2, redelivered=True)
    queue.session.stop_expecting()
    queue.bring(8)
    queue.session.pump()
    assert queue.outlet.bodies == [2, 7, 8]


def test_nor_when_nothing_more_can_come() -> None:
    queue = Queue(1)
    queue.session.expect(prints(1, 2))
    assert queue.session.prefetch == 2 + SPARE
    queue.bring(*range(10, 11 + SPARE))
    queue.session.pump()
    assert queue.outlet.bodies == []
    queue.bring(1, redelivered=True)
    queue.session.pump()
    assert queue.outlet.bodies == [1]


def test_who_leaves_before_all_of_it_has_come_hands_on_what_is_to_be_expected() -> None:
    queue = Queue(100)
    queue.session.expect(prints(1, 2, 3))
    queue.bring(9)
    queue.bring(2, redelivered=True)
    queue.consumer.take(99, (b"", b"", b"10"))  # it has come when the session was over already
    given_back = queue.consumer.drain().values()
    assert queue.session.fingerprints(given_back) == tuple(prints(1, 2, 3, 9, 10))


def test_what_came_in_another_order_is_handed_on_in_the_right_one() -> None:
    queue = Queue(100)
    queue.session.expect(prints(1, 2))
    queue.bring(2, 1, redelivered=True)
    queue.bring(3)
    given_back = queue.consumer.drain().values()
    assert queue.session.fingerprints(given_back) == tuple(prints(1, 2, 3))


def test_what_waited_over_a_connection_that_is_gone_comes_again() -> None:
    queue = Queue(100)
    queue.session.expect(prints(1, 2))
    queue.bring(3)
    queue.connect()
    queue.bring(2, 1, redelivered=True)
    queue.bring(3)
    queue.session.pump()
    assert queue.outlet.bodies == [1, 2, 3]


@pytest.mark.parametrize("receive_max", [1, 2, 100])
def test_what_was_published_twice_while_it_waits_is_sent_once(receive_max: int) -> None:
    queue = Queue(receive_max)
    queue.bring(1, 2, 3, 2, 3, 3, 4)
    for _ in range(5):
        queue.answer()
    assert queue.outlet.bodies == [1, 2, 3, 4]
    assert sorted(queue.acknowledged.tags) == [1, 2, 3, 4, 5, 6, 7]


def test_what_waits_comes_again_over_the_next_connection_and_is_kept_once() -> None:
    queue = Queue(1)
    queue.bring(*range(1, 6))
    assert queue.outlet.bodies == [1]
    for _ in range(10):
        queue.consumer.drain()
        queue.connect()
        queue.bring(*range(1, 6))
        assert len(queue.session) == 4  # that wait, behind the one in flight
    for _ in range(6):
        queue.answer()
    assert queue.outlet.bodies == [1, 2, 3, 4, 5]
    assert sorted(queue.acknowledged.tags) == [1, 2, 3, 4, 5]


def test_one_that_stops_sends_nothing_more() -> None:
    queue = Queue(1)
    queue.bring(1, 2)
    queue.session.stop()
    queue.answer()
    assert queue.outlet.bodies == [1]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds."""
    seconds = [0.0]
    monkeypatch.setattr(clock, "now", lambda: Monotonic(seconds[0]))
    return seconds


def test_what_an_earlier_owner_had_sent_may_come_behind_what_is_new(passed: list[float]) -> None:
    """A queue whose broker is busy has it back late: it was taken to be over, and lost."""
    queue = Queue(100, {7: (LIFE, 1), 8: (LIFE, 2)})
    queue.bring(2, redelivered=True)
    queue.bring(3)
    passed[0] = 29.0
    queue.bring(1, redelivered=True)
    assert not queue.outlet.released
    assert sorted(queue.outlet.bodies) == [1, 2, 3]
    assert {int(row.message.body): row.packet_id for row in queue.outlet.rows}.items() >= {1: 7, 2: 8}.items()
    queue.answer()
    assert sorted(queue.acknowledged.tags) == [1, 2, 3]


def test_what_was_sent_before_the_client_has_unsubscribed_is_completed(passed: list[float]) -> None:
    """At QoS 2 (5: 3.10.4): it may have lost the first PUBLISH, and waits for the rest otherwise."""
    queue = Queue(100, {7: (LIFE, 1)})
    del queue.session.subscriptions["a/b"]
    queue.bring(1, 2, redelivered=True)  # the second one had waited at the earlier owner
    assert [(int(row.message.body), row.packet_id) for row in queue.outlet.rows] == [(1, 7)]
    assert queue.acknowledged.tags == [2]
    queue.answer()
    assert queue.acknowledged.tags == [2, 1]
    queue.bring(1, redelivered=True)
    assert queue.outlet.bodies == [1]


def test_what_the_client_acknowledges_before_it_is_resent_is_not_resent(passed: list[float]) -> None:
    queue = Queue(1, {7: (LIFE, 1), 8: (LIFE, 2)})
    queue.bring(1, 2, redelivered=True)
    session = queue.session
    assert session.handle_pubrec(8)
    assert session.handle_pubrec(7)
    assert session.complete_delivery(7)
    session.pump()
    assert session.complete_delivery(8)
    assert (queue.outlet.bodies, session.in_flight, session.credit) == ([1], {}, 1)


def test_what_does_not_come_again_for_long_is_over(passed: list[float]) -> None:
    queue = Queue(100, {7: (LIFE, 1)})
    queue.bring(2)
    assert not queue.outlet.released
    passed[0] = 30.0
    queue.bring(3)
    assert queue.outlet.released == [7]


def test_what_is_over_is_acknowledged_before_that_is_stored(
    passed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[Callable[[Outcome], None]] = []
    queue = Queue(100, {7: (LIFE, 1), 8: (LIFE, 2)})
    engine = Engine()
    monkeypatch.setattr(engine, "after_stored", lambda _, done: stored.append(done))
    queue.session._engine = cast(Any, engine)
    passed[0] = 30.0
    queue.session._release_reserved()
    assert queue.session.complete_delivery(7)
    for done in stored:
        done(ACCEPTED)
    assert (queue.outlet.released, queue.session.credit) == ([8], 99)


def walk(queue: Queue, number: int) -> None:
    """The session is sent a message as a retained one."""
    session = queue.session
    if session.sent_retained is None:
        session.sent_retained = SentRetained()
    message = message_of(b"%d" % number, qos=2, retain=True)
    session.sent_retained.send(message, (LIFE, number), is_alone=False)
    session.offer([message], Grant(session, [SubscriptionOptions(2)], retained=True))


@pytest.mark.parametrize("answered", [False, True])
def test_what_was_sent_as_retained_is_settled_when_the_client_has_it(answered: bool) -> None:
    """It comes live as well. If the client is lost before it has it, the queue still has the message."""
    queue = Queue(100)
    walk(queue, 1)
    assert queue.outlet.bodies == [1]
    if answered:
        queue.answer()
    queue.bring(1, 2)
    assert queue.outlet.bodies == [1, 2]
    assert len({row.packet_id for row in queue.outlet.rows}) == 2
    assert len(queue.acknowledged.tags) == int(answered)
    queue.answer()
    queue.session.pump()
    assert len(queue.acknowledged.tags) == 2


def test_what_waits_to_be_sent_as_retained_comes_once() -> None:
    """The client has no room for it when it comes live."""
    queue = Queue(1)
    queue.bring(5)
    walk(queue, 1)
    queue.bring(1, 2)
    assert queue.outlet.bodies == [5]
    for _ in range(4):
        queue.answer()
    assert queue.outlet.bodies == [5, 1, 2]
    assert len(queue.acknowledged.tags) == 3


class Storing(Engine):
    """Collects what is to be stored; the cluster confirms bindings when the test says so."""

    def __init__(self) -> None:
        self.stored = SessionChange()
        self.asked: list[Callable[[], None]] = []
        self.consumers = Consumers(cast(Any, self), "x")

    def change(self, session: ClientSession) -> SessionChange:
        return self.stored

    def bind_queue(self, session: ClientSession, key: str) -> None:
        self.consumers.bind(session, key)

    def declare(
        self, method: object, done: Callable[[], None] | None = None, consumer: object = None
    ) -> None:
        assert done is not None
        self.asked.append(done)

    def confirm(self) -> None:
        asked, self.asked = self.asked, []
        for done in asked:
            done()


@pytest.mark.parametrize("later", [None, SubscriptionOptions(0), SubscriptionOptions(2)])
def test_a_late_binding_stores_no_subscription_that_was_changed_meanwhile(
    later: SubscriptionOptions | None,
) -> None:
    engine = Storing()
    session = ClientSession("c", SessionLimits(), SessionTally(), cast(Any, engine), OWNER)
    session.begin(Contents(), "queue", ())
    engine.consumers._consumers[session] = ClusterConsumer(engine.consumers, session, "1")
    first = SubscriptionOptions(1)
    session.subscribed("a/b", first, None)
    session.subscribed("a/b", later, first)
    engine.confirm()
    assert engine.stored.subscriptions == {"a/b": None if later is None else encode_options(later)}
    assert not session.unbound


def test_a_key_of_two_filters_is_bound_until_neither_needs_it() -> None:
    """Keys of long filters are shortened, and then may be those of others."""
    engine = Storing()
    session = ClientSession("c", SessionLimits(), SessionTally(), cast(Any, engine), OWNER)
    session.begin(Contents(), "queue", ())
    engine.consumers._consumers[session] = ClusterConsumer(engine.consumers, session, "1")
    long, short, options = "a/" + "b" * 252 + "/#", "a/#", SubscriptionOptions(1)

    def subscribe(topic_filter: str, now: SubscriptionOptions | None) -> None:
        before = session.subscriptions.get(topic_filter)
        if now is None:
            del session.subscriptions[topic_filter]
        else:
            session.subscriptions[topic_filter] = now
        session.subscribed(topic_filter, now, before)

    subscribe(long, options)
    subscribe(short, options)
    engine.confirm()
    encoded = encode_options(options)
    assert engine.stored.subscriptions == {long: encoded, short: encoded}
    assert not session.unbound
    subscribe(short, None)
    assert not session.unbound
    subscribe(short, options)
    subscribe(short, None)
    engine.confirm()
    assert engine.stored.subscriptions == {long: encoded, short: None}
    subscribe(long, None)
    assert list(session.unbound) == ["a.#"]
    engine.confirm()
    assert engine.stored.subscriptions == {long: None, short: None}


def test_changed_options_are_stored_when_the_queue_is_bound() -> None:
    """A restart in between would have a subscription that gets nothing."""
    engine = Storing()
    session = ClientSession("c", SessionLimits(), SessionTally(), cast(Any, engine), OWNER)
    session.begin(Contents(), "queue", ())
    engine.consumers._consumers[session] = ClusterConsumer(engine.consumers, session, "1")
    first, second = SubscriptionOptions(1), SubscriptionOptions(2)
    session.subscribed("a/b", first, None)
    session.subscribed("a/b", second, first)
    assert not engine.stored.subscriptions
    engine.confirm()
    assert engine.stored.subscriptions == {"a/b": encode_options(second)}
