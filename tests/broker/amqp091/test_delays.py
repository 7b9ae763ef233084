"""Exchanges of type `x-delayed-message`: what waits, when it goes on, and what it says then."""

from __future__ import annotations

from decimal import Decimal
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from gateway import clock
from gateway.broker.amqp091 import delays
from gateway.broker.amqp091.dead_letter_routing import EXPIRED_MAX
from gateway.broker.amqp091.delays import DelayedMessages, DelayedMessagesClaim, delay_of
from gateway.broker.amqp091.refusals import AmqpRefused
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.pressure import FULL, FullQueues
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.model.shares import UserShares
from gateway.model.times import WallTime
from gateway.protocols.amqp091.codec import BasicProperties, decode_properties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.translate import content_properties, encode_properties
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from tests.broker.amqp091.parts import NONE, Host, integer
from tests.broker.parts import SENDER, Answers, publish


class Time:
    """A clock that stands still until a test advances it, and rings a host's alarms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.utc = 1_000_000.0
        monkeypatch.setattr(clock, "utc", lambda: WallTime(self.utc))

    def advance(self, secs: float, host: VirtualHost) -> None:
        self.utc += secs
        host.alarms.run_due(self.utc)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def delaying(host: VirtualHost, kind: str = "direct", name: str = "d", **more: Any) -> DelayedMessages:
    said = {"durable": False, "auto_delete": False, "internal": False} | more
    arguments = (("x-delayed-type", string(kind)),)
    found = host.declare_exchange(name, "x-delayed-message", arguments=arguments, **said).delayed
    assert found is not None
    return found


def native(
    body: bytes = b"x", delay: Value | None = None, *, key: str = "k", exchange: str = "d", **said: Any
) -> Message:
    headers = said.pop("headers", ()) + (() if delay is None else (("x-delay", delay),))
    sender = said.pop("sender", SENDER)
    raw = encode_basic_properties(BasicProperties(headers=headers, **said))
    life = said.get("expiration")
    expires = NEVER if life is None else clock.utc() + int(life) / 1000
    return Message(amqp_address(exchange, key), body, content_properties(raw), expires=expires, sender=sender)


def sent(host: VirtualHost, *messages: Message) -> list[Outcome]:
    """Publish the messages as the dispatcher does, each to what it chooses."""
    outcomes = []
    for message in messages:
        sinks = host.sinks(message.address)
        for sink in host.choose(message) if sinks is None else sinks:
            outcomes += publish(sink, [message], Answers()).outcomes
    return outcomes


def taken(host: Host, name: str = "q") -> list[bytes]:
    found = []
    while (row := host.queues[name].take()) is not None:
        found.append(row[1].body)
    return found


def headers_of(message: Message) -> dict[str, Value]:
    return dict(decode_properties(encode_properties(message, clock.utc())).headers or ())


@pytest.fixture
def host(time: Time) -> Host:
    made = Host()
    delaying(made)
    made.bind("d", made.make("q"), "k", NONE)
    return made


@pytest.mark.parametrize(
    "given, wanted",
    [
        (integer(5), 5),
        (integer(0), 0),
        (integer(-5), 0),
        (Value(ValueType.UINT32, 4_294_967_295), 4_294_967_295),
        (Value(ValueType.INT64, 315_360_000_000), 315_360_000_000),
        (Value(ValueType.INT64, 315_360_000_001), 0),
        (string("70"), 70),
        (string("-70"), 0),
        (string("7 "), 0),
        (string("soon"), 0),
        (string("\u0665"), 0),
        (string("9" * 5_000), 0),
        (Value(ValueType.DOUBLE, 7.9), 7),
        (Value(ValueType.DOUBLE, float("nan")), 0),
        (Value(ValueType.DOUBLE, float("inf")), 0),
        (Value(ValueType.DECIMAL, Decimal("7.9")), 7),
        (Value(ValueType.BOOL, True), 0),
        (Value(ValueType.VOID, None), 0),
        (Value(ValueType.ARRAY, (integer(5),)), 0),
        (Value(ValueType.STRING, b"\xff"), 0),
    ],
)
def test_what_is_a_delay(given: Value, wanted: int) -> None:
    assert delay_of((("a", integer(1)), ("x-delay", given))) == wanted


def test_messages_come_when_they_are_due_and_not_in_their_order(time: Time, host: Host) -> None:
    rows = {b"late": 3_000, b"soon": 1_000, b"at once": 0, b"same": 3_000}
    messages = [native(body, integer(ms)) for body, ms in rows.items()]
    assert sent(host, *messages, native(b"none")) == [ACCEPTED] * 5
    assert taken(host) == [b"at once", b"none"]
    time.advance(0.999, host)
    assert taken(host) == []
    time.advance(0.001, host)
    assert taken(host) == [b"soon"]
    time.advance(60, host)
    assert taken(host) == [b"late", b"same"]
    delayed = host.exchanges["d"].delayed
    assert delayed is not None
    assert (len(delayed), delayed.byte_count, delayed.unacknowledged) == (0, 0, 0)


def test_what_arrives_says_that_its_delay_is_over_and_is_not_delayed_again(time: Time, host: Host) -> None:
    delaying(host, name="second")
    host.bind("d", host.exchange("second"), "k", NONE)
    host.bind("second", host.make("behind"), "k", NONE)
    sent(host, native(b"x", integer(500), headers=(("other", string("kept")),), message_id="id"))
    time.advance(0.5, host)
    for name in ("q", "behind"):
        row = host.queues[name].take()
        assert row is not None
        assert row[1].address == amqp_address("d", "k")
        assert headers_of(row[1]) == {"other": string("kept"), "x-delay": integer(-500)}
        assert row[1].properties.message_id == "id"


def test_a_delay_beyond_32_bits_stays_a_number(time: Time, host: Host) -> None:
    sent(host, native(b"x", Value(ValueType.INT64, 5_000_000_000)))
    time.advance(5_000_000, host)
    row = host.queues["q"].take()
    assert row is not None
    assert headers_of(row[1])["x-delay"] == Value(ValueType.INT64, -5_000_000_000)


def test_where_it_goes_is_decided_when_it_is_due(time: Time, host: Host) -> None:
    sent(host, native(b"x", integer(1_000)))
    host.unbind("d", host.queues["q"], "k", NONE)
    host.bind("d", host.make("new"), "k", NONE)
    time.advance(1, host)
    assert (taken(host), taken(host, "new")) == ([], [b"x"])


@pytest.mark.parametrize("kind, key", [("fanout", "any"), ("topic", "a.b"), ("x-consistent-hash", "z")])
def test_it_routes_as_the_type_in_its_arguments(time: Time, kind: str, key: str) -> None:
    host = Host()
    delaying(host, kind)
    binding = {"fanout": "", "topic": "a.*", "x-consistent-hash": "3"}[kind]
    host.bind("d", host.make("q"), binding, NONE)
    assert host.exchange("d").is_topic is (kind == "topic")  # on whose keys there are rights
    sent(host, native(b"late", integer(100), key=key), native(b"now", key=key))
    assert taken(host) == [b"now"]
    time.advance(1, host)
    assert taken(host) == [b"late"]


def test_headers_and_copies_are_looked_at_when_it_is_due(time: Time) -> None:
    host = Host()
    delaying(host, "headers")
    host.bind("d", host.make("q"), "", (("a", string("1")),))
    delaying(host, "direct", "copying")
    host.bind("copying", host.make("copy"), "blind", NONE)
    copies = (("BCC", Value(ValueType.ARRAY, (string("blind"),))),)
    sent(
        host,
        native(b"x", integer(100), headers=(("a", string("1")),)),
        native(b"other", integer(100), headers=(("a", string("2")),)),
        native(b"y", integer(100), exchange="copying", headers=copies),
    )
    time.advance(1, host)
    assert (taken(host), taken(host, "copy")) == ([b"x"], [b"y"])


def test_what_nothing_takes_goes_to_the_alternate_exchange_when_it_is_due(time: Time) -> None:
    host = Host()
    host.exchange_of("other", "fanout")
    host.bind("other", host.make("q"), "", NONE)
    arguments = (("x-delayed-type", string("direct")), ("alternate-exchange", string("other")))
    host.declare_exchange(
        "d", "x-delayed-message", durable=False, auto_delete=False, internal=False, arguments=arguments
    )
    sent(host, native(b"x", integer(1_000)))
    assert taken(host) == []
    time.advance(1, host)
    assert taken(host) == [b"x"]


def test_what_no_queue_takes_when_it_is_due_is_counted_and_a_dead_letter(time: Time) -> None:
    lost: list[tuple[list[Message], Outcome]] = []
    host = VirtualHost("/", lambda: None, lost=lambda messages, outcome: lost.append((messages, outcome)))
    delaying(host)
    assert sent(host, native(b"x", integer(1_000))) == [ACCEPTED]
    time.advance(1, host)
    assert [([one.body for one in messages], outcome.text) for messages, outcome in lost] == [
        ([b"x"], "no queue matches the delayed message")
    ]
    assert host.dead_lettering.dropped == {"delayed_unrouted": 1}


def test_an_expiration_begins_when_the_delay_ends(time: Time, host: Host) -> None:
    sent(host, native(b"x", integer(10_000), expiration="1000"))
    time.advance(10, host)
    row = host.queues["q"].take()
    assert row is not None
    assert row[1].expires == time.utc + 1
    host.queues["q"].requeue([(row[0], row[1])])
    time.advance(1, host)
    assert taken(host) == []


@pytest.mark.parametrize("expires_secs, arrives", [(30, True), (10, False), (5, False)])
def test_an_expiry_of_another_protocol_goes_on(
    time: Time, host: Host, expires_secs: int, arrives: bool
) -> None:
    properties = property_set(Properties(headers=(("x-delay", string("10000")),)))
    message = Message(
        topic_address("a"), b"x", properties, expires=time.utc + expires_secs, sender=SENDER
    ).with_crossing(amqp_address("d", "k"))
    assert sent(host, message) == [ACCEPTED]
    time.advance(10, host)
    row = host.queues["q"].take()
    assert (row is not None) is arrives
    if row is not None:
        assert row[1].expires == pytest.approx(time.utc + expires_secs - 10)
        assert headers_of(row[1])["x-delay"] == integer(-10_000)


def test_a_full_queue_refuses_and_what_it_refuses_is_a_dead_letter(time: Time) -> None:
    lost: list[bytes] = []
    host = VirtualHost("/", lambda: None, lost=lambda messages, _: lost.extend(one.body for one in messages))
    delaying(host)
    short = (("x-max-length", integer(1)), ("x-overflow", string("reject-publish")))
    queue = host.declare_queue("q", None, durable=False, exclusive=False, auto_delete=False, arguments=short)
    host.bind("d", queue, "k", NONE)
    sent(host, native(b"1", integer(10)), native(b"2", integer(20)))
    time.advance(1, host)
    assert (len(queue), lost) == (1, [b"2"])
    assert host.dead_lettering.dropped == {"dead_letter_refused": 1}


def test_what_waits_is_counted_against_the_limits_of_a_queue(time: Time) -> None:
    host = Host(queue_messages_max=3)
    delayed = delaying(host)
    host.bind("d", host.make("q"), "k", NONE)
    answers = Answers()
    for _ in range(7):
        publish(delayed, [native(b"x", integer(1_000))], answers)
    assert [outcome is FULL for outcome in answers.outcomes] == [False] * 6 + [True]
    assert len(answers.held) == 3
    time.advance(1, host)
    assert (answers.released, len(taken(host))) == (3, 6)


def test_a_sender_with_too_much_memory_is_restrained(time: Time, host: Host) -> None:
    delayed = host.exchanges["d"].delayed
    assert delayed is not None
    for _ in range(3):
        sent(host, native(bytes(100_000), integer(1_000)))
    ((claim, byte_count, user),) = delayed.claims()
    assert (byte_count > 300_000, user) == (True, SENDER.user)
    claim.restrain(True)
    claim.restrain(True)
    answers = Answers()
    (sink,) = host.choose(native(b"", integer(1_000)))
    publish(sink, [native(b"held", integer(1_000))], answers)
    other = Sender("test", user="other")
    free = Answers()
    publish(sink, [native(b"free", integer(1_000), sender=other)], free)
    assert not delayed.full
    DelayedMessagesClaim(delayed, user).restrain(False)
    assert (answers.released, free.released) == (1, 0)


@pytest.mark.parametrize("what", ["number", "bytes"])
@pytest.mark.parametrize("may_hold", [True, False])
def test_a_sender_has_a_share_of_the_exchange(time: Time, what: str, may_hold: bool) -> None:
    """Others get in until it is full, and the shares follow what leaves."""
    lots = 1 << 30
    weight = native(b"", integer(1_000)).byte_count
    shares = partial(UserShares, "delayed messages", user_share=0.5)
    host = VirtualHost(
        "/",
        lambda: None,
        limits=Limits(
            queue_messages_max=10 if what == "number" else lots,
            queue_bytes_max=10 * weight if what == "bytes" else lots,
        ),
        full_queues=FullQueues(lambda user: may_hold, shares),
    )
    delayed = delaying(host)
    (eve, ann) = (Sender("test", user=name) for name in ("eve", "ann"))

    def outcomes(sender: Sender, count: int) -> list[Outcome]:
        some = [native(b"", integer(1_000), sender=sender) for _ in range(count)]
        return publish(delayed, some, Answers()).outcomes

    most = 10 if may_hold else 5
    assert outcomes(eve, 30).count(ACCEPTED) == most
    assert host.full_queues.refused == 30 - most
    if not may_hold:
        mixed = [native(b"", integer(1_000), sender=one) for one in (eve, ann, eve, ann)]
        assert publish(delayed, mixed, Answers()).outcomes.count(ACCEPTED) == 2
        assert outcomes(ann, 9).count(ACCEPTED) == 3
        assert len(delayed) == 10
    time.advance(2, host)
    assert len(delayed) == 0
    assert list(delayed.claims()) == []
    assert outcomes(eve, 30).count(ACCEPTED) == most
    assert delayed.purge() == most
    assert list(delayed.claims()) == []


@pytest.mark.parametrize("eves", [5, 10])
@pytest.mark.parametrize("what", ["number", "bytes"])
def test_a_sender_waits_for_its_own_messages_and_not_for_years(time: Time, eves: int, what: str) -> None:
    """What another user delays for years may fill the exchange; it holds nobody for as long as that."""
    lots = 1 << 30
    weight = native(b"", integer(1_000)).byte_count
    host = VirtualHost(
        "/",
        lambda: None,
        limits=Limits(
            queue_messages_max=10 if what == "number" else lots,
            queue_bytes_max=10 * weight if what == "bytes" else lots,
        ),
        full_queues=FullQueues(lambda _: True, partial(UserShares, "delayed messages", user_share=0.5)),
    )
    delayed = delaying(host)
    (eve, ann) = (Sender("test", user=name) for name in ("eve", "ann"))

    def some(sender: Sender, count: int, delay_ms: int) -> Answers:
        return publish(delayed, [native(b"", integer(delay_ms), sender=sender) for _ in range(count)])

    evil = some(eve, eves, 1_000_000_000)
    for _ in range(3):
        held = some(ann, 6, 1_000)
        assert held.outcomes == [ACCEPTED] * 6
        assert (len(held.held), held.released) == (1, 0)
        time.advance(2, host)
        assert held.released == 1
        assert len(delayed) == eves
    assert evil.released == 0
    assert len(evil.held) == (eves > 5)
    time.advance(2_000_000, host)
    assert evil.released == len(evil.held)


def test_a_sender_whose_messages_the_disk_refuses_is_not_held_by_those_of_others(time: Time) -> None:
    host = VirtualHost(
        "/",
        lambda: None,
        limits=Limits(queue_messages_max=10),
        full_queues=FullQueues(lambda _: True, partial(UserShares, "delayed messages", user_share=0.5)),
    )
    delayed = delaying(host)
    publish(delayed, [native(b"", integer(1_000), sender=Sender("test", user="eve"))] * 10)
    held = publish(delayed, [native(b"", integer(1_000), sender=Sender("test", user="ann"))] * 2)
    assert (len(held.held), held.released) == (1, 0)
    delayed.remove_refused(10, 2)
    assert held.released == 1


@pytest.mark.interpreted
def test_a_sender_of_whom_a_failing_disk_takes_nothing_is_not_held(time: Time) -> None:
    host = VirtualHost("/", lambda: None, limits=Limits(queue_messages_max=10))
    delayed = delaying(host)
    publish(delayed, [native(b"", integer(1_000), sender=Sender("test", user="eve"))] * 10)
    delayed.storage = SimpleNamespace(count=0, refill=lambda: False, take=lambda *_: [])  # type: ignore[assignment]
    held = publish(delayed, [native(b"", integer(1_000), sender=Sender("test", user="ann"))])
    assert (len(held.held), held.released) == (1, 1)


def test_a_message_to_a_full_share_by_a_binding_costs_its_publisher_nothing(time: Time) -> None:
    full = FullQueues(lambda user: False)
    host = VirtualHost("/", lambda: None, limits=Limits(queue_messages_max=2), full_queues=full)
    delayed = delaying(host)
    some = [native(b"", integer(1_000), exchange="other") for _ in range(5)]
    assert publish(delayed, some, Answers()).outcomes == [ACCEPTED] * 5
    assert (len(delayed), full.dropped) == (2, 3)


def test_very_many_that_are_due_at_once_go_in_turns(time: Time, host: Host) -> None:
    count = 3 * EXPIRED_MAX
    delayed = host.exchanges["d"].delayed
    assert delayed is not None
    publish(delayed, [native(b"%d" % number, integer(1_000)) for number in range(count)])
    time.advance(1, host)
    assert 0 < len(host.queues["q"]) <= EXPIRED_MAX
    turns = 0
    while len(host.queues["q"]) < count:
        host.alarms.run_due(time.utc)
        turns += 1
        assert turns < 100
    assert taken(host) == [b"%d" % number for number in range(count)]


def test_a_purged_queue_keeps_its_delayed_messages_and_a_deleted_exchange_loses_them(
    time: Time, host: Host
) -> None:
    delayed = host.exchanges["d"].delayed
    assert delayed is not None
    sent(host, native(b"x", integer(1_000)), native(b"now"))
    assert host.queues["q"].purge() == 1
    assert len(delayed) == 1
    host.delete_exchange("d", if_unused=False)
    assert host.dead_lettering.dropped == {"delayed_deleted": 1}
    delaying(host)
    host.bind("d", host.queues["q"], "k", NONE)
    time.advance(1, host)
    assert taken(host) == []
    assert publish(delayed, [native(b"late", integer(1))]).outcomes == [ACCEPTED]  # a transaction's
    assert host.dead_lettering.dropped == {"delayed_deleted": 2}


def test_a_dead_letter_is_delayed_by_an_exchange_with_the_name_of_its_queue(time: Time) -> None:
    """It has died in the queue of that name, so that it does not return to the queue, but to the exchange."""
    host = Host()
    delaying(host, name="retry")
    host.make(
        "retry",
        ("x-message-ttl", integer(1_000)),
        ("x-dead-letter-exchange", string("retry")),
        ("x-dead-letter-routing-key", string("done")),
    )
    host.bind("retry", host.make("done"), "done", NONE)
    publish(host.queues["retry"], [native(b"x", integer(5_000), exchange="")])
    time.advance(1, host)
    assert (len(host.queues["retry"]), taken(host, "done")) == (0, [])
    time.advance(5, host)
    assert taken(host, "done") == [b"x"]
    assert not host.dead_lettering.dropped


def test_what_is_due_while_the_disk_fails_waits_until_it_does_not(time: Time) -> None:
    class Failing(Host):
        fails = True

        @property
        def disk_fails(self) -> bool:
            return self.fails

    host = Failing()
    delayed = delaying(host)
    host.bind("d", host.make("q"), "k", NONE)
    sent(host, native(b"x", integer(1_000)), native(b"y", integer(2_000)))
    for _ in range(5):
        time.advance(1, host)
    assert (taken(host), len(delayed)) == ([], 2)
    host.fails = False
    time.advance(1, host)
    assert taken(host) == [b"x", b"y"]


def test_what_cannot_be_written_when_it_is_due_is_a_dead_letter_that_has_not_expired(
    time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Message] = []
    host = VirtualHost("/", lambda: None, lost=lambda messages, _: lost.extend(messages))
    delaying(host)

    def broken(*_: object) -> bytes:
        raise ValueError("no")

    sent(host, native(b"x", integer(1_000)))
    monkeypatch.setattr(delays, "encode_basic_properties", broken)
    time.advance(1, host)
    assert [(one.body, one.expires) for one in lost] == [(b"x", NEVER)]


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        (NONE, 406, "'x-delayed-type' must be an existing exchange type"),
        ((("x-delayed-type", integer(1)),), 406, "must be an existing exchange type"),
        ((("x-delayed-type", string("x-delayed-message")),), 406, "can't be used for 'x-delayed-type'"),
        ((("x-delayed-type", string("other")),), 503, "unknown exchange type 'other'"),
        (
            (("x-delayed-type", string("x-consistent-hash")), ("hash-property", string("x"))),
            406,
            "Unsupported property: x",
        ),
    ],
)
def test_what_cannot_be_declared(arguments: Any, code: int, text: str) -> None:
    with pytest.raises(AmqpRefused, match=text) as refused:
        Host().declare_exchange(
            "d", "x-delayed-message", durable=False, auto_delete=False, internal=False, arguments=arguments
        )
    assert refused.value.code == code
