"""What an MQTT link brings in: acknowledged when its targets have it, and not before."""

from __future__ import annotations

import pytest
import trio

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dead_letters.redrive import Redriving
from gateway.egress.held_back import EXPIRED, ROUTE_REMOVED, TOO_LONG
from gateway.egress.mqtt.publisher import PACKET_IDS
from gateway.mapping.loader import parse
from gateway.mapping.router import Router
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode
from tests.broker.parts import newest
from tests.egress.mqtt.remote import Collector, World, message, row

pytestmark = pytest.mark.interpreted  # the stream is one in memory

RELEASED = Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "down")
REJECTED = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "too much")
FULL = Outcome(Verdict.RELEASED, Reason.STORE, "the gateway cannot store the message: disk is full")
VERSIONS = pytest.mark.parametrize("version", ["5.0", "3.1.1"])
PUBACK, PUBREC, PUBCOMP = PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBCOMP

BACK = """
version: 1
routes:
  - name: back
    from: {endpoint: plant, topic: "up/{rest...}"}
    to: {endpoint: plant, topic: "down/{rest...}"}
"""

OTHERS = """
version: 1
routes:
  - {name: others, from: {endpoint: plant, topic: "others/#"}, to: {endpoint: local, topic: "in/{topic}"}}
"""
TWO = """
version: 1
routes:
  - {name: up, from: {endpoint: plant, topic: "up/#"}, to: {endpoint: local, topic: "in/{topic}"}}
  - {name: too, from: {endpoint: plant, topic: "up/#"}, to: {endpoint: local, topic: "too/{topic}"}}
"""


@VERSIONS
async def test_an_acknowledgement_waits_for_the_target(version: str) -> None:
    world = World(version=version)
    world.local.answer = None
    remote = world.connect()
    world.deliver(row("zero", 0), row("one", 1, 7), row("two", 2, 8))
    assert [message.body for message in world.local.messages] == [b"zero", b"one", b"two"]
    assert [message.assurance for message in world.local.messages] == [0, 1, 2]
    assert not remote.acks_of(PUBACK)
    assert world.session.receiver.unsettled == 2
    world.local.parts[0].accept()
    world.talk()
    assert remote.acks_of(PUBACK) == [(7, 0)]
    assert remote.acks_of(PUBREC) == [(8, 0)]
    assert world.session.idle
    remote.machine.acknowledge(PacketType.PUBREL, [8])
    world.talk()
    assert remote.acks_of(PUBCOMP) == [(8, 0)]
    assert world.stats.messages_in == 3
    assert world.stats.accepted_messages == 3


async def test_when_memory_is_short_topics_are_forgotten() -> None:
    world = World()
    world.connect()
    world.deliver(row("one", 0))
    before = len(world.session.receiver._entries)
    world.session.forget_entries()
    assert (before, len(world.session.receiver._entries)) == (1, 0)
    world.deliver(row("two", 0))
    assert [message.body for message in world.local.messages] == [b"one", b"two"]


async def test_addresses_properties_and_flags_cross() -> None:
    world = World()
    world.connect()
    raw = encode_list(
        {
            Property.MESSAGE_EXPIRY_INTERVAL: 100,
            Property.CONTENT_TYPE: "text/plain",
            Property.USER_PROPERTY: (("a", "1"), ("a", "2"), ("gateway-hops", "2")),
        },
        PacketType.PUBLISH,
    )
    world.deliver(row("x", 1, 5, topic="up/b/c", raw=raw, flags=1))
    (message,) = world.local.messages
    assert message.address == topic_address("in/up/b/c")
    assert (message.retain, message.durable, message.hops) == (True, True, 3)
    assert message.expires > 0
    assert message.properties.content_type == "text/plain"
    assert [(name, value.value) for name, value in message.properties.headers] == [("a", "1"), ("a", "2")]
    assert message.sender.endpoint == "plant"


@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_without_a_route_is_acknowledged(version: str, qos: int) -> None:
    world = World(version=version)
    remote = world.connect()
    world.deliver(row("x", qos, 5, topic="elsewhere"))
    assert remote.acks_of(PUBACK if qos == 1 else PUBREC) == [(5, 0)]
    assert (world.local.messages, len(world.dead_letters)) == ([], 0)
    assert world.session.idle


@VERSIONS
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_rejected_message_is_answered_in_the_words_of_the_version(version: str, qos: int) -> None:
    world = World(version=version)
    world.local.answer = REJECTED
    remote = world.connect()
    world.deliver(row("x", qos, 5))
    five = version == "5.0"
    code = ReasonCode.QUOTA_EXCEEDED if five else 0
    assert remote.acks_of(PUBACK if qos == 1 else PUBREC) == [(5, code)]
    assert len(world.dead_letters) == (0 if five else 1)
    refused = sum(count for verdict, _, count in world.stats.settled_counts() if verdict != "accepted")
    assert refused == (1 if five else 0), "a dead letter is accepted"
    assert world.session.idle
    if five and qos == 2:  # the id is free again
        world.local.answer = ACCEPTED
        world.deliver(row("y", 2, 5))
        assert remote.acks_of(PUBREC) == [(5, code), (5, 0)]


@VERSIONS
async def test_a_released_message_is_tried_again_with_growing_waits(
    version: str, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(version=version)
    world.local.answer = RELEASED
    remote = world.connect()
    world.deliver(row("one", 1, 5), row("two", 2, 6), row("zero", 0))
    (route,) = world.dispatcher.router.routes
    for seconds in (1, 2, 4, 8, 10, 10):
        before = len(world.local.messages)
        await tick_after(world, seconds / 2 - 0.1)
        assert len(world.local.messages) == before, "it waits"
        await tick_after(world, seconds / 2 + 0.1)
        assert [message.body for message in world.local.messages[before:]] == [b"one"], "one goes alone"
        if seconds == 8:
            world.deliver(row("three", 1, 7))
        assert not remote.acks_of(PUBACK)
    assert route.retried == 6
    world.local.answer = ACCEPTED
    await tick_after(world, 10)
    assert [message.body for message in world.local.messages[-3:]] == [b"one", b"two", b"three"]
    assert remote.acks_of(PUBACK) == [(5, 0), (7, 0)]
    assert remote.acks_of(PUBREC) == [(6, 0)]
    assert world.session.idle


@VERSIONS
@pytest.mark.parametrize("present", [True, False])
async def test_a_paused_route_holds_one_copy_of_what_a_broker_delivers_again(
    version: str, present: bool, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(version=version)
    pauses = world.dispatcher.pauses
    pauses._changed = world.dispatcher.invalidate
    pauses.pause("route", "up")
    world.connect()
    world.deliver(row("one", 1, 5), row("two", 2, 6))
    world.drop()
    world.present = present
    remote = world.connect()
    again = [row("one", 1, 5), row("two", 2, 6)] if present else [row("three", 1, 5)]
    world.deliver(*again)
    await tick_after(world, 2)
    pauses.resume("route", "up")
    await tick_after(world, 2)
    assert sorted(message.body for message in world.local.messages) == (
        [b"one", b"two"] if present else [b"one", b"three", b"two"]
    ), "a broker that has lost the session does not deliver again"
    assert remote.acks_of(PUBACK) == [(5, 0)]
    assert remote.acks_of(PUBREC) == ([(6, 0)] if present else [])
    assert world.session.idle


@VERSIONS
@pytest.mark.parametrize("removed", [True, False])
async def test_a_link_that_is_down_sends_what_no_route_accepts_again(version: str, removed: bool) -> None:
    near, far = World(version=version), World(version=version)
    near.dispatcher.namespaces["local"] = far.session
    near.connect()
    near.deliver(row("one", 1, 5))
    if removed:
        near.dispatcher.use(Router([parse(OTHERS)], {"plant": "mqtt", "local": "mqtt"}))
    near.drop()
    near.present = True
    remote = near.connect()
    near.deliver(row("one", 1, 5))
    far.connect()
    near.talk()
    assert [body for _, body in far.sent()] == [b"one"]
    assert remote.acks_of(PUBACK) == [(5, 0)]
    assert near.session.idle
    assert far.session.idle


@VERSIONS
async def test_what_waits_for_a_removed_route_becomes_a_dead_letter_although_it_comes_again(
    version: str, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(version=version)
    world.local.answer = RELEASED
    world.connect()
    world.deliver(row("one", 1, 5))
    world.dispatcher.use(Router([parse(OTHERS)], {"plant": "mqtt", "local": "mqtt"}))
    world.drop()
    world.present = True
    remote = world.connect()
    world.deliver(row("one", 1, 5))
    await tick_after(world, 2)
    (letter,) = newest(world.dead_letters)
    assert (letter.message.body, letter.outcome, letter.route) == (b"one", ROUTE_REMOVED, "up")
    assert remote.acks_of(PUBACK) == [(5, 0)]
    assert world.session.idle


@VERSIONS
async def test_what_a_broker_delivers_again_waits_for_a_paused_route_and_for_nothing_else(
    version: str, autojump_clock: trio.testing.MockClock
) -> None:
    """It is not held back for the dropped copies, where it would become a dead letter in time."""
    world = World(version=version, retry_secs_max=5)
    pauses = world.dispatcher.pauses
    pauses._changed = world.dispatcher.invalidate
    pauses.pause("route", "up")
    world.connect()
    rows = [row(body, 1, packet_id) for packet_id, body in enumerate(("a", "b", "c"), 5)]
    world.deliver(*rows)
    world.drop()
    world.present = True
    remote = world.connect()
    world.deliver(*rows)
    assert pauses.waiting_by_route() == {"up": 3}
    assert world.session.receiver.unsettled == 3
    await tick_after(world, 10)
    assert len(world.dead_letters) == 0
    pauses.resume("route", "up")
    await tick_after(world, 0)
    assert [message.body for message in world.local.messages] == [b"a", b"b", b"c"]
    assert remote.acks_of(PUBACK) == [(5, 0), (6, 0), (7, 0)]
    assert world.session.idle


@VERSIONS
async def test_a_route_that_goes_on_while_the_link_is_down_delivers_what_it_holds(version: str) -> None:
    """The broker may have lost the session."""
    world = World(version=version)
    pauses = world.dispatcher.pauses
    pauses._changed = world.dispatcher.invalidate
    pauses.pause("route", "up")
    world.connect()
    world.deliver(row("one", 1, 5), row("two", 2, 6))
    world.drop()
    pauses.resume("route", "up")
    assert [message.body for message in world.local.messages] == [b"one", b"two"]
    world.connect()
    assert world.session.idle


@VERSIONS
@pytest.mark.parametrize("waits_for", [RELEASED, FULL])
async def test_what_waits_for_a_removed_route_becomes_a_dead_letter(
    version: str, waits_for: Outcome, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(version=version)
    world.dispatcher.disk_healthy = lambda: world.local.answer is not FULL
    world.local.answer = waits_for
    remote = world.connect()
    world.deliver(row("one", 1, 5), row("two", 2, 6))
    world.deliver(row("three", 1, 7), row("no route", 1, 8, topic="elsewhere"))
    assert remote.acks_of(PUBACK) == [(8, 0)], "it waits for nothing"
    world.local.answer = None  # what is on its way is answered after the reload
    await tick_after(world, 2)
    world.dispatcher.use(Router([parse(OTHERS)], {"plant": "mqtt", "local": "mqtt"}))
    for part in world.local.parts[-1:]:
        part.settle(waits_for)
    world.local.answer = ACCEPTED
    for _ in range(3):
        await tick_after(world, 20)
    assert sorted(remote.acks_of(PUBACK)) == [(5, 0), (7, 0), (8, 0)]
    assert remote.acks_of(PUBREC) == [(6, 0)]
    letters = newest(world.dead_letters)
    assert {letter.message.body for letter in letters} == {b"one", b"two", b"three"}
    assert {letter.outcome for letter in letters} == {ROUTE_REMOVED}
    assert {letter.route for letter in letters} == {"up"}
    assert world.dead_letters.unwanted_count == 0, "they are kept like others of routes"
    assert world.session.idle


@VERSIONS
async def test_what_is_refused_for_too_long_becomes_a_dead_letter(
    version: str, autojump_clock: trio.testing.MockClock
) -> None:
    world = World(version=version, retry_secs_max=60)
    world.local.answer = RELEASED
    remote = world.connect()
    world.deliver(row("one", 1, 5), row("two", 2, 6))
    world.deliver(row("three", 1, 7))
    for _ in range(59):
        await tick_after(world, 1)
    assert (remote.acks_of(PUBACK), remote.acks_of(PUBREC)) == ([], [])
    await tick_after(world, 10)
    await tick_after(world, 1)
    assert [letter.message.body for letter in newest(world.dead_letters)] == [b"three", b"two", b"one"]
    assert {letter.outcome for letter in newest(world.dead_letters)} == {TOO_LONG}
    assert (remote.acks_of(PUBACK), remote.acks_of(PUBREC)) == ([(5, 0), (7, 0)], [(6, 0)])
    world.local.answer = ACCEPTED
    world.deliver(row("four", 1, 8))
    assert remote.acks_of(PUBACK)[2:] == [(8, 0)]
    assert world.session.idle


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("refusal", [RELEASED, FULL])
async def test_what_expires_while_it_is_held_back_becomes_a_dead_letter(
    refusal: Outcome, qos: int, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    world.local.answer = refusal
    remote = world.connect()
    raw = encode_list({Property.MESSAGE_EXPIRY_INTERVAL: 60}, PacketType.PUBLISH)
    world.deliver(row("old", qos, 5, raw=raw), row("new", qos, 6))
    world.local.answer, tried = ACCEPTED, len(world.local.messages)
    utc = clock.utc()
    monkeypatch.setattr(clock, "utc", lambda: utc + 100)
    await tick_after(world, 10)
    assert [message.body for message in world.local.messages[tried:]] == [b"new"]
    (letter,) = newest(world.dead_letters)
    assert (letter.message.body, letter.route, letter.outcome) == (b"old", "up", EXPIRED)
    assert remote.acks_of(PUBACK if qos == 1 else PUBREC) == [(5, 0), (6, 0)]
    assert world.session.idle


FAN = """
version: 1
routes:
  - {name: one, from: {endpoint: plant, topic: "up/#"}, to: {endpoint: local, topic: "in/{topic}"}}
  - {name: two, from: {endpoint: plant, topic: "up/#"}, to: {endpoint: other, topic: "in/{topic}"}}
"""


@pytest.mark.parametrize("qos", [1, 2])
async def test_what_one_route_refused_for_too_long_is_redriven_on_it_alone(
    qos: int, autojump_clock: trio.testing.MockClock
) -> None:
    world, other = World(retry_secs_max=60), Collector()
    world.dispatcher.use(Router([parse(FAN)], {"plant": "mqtt", "local": "mqtt", "other": "mqtt"}))
    world.dispatcher.namespaces = {**world.dispatcher.namespaces, "other": other}
    other.answer = RELEASED
    remote = world.connect()
    world.deliver(row("a", qos, 5), row("b", qos, 6))
    for _ in range(7):
        await tick_after(world, 10)
    letters = newest(world.dead_letters)
    assert [(letter.message.body, letter.route) for letter in letters] == [(b"b", "two"), (b"a", "two")]
    assert remote.acks_of(PUBACK if qos == 1 else PUBREC) == [(5, 0), (6, 0)]
    assert world.session.idle
    tried, other.answer = len(other.messages), ACCEPTED
    Redriving(world.dispatcher, world.dead_letters).redrive(letters, lambda id, outcome: None)
    assert [message.body for message in other.messages[tried:]] == [b"b", b"a"]
    assert [message.body for message in world.local.messages] == [b"a", b"b"], "it had accepted them"
    assert len(world.dead_letters) == 0


async def tick_after(world: World, seconds: float) -> None:
    await trio.sleep(seconds)
    world.session.tick(trio.current_time())
    world.session.end_turn()
    world.talk()


def recovered(world: World) -> list[bytes]:
    """The disk takes messages again, and a second passes: what is tried now."""
    world.local.answer = ACCEPTED
    before = len(world.local.messages)
    world.dispatcher.disk_healthy = lambda: True
    world.session.tick(trio.current_time())
    world.session.end_turn()
    world.talk()
    return [message.body for message in world.local.messages[before:]]


@VERSIONS
async def test_nothing_overtakes_what_a_full_disk_refused(version: str) -> None:
    world = World(version=version)
    world.dispatcher.disk_healthy = lambda: False
    world.local.answer = FULL
    remote = world.connect()
    world.deliver(row("1", 1, 5), row("2", 2, 6))
    world.deliver(row("3", 2, 7), row("0", 0), row("4", 1, 8))
    world.session.tick(trio.current_time() + 100)
    world.session.end_turn()
    assert [message.body for message in world.local.messages] == [b"1", b"2", b"0"]
    world.local.answer = ACCEPTED
    world.deliver(row("5", 1, 9))
    assert not remote.acks_of(PUBACK)
    assert recovered(world) == [b"1", b"2", b"3", b"4", b"5"]
    assert remote.acks_of(PUBACK) == [(5, 0), (8, 0), (9, 0)]
    assert remote.acks_of(PUBREC) == [(6, 0), (7, 0)]
    assert world.session.idle


async def test_what_waits_for_the_disk_over_a_lost_connection_is_taken_once() -> None:
    world = World()
    world.dispatcher.disk_healthy = lambda: False
    world.local.answer = FULL
    world.connect()
    world.deliver(row("1", 1, 5), row("2", 2, 6))
    world.drop()
    world.present = True
    remote = world.connect()
    world.deliver(row("1", 1, 5, flags=8), row("2", 2, 6, flags=8), row("3", 2, 7))
    assert sorted(recovered(world)) == [b"1", b"2", b"3"]
    assert remote.acks_of(PUBACK) == [(5, 0)]
    assert remote.acks_of(PUBREC) == [(6, 0), (7, 0)]
    assert world.session.idle


async def test_a_qos_2_message_is_taken_once_while_the_session_lasts() -> None:
    world = World()
    world.local.answer = None
    world.connect()
    world.deliver(row("x", 2, 5))
    world.drop()
    world.present = True
    remote = world.connect()
    world.deliver(row("x", 2, 5, flags=8))
    assert len(world.local.messages) == 1
    assert not remote.acks_of(PUBREC)
    world.local.parts[0].accept()
    world.talk()
    assert remote.acks_of(PUBREC) == [(5, 0)]
    world.drop()
    remote = world.connect()
    world.deliver(row("x", 2, 5, flags=8))
    assert remote.acks_of(PUBREC) == [(5, 0)]
    assert len(world.local.messages) == 1
    assert world.stats.duplicates == 2
    remote.machine.acknowledge(PacketType.PUBREL, [5])
    world.talk()
    world.deliver(row("another", 2, 5))
    assert len(world.local.messages) == 2


async def test_a_new_session_starts_with_no_known_ids() -> None:
    world = World()
    world.local.answer = None
    world.connect()
    world.deliver(row("old", 2, 5), row("old one", 1, 6))
    world.drop()
    remote = world.connect()
    world.deliver(row("new", 2, 5))
    assert [message.body for message in world.local.messages] == [b"old", b"old one", b"new"]
    world.local.parts[0].accept()
    world.talk()
    assert not remote.acks_of(PUBREC)
    assert not remote.acks_of(PUBACK)
    world.local.parts[1].accept()
    world.talk()
    assert remote.acks_of(PUBREC) == [(5, 0)]
    assert world.session.idle


@pytest.mark.parametrize("present, tries", [(True, 1), (False, 2)])
async def test_a_released_message_of_a_lost_connection_is_the_brokers_again(
    present: bool, tries: int
) -> None:
    """On a kept session the broker delivers a QoS 1 message again; a lost session has nobody but us."""
    world = World()
    world.local.answer = RELEASED
    world.connect()
    world.deliver(row("x", 1, 5))
    world.drop()
    world.session.tick(trio.current_time() + 5)  # nobody to acknowledge to: not yet
    assert len(world.local.messages) == 1
    world.present = present
    remote = world.connect()
    world.local.answer = ACCEPTED
    world.session.tick(trio.current_time() + 5)
    world.session.end_turn()
    world.talk()
    assert len(world.local.messages) == tries
    assert not remote.acks_of(PUBACK)
    assert world.session.idle


async def test_before_mqtt_5_an_oversized_message_is_kept_as_a_dead_letter() -> None:
    """To hang up would bring it again and again."""
    world = World(version="3.1.1", limits={"message_bytes_max": 10})
    remote = world.connect()
    world.deliver(row("x" * 70_000, 1, 5), row("small", 1, 6), row("y" * 70_000, 2, 7))
    assert sorted(remote.acks_of(PUBACK)) == [(5, 0), (6, 0)]
    assert remote.acks_of(PUBREC) == [(7, 0)]
    assert [message.body for message in world.local.messages] == [b"small"]
    assert world.dead_letters.counted["", "too_large"] == 2
    assert world.link.downs == []
    assert world.session.idle


async def test_mqtt_5_is_told_how_much_we_take() -> None:
    world = World(limits={"message_bytes_max": 10, "connect_bytes_max": 1_000}, prefetch=5)
    remote = world.connect()
    assert remote.connect is not None
    assert remote.connect.properties[Property.MAXIMUM_PACKET_SIZE] == 1_010
    assert remote.connect.properties[Property.RECEIVE_MAXIMUM] == 5


async def test_a_new_mapping_is_in_force_for_the_next_message() -> None:
    world = World()
    world.connect()
    world.deliver(row("a", 1, 1))
    world.dispatcher.invalidate()
    world.dispatcher.namespaces.pop("local")
    world.deliver(row("b", 1, 2))
    assert [message.body for message in world.local.messages] == [b"a"]
    assert world.remote.acks_of(PUBACK) == [(1, 0), (2, 0)]


async def test_reading_stops_while_too_much_is_unsettled() -> None:
    world = World(version="3.1.1", prefetch=4, heartbeat_secs=10)
    world.local.answer = None
    remote = world.connect()
    world.deliver(*[row(str(number), 1, number) for number in range(1, 5)])
    assert world.stream.holds == 0
    world.deliver(*[row(str(number), 1, number) for number in range(5, 9)])
    assert world.stream.holds == 1
    for now in (6.0, 40.0):  # it is not the broker that is silent, and we must not be either
        world.connection.tick(now)
        assert world.stream.owner.data_to_send() == b"\xc0\x00"  # type: ignore[union-attr]
    world.local.parts[0].accept()
    assert world.stream.holds == 1
    world.local.parts[1].settle_at([0, 1])
    assert world.stream.holds == 0
    world.connection.tick(41.0)
    world.talk()
    assert len(remote.acks_of(PUBACK)) == 6
    assert world.link.downs == []


async def test_what_frees_ids_of_an_earlier_life_is_read_whatever_waits() -> None:
    world = World(version="3.1.1", prefetch=2)
    world.local.answer, world.present = None, True
    remote = world.connect()
    remote.acks = False
    world.publish(message("two", 2))
    world.deliver(*[row(str(number), 1, number) for number in range(1, 7)])
    assert world.stream.holds == 0
    remote.machine.acknowledge(PacketType.PUBCOMP, range(1, PACKET_IDS + 1))
    world.talk()
    assert world.sent() == [(4, b"two")]


async def test_a_link_that_feeds_itself_goes_on_reading() -> None:
    """What it brings in is settled by acknowledgements that come over the same connection."""
    world = World(version="3.1.1", prefetch=2, routes=BACK)
    world.acks = False
    remote = world.connect()
    world.deliver(*[row(str(number), 1, number) for number in range(1, 7)])
    assert [(one[1], one[4]) for one in remote.rows] == [(b"down/a", b"%d" % at) for at in range(1, 7)]
    assert world.stream.holds == 0
    remote.ack(remote.rows)
    world.talk()
    assert remote.acks_of(PUBACK) == [(number, 0) for number in range(1, 7)]


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("topic", ["up/#", "up/+"])
async def test_a_topic_that_is_none_is_a_dead_letter_and_the_link_stays(topic: str, qos: int) -> None:
    """Hanging up would bring it again with the next connection, and everything behind it would wait."""
    world = World()
    remote = world.connect()
    world.deliver(row("x", qos, 5 if qos else 0, topic=topic), row("behind", 1, 6))
    assert not world.stream.ending
    assert [message.body for message in world.local.messages] == [b"behind"]
    assert remote.acks_of(PUBACK) == ([(5, 0), (6, 0)] if qos == 1 else [(6, 0)])
    assert remote.acks_of(PUBREC) == ([(5, 0)] if qos == 2 else [])
    assert world.dispatcher.dead_letters.counted == {("", "malformed"): 1}


async def test_a_repeat_of_what_became_a_dead_letter_is_acknowledged_again() -> None:
    world = World()
    remote = world.connect()
    for dup in (0, 8):
        world.deliver(row("x", 2, 5, topic="up/#", flags=dup))
    assert remote.acks_of(PUBREC) == [(5, 0), (5, 0)]
    assert len(world.dead_letters) == 1


async def test_what_waits_for_room_among_the_dead_letters_waits_once_over_reconnects(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The broker sends a QoS 1 message again on each connection; the link has to read on meanwhile."""
    world = World(prefetch=2)
    world.dispatcher.dead_letters = letters = DeadLetters(messages_max=1)
    letters.add([message("other")], "r", REJECTED)
    world.present = True
    for _ in range(4):
        remote = world.connect()
        world.deliver(row("x", 1, 5, topic="up/#"))
        await tick_after(world, 1)
        world.deliver(row("y", 1, 6))
        assert (remote.acks_of(PUBACK), world.stream.holds) == ([(6, 0)], 0)
        world.drop()
    remote = world.connect()
    world.deliver(row("x", 1, 5, topic="up/#"))
    letters.delete([letter.id for letter in newest(letters)])
    await tick_after(world, 1)
    await tick_after(world, 1)
    assert [letter.message.body for letter in newest(letters)] == [b"x"]
    assert letters.counted["", "malformed"] == 1
    assert letters.refused == 5, "once for each delivery"
    assert remote.acks_of(PUBACK) == [(5, 0)]
    assert world.session.idle


async def test_a_dead_letter_tells_that_its_properties_are_lost() -> None:
    world = World(limits={"properties_bytes_max": 2_000})
    raw = encode_list({Property.CONTENT_TYPE: "x" * 2_000}, PacketType.PUBLISH)
    remote = world.connect()
    world.deliver(row("x", 1, 5, raw=raw), row("y", 1, 6, topic="up/#"))
    without_properties, whole = newest(world.dead_letters)[::-1]
    assert (without_properties.message.body, without_properties.lost_part) == (
        b"x",
        "the properties were not stored",
    )
    assert (whole.message.body, whole.lost_part) == (b"y", "")
    assert remote.acks_of(PUBACK) == [(5, 0), (6, 0)]


@VERSIONS
async def test_nothing_is_taken_while_memory_is_short(version: str) -> None:
    world = World(version=version)
    remote = world.connect()
    memory = world.dispatcher.memory
    memory.short = True
    world.deliver(row("1", 1, 5), row("0", 0), row("2", 2, 6))
    for seconds in (100, 200):
        world.session.tick(trio.current_time() + seconds)
        world.session.end_turn()
    assert [message.body for message in world.local.messages] == [b"0"]
    memory.is_scarce = True
    world.deliver(row("dropped", 0), row("3", 1, 7))
    memory.short = memory.is_scarce = False
    world.session.tick(trio.current_time() + 300)
    world.session.end_turn()
    world.talk()
    assert [message.body for message in world.local.messages] == [b"0", b"1", b"2", b"3"]
    assert remote.acks_of(PUBACK) == [(5, 0), (7, 0)]
    assert remote.acks_of(PUBREC) == [(6, 0)]
    assert (memory.refused, world.session.idle) == (1, True)


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("is_back", [False, True])
async def test_what_is_rejected_after_the_broker_lost_the_session_is_a_dead_letter(
    qos: int, is_back: bool
) -> None:
    """Neither can the broker be told, nor has it the message any more."""
    world = World()
    world.local.answer = None
    world.connect()
    world.deliver(row("lost", qos, 7))
    world.drop()
    if is_back:
        world.present = False
        world.connect()
    world.local.parts[0].settle(REJECTED)
    assert [letter.message.body for letter in newest(world.dead_letters)] == [b"lost"]
    assert world.session.receiver.unsettled == 0


@pytest.mark.parametrize("is_lost_first", [False, True])
async def test_what_is_rejected_has_its_route_if_the_connection_is_lost(is_lost_first: bool) -> None:
    """One of two routes rejects it, and when the other one accepts it, the broker cannot be told any more."""
    world = World(routes=TWO)
    world.local.answer = None
    world.connect()
    world.deliver(row("x", 1, 7))
    first, second = world.local.parts
    if is_lost_first:
        world.drop()
    first.settle(REJECTED)
    world.drop()
    second.accept()
    assert [letter.route for letter in newest(world.dead_letters)] == ["up"]
    assert world.session.receiver.unsettled == 0
    assert not world.session.receiver._held_back.on


async def test_what_is_rejected_is_no_dead_letter_while_the_broker_has_it() -> None:
    world = World()
    world.local.answer = None
    world.connect()
    world.deliver(row("again", 1, 7), row("once", 2, 8))
    world.drop()
    world.present = True
    remote = world.connect()
    world.local.parts[0].settle(REJECTED)
    world.talk()
    assert newest(world.dead_letters) == []
    assert remote.acks_of(PUBACK) == [], "it comes again"
    assert remote.acks_of(PUBREC) == [(8, ReasonCode.QUOTA_EXCEEDED)]
    assert world.session.receiver.unsettled == 0


@pytest.mark.parametrize("session_expiry_secs", [3_600, 0])
async def test_what_is_held_back_waits_at_the_broker_if_that_stores_the_session(
    session_expiry_secs: int,
) -> None:
    world = World(session_expiry_secs=session_expiry_secs)
    world.local.answer = RELEASED
    world.connect()
    world.deliver(row("one", 1, 5), row("two", 2, 6))
    assert world.session.receiver.unsettled == 2
    assert world.session.idle is bool(session_expiry_secs)
