"""What an AMQP 0-9-1 link consumes: through the routes, and acknowledged when every target has settled it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trio

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dead_letters.redrive import Redriving
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.egress.held_back import EXPIRED, ROUTE_REMOVED, TOO_LONG, HeldBack
from gateway.egress.session import message_of
from gateway.model.address import Address
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.methods import BasicQos, ChannelFlow, ChannelFlowOk
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from tests.broker.parts import newest
from tests.egress.amqp091.remote import NO_PROPERTIES, PERSISTENT, LinkRig, Shelf, routed

pytestmark = pytest.mark.interpreted  # the stream is one in memory

MAPPING = """
version: 1
routes:
  - name: commands
    from: {endpoint: erp, queue: commands}
    to: {endpoint: mqtt, topic: "commands/{routing_key...}"}
  - name: events
    from: {endpoint: erp, exchange: events, binding_key: "{plant}.#"}
    to: {endpoint: mqtt, topic: "events/{plant}"}
  - name: hot
    from: {endpoint: erp, queue: conditional}
    to: {endpoint: mqtt, topic: "hot"}
    when: "body.hot"
"""
DROPPED = Outcome(Verdict.REJECTED, Reason.NAME_INVALID, "no")
BUSY = Outcome(Verdict.RELEASED, Reason.QUOTA, "later")
FULL = Outcome(Verdict.RELEASED, Reason.STORE, "the gateway cannot store the message: disk is full")
EVENTS = amqp_address("events", "p1.x")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def rig(
    folder: Path,
    shelf: Shelf,
    letters: DeadLetters | None = None,
    *,
    mapping: str = MAPPING,
    limits: Limits | None = None,
    **settings: object,
) -> LinkRig:
    router = routed(folder, mapping)
    dispatcher = Dispatcher(router, DeadLetters() if letters is None else letters)
    made = LinkRig(dispatcher, limits, **{"prefetch": 50, **settings})
    dispatcher.namespaces |= {"mqtt": shelf, "erp": made.session}
    made.route(router.subscriptions("erp"), router.targets("erp"))
    made.connect()
    return made


@pytest.fixture
async def one(tmp_path: Path, shelf: Shelf) -> LinkRig:
    return rig(tmp_path, shelf)


def consume(one: LinkRig, queue: str, address: Address, *bodies: bytes, raw: bytes = b"\x10\0\x02") -> None:
    one.remote.deliver(queue, address, bodies, raw)
    one.move()


async def test_messages_take_the_routes_of_their_queue(one: LinkRig, shelf: Shelf) -> None:
    consume(one, "commands", amqp_address("", "commands"), b"a", b"b")
    consume(one, "gw-1.events", EVENTS, b"c")
    assert [(message.address, message.body) for message in shelf.messages] == [
        (topic_address("commands/commands"), b"a"),
        (topic_address("commands/commands"), b"b"),
        (topic_address("events/p1"), b"c"),
    ]
    assert [ack[1:] for ack in one.world.acks] == [(2, True), (1, False)]
    assert one.stats.messages_in == one.stats.accepted_messages == 3
    assert shelf.messages[0].sender.endpoint == "erp"
    assert one.session.idle


async def test_a_stop_of_the_flow_is_confirmed_on_any_channel(one: LinkRig, shelf: Shelf) -> None:
    for number in one.remote.consumers:
        one.remote.machine.send_method(number, ChannelFlow(False))
    one.move()
    assert one.world.heard.count(ChannelFlowOk(False)) == len(one.remote.consumers)
    assert not one.session.stats.blocked, "it publishes on another channel"
    consume(one, "commands", amqp_address("", "commands"), b"a")
    assert len(one.world.acks) == 1


async def test_when_memory_is_short_addresses_are_forgotten(one: LinkRig, shelf: Shelf) -> None:
    consume(one, "commands", amqp_address("", "commands"), b"a")
    consume(one, "gw-1.events", EVENTS, b"b")
    before = sum(map(len, one.session.caches().values()))
    one.session.forget_entries()
    assert (before, sum(map(len, one.session.caches().values()))) == (2, 0)
    consume(one, "gw-1.events", EVENTS, b"c")
    assert [message.body for message in shelf.messages] == [b"a", b"b", b"c"]


async def test_what_the_properties_say_is_kept(one: LinkRig, shelf: Shelf) -> None:
    consume(one, "commands", EVENTS, b"transient", raw=NO_PROPERTIES)
    consume(one, "commands", EVENTS, b"persistent")
    consume(one, "commands", EVENTS, b"mortal", raw=b"\x01\0\x045000")
    table = b"\x0ex-gateway-hopsI\0\0\0\x03" + b"\x0dx-mqtt-retaint\x01"
    consume(one, "commands", EVENTS, b"travelled", raw=b"\x20\0" + len(table).to_bytes(4, "big") + table)
    transient, persistent, mortal, travelled = shelf.messages
    assert (transient.assurance, transient.durable, transient.expires) == (0, False, 0.0)
    assert (persistent.assurance, persistent.durable) == (1, True)
    assert mortal.expires == pytest.approx(time.time() + 5, abs=2)
    assert (travelled.hops, travelled.retain) == (4, True)


async def test_acknowledgements_wait_for_the_targets(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = None
    consume(one, "commands", EVENTS, *[b"%d" % at for at in range(6)])
    consume(one, "commands", EVENTS, b"6")
    assert one.world.acks == []
    assert not one.session.idle
    first, second = shelf.parts
    first.settle_at([1, 4])
    one.move()
    assert [ack[1:] for ack in one.world.acks] == [(2, False), (5, False)]
    first.settle_at([0, 2])
    one.move()
    assert [ack[1:] for ack in one.world.acks[2:]] == [(3, True)]
    second.accept()
    one.move()
    assert [ack[1:] for ack in one.world.acks[3:]] == [(7, False)]
    first.accept()
    one.move()
    assert sorted(ack[1:] for ack in one.world.acks[4:]) == [(6, True)]
    assert one.session.idle


async def test_a_rejected_message_is_not_put_back(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = DROPPED
    consume(one, "commands", EVENTS, b"a")
    assert [nack[1:] for nack in one.world.nacks] == [(1, False)]
    assert list(one.stats.settled_counts())[1:] == [("rejected", "name_invalid", 1)]
    shelf.outcome = ACCEPTED
    consume(one, "commands", EVENTS, b"b")
    assert [ack[1:] for ack in one.world.acks] == [(2, False)]


async def test_a_released_message_is_kept_and_tried_again_before_what_came_behind_it(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    one.session.held_back = HeldBack(message_of, lambda: 1.0)
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a", b"b", b"c")
    tried = [b"a", b"b", b"c"]
    for seconds in (1, 2, 4, 8, 10):
        await trio.sleep(seconds - 0.1)
        one.tick()
        assert [message.body for message in shelf.messages] == tried, "it waits"
        await trio.sleep(0.2)
        one.tick()
        tried.append(b"a")
        assert [message.body for message in shelf.messages] == tried, "one goes alone"
    consume(one, "commands", EVENTS, b"d")
    assert one.world.acks == one.world.nacks == []
    assert one.session.idle, "nothing comes of waiting for it"
    shelf.outcome = ACCEPTED
    await trio.sleep(10.1)
    one.tick()
    one.move()
    assert shelf.accepted == [b"a", b"b", b"c", b"d"]
    assert [ack[1:] for ack in one.world.acks] == [(4, True)]
    consume(one, "commands", EVENTS, b"e")
    assert shelf.accepted[4:] == [b"e"]


async def test_other_routes_go_on_meanwhile(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a")
    shelf.outcome = ACCEPTED
    consume(one, "gw-1.events", EVENTS, b"b")
    assert shelf.accepted == [b"b"]


async def test_what_is_held_back_comes_again_after_a_lost_connection(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a", b"b")
    one.lose()
    one.connect()
    shelf.outcome = ACCEPTED
    consume(one, "commands", EVENTS, b"a", b"b")
    await trio.sleep(30)
    one.tick()
    assert shelf.accepted == [b"a", b"b"], "each once"
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]


async def test_a_full_disk_meanwhile_keeps_the_order(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is not FULL
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a", b"b")
    shelf.outcome = FULL
    await trio.sleep(2)
    one.tick()
    consume(one, "commands", EVENTS, b"c")
    shelf.outcome = ACCEPTED
    await trio.sleep(10)
    one.tick()
    assert shelf.accepted == [b"a", b"b", b"c"]


async def test_what_is_held_back_goes_back_when_its_queue_is_not_wanted_any_more(
    one: LinkRig, shelf: Shelf, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a", b"b")
    router = routed(tmp_path, MAPPING.replace("queue: commands", "queue: others"))
    one.dispatcher.use(router)
    one.route(router.subscriptions("erp"), router.targets("erp"))
    one.move()
    for _ in range(2):
        await trio.sleep(2)
        one.tick()
    assert sorted(nack[1:] for nack in one.world.nacks) == [(1, True), (2, True)]
    assert len(shelf.messages) == 2


OTHERS = MAPPING.replace("queue: commands", "queue: others")


def reload(one: LinkRig, folder: Path, mapping: str) -> None:
    """Put a mapping in force, as a reload does."""
    router = routed(folder, mapping)
    one.dispatcher.use(router)
    one.route(router.subscriptions("erp"), router.targets("erp"))
    one.move()


async def test_what_waits_for_the_disk_goes_back_when_its_queue_is_not_wanted_any_more(
    one: LinkRig, shelf: Shelf, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is not FULL
    shelf.outcome = FULL
    consume(one, "commands", EVENTS, b"a")
    consume(one, "commands", EVENTS, b"b")
    reload(one, tmp_path, OTHERS)
    shelf.outcome = ACCEPTED
    for _ in range(3):
        await trio.sleep(2)
        one.tick()
    assert sorted(nack[1:] for nack in one.world.nacks) == [(1, True), (2, True)]
    assert (shelf.accepted, one.world.acks, len(one.dispatcher.dead_letters)) == ([], [], 0)
    assert one.session.idle


async def test_what_arrives_after_its_queue_is_not_wanted_any_more_goes_back(
    one: LinkRig, shelf: Shelf, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    shelf.outcome = None
    consume(one, "commands", EVENTS, b"on the wire")
    one.remote.deliver("commands", EVENTS, [b"late"], b"\x10\0\x02")  # before basic.cancel is there
    reload(one, tmp_path, OTHERS)
    shelf.parts[0].accept()
    for _ in range(2):
        await trio.sleep(2)
        one.tick()
        one.move()
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]
    assert [nack[1:] for nack in one.world.nacks] == [(2, True)]
    assert len(one.dispatcher.dead_letters) == 0
    assert one.session.idle


@pytest.mark.parametrize("later", ["released", "rejected"])
async def test_a_message_on_the_wire_of_a_removed_route_goes_back_when_its_target_refuses(
    one: LinkRig, shelf: Shelf, tmp_path: Path, autojump_clock: trio.testing.MockClock, later: str
) -> None:
    shelf.outcome = None
    consume(one, "commands", EVENTS, b"a")
    reload(one, tmp_path, OTHERS)
    shelf.parts[0].settle(BUSY if later == "released" else DROPPED)
    await trio.sleep(2)
    one.tick()
    one.move()
    assert [nack[1:] for nack in one.world.nacks] == [(1, later == "released")]
    assert one.session.idle


@pytest.mark.parametrize("outcome", [BUSY, FULL])
async def test_what_waits_for_a_removed_route_is_a_dead_letter_if_its_queue_is_still_wanted(
    tmp_path: Path, shelf: Shelf, autojump_clock: trio.testing.MockClock, outcome: Outcome
) -> None:
    rest = MAPPING.replace("{plant}.#", "p2.#").replace("events/{plant}", "events/p2")
    both = (
        rest
        + """
  - name: removed
    from: {endpoint: erp, exchange: events, binding_key: "p1.#"}
    to: {endpoint: mqtt, topic: "events/p1"}
"""
    )
    one = rig(tmp_path, shelf, mapping=both)
    one.dispatcher.disk_healthy = lambda: shelf.outcome is not FULL
    shelf.outcome = outcome
    consume(one, "gw-1.events", EVENTS, b"a")
    consume(one, "gw-1.events", EVENTS, b"b")
    reload(one, tmp_path, rest)
    shelf.outcome = ACCEPTED
    consume(one, "gw-1.events", amqp_address("events", "p2.x"), b"c")
    for _ in range(3):
        await trio.sleep(5)
        one.tick()
        one.move()
    letters = newest(one.dispatcher.dead_letters)
    assert {(letter.message.body, letter.outcome) for letter in letters} == {
        (b"a", ROUTE_REMOVED),
        (b"b", ROUTE_REMOVED),
    }
    assert {letter.route for letter in letters} == {"removed"}
    assert shelf.accepted == [b"c"]
    assert one.dispatcher.dead_letters.unwanted_count == 0, "they are kept like others of routes"
    assert one.session.idle
    assert not one.session.held_back.on


async def test_what_is_refused_for_too_long_becomes_a_dead_letter(
    tmp_path: Path, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    letters = DeadLetters(messages_max=2)
    one = rig(tmp_path, shelf, letters, retry_secs_max=60)
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a")
    consume(one, "commands", EVENTS, b"b")
    await pass_time(one, 40)
    consume(one, "commands", EVENTS, b"c")
    assert (one.world.acks, len(letters)) == ([], 0)
    await pass_time(one, 25)
    assert [letter.message.body for letter in newest(letters)] == [b"b", b"a"]
    assert {letter.outcome for letter in newest(letters)} == {TOO_LONG}
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]
    assert ("rejected", "expired", 2) in list(one.stats.settled_counts())
    await pass_time(one, 60)
    assert len(one.world.acks) == 1, "there is no room for its dead letter"
    letters.delete([letter.id for letter in newest(letters)])
    await pass_time(one, 2)
    assert [letter.message.body for letter in newest(letters)] == [b"c"]
    shelf.outcome = ACCEPTED
    consume(one, "commands", EVENTS, b"d")
    assert shelf.accepted == [b"d"]
    assert sorted(ack[1] for ack in one.world.acks) == [2, 3, 4]
    assert one.session.idle
    assert not one.session.held_back.on


@pytest.mark.parametrize("refusal", [BUSY, FULL])
async def test_what_expires_while_it_is_held_back_becomes_a_dead_letter(
    tmp_path: Path,
    shelf: Shelf,
    refusal: Outcome,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    letters = DeadLetters()
    one = rig(tmp_path, shelf, letters)
    shelf.outcome = refusal
    consume(one, "commands", EVENTS, b"old", raw=b"\x11\0\x02\x0560000")
    consume(one, "commands", EVENTS, b"new")
    shelf.outcome, utc = ACCEPTED, clock.utc()
    monkeypatch.setattr(clock, "utc", lambda: utc + 100)
    await pass_time(one, 2)
    (letter,) = newest(letters)
    assert (letter.message.body, letter.route, letter.outcome) == (b"old", "commands", EXPIRED)
    assert shelf.accepted == [b"new"]
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]
    assert one.session.idle
    assert not one.session.held_back.on


async def pass_time(one: LinkRig, seconds: int) -> None:
    for _ in range(seconds):
        await trio.sleep(1)
        one.tick()
        one.move()


FAN = (
    MAPPING
    + """
  - name: copies
    from: {endpoint: erp, queue: commands}
    to: {endpoint: crm, topic: "copies/{routing_key...}"}
"""
)


def fan_rig(
    tmp_path: Path, letters: DeadLetters | None = None, **settings: object
) -> tuple[LinkRig, Shelf, Shelf]:
    """Return a link with two routes from one queue, and the targets of these."""
    router = routed(tmp_path, FAN, crm="mqtt")
    dispatcher = Dispatcher(router, DeadLetters() if letters is None else letters)
    one = LinkRig(dispatcher, **{"prefetch": 50, **settings})
    shelf, other = Shelf(), Shelf()
    dispatcher.links = frozenset({"erp"})
    dispatcher.namespaces |= {"mqtt": shelf, "crm": other, "erp": one.session}
    one.route(router.subscriptions("erp"), router.targets("erp"))
    one.connect()
    return one, shelf, other


async def test_what_one_route_refused_for_too_long_is_redriven_on_it_alone(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    letters = DeadLetters()
    one, shelf, other = fan_rig(tmp_path, letters, retry_secs_max=60)
    other.outcome = BUSY
    consume(one, "commands", EVENTS, b"a")
    await pass_time(one, 65)
    (letter,) = newest(letters)
    assert (letter.route, letter.outcome, letter.crossed) == ("copies", TOO_LONG, False)
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]
    other.outcome = ACCEPTED
    told: dict[str, Outcome] = {}
    Redriving(one.dispatcher, letters).redrive([letter], told.__setitem__)
    assert told == {letter.id: ACCEPTED}
    assert (shelf.accepted, other.accepted) == ([b"a"], [b"a"])
    assert [message.address for message in shelf.messages] == [topic_address("commands/p1/x")]
    assert len(letters) == 0


async def test_every_route_that_refuses_for_too_long_has_a_dead_letter_of_its_own(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    letters = DeadLetters(messages_max=1)
    one, shelf, other = fan_rig(tmp_path, letters, retry_secs_max=60)
    shelf.outcome = other.outcome = BUSY
    consume(one, "commands", EVENTS, b"a")
    await pass_time(one, 65)
    assert [letter.route for letter in newest(letters)] == ["commands"]
    assert one.world.acks == [], "there is no room for the second one"
    letters.delete([letter.id for letter in newest(letters)])
    await pass_time(one, 2)
    assert [letter.route for letter in newest(letters)] == ["copies"]
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]
    assert one.session.idle


async def test_only_the_route_that_released_a_message_is_tried_again(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    one, shelf, other = fan_rig(tmp_path)
    other.outcome = BUSY
    consume(one, "commands", EVENTS, b"a", b"b")
    await trio.sleep(2)
    one.tick()
    other.outcome = ACCEPTED
    await trio.sleep(4)
    one.tick()
    assert shelf.accepted == [b"a", b"b"], "it had accepted them"
    assert other.accepted == [b"a", b"b"]
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]


async def test_while_memory_is_short_everything_goes_back(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    one.dispatcher.memory.short = True
    consume(one, "commands", EVENTS, b"a", b"b")
    await trio.sleep(1.1)
    one.tick()
    assert shelf.messages == one.world.acks == []
    assert [nack[1:] for nack in one.world.nacks] == [(1, True), (2, True)]
    one.dispatcher.memory.short = False
    consume(one, "commands", EVENTS, b"a")
    assert shelf.accepted == [b"a"]
    assert one.session.idle


async def test_nothing_overtakes_what_a_full_disk_refused(one: LinkRig, shelf: Shelf) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is ACCEPTED
    shelf.outcome = FULL
    consume(one, "commands", EVENTS, b"1", b"2")
    consume(one, "commands", EVENTS, b"3")
    one.tick()
    assert len(shelf.messages) == 2, "what came behind a refused message is not even tried"
    shelf.outcome = ACCEPTED
    consume(one, "commands", EVENTS, b"4")
    assert shelf.accepted == one.world.acks == []
    assert not one.session.idle
    one.tick()
    assert shelf.accepted == [b"1", b"2", b"3", b"4"]
    consume(one, "commands", EVENTS, b"5")
    assert shelf.accepted[4:] == [b"5"]
    assert [ack[1:] for ack in one.world.acks] == [(4, True), (5, False)]
    assert one.world.nacks == []
    assert one.session.idle
    assert [route.retried for route in one.dispatcher.router.routes] == [4, 0, 0]


async def test_what_is_refused_late_still_goes_first(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = None
    consume(one, "commands", EVENTS, b"1", b"2", b"3")
    (part,) = shelf.parts
    part.settle_at([0], FULL)
    consume(one, "commands", EVENTS, b"4")
    part.settle_at([1, 2], FULL)
    shelf.outcome = ACCEPTED
    one.tick()
    assert shelf.accepted == [b"1", b"2", b"3", b"4"]


async def test_what_waits_for_the_disk_comes_again_after_a_lost_connection(
    one: LinkRig, shelf: Shelf
) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is ACCEPTED
    shelf.outcome = FULL
    consume(one, "commands", EVENTS, b"1", b"2")
    one.lose()
    one.connect()
    consume(one, "commands", EVENTS, b"1", b"2")
    shelf.outcome = ACCEPTED
    one.tick()
    assert shelf.accepted == [b"1", b"2"]
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]


async def test_without_a_route_it_is_a_dead_letter(one: LinkRig, shelf: Shelf) -> None:
    consume(one, "gw-1.events", amqp_address("strange", "key"), b"lost")
    assert [letter.message.body for letter in newest(one.dispatcher.dead_letters)] == [b"lost"]
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]
    assert shelf.messages == []


async def test_what_a_condition_excludes_is_just_acknowledged(one: LinkRig, shelf: Shelf) -> None:
    consume(one, "conditional", EVENTS, b'{"hot": false}', b'{"hot": true}')
    assert [message.body for message in shelf.messages] == [b'{"hot": true}']
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]
    assert len(one.dispatcher.dead_letters) == 0


async def test_a_message_that_cannot_be_read_is_a_dead_letter_alone(one: LinkRig, shelf: Shelf) -> None:
    consume(one, "commands", EVENTS, b"bad", raw=b"\x10\0")
    consume(one, "commands", EVENTS, b"good")
    assert one.world.nacks == []
    (letter,) = newest(one.dispatcher.dead_letters)
    assert (letter.message.address, letter.message.body) == (EVENTS, b"bad")
    assert letter.outcome.reason is Reason.MALFORMED
    assert letter.lost_part == "the properties were not stored"
    assert [message.body for message in shelf.messages] == [b"good"]
    assert [ack[1:] for ack in one.world.acks] == [(1, False), (2, False)]
    assert one.session.idle


async def test_a_body_over_the_limit_is_a_dead_letter_without_it(tmp_path: Path, shelf: Shelf) -> None:
    one = rig(tmp_path, shelf, limits=Limits(message_bytes_max=1_000))
    consume(one, "gw-1.events", EVENTS, b"x" * 1_001, b"after")
    (letter,) = newest(one.dispatcher.dead_letters)
    assert (letter.message.address, letter.message.body) == (EVENTS, b"")
    assert letter.outcome.reason is Reason.TOO_LARGE
    assert letter.lost_part == "the body was not stored"
    assert [message.body for message in shelf.messages] == [b"after"]
    assert [nack[1:] for nack in one.world.nacks] == [(1, False)], "the broker has the whole message"
    assert [ack[1:] for ack in one.world.acks] == [(2, False)]
    assert one.session.idle


async def test_an_unusable_message_stays_at_the_broker_while_the_dead_letters_are_full(
    tmp_path: Path, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    letters = DeadLetters(messages_max=1)
    one = rig(tmp_path, shelf, letters)
    consume(one, "commands", EVENTS, b"1", b"2", raw=b"\x10\0")
    consume(one, "commands", EVENTS, b"good")
    assert [message.body for message in shelf.messages] == [b"good"]
    assert sorted(ack[1:] for ack in one.world.acks) == [(1, False), (3, False)]
    assert not one.session.idle
    one.tick()
    one.move()
    assert letters.refused == 1, "it is refused once, however long it waits"
    letters.delete([newest(letters)[0].id], lambda count: None)
    one.tick()
    one.move()
    assert [letter.message.body for letter in newest(letters)] == [b"2"]
    assert one.world.nacks == []
    assert one.session.idle


async def test_an_unusable_message_of_a_lost_connection_is_not_stored_later(
    tmp_path: Path, shelf: Shelf
) -> None:
    letters = DeadLetters(messages_max=1)
    one = rig(tmp_path, shelf, letters)
    consume(one, "commands", EVENTS, b"1", b"2", raw=b"\x10\0")
    one.lose()
    one.connect()
    letters.delete([newest(letters)[0].id], lambda count: None)
    one.tick()
    one.move()
    assert len(letters) == 0, "the broker sends it again"


@pytest.mark.parametrize("policy, buried", [("retry", 0), ("dead_letter", 1)])
async def test_a_route_may_leave_unusable_messages_to_the_broker(
    tmp_path: Path, shelf: Shelf, policy: str, buried: int
) -> None:
    mapping = MAPPING.replace('{routing_key...}"}', '{routing_key...}"}\n    on_reject: ' + policy)
    one = rig(tmp_path, shelf, mapping=mapping)
    consume(one, "commands", EVENTS, b"bad", raw=b"\x10\0")
    assert len(one.dispatcher.dead_letters) == buried
    assert [nack[1:] for nack in one.world.nacks] == [(1, False)][buried:]
    assert one.session.idle


@pytest.mark.parametrize("durable", [True, False])
async def test_a_paused_route_holds_one_copy_of_what_a_broker_delivers_again(
    tmp_path: Path, shelf: Shelf, durable: bool
) -> None:
    one = rig(tmp_path, shelf)
    pauses = one.dispatcher.pauses
    pauses._changed = one.dispatcher.invalidate
    pauses.pause("route", "commands")
    raw = PERSISTENT if durable else NO_PROPERTIES
    for _ in range(3):
        consume(one, "commands", EVENTS, b"a", b"b", raw=raw)
        one.lose()
        one.connect()
    consume(one, "commands", EVENTS, b"a", b"b", raw=raw)
    copies = 1 if durable else 4  # a broker that has restarted may have lost the others
    assert pauses.waiting_by_route() == {"commands": 2 * copies}
    pauses.resume("route", "commands")
    one.move()
    assert shelf.accepted == [b"a", b"b"] * copies
    assert [ack[1:] for ack in one.world.acks] == [(2, True)]
    assert one.session.idle


async def test_a_paused_route_keeps_what_a_deleted_queue_has_lost(tmp_path: Path, shelf: Shelf) -> None:
    """An auto-delete queue ends with the link's connection; the link creates it again."""
    one = rig(tmp_path, shelf)
    pauses = one.dispatcher.pauses
    pauses._changed = one.dispatcher.invalidate
    pauses.pause("route", "commands")
    consume(one, "commands", EVENTS, b"a", b"b", raw=PERSISTENT)
    one.lose()
    one.world.queues.discard("commands")
    one.connect()
    consume(one, "commands", EVENTS, b"c", raw=PERSISTENT)
    pauses.resume("route", "commands")
    one.move()
    assert shelf.accepted == [b"a", b"b", b"c"]
    assert one.session.idle


async def test_a_link_that_is_down_sends_one_copy_of_what_a_broker_delivers_again(
    tmp_path: Path, shelf: Shelf
) -> None:
    far = LinkRig()
    far.world.exchanges["ex"] = "topic"
    mapping = MAPPING.replace(
        '{endpoint: mqtt, topic: "commands/{routing_key...}"}', "{endpoint: far, queue: q}"
    )
    router = routed(tmp_path, mapping, far="amqp091")
    near = LinkRig(Dispatcher(router, DeadLetters(), DispatcherServices(links={"erp", "far"})))
    near.dispatcher.namespaces |= {"mqtt": shelf, "erp": near.session, "far": far.session}
    near.route(router.subscriptions("erp"), router.targets("erp"))
    for _ in range(3):
        near.connect()
        consume(near, "commands", EVENTS, b"a", b"b", raw=PERSISTENT)
        near.lose()
    near.connect()
    consume(near, "commands", EVENTS, b"a", b"b", raw=PERSISTENT)
    far.connect()
    far.move()
    near.move()
    assert far.world.bodies == [b"a", b"b"]
    assert [ack[1:] for ack in near.world.acks] == [(2, True)]
    assert near.session.idle
    assert far.session.idle


async def test_a_settlement_after_the_connection_was_lost_is_dropped(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = None
    consume(one, "commands", EVENTS, b"a", b"b")
    one.lose()
    one.connect()
    old = shelf.parts.pop()
    consume(one, "commands", EVENTS, b"a")
    old.settle_at([0])
    old.settle(BUSY)
    one.tick()
    assert one.world.acks == one.world.nacks == []
    shelf.parts[0].accept()
    one.move()
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]


async def test_a_queue_that_is_not_wanted_is_left_when_its_messages_are_answered(
    one: LinkRig, shelf: Shelf, tmp_path: Path
) -> None:
    shelf.outcome = None
    consume(one, "commands", EVENTS, b"a")
    router = routed(tmp_path, MAPPING.replace("queue: commands", "queue: others"))
    one.dispatcher.use(router)
    one.route(router.subscriptions("erp"), router.targets("erp"))
    one.move()
    assert one.remote.consumed == ["conditional", "gw-1.events", "others"]
    channels = len(one.remote.machine.channels)
    shelf.parts[0].accept()
    one.move()
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]
    assert len(one.remote.machine.channels) == channels - 1


async def test_prefetch_is_what_the_settings_say(one: LinkRig) -> None:
    asked = {method.prefetch_count for method in one.world.heard if isinstance(method, BasicQos)}
    assert asked == {50}


async def test_what_a_full_disk_released_leaves_no_trace_when_it_is_accepted(
    one: LinkRig, shelf: Shelf
) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is ACCEPTED
    shelf.outcome = FULL
    consume(one, "commands", EVENTS, b"a", b"b")
    assert one.session.held_back.on, "it is known by which route to try again"
    shelf.outcome = ACCEPTED
    one.tick()
    assert shelf.accepted == [b"a", b"b"]
    assert (one.session.held_back.on, one.session.held_back._undone) == (False, {})


async def test_what_is_held_back_takes_the_routes_of_a_new_mapping(
    one: LinkRig, shelf: Shelf, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    shelf.outcome = BUSY
    consume(one, "commands", EVENTS, b"a")
    router = routed(tmp_path, MAPPING.replace("name: commands", "name: renamed"))
    one.dispatcher.use(router)
    one.route(router.subscriptions("erp"), router.targets("erp"))
    one.move()
    shelf.outcome = ACCEPTED
    await trio.sleep(2)
    one.tick()
    assert shelf.accepted == [b"a"]
    assert [ack[1:] for ack in one.world.acks] == [(1, False)]


async def test_a_rejection_waits_until_the_other_route_has_accepted(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """The broker can be told once: then it would drop what the other route has only released."""
    copies = """
  - name: copies
    from: {endpoint: erp, queue: commands}
    to: {endpoint: crm, topic: "copies/{routing_key...}"}
"""
    router = routed(tmp_path, MAPPING + copies, crm="mqtt")
    dispatcher = Dispatcher(router, DeadLetters())
    one = LinkRig(dispatcher, prefetch=50)
    shelf, other = Shelf(), Shelf()
    dispatcher.namespaces |= {"mqtt": shelf, "crm": other, "erp": one.session}
    one.route(router.subscriptions("erp"), router.targets("erp"))
    one.connect()
    shelf.outcome, other.outcome = DROPPED, BUSY
    consume(one, "commands", EVENTS, b"a")
    assert one.world.nacks == []
    other.outcome = ACCEPTED
    await trio.sleep(2)
    one.tick()
    one.move()
    assert other.accepted == [b"a"]
    assert [nack[1:] for nack in one.world.nacks] == [(1, False)]
    assert one.session.idle
    assert not one.session.held_back.on
