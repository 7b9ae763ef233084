"""AMQP queues: limits, deaths and letters, times to live, priorities, who may consume."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from gateway import clock
from gateway.broker.amqp091 import dead_letter_routing
from gateway.broker.amqp091.dead_letter_routing import BURIED_MAX, DEATHS_MAX, EXPIRED_MAX, NOTED_MAX
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.pressure import FULL, FullQueues
from gateway.broker.queue import Queue
from gateway.broker.scheduler import CANCELLED_MAX, CallScheduler
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.model.shares import UserShares
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.table import encode_value
from gateway.protocols.amqp091.translate import content_properties
from tests.broker.amqp091.parts import NONE, Host, integer
from tests.broker.parts import SENDER, Taker, amqp, publish
from tests.idle import idle_report

SOON = 3_600.0


def queue(host: Host, name: str, **arguments: int | str | bool) -> AmqpQueue:
    return host.make(
        name, *((f"x-{key.replace('_', '-')}", value_of(said)) for key, said in arguments.items())
    )


def value_of(said: int | str | bool) -> Value:
    if isinstance(said, bool):
        return Value(ValueType.BOOL, said)
    return string(said) if isinstance(said, str) else integer(said)


def native(body: bytes, key: str = "q", *, life: float = NEVER, **said: Any) -> Message:
    """A message as an AMQP client publishes it."""
    raw = encode_basic_properties(BasicProperties(**said))
    return Message(amqp_address("", key), body, content_properties(raw), expires=life, sender=SENDER)


def drained(one: AmqpQueue) -> list[bytes]:
    found = []
    while (taken := one.take()) is not None:
        found.append(taken[1].body)
    return found


def bodies(*texts: str) -> list[Message]:
    return [native(text.encode()) for text in texts]


def history(message: Message) -> list[tuple[str, str, int]]:
    """Queue, reason and count of each death."""
    deaths = dict(message.properties.headers)["x-death"].value
    tables = [death.value for death in deaths if death.type is ValueType.TABLE]
    said = [{name: value.value for name, value in table} for table in tables]
    return [(one["queue"], one["reason"], one["count"]) for one in said]


def test_a_batch_into_a_short_queue_leaves_its_end_and_tells_all_accepted() -> None:
    host = Host()
    one = queue(host, "q", max_length=3)
    assert publish(one, bodies(*"abcdefgh")).outcomes == [ACCEPTED] * 8
    assert drained(one) == [b"f", b"g", b"h"]
    assert host.dead_lettering.dropped == {"queue_maxlen": 5}
    assert (one.byte_count, len(one)) == (0, 0)


def test_a_queue_that_refuses_takes_what_fits_in_order_and_what_its_consumer_makes_room_for() -> None:
    host = Host()
    one = queue(host, "q", max_length=2, overflow="reject-publish")
    outcomes = publish(one, bodies(*"abc")).outcomes
    assert outcomes == [ACCEPTED, ACCEPTED, FULL]
    taker = Taker(credit=3)
    one.add(taker)
    assert publish(one, bodies(*"defg")).outcomes == [ACCEPTED, ACCEPTED, ACCEPTED, FULL]
    assert taker.bodies == [b"a", b"b", b"d"]
    assert (drained(one), host.full_queues.refused) == ([b"e", b"f"], 2)


def test_bytes_are_counted_message_by_message() -> None:
    one = queue(Host(), "q", max_length_bytes=5, overflow="reject-publish")
    outcomes = publish(one, bodies("abc", "defg", "h", "ij", "")).outcomes
    assert outcomes == [ACCEPTED, FULL, ACCEPTED, FULL, ACCEPTED]


def test_letters_go_round_until_someone_takes_them_and_count_their_deaths() -> None:
    host = Host()
    work = queue(host, "work", dead_letter_exchange="", dead_letter_routing_key="wait")
    wait = queue(host, "wait", message_ttl=1, dead_letter_exchange="", dead_letter_routing_key="work")
    publish(work, [native(b"x", "work")])
    for count in (1, 2, 3):
        taken = work.take()
        assert taken is not None
        work.reject(taken[0], taken[1])
        work.dispatch()
        assert (len(work), len(wait)) == (0, 1)
        host.alarms.run_due(time.time() + SOON)
        while not len(work):  # the message itself looks at the clock
            wait.settle_head()
        assert len(wait) == 0
        waiting = work.take()
        assert waiting is not None
        assert history(waiting[1]) == [("wait", "expired", count), ("work", "rejected", count)]
        work.requeue([(waiting[0], waiting[1])])
    assert host.dead_lettering.dropped == {}


def test_a_circle_that_nobody_rejects_in_ends_at_the_second_visit() -> None:
    host = Host()
    queue(host, "there", max_length=0, dead_letter_exchange="", dead_letter_routing_key="back")
    back = queue(host, "back", max_length=0, dead_letter_exchange="", dead_letter_routing_key="there")
    assert publish(back, [native(b"x", "back")]).outcomes == [ACCEPTED]
    assert host.dead_lettering.dropped == {"queue_maxlen": 1}


@pytest.mark.parametrize("count", [BURIED_MAX - 1, 3 * BURIED_MAX + 1])
def test_very_many_deaths_are_buried_in_turns(count: int) -> None:
    """In order, and each once."""
    host = Host()
    there = queue(host, "there")
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="there")
    publish(one, [native(b"%d" % at) for at in range(count)])
    taken = [one.take() for _ in range(count)]
    for found in taken:
        assert found is not None
        one.reject(found[0], found[1])
    one.dispatch()
    turns = 1
    while len(there) < count:
        assert len(there) <= turns * BURIED_MAX
        assert host.dead_lettering.has_unsent
        assert host.alarms.next_due <= time.time()
        host.alarms.run_due(time.time())
        turns += 1
    assert turns == 1 + count * 2 // BURIED_MAX
    assert not host.dead_lettering.has_unsent
    assert drained(there) == [b"%d" % at for at in range(count)]


def test_a_queue_tells_the_disk_of_its_dead_when_they_are_buried() -> None:
    told: list[int] = []
    host = Host()
    there = queue(host, "there")
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="there")
    one.storage = SimpleNamespace(forget=told.extend, count=0, refill=lambda: False, recovered=0)
    one.removed_positions = []
    one.put([native(b"x") for _ in range(BURIED_MAX)])
    taken = [one.take() for _ in range(BURIED_MAX)]
    for found in taken:
        assert found is not None
        one.reject(found[0], found[1])
    one.dispatch()
    one.dispatch()
    assert host.dead_lettering.has_unsent
    assert told == list(range(len(there))) != list(range(BURIED_MAX))
    host.alarms.run_due(time.time())
    host.alarms.run_due(time.time())
    assert told == list(range(len(there))) == list(range(BURIED_MAX))


def test_very_many_that_expire_at_once_go_in_turns() -> None:
    """Nobody gets one of them, nor waits for ever for what is behind them."""
    host = Host()
    one = queue(host, "q")
    count = 3 * EXPIRED_MAX
    past = time.time() - 1
    one.put([*(native(b"old", life=past) for _ in range(count)), native(b"new")])
    taker = Taker(10)
    one.add(taker)
    assert len(one) == count + 1 - EXPIRED_MAX
    assert one.take() is None
    while host.alarms.next_due <= time.time():
        before = len(one)
        host.alarms.run_due(time.time())
        assert before - len(one) <= 2 * EXPIRED_MAX + 3
    assert taker.bodies == [b"new"]
    assert one.byte_count == 0


def test_no_letter_of_a_long_queue_is_given_up() -> None:
    """What expires waits for the letters of what has expired before."""
    host = Host()
    there = queue(host, "there")
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="there")
    count = 5 * EXPIRED_MAX
    past = time.time() - 1
    one.put([native(b"%d" % at, life=past) for at in range(count)])
    one.dispatch()
    while host.alarms.next_due <= time.time():
        assert len(host.dead_lettering.waiting_deaths) <= EXPIRED_MAX
        host.alarms.run_due(time.time())
    assert drained(there) == [b"%d" % at for at in range(count)]
    assert host.dead_lettering.dropped == {}


def rung(host: Host) -> None:
    """Send all dead letters that wait."""
    while host.dead_lettering.waiting_deaths:
        host.alarms.run_due(time.time())


@pytest.mark.interpreted
def test_no_rejected_message_is_given_up_when_very_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer gets no more before their letters are sent."""
    monkeypatch.setattr(dead_letter_routing, "NOTED_MAX", 2 * BURIED_MAX)
    host = Host()
    there = queue(host, "there")
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="there")
    taker = Taker()
    one.add(taker)
    count = 4 * BURIED_MAX
    publish(one, [native(b"%d" % at) for at in range(count)])
    for position, message, _ in taker.taken:
        one.reject(position, message)
    taker.taken.clear()
    publish(one, bodies("next"))
    assert taker.bodies == [], "too many letters wait"
    told: list[str] = []
    assert one.take() is None
    assert one.when_takeable(lambda: told.append("takeable"))
    assert told == []
    rung(host)
    assert told == ["takeable"]
    assert not one.when_takeable(told.clear), "it is empty"
    assert taker.bodies == [b"next"]
    assert drained(there) == [b"%d" % at for at in range(count)]
    assert host.dead_lettering.dropped == {}
    assert not host.dead_lettering._waiting


@pytest.mark.interpreted
def test_nobody_waits_for_what_is_not_there_or_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests of the connection would wait, too."""
    monkeypatch.setattr(dead_letter_routing, "NOTED_MAX", 2 * BURIED_MAX)
    host = Host()
    queue(host, "there")
    options = {"dead_letter_exchange": "", "dead_letter_routing_key": "there"}
    one, empty = (queue(host, name, **options) for name in ("q", "empty"))
    taker = Taker()
    one.add(taker)
    publish(one, [native(b"x") for _ in range(4 * BURIED_MAX)])
    for position, message, _ in taker.taken:
        one.reject(position, message)
    one.remove(taker)
    publish(one, [native(b"next")])
    told: list[str] = []
    assert one.take() is None
    assert empty.take() is None
    assert not empty.when_takeable(lambda: told.append("empty"))
    with monkeypatch.context() as failing:
        failing.setattr(Host, "disk_fails", True)
        assert not one.when_takeable(lambda: told.append("failing"))
    assert one.when_takeable(lambda: told.append("takeable"))
    rung(host)
    assert told == ["takeable"]


def test_who_waits_for_a_message_is_told_that_the_queue_is_deleted() -> None:
    one = queue(Host(), "q", dead_letter_exchange="")
    one.put([native(b"late", life=1.0) for _ in range(EXPIRED_MAX + 1)])
    assert one.take() is None
    told: list[str] = []
    assert one.when_takeable(lambda: told.append("deleted"))
    one.delete()
    assert told == ["deleted"]


def test_no_letter_of_a_long_queue_with_priorities_is_given_up() -> None:
    host = Host()
    there = queue(host, "there")
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="there", max_priority=5)
    count = 4 * EXPIRED_MAX
    past = time.time() - 1
    publish(one, [native(b"%d" % at, life=past, priority=at % 2) for at in range(count)])
    while host.alarms.next_due <= time.time():
        assert len(host.dead_lettering.waiting_deaths) <= EXPIRED_MAX
        host.alarms.run_due(time.time())
    assert sorted(int(body) for body in drained(there)) == list(range(count))
    assert host.dead_lettering.dropped == {}


def test_letters_that_breed_come_to_an_end() -> None:
    """Queues that hold nothing, each bound to where the others' letters go: the turns stay short."""
    host = Host()
    host.exchange_of("x", "fanout")
    for at in range(30):
        one = queue(host, f"q{at}", max_length=0, dead_letter_exchange="x")
        host.bind("x", one, "", NONE)
    publish(one, bodies("x"))
    for _ in range(20):
        assert host.dead_lettering.has_unsent
        assert len(host.dead_lettering.waiting_deaths) <= NOTED_MAX
        host.alarms.run_due(time.time())


# Deaths that wait, and users.


def halves() -> FullQueues:
    """Two users, each of whom may have half of what waits."""
    return FullQueues(user_shares=partial(UserShares, "waiting messages", user_share=0.5))


def declared(host: Host, name: str, user: str | None, **arguments: int | str) -> AmqpQueue:
    return host.declare_queue(
        name,
        None,
        durable=False,
        exclusive=False,
        auto_delete=False,
        arguments=tuple((f"x-{key.replace('_', '-')}", value_of(value)) for key, value in arguments.items()),
        user=user,
    )


def spread(host: Host, user: str, count: int = 250) -> AmqpQueue:
    """A queue that holds nothing, whose dead letters go to many queues."""
    host.exchange_of("spread", "fanout")
    for at in range(count):
        host.bind("spread", declared(host, f"to{at}", user, max_length=1), "", NONE)
    return declared(host, "source", user, max_length=0, dead_letter_exchange="spread")


def test_deaths_that_wait_count_in_bytes_for_the_user_of_their_queue() -> None:
    host = Host(queue_bytes_max=1_000_000, full_queues=halves())
    source = spread(host, "mallory")
    for _ in range(5):
        publish(source, [native(bytes(100_000), "source") for _ in range(10)])
    noted = host.dead_lettering.waiting_deaths
    assert 300_000 < noted.shares.of("mallory") == noted.shares.total < 700_000
    assert host.dead_lettering.dropped["dead_letter_refused"] > 40
    there = declared(host, "there", "alice")
    one = declared(host, "q", "alice", dead_letter_exchange="", dead_letter_routing_key="there")
    publish(one, [native(b"x")])
    taker = Taker()
    one.add(taker)
    one.reject(taker.taken[0][0], taker.taken[0][1])
    one.dispatch()
    rung(host)
    assert drained(there) == [b"x"]
    assert (noted.shares.total, noted.shares.count) == (0, 0)


def test_deaths_of_others_stop_no_expiry() -> None:
    """And those of a user with few letters are routed between those with many."""
    host = Host(full_queues=halves())
    source = spread(host, "mallory")
    publish(source, [native(b"x", "source") for _ in range(2 * EXPIRED_MAX)])
    assert len(host.dead_lettering.waiting_deaths) > EXPIRED_MAX
    there = declared(host, "there", "alice")
    one = declared(host, "q", "alice", dead_letter_exchange="", dead_letter_routing_key="there")
    ranked = declared(host, "ranked", "alice", max_priority=5)
    past = time.time() - 1
    for queue_, taker in ((one, Taker(1)), (ranked, Taker(1))):
        queue_.put([native(b"old", life=past, priority=1), native(b"new", priority=1)])
        queue_.add(taker)
        assert taker.bodies == [b"new"]
    host.alarms.run_due(time.time())
    assert len(host.dead_lettering.waiting_deaths) > EXPIRED_MAX
    assert drained(there) == [b"old"]
    for name in [*host.queues]:
        host.delete_queue(host.queues[name])
    rung(host)


def test_queues_of_a_user_who_holds_too_much_memory_wait_for_their_deaths() -> None:
    host = Host(full_queues=halves())
    source = spread(host, "mallory", 600)
    dead_lettering = host.dead_lettering
    publish(source, [native(bytes(50_000), "source") for _ in range(10)])
    ((claim, byte_count, user),) = dead_lettering.claims()
    assert (byte_count, user) == (dead_lettering.waiting_deaths.shares.of("mallory"), "mallory")
    assert byte_count > 400_000
    claim.restrain(True)
    claim.restrain(True)
    publish(source, [native(b"dropped", "source")])
    assert dead_lettering.dropped == {"dead_letter_refused": 1}
    one = declared(host, "q", "mallory", dead_letter_exchange="", dead_letter_routing_key="to0")
    taker = Taker()
    one.add(taker)
    publish(one, [native(b"waits")])
    assert taker.bodies == []
    other = declared(host, "other", "alice", dead_letter_exchange="", dead_letter_routing_key="to0")
    free = Taker()
    other.add(free)
    publish(other, [native(b"passes", "other")])
    assert free.bodies == [b"passes"]
    claim.restrain(False)
    assert taker.bodies == [b"waits"]
    rung(host)
    assert list(dead_lettering.claims()) == []


def test_expired_messages_stay_in_their_queue_while_too_many_of_its_user_are_dead() -> None:
    host = Host(full_queues=halves())
    publish(spread(host, "mallory", 600), [native(bytes(50_000), "source") for _ in range(10)])
    ((claim, _, _),) = host.dead_lettering.claims()
    claim.restrain(True)
    one = declared(host, "q", "mallory", dead_letter_exchange="", dead_letter_routing_key="to0")
    plain = declared(host, "plain", "mallory")
    waiting = len(host.dead_lettering.waiting_deaths)
    for queue_ in (one, plain):
        queue_.put([native(b"old", life=time.time() - 1), native(b"new")])
        queue_.settle_head()
    assert (len(one), len(plain), len(host.dead_lettering.waiting_deaths)) == (2, 1, waiting)
    live = declared(host, "live", "mallory", dead_letter_exchange="", dead_letter_routing_key="to0")
    live.put([native(b"live")])
    assert (one.take(), live.take()) == (None, None)
    assert drained(plain) == [b"new"]
    claim.restrain(False)
    rung(host)
    assert (drained(one), drained(live)) == ([b"new"], [b"live"])
    rung(host)
    assert host.dead_lettering.dropped["dead_letter_refused"] == 0


def test_a_queue_with_priorities_forgets_positions_when_it_stops_sorting() -> None:
    one = queue(Host(), "q", max_priority=5)
    publish(one, [native(b"%d" % level, priority=level) for level in (1, 3, 2)])
    taker = Taker()
    one.add(taker)
    assert taker.bodies == [b"3", b"2", b"1"]
    assert not one._lines  # type: ignore[attr-defined]
    publish(one, [native(b"next", priority=1)])
    assert taker.bodies[3:] == [b"next"]


def test_a_chain_of_queues_ends_where_a_letter_has_died_too_often() -> None:
    lost: list[bytes] = []
    host = Host()
    host.dead_lettering._lost = lambda messages, outcome: lost.extend(one.body for one in messages)
    for at in range(DEATHS_MAX + 10):
        queue(host, f"q{at}", max_length=0, dead_letter_exchange="", dead_letter_routing_key=f"q{at + 1}")
    publish(host.queues["q0"], [native(b"x", "q0")])
    while host.dead_lettering.has_unsent:
        host.alarms.run_due(time.time())
    assert host.dead_lettering.dropped == {"dead_letter_refused": 1}
    assert lost == [b"x"]


@pytest.mark.parametrize("deaths", [1, DEATHS_MAX - 1, DEATHS_MAX, DEATHS_MAX + 20])
def test_a_message_with_a_long_history_that_a_client_rejects_is_no_end(deaths: int) -> None:
    """Its newest deaths are kept."""
    host = Host()
    there = queue(host, "there")
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="there")
    history = tuple(
        Value(ValueType.TABLE, (("queue", string(f"old{at}")), ("reason", string("expired"))))
        for at in range(deaths)
    )
    one.put([native(b"x", headers=(("x-death", Value(ValueType.ARRAY, history)),))])
    taken = one.take()
    assert taken is not None
    one.reject(taken[0], taken[1])
    one.dispatch()
    assert drained(there) == [b"x"]
    assert host.dead_lettering.dropped == {}


class CountedRows(dict[int, Any]):
    """Messages by position; `reads` counts what is looked up."""

    reads = 0

    def __getitem__(self, position: int) -> Any:
        self.reads += 1
        return super().__getitem__(position)

    def get(self, position: int, default: Any = None) -> Any:
        self.reads += 1
        return super().get(position, default)


def test_a_queue_with_priorities_examines_only_the_heads_for_each_that_expires() -> None:
    host = Host()
    one = queue(host, "q", max_priority=5)
    now = time.time()
    publish(one, [native(b"x", life=now + SOON, priority=at % 5) for at in range(10_000)])
    one._waiting = rows = CountedRows(one._waiting)  # type: ignore[attr-defined]
    one.put([native(b"old", life=now - 1, priority=5)])
    assert one.drop_expired() == now + SOON
    assert len(one) == 10_000
    assert rows.reads < 100


@pytest.mark.parametrize("credit", [0, 1, 10])
def test_very_many_of_a_priority_that_expire_go_in_turns(credit: int) -> None:
    """Also behind a message that has not expired, which a consumer gets."""
    host = Host()
    one = queue(host, "q", max_priority=5)
    count = 3 * EXPIRED_MAX
    past = time.time() - 1
    old = [native(b"old", life=past, priority=3) for _ in range(count)]
    one.put([native(b"first", priority=3), *old, native(b"new", priority=1), native(b"last", priority=3)])
    taker = Taker(credit)
    one.add(taker)
    if not credit:
        assert len(one) == count + 3
        assert one.take() is not None
    for _ in range(count):
        if host.alarms.next_due > time.time():
            break
        before = len(one)
        host.alarms.run_due(time.time())
        assert before - len(one) <= 2 * EXPIRED_MAX + 3
    bodies = [b"first", b"last", b"new"]
    assert taker.bodies == bodies[:credit]
    assert drained(one) == (bodies[1:] if not credit else bodies[credit:])
    assert (len(one), one.byte_count) == (0, 0)


def test_messages_that_are_consumed_and_requeued_again_and_again_leave_nothing() -> None:
    host = Host()
    one = queue(host, "q", max_priority=5)
    one.put([native(b"%d" % at, priority=at % 5) for at in range(100)])
    for _ in range(200):
        taken = [one.take() for _ in range(50)]
        one.requeue([row[:2] for row in taken if row is not None])
    assert sum(map(len, one._lines.values())) < 10_000  # type: ignore[attr-defined]
    assert len(drained(one)) == 100
    assert not any(one._lines.values())  # type: ignore[attr-defined]


def test_a_letter_that_its_queue_refuses_is_counted_and_handed_on() -> None:
    lost: list[tuple[bytes, str]] = []
    host = Host()
    host.dead_lettering._lost = lambda messages, outcome: lost.append(
        (messages[0].body, outcome.reason.value)
    )
    queue(host, "full", max_length=0, overflow="reject-publish")
    one = queue(host, "q", max_length=0, dead_letter_exchange="", dead_letter_routing_key="full")
    publish(one, bodies("x"))
    assert host.dead_lettering.dropped == {"dead_letter_refused": 1}
    assert lost == [(b"x", "quota")]


def test_a_letter_keeps_what_the_message_said() -> None:
    host = Host()
    grave = queue(host, "grave")
    one = queue(host, "q", max_length=0, dead_letter_exchange="", dead_letter_routing_key="grave")
    said: dict[str, Any] = {
        "content_type": "t",
        "delivery_mode": 2,
        "message_id": "m",
        "priority": 3,
        "expiration": "60000",
    }
    publish(one, [native(b"x", life=time.time() + 60, **said)])
    taken = grave.take()
    assert taken is not None
    letter = taken[1]
    assert (letter.properties.content_type, letter.properties.message_id) == ("t", "m")
    assert letter.expires == NEVER
    death = dict(letter.properties.headers)["x-death"].value[0]
    assert dict(death.value)["original-expiration"] == string("60000")


def test_a_message_of_another_protocol_becomes_a_letter_too() -> None:
    host = Host()
    grave = queue(host, "grave")
    one = queue(host, "q", max_length=0, dead_letter_exchange="", dead_letter_routing_key="grave")
    publish(one, [amqp(b"x", "q")])
    taken = grave.take()
    assert taken is not None
    assert history(taken[1]) == [("q", "maxlen", 1)]


def nested(depth: int) -> Value:
    value = Value(ValueType.ARRAY, ())
    for _ in range(depth):
        value = Value(ValueType.ARRAY, (value,))
    return value


@pytest.mark.parametrize(
    "claimed",
    [
        (("x-death", nested(31)),),
        (("deep", nested(32)), ("x-death", Value(ValueType.ARRAY, (string("no table"),)))),
        (("x-death", Value(ValueType.TABLE, ())), ("CC", string("no list"))),
        (
            (
                "x-death",
                Value(
                    ValueType.ARRAY,
                    (
                        Value(
                            ValueType.TABLE,
                            (
                                ("queue", string("q")),
                                ("reason", string("maxlen")),
                                ("count", Value(ValueType.INT64, (1 << 63) - 1)),
                            ),
                        ),
                    ),
                ),
            ),
        ),
    ],
)
def test_whatever_history_a_client_claims_makes_a_letter(claimed: Headers) -> None:
    host = Host()
    queue(host, "grave")
    one = queue(host, "q", max_length=0, dead_letter_exchange="", dead_letter_routing_key="grave")
    raw = b"\x20\x00" + _table(claimed)
    publish(one, [Message(amqp_address("", "q"), b"x", content_properties(raw), sender=SENDER)])
    taken = host.queues["grave"].take()
    assert taken is not None
    assert history(taken[1])[0] == ("q", "maxlen", 1)


def _table(headers: Headers) -> bytes:
    """A table, deeper than we would write one."""
    data = b""
    for name, value in headers:
        data += bytes((len(name),)) + name.encode() + _value(value)
    return len(data).to_bytes(4, "big") + data


def _value(value: Value) -> bytes:
    if value.type is ValueType.ARRAY:
        data = b"".join(_value(one) for one in value.value)
        return b"A" + len(data).to_bytes(4, "big") + data
    if value.type is ValueType.TABLE:
        return b"F" + _table(value.value)
    return encode_value(value)


def test_an_alarm_rings_for_the_head_and_for_what_comes_to_stand_there() -> None:
    host = Host()
    one = queue(host, "q")
    past, far = time.time() - 1.0, time.time() + SOON
    publish(one, [native(b"1"), native(b"2", life=past), native(b"3", life=far), native(b"4", life=past)])
    assert len(one) == 4, "what stands behind another does not expire"
    assert one.take() is not None
    assert len(one) == 2
    host.alarms.run_due(time.time())
    assert len(one) == 2
    assert drained(one) == [b"3"]
    assert host.dead_lettering.dropped == {"queue_expired": 2}


def test_what_has_no_time_at_all_goes_to_whoever_waits() -> None:
    one = queue(Host(), "q", message_ttl=0)
    taker = Taker(credit=1)
    one.add(taker)
    publish(one, bodies("a", "b"))
    assert taker.bodies == [b"a"]
    one.settle_head()
    assert len(one) == 0


def test_priorities_and_expiry_in_each_of_them() -> None:
    host = Host()
    one = queue(host, "q", max_priority=5)
    past = time.time() - 1.0
    rows = (
        (b"low", 1, NEVER),
        (b"late", 1, past),
        (b"gone", 3, past),
        (b"high", 9, NEVER),
        (b"none", None, NEVER),
    )
    publish(one, [native(body, life=life, priority=level) for body, level, life in rows])
    assert len(one) == 5
    host.alarms.run_due(time.time() + SOON)
    assert len(one) == 4, "late stands behind low"
    assert drained(one) == [b"high", b"low", b"none"]


@pytest.mark.parametrize("by", ["get", "consumer", "limit"])
def test_what_has_expired_behind_another_leaves_when_that_is_gone(by: str) -> None:
    """Its dead letter must not wait for the next message or consumer."""
    host = Host()
    limits = {"max_length": 2} if by == "limit" else {}
    one = queue(host, "q", max_priority=5, dead_letter_exchange="", dead_letter_routing_key="dead", **limits)
    dead = queue(host, "dead")
    past = time.time() - 1.0
    publish(one, [native(b"first", priority=1), native(b"late", life=past, priority=1)])
    host.alarms.run_due(time.time() + SOON)
    assert len(one) == 2, "late stands behind first"
    if by == "get":
        assert first_of(one) == b"first"
    elif by == "limit":
        publish(one, [native(b"next", priority=0)])
    else:
        one.add(Taker(credit=1))
    host.alarms.run_due(time.time() + SOON)
    assert len(one) == (by == "limit")
    assert drained(dead) == ([b"first", b"late"] if by == "limit" else [b"late"])


def first_of(one: AmqpQueue) -> bytes:
    taken = one.take()
    assert taken is not None
    return taken[1].body


@pytest.mark.parametrize("single", [True, False])
def test_consumers_of_higher_priority_or_the_first_one_go_first(single: bool) -> None:
    one = queue(Host(), "q", single_active_consumer=True) if single else queue(Host(), "q")
    low, high, other = Taker(credit=100), Taker(credit=2), Taker(credit=100)
    one.add_ranked(low, 0, exclusive=False)
    one.add_ranked(high, 10, exclusive=False)
    one.add_ranked(other, -1, exclusive=False)
    publish(one, bodies(*"abcd"))
    assert (len(low.taken), len(high.taken), len(other.taken)) == ((4, 0, 0) if single else (2, 2, 0))
    one.remove(low)
    publish(one, bodies("e"))
    assert (len(high.taken), len(other.taken)) == ((1, 0) if single else (2, 1))


class NarrowTaker(Taker):
    """A consumer that cannot receive a message with the body `wide`, as one with small frames."""

    def deliver(self, queue: Queue, position: int, messages: list[Message], redelivered: bool) -> None:
        super().deliver(queue, position, messages, redelivered)
        for row in [row for row in self.taken if row[1].body == b"wide"]:
            self.taken.remove(row)
            self.credit += 1
            queue.set_aside(self, *row)


@pytest.mark.parametrize("priorities", [False, True])
def test_a_standby_consumer_gets_no_message_that_the_active_one_cannot_receive(priorities: bool) -> None:
    levels = {"max_priority": 5} if priorities else {}
    one = queue(Host(), "q", single_active_consumer=True, **levels)
    active, standby, last = NarrowTaker(), NarrowTaker(), Taker()
    for consumer in (active, standby, last):
        one.add_ranked(consumer, 0, exclusive=False)
    publish(one, bodies("a", "wide", "b"))
    assert active.bodies == [b"a", b"b"]
    assert (standby.bodies, last.bodies, len(one)) == ([], [], 1)
    one.remove(active)
    assert (standby.bodies, last.bodies, len(one)) == ([], [], 1)
    one.remove(standby)
    assert (last.bodies, len(one)) == ([b"wide"], 0), "it has become the active one"


@pytest.mark.parametrize("priorities", [False, True])
def test_a_set_aside_message_expires_without_other_messages(
    monkeypatch: pytest.MonkeyPatch, priorities: bool
) -> None:
    host = Host()
    levels = {"max_priority": 5} if priorities else {}
    one = queue(host, "q", dead_letter_exchange="", dead_letter_routing_key="dead", **levels)
    dead = queue(host, "dead")
    one.add(NarrowTaker())
    expires = time.time() + 60.0
    publish(one, [native(b"wide", life=expires), native(b"wide", life=expires + 60.0), native(b"wide")])
    for utc, left in ((expires, 2), (expires + 60.0, 1)):
        monkeypatch.setattr(clock, "utc", lambda utc=utc: utc)
        host.alarms.run_due(utc)
        assert len(one) == left
    assert drained(dead) == [b"wide", b"wide"]
    assert host.alarms.next_due > utc, "no alarm rings for what has left"


def test_a_set_aside_message_goes_to_the_highest_priority_with_credit() -> None:
    one = queue(Host(), "q")
    narrow, low, high, busy = NarrowTaker(), Taker(), Taker(), Taker(0)
    for consumer, rank in ((low, 0), (narrow, 9), (high, 5), (busy, 7)):
        one.add_ranked(consumer, rank, exclusive=False)
    publish(one, bodies("wide", "a"))
    assert (narrow.bodies, high.bodies, low.bodies) == ([b"a"], [b"wide"], [])
    high.credit, busy.credit = 0, 1
    publish(one, bodies("wide", "b"))
    assert (busy.bodies, low.bodies) == ([b"wide"], [])
    publish(one, bodies("wide"))
    assert low.bodies == [b"wide"], "those above it have no credit"


def test_what_returns_goes_to_the_one_that_is_active() -> None:
    one = queue(Host(), "q", single_active_consumer=True)
    first, second = Taker(), Taker()
    one.add(first)
    one.add(second)
    publish(one, bodies("a", "b"))
    one.remove(first)
    one.requeue((position, message) for position, message, _ in first.taken)
    one.dispatch()
    assert second.bodies == [b"a", b"b"]


def test_alarms_ring_in_order_once_and_one_may_set_another() -> None:
    alarms = CallScheduler()
    rung: list[str] = []

    def again() -> None:
        rung.append("again")
        alarms.set(5.0, lambda: rung.append("later"))

    alarms.set(3.0, lambda: rung.append("third"))
    alarms.set(1.0, again)
    assert alarms.run_due(0.5) == 1.0
    assert alarms.run_due(3.0) == 5.0
    assert rung == ["again", "third"]
    assert alarms.run_due(6.0) == float("inf")
    assert rung[2:] == ["later"]


def test_a_cancelled_alarm_lets_go_and_does_not_ring() -> None:
    alarms = CallScheduler()
    alarms.set(2.0, lambda: None).cancel()
    assert alarms.run_due(3.0) == float("inf")
    host = Host()
    for number in range(5_000):
        one = queue(host, f"q{number}", expires=86_400_000)
        publish(one, [native(b"x", life=time.time() + SOON)])
        host.delete_queue(one)
    assert len(host.alarms) <= 2 * CANCELLED_MAX + 2


async def test_the_task_wakes_for_an_alarm_that_is_set_while_it_sleeps(autojump_clock: MockClock) -> None:
    alarms = CallScheduler()
    rung: list[str] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(alarms.run, lambda: rung.append("written"))
        await trio.testing.wait_all_tasks_blocked()
        alarms.set(time.time() - 1.0, lambda: rung.append("rung"))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert rung == ["written", "rung", "written"]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("publish"), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.booleans()))
        ),
        st.tuples(st.just("take"), st.just(())),
        st.tuples(st.sampled_from(("acknowledge", "reject", "requeue")), st.integers(0, 5)),
        st.tuples(st.just("consume"), st.integers(0, 3)),
        st.tuples(st.sampled_from(("purge", "settle")), st.just(())),
    ),
    max_size=40,
)


@pytest.mark.needs("time")
@settings(max_examples=300)
@given(
    STEPS,
    st.fixed_dictionaries(
        {},
        optional={
            "max_length": st.integers(0, 4),
            "max_length_bytes": st.integers(0, 8),
            "overflow": st.sampled_from(("drop-head", "reject-publish", "reject-publish-dlx")),
            "max_priority": st.integers(1, 5),
            "dead_letter_exchange": st.just(""),
            "message_ttl": st.just(0),
            "single_active_consumer": st.booleans(),
        },
    ),
)
def test_no_message_is_lost_or_counted_twice(steps: list[tuple[str, Any]], arguments: dict[str, Any]) -> None:
    """What was published is ready, taken, dead, or was refused, acknowledged or purged: nothing else."""
    host = Host()
    one = queue(host, "q", **arguments)
    if "dead_letter_exchange" in arguments:
        one.options = one.options._replace(dead_letter_key="grave")
    grave = queue(host, "grave")
    held: list[tuple[int, Message]] = []
    taker = Taker(credit=0)
    one.add(taker)
    published = done = 0
    for word, what in steps:
        if word == "publish":
            past = time.time() - 1.0
            publish(
                one, [native(b"x" * size, life=past if late else NEVER, priority=p) for size, p, late in what]
            )
            published += len(what)
        elif word == "take" and (taken := one.take()) is not None:
            held.append(taken[:2])
        elif word == "consume":
            taker.credit = what
            one.dispatch()
            held += [row[:2] for row in taker.taken]
            taker.taken.clear()
            taker.credit = 0
        elif word in ("purge", "settle"):
            done += one.purge() if word == "purge" else 0
            one.settle_head()
        elif what in range(len(held)):
            position, message = held.pop(what)
            if word == "requeue":
                one.requeue([(position, message)])
            elif word == "reject":
                one.reject(position, message)
            else:
                one.acknowledged((position,))
                done += 1
            one.dispatch()
        dropped = sum(host.dead_lettering.dropped.values())
        letters = "overflow" in arguments and arguments["overflow"] == "reject-publish"
        refused = host.full_queues.refused if letters or "dead_letter_exchange" not in arguments else 0
        if arguments.get("overflow") == "reject-publish-dlx" and one.options.dead_letter_exchange is None:
            refused = 0  # each was noted as a death
        assert published == len(one) + len(held) + len(grave) + dropped + done + refused
        assert (one.unacknowledged, one.byte_count >= 0) == (len(held), True)
        if not len(one):
            assert one.byte_count == 0
    one.requeue(held)
    grave.add(rest := Taker(credit=0))
    emptied((one, taker), (grave, rest))
    assert idle_report(host) == []


def emptied(*rows: tuple[AmqpQueue, Taker]) -> None:
    """Consume and acknowledge what is left in queues."""
    for one, taker in rows:
        taker.credit = 1_000
        one.dispatch()
        one.acknowledged([position for position, _, _ in taker.taken])
        assert len(one) == one.unacknowledged == one.byte_count == 0


def quorum(host: Host, name: str, **arguments: int | str) -> AmqpQueue:
    said = {"queue_type": "quorum", **arguments}
    headers = tuple((f"x-{key.replace('_', '-')}", value_of(one)) for key, one in said.items())
    return host.declare_queue(name, None, durable=True, exclusive=False, auto_delete=False, arguments=headers)


def test_a_quorum_queue_forgets_the_counts_of_what_is_gone() -> None:
    """However a message goes, and although nothing is on disk that would have to be told."""
    one = quorum(Host(), "q", delivery_limit=5)
    publish(one, bodies("acknowledged", "rejected", "got", "purged", "expires"))
    taken = [one.take() for _ in range(5)]
    one.requeue([(position, message) for position, message, _ in filter(None, taken)])
    assert one.deliveries is not None
    assert [one.deliveries.of(position) for position in range(5)] == [1] * 5
    position, message, redelivered = one.take() or (0, message_of(""), False)
    assert (message.body, redelivered) == (b"acknowledged", True)
    one.unacknowledged -= 1  # as a channel does it for an ack
    one.removed_positions.append(position)
    position, message, _ = one.take() or (0, message_of(""), False)
    one.reject(position, message)
    position, message, _ = one.take() or (0, message_of(""), False)
    one.acknowledged((position,))
    one.dispatch()
    assert [one.deliveries.of(position) for position in range(5)] == [0, 0, 0, 1, 1]
    one.purge()
    assert not one.deliveries
    assert not one.removed_positions


def message_of(body: str) -> Message:
    return native(body.encode())


@pytest.mark.parametrize("strategy, kept", [("at-most-once", []), ("at-least-once", [b"x", b"y"])])
def test_a_letter_that_nothing_takes_is_kept_at_least_once(strategy: str, kept: list[bytes]) -> None:
    lost: list[bytes] = []
    host = Host()
    host.dead_lettering._lost = lambda messages, outcome: lost.extend(one.body for one in messages)
    said: dict[str, Any] = {
        "dead_letter_exchange": "amq.direct",
        "dead_letter_strategy": strategy,
        "delivery_limit": 0,
    }
    one = quorum(host, "q", overflow="reject-publish", **said)
    publish(one, bodies("x", "y"))
    position, message, _ = one.take() or (0, message_of(""), False)
    one.reject(position, message)
    position, message, _ = one.take() or (0, message_of(""), False)
    one.requeue([(position, message)])
    one.dispatch()
    assert lost == kept
    assert host.dead_lettering.dropped == (
        {"dead_letter_refused": 2} if kept else {"queue_rejected": 1, "queue_delivery_limit": 1}
    )
