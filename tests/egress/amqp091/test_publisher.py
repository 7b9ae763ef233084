"""What an AMQP 0-9-1 link publishes: every message is settled once, as the broker says, and none is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from errno import EMFILE, ENOENT
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.broker.shares import UserQuotas
from gateway.egress.confirms import WAITING_USER_FULL
from gateway.mapping.router import Router, Targets
from gateway.model.batch import Batch, Recipient
from gateway.model.message import MESSAGE_BYTES, NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet, property_set, string
from gateway.model.spooled_bodies import Spooled
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.methods import (
    ChannelFlow,
    ChannelFlowOk,
    ConfirmSelect,
    ConnectionBlocked,
    ConnectionUnblocked,
)
from gateway.protocols.amqp091.table import syntax_error
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from tests.broker.outbox.bench import Bench, mapping
from tests.broker.parts import Answers, mqtt, unreadable
from tests.egress.amqp091.remote import LinkRig, Settled, routed

pytestmark = pytest.mark.interpreted  # the stream is one in memory

EX = "amq.topic"
OUTBOX_WAIT_SECS_MAX = 30.0


def bodies(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


def rig(confirms: bool = False, limits: Limits | None = None, **settings: Any) -> tuple[LinkRig, Settled]:
    made = LinkRig(limits=limits, **settings)
    made.world.exchanges[EX] = "topic"
    made.world.confirms = confirms
    made.connect()
    return made, Settled()


def publish(one: LinkRig, source: Settled, names: list[bytes], exchange: str = EX) -> None:
    source.publish(one.session.publisher, exchange, names)
    one.move()


def accepted(source: Settled) -> list[object]:
    return [receipt for receipt in source.order if source.outcomes[receipt] is ACCEPTED]


Confirm = Callable[[LinkRig], None]


def ack(number: int, multiple: bool = False) -> Confirm:
    return lambda one: one.remote.machine.ack(one.remote.publishing, number, multiple)


def nack(number: int, multiple: bool = False) -> Confirm:
    return lambda one: one.remote.machine.nack(one.remote.publishing, number, multiple)


@pytest.mark.parametrize(
    "confirms, first, refused",
    [
        ([ack(10, True)], "0123456789", ""),
        ([ack(1), ack(2), ack(3)], "012", ""),
        ([ack(4, True)], "0123", ""),
        ([ack(3), ack(1), ack(2)], "012", ""),
        ([ack(7), ack(9), ack(3)], "268", ""),
        ([ack(7), ack(9), ack(8, True)], "012345678", ""),
        ([ack(2), ack(10, True)], "0123456789", ""),
        ([nack(2)], "", "1"),
        ([nack(3, True)], "", "012"),
        ([ack(2), nack(3, True), ack(5, True)], "134", "02"),
        ([ack(5), nack(10, True)], "4", "012356789"),
        ([nack(6), ack(10, True)], "012346789", "5"),
        ([ack(5, True), ack(3, True), ack(5)], "01234", ""),
    ],
)
async def test_confirms_settle(confirms: list[Confirm], first: str, refused: str) -> None:
    """In one byte stream or one by one, over parts of one, four and five messages."""
    for together in (True, False):
        one, source = rig()
        for part in (bodies(0, 1), bodies(1, 5), bodies(5, 10)):
            publish(one, source, part)
        assert source.order == []
        for confirm in confirms:
            confirm(one)
            if not together:
                one.move()
        one.move()
        told = {receipt for receipt, outcome in source.outcomes.items() if outcome is not ACCEPTED}
        assert told == {b"%c" % ord(digit) for digit in refused}
        assert set(accepted(source)) == {b"%c" % ord(digit) for digit in first}
        assert all(source.outcomes[receipt].reason is Reason.TARGET_REFUSED for receipt in told)
        assert one.stats.in_flight == 10 - len(first) - len(refused)
        ack(10, True)(one)
        one.move()
        assert len(source.order) == 10
        assert one.stats.in_flight == 0
        assert one.session.idle


async def test_what_was_not_confirmed_is_sent_again_in_order_before_what_waited() -> None:
    one, source = rig()
    publish(one, source, bodies(0, 6))
    ack(2)(one)
    ack(4)(one)
    one.move()
    one.lose()
    assert one.link.downs == ["broken"]
    source.publish(one.session.publisher, EX, bodies(6, 9))
    assert accepted(source) == [b"1", b"3"]
    one.world.published.clear()
    one.world.confirms = True
    one.connect()
    assert one.world.bodies == [b"0", b"2", b"4", b"5", b"6", b"7", b"8"]
    assert sorted(map(bytes.decode, source.outcomes)) == list("012345678")  # type: ignore[arg-type]
    assert one.session.idle
    assert one.link.ups == 2


async def test_no_more_is_on_its_way_than_the_window_allows() -> None:
    one, source = rig(in_flight_max=10)
    publish(one, source, bodies(0, 25))
    assert len(one.world.published) == 10
    assert one.stats.in_flight == 10
    ack(4, True)(one)
    one.move()
    assert len(one.world.published) == 14
    one.lose()
    one.world.published.clear()
    one.connect()
    assert one.world.bodies == bodies(4, 14)
    ack(10, True)(one)
    one.move()
    ack(20, True)(one)
    one.move()
    ack(21, True)(one)
    one.move()
    assert accepted(source) == bodies(0, 25)


async def test_beyond_its_limits_a_link_that_is_down_releases_the_newest() -> None:
    one = LinkRig(limits=Limits(queue_messages_max=5, queue_bytes_max=100 + 5 * MESSAGE_BYTES))
    source = Settled()
    outgoing = one.session.publisher
    source.publish(outgoing, EX, bodies(0, 4))
    source.publish(outgoing, EX, bodies(4, 6))
    source.publish(outgoing, EX, [b"x" * (98 + MESSAGE_BYTES)])
    source.publish(outgoing, EX, bodies(6, 7))
    assert set(source.order) == {b"5", b"6", b"x" * (98 + MESSAGE_BYTES)}
    outcome = source.outcomes[b"5"]
    assert (outcome.verdict, outcome.reason) == (Verdict.RELEASED, Reason.TARGET_DOWN)
    assert not one.session.idle
    assert outgoing.waiting_messages == 5
    one.world.exchanges[EX] = "topic"
    one.connect()
    assert one.world.bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert (outgoing.waiting_messages, outgoing.waiting_bytes) == (0, 0)


async def test_a_user_has_no_more_than_its_share_of_what_waits_for_a_link_that_is_down() -> None:
    quotas = UserQuotas(Limits(user_share=0.5))
    dispatcher = Dispatcher(Router([], {}), DeadLetters(), DispatcherServices(quotas=quotas))
    one = LinkRig(dispatcher, limits=Limits(queue_messages_max=8))
    source, outgoing = Settled(), one.session.publisher

    def send(user: str, *names: bytes) -> None:
        sender = Sender("mqtt", user, user)
        messages = [Message(amqp_address(EX, "k"), name, durable=True, sender=sender) for name in names]
        outgoing.publish(source.part(messages, outgoing))

    send("greedy", *bodies(0, 3))
    send("greedy", *bodies(3, 6))
    send("modest", *bodies(6, 8))
    send("greedy", b"8")
    assert source.outcomes == dict.fromkeys((b"4", b"5", b"8"), WAITING_USER_FULL)
    assert quotas.refusal_counts()["waiting_messages"] == 3
    one.world.exchanges[EX] = "topic"
    one.connect()
    assert one.world.bodies == [b"0", b"1", b"2", b"3", b"6", b"7"]
    assert (outgoing._shares.count, outgoing._shares.total) == (0, 0)  # type: ignore[union-attr]


async def test_a_blocked_broker_gets_nothing_until_it_says_so() -> None:
    one, source = rig(confirms=True)
    one.remote.machine.send_method(0, ConnectionBlocked("memory"))
    one.move()
    publish(one, source, bodies(0, 2))
    assert one.world.published == []
    assert source.order == []
    one.remote.machine.send_method(0, ConnectionUnblocked())
    one.move()
    assert accepted(source) == bodies(0, 2)


def flow(one: LinkRig, active: bool) -> None:
    one.remote.machine.send_method(one.remote.publishing, ChannelFlow(active))
    one.move()


async def test_a_stopped_channel_gets_nothing_and_its_successor_everything() -> None:
    """The broker stops the flow of a channel, and closes it; the next channel was never stopped."""
    one, source = rig(confirms=True)
    flow(one, False)
    publish(one, source, bodies(0, 2))
    assert one.world.published == []
    assert ChannelFlowOk(False) in one.world.heard
    assert one.session.stats.blocked
    stopped = one.remote.publishing
    one.remote.machine.close_channel(stopped, 541, "INTERNAL_ERROR", 0, 0)
    one.move()
    assert accepted(source) == bodies(0, 2)
    assert not one.session.stats.blocked


@pytest.mark.parametrize("first", ["blocked", "stopped"])
async def test_a_broker_that_blocks_and_stops_gets_nothing_before_both_are_over(first: str) -> None:
    one, source = rig(confirms=True)
    one.remote.machine.send_method(0, ConnectionBlocked("memory"))
    flow(one, False)
    publish(one, source, bodies(0, 2))
    if first == "stopped":
        flow(one, True)
    else:
        one.remote.machine.send_method(0, ConnectionUnblocked())
        one.move()
    assert one.world.published == []
    assert one.session.stats.blocked
    if first == "blocked":
        flow(one, True)
    else:
        one.remote.machine.send_method(0, ConnectionUnblocked())
        one.move()
    assert accepted(source) == bodies(0, 2)


async def test_a_congested_stream_gets_nothing_until_it_has_drained() -> None:
    one, source = rig(confirms=True)
    one.stream.congested = True
    publish(one, source, bodies(0, 2))
    assert one.world.published == []
    one.stream.congested = False
    one.connection.resume_writing()
    one.move()
    assert accepted(source) == bodies(0, 2)


async def test_a_message_that_comes_back_is_rejected_and_its_ack_changes_nothing() -> None:
    one, source = rig(confirms=True)
    one.world.unroutable.add("nowhere")
    outgoing = one.session.publisher
    there, nowhere = amqp_address(EX, "k"), amqp_address(EX, "nowhere")
    messages = [Message(there if at % 2 else nowhere, b"%d" % at, durable=at < 3) for at in range(6)]
    outgoing.publish(source.part(messages, outgoing))
    one.move()
    assert {receipt for receipt, got in source.outcomes.items() if got is not ACCEPTED} == {b"0", b"2", b"4"}
    outcome = source.outcomes[b"0"]
    assert (outcome.verdict, outcome.reason) == (Verdict.REJECTED, Reason.NO_ROUTE)
    assert "nowhere" in outcome.text
    assert one.session.idle


async def test_a_returned_message_is_not_sent_again() -> None:
    one, source = rig()
    one.world.unroutable.add("k")
    publish(one, source, bodies(0, 3))
    assert len(source.order) == 3
    one.lose()
    one.world.published.clear()
    one.connect()
    assert one.world.published == []
    assert one.session.idle


async def test_equal_messages_come_back_one_by_one() -> None:
    one, source = rig()
    outgoing = one.session.publisher
    one.world.unroutable.add("k")
    batch = Batch(source, Monotonic(0.0))
    part = source.part([], outgoing)
    for number in range(3):
        message = Message(amqp_address(EX, "k"), b"same")
        batch.add_only(number, part.recipient, message)
        part.messages.append(message)
        part.slots.append(number)
    part.batch = batch
    outgoing.publish(part)
    one.move()
    assert source.order == [0, 1, 2]


async def test_a_missing_exchange_costs_its_own_messages_only() -> None:
    one, source = rig()
    outgoing = one.session.publisher
    addresses = [amqp_address(EX, "k"), amqp_address("gone", "k")]
    outgoing.publish(source.part([Message(addresses[at % 2], b"%d" % at) for at in range(6)], outgoing))
    one.move()
    assert {receipt for receipt, got in source.outcomes.items() if got is not ACCEPTED} == {b"1", b"3", b"5"}
    outcome = source.outcomes[b"1"]
    assert (outcome.verdict, outcome.reason) == (Verdict.REJECTED, Reason.TARGET_REFUSED)
    assert outcome.text == "NOT_FOUND - no exchange 'gone' in vhost '/'"
    assert one.world.bodies[-3:] == [b"0", b"2", b"4"]  # again, on a new channel
    ack(3, True)(one)
    one.move()
    assert accepted(source) == [b"0", b"2", b"4"]
    sent = len(one.world.published)
    publish(one, source, [b"later"], "gone")
    assert source.outcomes[b"later"].verdict is Verdict.REJECTED
    assert len(one.world.published) == sent


async def test_an_exchange_that_appears_is_used_again(autojump_clock: trio.testing.MockClock) -> None:
    one, source = rig(confirms=True)
    publish(one, source, [b"early"], "gone")
    assert source.outcomes[b"early"].verdict is Verdict.REJECTED
    one.tick()
    await trio.sleep(1.5)
    one.tick()
    publish(one, source, [b"still early"], "gone")
    assert source.outcomes[b"still early"].verdict is Verdict.REJECTED
    one.world.exchanges["gone"] = "topic"
    await trio.sleep(2.5)
    one.tick()
    publish(one, source, [b"in time"], "gone")
    assert source.outcomes[b"in time"] is ACCEPTED


@pytest.mark.parametrize("culprits", [{3}, {0, 1}, {9}, {2, 7}])
async def test_a_message_that_closes_the_channel_is_found_out(culprits: set[int]) -> None:
    one, source = rig(confirms=True)
    one.world.poison = {b"%d" % at for at in culprits}
    publish(one, source, bodies(0, 10))
    refused = {receipt for receipt, got in source.outcomes.items() if got is not ACCEPTED}
    assert refused == one.world.poison
    assert all("user_id" in source.outcomes[receipt].text for receipt in refused)
    assert len(source.order) == 10
    assert one.session.idle
    publish(one, source, bodies(10, 30))
    assert len(source.order) == 30


NO_ROOM = (506, "RESOURCE_ERROR - the disk of queue 'q' is full")


@pytest.mark.parametrize("culprits", [{3}, {0, 1}, {9}, {2, 7}])
async def test_a_message_that_closes_the_channel_for_lack_of_resources_is_released(
    culprits: set[int],
) -> None:
    """It may be accepted later, and costs no other message."""
    one, source = rig(confirms=True)
    one.world.refusal = NO_ROOM
    one.world.poison = {b"%d" % at for at in culprits}
    publish(one, source, bodies(0, 10))
    refused = {receipt: got for receipt, got in source.outcomes.items() if got is not ACCEPTED}
    assert refused == dict.fromkeys(one.world.poison, Outcome(Verdict.RELEASED, Reason.QUOTA, NO_ROOM[1]))
    assert set(accepted(source)) == set(bodies(0, 10)) - one.world.poison
    assert one.session.idle
    again, one.world.poison = one.world.poison, set()
    later = Settled()
    publish(one, later, sorted(again))
    assert set(accepted(later)) == again


async def test_a_connection_that_is_closed_for_lack_of_resources_releases_one_message() -> None:
    one, source = rig()
    publish(one, source, [b"full"])
    one.remote.machine.close(*NO_ROOM, 60, 40)
    one.move()
    assert source.outcomes == {b"full": Outcome(Verdict.RELEASED, Reason.QUOTA, NO_ROOM[1])}
    assert one.session.idle


async def test_an_outbox_tries_again_what_closed_the_channel_for_lack_of_resources(tmp_path: Path) -> None:
    """Nothing becomes a dead letter, though the route allows one attempt after a rejection."""
    one, _ = rig(confirms=True)
    one.world.refusal, one.world.poison = NO_ROOM, {b"1"}
    bench = Bench(tmp_path, mapping(", attempts_max: 1"), link=one.session)
    assert bench.stored(0, 1, 2).outcomes == [ACCEPTED] * 3
    for _ in range(5):
        one.move()
        bench.commit()
        assert bench.state.messages
        bench.after(OUTBOX_WAIT_SECS_MAX)
    one.world.poison = set()
    while bench.state.messages:
        bench.after(OUTBOX_WAIT_SECS_MAX)
        one.move()
        bench.commit()
    assert set(one.world.bodies) == {b"0", b"1", b"2"}
    assert bench.dead() == []
    assert one.session.idle
    bench.one.end(True, bench.outboxes)


async def test_an_expired_message_does_not_leave_the_link() -> None:
    one, source = rig(confirms=True)
    outgoing = one.session.publisher
    one.lose()
    utc = time.time()
    address = amqp_address(EX, "k")
    kept = Message(address, b"kept", expires=utc + 1000)
    outgoing.publish(source.part([Message(address, b"late", expires=utc - 1), kept], outgoing))
    one.connect()
    assert source.outcomes[b"late"].reason is Reason.EXPIRED
    assert source.outcomes[b"kept"] is ACCEPTED
    assert one.world.bodies == [b"kept"]


async def test_an_outbox_sends_in_order_past_what_expires_while_the_link_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox has something to send as soon as it hears that the first message has expired."""
    one, _ = rig()
    bench = Bench(tmp_path, mapping(), link=one.session, window=4)
    one.lose()
    utc = time.time()
    source = Answers()
    batch = Batch(source, Monotonic(0.0))
    for number in range(8):
        sent = mqtt("out/x", b"%d" % number, expires=NEVER if number else utc + 10)
        entry = bench.dispatcher.entry("mqtt", bench.dispatcher.namespaces["mqtt"], sent.address)
        assert bench.dispatcher.publish(batch, entry, sent, number)
    batch.send()
    bench.commit()
    assert source.outcomes == [ACCEPTED] * 8
    one.connect()
    bench.outboxes.link_up("erp")
    one.move()
    assert one.world.bodies == bodies(0, 4)
    one.lose()
    one.world.published.clear()
    one.world.confirms = True
    monkeypatch.setattr(clock, "utc", lambda: utc + 20)
    one.connect()
    bench.outboxes.link_up("erp")
    one.move()
    assert one.world.bodies == bodies(1, 8)
    bench.commit()
    assert bench.dead() == [(0, "out", "expired")]
    bench.one.end(True, bench.outboxes)


async def test_a_life_that_the_broker_would_refuse_is_shortened_and_counted() -> None:
    one, source = rig()
    outgoing, utc = one.session.publisher, time.time()
    address = amqp_address(EX, "a")
    lives = [Message(address, b"long", expires=utc + 0xFFFFFFFF), Message(address, b"x", expires=utc + 1000)]
    outgoing.publish(source.part(lives, outgoing))
    one.move()
    assert one.stats.degraded.counts == {"expiration": 1}


async def test_properties_that_cannot_be_written_cost_their_own_message_only() -> None:
    def malformed(raw: bytes) -> None:
        raise syntax_error("cut short")

    one, source = rig(confirms=True)
    outgoing = one.session.publisher
    address = amqp_address(EX, "k")
    broken = Message(address, b"broken", PropertySet("mqtt", b"?", malformed))  # type: ignore[arg-type]
    long = tuple((f"h{at}", string("x" * 20_000)) for at in range(10))
    huge = Message(address, b"huge", property_set(Properties(headers=long)))
    outgoing.publish(source.part([Message(address, b"a"), broken, huge, Message(address, b"b")], outgoing))
    one.move()
    assert {receipt: got.reason for receipt, got in source.outcomes.items()} == {
        b"a": Reason.NONE,
        b"broken": Reason.MALFORMED,
        b"huge": Reason.TOO_LARGE,
        b"b": Reason.NONE,
    }
    assert one.world.bodies == [b"a", b"b"]


@pytest.mark.parametrize("error, verdict", [(EMFILE, Verdict.RELEASED), (ENOENT, Verdict.REJECTED)])
async def test_a_body_that_cannot_be_read_costs_its_own_message_only(error: int, verdict: Verdict) -> None:
    class Unreadable:
        name = "body"

        def read(self, at: int, count: int) -> bytes:
            raise OSError(error, os.strerror(error))

    one, source = rig(confirms=True)
    outgoing, address = one.session.publisher, amqp_address(EX, "k")
    body = cast(bytes, Spooled(cast(Any, Unreadable()), 1_000_000))
    outgoing.publish(source.part([Message(address, one) for one in (b"a", body, b"b")], outgoing))
    one.move()
    assert [source.outcomes[receipt].verdict for receipt in (b"a", b"b")] == [Verdict.ACCEPTED] * 2
    assert source.outcomes[body].verdict is verdict
    assert one.world.bodies == [b"a", b"b"]
    assert not one.stream.closed
    assert one.session.idle


@pytest.mark.parametrize("mandatory", [True, False])
async def test_mandatory_is_what_the_route_says(mandatory: bool, tmp_path: Path) -> None:
    router = routed(
        tmp_path,
        f"""
version: 1
routes:
  - name: up
    from: {{endpoint: mqtt, topic: "t/{{rest...}}"}}
    to: {{endpoint: erp, exchange: {EX}, routing_key: "{{rest}}", mandatory: {str(mandatory).lower()}}}
""",
    )
    dispatcher = Dispatcher(router, DeadLetters())
    one = LinkRig(dispatcher)
    dispatcher.add_endpoint("erp", one.session)
    one.world.exchanges[EX] = "topic"
    one.world.unroutable.add("a")
    one.connect()
    source = Settled()
    batch = Batch(source, Monotonic(trio.current_time()))
    address = topic_address("t/a")
    entry = dispatcher.entry("mqtt", None, address)
    assert dispatcher.publish(batch, entry, Message(address, b"body", assurance=1, durable=True), 1)
    batch.send()
    one.move()
    assert [row[2] for row in one.world.published] == [mandatory]
    assert (source.outcomes[1] is ACCEPTED) is not mandatory


async def test_without_a_router_the_link_stays_a_sink_for_every_address() -> None:
    one = LinkRig(Dispatcher(Router([], {}), DeadLetters()))
    one.route(targets=Targets(scopes=(EX,)))
    address = amqp_address("any", "where")
    assert one.session.sinks(address) == one.session.choose(Message(address, b""))


def channels(one: LinkRig) -> dict[int, int]:
    """How many messages came on each channel."""
    return {channel: count for channel, count in one.remote.numbers.items() if count}


async def test_a_channel_that_refuses_is_left_when_the_rest_is_confirmed() -> None:
    """RabbitMQ nacks for ever on a channel that has met a quorum queue without its leader."""
    one, source = rig()
    publish(one, source, bodies(0, 3))
    (first,) = channels(one)
    nack(2)(one)
    one.move()
    one.tick()
    publish(one, source, bodies(3, 5))
    assert one.world.bodies == bodies(0, 3), "nothing more goes to a channel that is to be left"
    ack(3, True)(one)
    one.move()
    one.tick()
    one.move()
    assert one.world.bodies == bodies(0, 5)
    (other,) = channels(one).keys() - {first}
    assert first not in one.remote.machine.channels
    one.remote.machine.ack(other, 2, True)
    one.move()
    assert source.outcomes[b"1"].reason is Reason.TARGET_REFUSED
    assert [receipt for receipt in bodies(0, 5) if source.outcomes[receipt] is not ACCEPTED] == [b"1"]
    assert one.session.idle


async def test_where_each_channel_refuses_the_next_one_comes_later_and_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, source = rig()
    for second in range(200):
        publish(one, source, bodies(second, second + 1))
        newest = one.remote.newest
        one.remote.machine.nack(newest, one.remote.numbers[newest])
        one.move()
        await trio.sleep(1.0)
        one.tick()
        one.move()
    assert len(source.outcomes) == 200
    chosen = sum(isinstance(method, ConfirmSelect) for method in one.world.heard)
    assert 1 + 6 <= chosen <= 1 + 9  # after 2, 4, 8, 16, 32, 60, 60 seconds


async def test_what_is_never_confirmed_holds_up_no_others(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, source = rig()
    publish(one, source, bodies(0, 2))
    (first,) = channels(one)
    nack(2)(one)
    one.move()
    one.tick()
    publish(one, source, bodies(2, 3))
    for _ in range(5):
        assert one.world.bodies == bodies(0, 2)
        await trio.sleep(1.0)
        one.tick()
        one.move()
    assert one.world.bodies == bodies(0, 3)
    assert list(channels(one)) == [first]


@pytest.mark.parametrize("odd", ["too large", "malformed"])
async def test_confirms_count_what_was_sent_when_the_first_message_cannot_be(
    tmp_path: Path, odd: str
) -> None:
    """The outbox sends its next message as soon as it hears of the first; the broker confirms the second."""
    one, _ = rig()
    bench = Bench(tmp_path, mapping(", attempts_max: 1"), link=one.session, window=2)
    one.remote.machine.send_method(0, ConnectionBlocked("memory"))
    one.move()
    properties = property_set(Properties(headers=(("big", string("x" * 200_000)),)))
    if odd == "malformed":
        properties = unreadable()
    source = Answers()
    batch = Batch(source, Monotonic(0.0))
    for number in range(4):
        given = NO_PROPERTIES if number else properties
        sent = mqtt("out/x", b"%d" % number, properties=given)
        entry = bench.dispatcher.entry("mqtt", bench.dispatcher.namespaces["mqtt"], sent.address)
        assert bench.dispatcher.publish(batch, entry, sent, number)
    batch.send()
    bench.commit()
    one.remote.machine.send_method(0, ConnectionUnblocked())
    one.move()
    assert one.world.bodies[0] == b"1"
    one.remote.machine.ack(one.remote.publishing, 1)
    one.move()
    one.lose()
    one.world.published.clear()
    one.world.confirms = True
    one.connect()
    bench.outboxes.link_up("erp")
    one.move()
    assert one.world.bodies == [b"2", b"3"], "the broker has confirmed 1"
    bench.commit()
    assert [body for body, _, _ in bench.dead()] == [0]
    bench.one.end(True, bench.outboxes)


async def test_what_waits_stays_first_when_an_exchange_is_refused() -> None:
    """The source of a refused message publishes another one at that moment."""
    one, _ = rig(confirms=True)
    outgoing = one.session.publisher
    recipient = Recipient(outgoing)

    class Retrying(Answers):
        def settle(self, receipts: list[object], refused: dict[int, Outcome] | None, received: float) -> None:
            if refused:
                later = Batch(self, Monotonic(0.0))
                later.add_only(b"later", recipient, Message(amqp_address(EX, "k"), b"later"))
                later.send()

    one.remote.machine.send_method(0, ConnectionBlocked("memory"))
    one.move()
    batch = Batch(Retrying(), Monotonic(0.0))
    for exchange, body in (("nowhere", b"0"), (EX, b"1"), (EX, b"2")):
        batch.add_only(body, recipient, Message(amqp_address(exchange, "k"), body))
    batch.send()
    one.remote.machine.send_method(0, ConnectionUnblocked())
    outgoing.refuse("nowhere", Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no"))
    one.move()
    assert one.world.bodies == [b"1", b"2", b"later"]
