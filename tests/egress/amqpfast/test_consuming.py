"""What an AMQP/Fast link consumes: through the routes, and acknowledged when every target has settled it."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.egress.held_back import ROUTE_REMOVED
from gateway.mapping.router import Router, Subscriptions, Targets
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import Head, encode_head_properties
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.amqpfast.sender import Notifier
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits
from tests.broker.parts import newest
from tests.egress.amqp091.remote import Shelf
from tests.egress.amqpfast.remote import TRANSIENT, LinkRig, routed

pytestmark = pytest.mark.interpreted  # the stream is one in memory

MAPPING = """
version: 1
routes:
  - name: commands
    from: {endpoint: fast, service: queue, destination: commands}
    to: {endpoint: mqtt, topic: "commands"}
  - name: events
    from: {endpoint: fast, service: topic, destination: "plant.{line}.t"}
    to: {endpoint: mqtt, topic: "events/{line}"}
  - name: inner
    from: {endpoint: fast, service: topic, destination: "plant.a.{rest...}"}
    to: {endpoint: mqtt, topic: "inner/{rest...}"}
  - name: jobs
    from: {endpoint: fast, service: queue, destination: "jobs.{name}"}
    to: {endpoint: mqtt, topic: "jobs/{name}"}
"""
DROPPED = Outcome(Verdict.REJECTED, Reason.NAME_INVALID, "no")
BUSY = Outcome(Verdict.RELEASED, Reason.QUOTA, "later")
FULL = Outcome(Verdict.RELEASED, Reason.STORE, "the gateway cannot store the message: disk is full")


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def one(tmp_path: Path, shelf: Shelf) -> LinkRig:
    return rig(tmp_path, shelf)


def rig(tmp_path: Path, shelf: Shelf, limits: Limits | None = None, **settings: object) -> LinkRig:
    router = routed(tmp_path, MAPPING)
    dispatcher = Dispatcher(router, DeadLetters())
    made = LinkRig(dispatcher, limits, **{"prefetch": 50, **settings})
    dispatcher.namespaces |= {"mqtt": shelf, "fast": made.session}
    made.session.route(router.subscriptions("fast"), router.targets("fast"))
    made.connect()
    return made


def notify(one: LinkRig, source: str, *bodies: bytes, name: str = "", **more: object) -> None:
    one.remote.notify(source, name or source, bodies, **more)  # type: ignore[arg-type]
    one.move()


def acks(one: LinkRig, source: str) -> list[int]:
    channel = one.remote.consumer(source).channel
    return [number for found, number in one.world.acks if found == channel]


async def test_each_source_is_consumed_once_and_topics_durably(one: LinkRig) -> None:
    said = {
        (consumer.name, consumer.prefetch, consumer.no_local, consumer.identifier)
        for consumer in one.remote.consumers
    }
    assert said == {
        ("commands", 50, False, ""),
        ("plant.", 50, True, "gateway.plant."),  # and not plant.a. as well
        ("jobs.", 50, False, ""),
    }
    assert len({consumer.channel for consumer in one.remote.consumers}) == 3
    assert one.link.ups == 1


async def test_subscriptions_may_be_temporary(tmp_path: Path, shelf: Shelf) -> None:
    one = rig(tmp_path, shelf, durable_subscriptions=False)
    assert {consumer.identifier for consumer in one.remote.consumers} == {""}


async def test_messages_take_the_routes_of_their_destination(one: LinkRig, shelf: Shelf) -> None:
    notify(one, "commands", b"1", b"2")
    notify(one, "plant.", b"3", name="plant.b.t")
    notify(one, "plant.", b"4", name="plant.a.t")
    assert [(str(message.address), message.body) for message in shelf.messages] == [
        (str(topic_address(topic)), body)
        for topic, body in (
            ("commands", b"1"),
            ("commands", b"2"),
            ("events/b", b"3"),
            ("events/a", b"4"),
            ("inner/t", b"4"),
        )
    ]
    assert acks(one, "commands") == [2]
    assert acks(one, "plant.") == [1, 2]
    assert one.stats.messages_in == one.stats.accepted_messages == 4
    assert one.session.idle


async def test_what_the_head_says_is_kept(one: LinkRig, shelf: Shelf) -> None:
    headers = (("HOPS", Value(ValueType.INT32, 3)), ("RETAIN", Value(ValueType.INT32, 1)))
    head = Head(persistent=True, priority=6, expiration=4_000_000_000, identifier="id", headers=headers)
    notify(one, "commands", b"transient", head=TRANSIENT)
    notify(one, "commands", b"persistent", head=encode_head_properties(head))
    transient, persistent = shelf.messages
    assert (transient.assurance, transient.durable, transient.expires) == (0, False, 0.0)
    assert (persistent.assurance, persistent.durable, persistent.expires) == (1, True, 4e9)
    assert (persistent.hops, persistent.retain) == (4, True)
    said = persistent.properties
    assert (said.priority, said.message_id) == (6, "id")


async def test_acknowledgements_wait_for_the_targets_and_are_cumulative(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = None
    notify(one, "commands", *[b"%d" % at for at in range(6)])
    notify(one, "plant.", b"x", name="plant.b.t")
    first, other = shelf.parts
    first.settle_at([1, 4])
    one.move()
    assert one.world.acks == []
    assert not one.session.idle
    first.settle_at([0, 2])
    one.move()
    assert acks(one, "commands") == [3]
    other.settle(ACCEPTED)
    first.settle_at([3, 5])
    one.move()
    assert acks(one, "commands") == [3, 6]
    assert acks(one, "plant.") == [1]
    assert one.session.idle


async def test_numbers_that_the_server_never_used_hold_nothing_up(one: LinkRig) -> None:
    notify(one, "commands", b"1", skip=4)
    notify(one, "commands", b"2", b"3", skip=2)
    assert acks(one, "commands") == [5, 11]
    assert one.session.idle


async def test_what_a_target_refuses_is_a_dead_letter_and_acknowledged(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = DROPPED
    notify(one, "commands", b"1")
    letter = newest(one.dispatcher.dead_letters)[0]
    assert (letter.message.body, letter.outcome) == (b"1", DROPPED)
    assert acks(one, "commands") == [1]
    assert (letter.route, letter.crossed) == ("commands", True), (
        "it is redriven through the route that failed"
    )
    assert list(one.stats.settled_counts()) == [("accepted", "none", 1)]


@pytest.mark.parametrize("source, name", [("commands", ""), ("plant.", "plant.b.t")])
async def test_what_is_released_is_kept_and_tried_again_before_what_came_behind_it(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock, source: str, name: str
) -> None:
    shelf.outcome = BUSY
    notify(one, source, b"1", name=name)
    await trio.sleep(1.5)
    one.tick()
    shelf.outcome = ACCEPTED
    notify(one, source, b"2", name=name)
    assert acks(one, source) == []
    assert one.session.idle, "nothing comes of waiting for it"
    await trio.sleep(2.5)
    one.tick()
    assert [message.body for message in shelf.messages] == [b"1", b"1", b"1", b"2"]
    assert one.world.ungets == []
    assert acks(one, source) == [2]
    assert one.session.idle


@pytest.mark.parametrize("source, name", [("commands", ""), ("plant.", "plant.b.t")])
@pytest.mark.parametrize("waits_for", [BUSY, FULL])
async def test_what_waits_for_a_removed_route_becomes_a_dead_letter(
    one: LinkRig,
    shelf: Shelf,
    tmp_path: Path,
    autojump_clock: trio.testing.MockClock,
    source: str,
    name: str,
    waits_for: Outcome,
) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is not FULL
    shelf.outcome = waits_for
    channel = one.remote.consumer(source).channel
    notify(one, source, b"1", name=name)
    notify(one, source, b"2", name=name)
    shelf.outcome = None
    await trio.sleep(2)
    one.tick()  # one or both are on their way
    router = routed(tmp_path, "version: 1\nroutes:\n" + MAPPING[MAPPING.index("  - name: inner") :])
    one.dispatcher.use(router)
    one.session.route(router.subscriptions("fast"), router.targets("fast"))
    one.move()
    for part in shelf.parts[-1:]:
        part.settle(waits_for)
    shelf.outcome = ACCEPTED
    for _ in range(4):
        await trio.sleep(20)
        one.tick()
        one.move()
    letters = newest(one.dispatcher.dead_letters)
    assert {letter.message.body for letter in letters} == {b"1", b"2"}
    assert {letter.outcome for letter in letters} == {ROUTE_REMOVED}
    assert one.dispatcher.dead_letters.unwanted_count == 0, "they are kept like others of routes"
    assert [number for found, number in one.world.acks if found == channel][-1:] == [2]
    assert one.session.idle
    assert not one.session.held_back.on


@pytest.mark.parametrize("source, name", [("commands", ""), ("plant.", "plant.b.t")])
async def test_what_is_refused_for_too_long_becomes_a_dead_letter(
    tmp_path: Path, shelf: Shelf, autojump_clock: trio.testing.MockClock, source: str, name: str
) -> None:
    one = rig(tmp_path, shelf, retry_secs_max=60)
    shelf.outcome = BUSY
    notify(one, source, b"1", b"2", name=name)
    for _ in range(59):
        await trio.sleep(1)
        one.tick()
    assert (acks(one, source), len(one.dispatcher.dead_letters)) == ([], 0)
    await trio.sleep(10)
    one.tick()
    one.move()
    assert [letter.message.body for letter in newest(one.dispatcher.dead_letters)] == [b"2", b"1"]
    shelf.outcome = ACCEPTED
    notify(one, source, b"3", name=name)
    assert (shelf.accepted, acks(one, source)) == ([b"3"], [2, 3])
    assert one.session.idle


async def test_while_memory_is_short_what_a_queue_sent_goes_back(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    one.dispatcher.memory.short = True
    notify(one, "commands", b"1")
    await trio.sleep(1.5)
    one.tick()
    assert one.world.ungets == [1]
    assert one.session.idle


@pytest.mark.parametrize("source", ["commands", "plant."])
async def test_nothing_overtakes_what_a_full_disk_refused(one: LinkRig, shelf: Shelf, source: str) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is ACCEPTED
    name = "plant.b.t" if source == "plant." else ""
    shelf.outcome = FULL
    notify(one, source, b"1", b"2", name=name)
    notify(one, source, b"3", name=name)
    one.tick()
    assert len(shelf.messages) == 2, "what came behind a refused message is not even tried"
    shelf.outcome = ACCEPTED
    notify(one, source, b"4", name=name)
    assert shelf.accepted == acks(one, source) == []
    one.tick()
    assert shelf.accepted == [b"1", b"2", b"3", b"4"]
    notify(one, source, b"5", name=name)
    assert shelf.accepted[4:] == [b"5"]
    assert acks(one, source)[-1] == 5
    assert one.world.ungets == []
    assert one.session.idle


async def test_what_waits_for_the_disk_comes_again_after_a_lost_connection(
    one: LinkRig, shelf: Shelf
) -> None:
    one.dispatcher.disk_healthy = lambda: shelf.outcome is ACCEPTED
    shelf.outcome = FULL
    notify(one, "commands", b"1", b"2")
    one.lose()
    one.connect()
    notify(one, "commands", b"1", b"2")
    shelf.outcome = ACCEPTED
    one.tick()
    assert shelf.accepted == [b"1", b"2"]


async def test_a_message_without_a_route_is_a_dead_letter_if_it_came_from_a_queue(one: LinkRig) -> None:
    notify(one, "jobs.", b"1", name="jobs.a.b")
    notify(one, "plant.", b"2", name="plant.x.y.z")
    letters = one.dispatcher.dead_letters
    assert newest(letters)[0].message.body == b"1"
    assert len(letters) == 1
    assert acks(one, "jobs.") == acks(one, "plant.") == [1]


async def test_settlements_of_a_lost_connection_are_dropped(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = None
    notify(one, "commands", b"1")
    one.lose()
    one.connect()
    shelf.parts[0].settle(ACCEPTED)
    one.move()
    assert one.world.acks == []
    assert one.session.idle


@pytest.mark.parametrize("change", ["cancelled", "unrouted", "none"])
async def test_a_paused_route_keeps_what_does_not_come_again(one: LinkRig, shelf: Shelf, change: str) -> None:
    pauses = one.dispatcher.pauses
    pauses._changed = one.dispatcher.invalidate
    pauses.pause("route", "events")
    notify(one, "plant.", b"x", name="plant.b.t")
    assert pauses.waiting_by_route() == {"events": 1}
    if change == "cancelled":
        one.route(("queue", "commands"))
        one.move()
    elif change == "unrouted":
        one.dispatcher.use(Router([], {}))
    assert one.world.cancelled == (["gateway.plant."] if change == "cancelled" else [])
    one.lose()
    one.connect()
    pauses.resume("route", "events")
    one.move()
    assert shelf.accepted == ([] if change == "none" else [b"x"]), "otherwise the server delivers it again"
    assert one.session.idle


async def test_a_body_in_fragments_is_joined(one: LinkRig, shelf: Shelf) -> None:
    body = bytes(range(256)) * 2_000
    notify(one, "commands", body, b"after")
    assert [message.body for message in shelf.messages] == [body, b"after"]
    assert acks(one, "commands") == [2]


async def test_a_body_over_the_limit_does_not_stop_the_queue(tmp_path: Path, shelf: Shelf) -> None:
    one = rig(tmp_path, shelf, Limits(message_bytes_max=1_000))
    notify(one, "commands", b"x" * 500_000, b"y" * 1_001, b"after")
    assert [message.body for message in shelf.messages] == [b"after"]
    assert acks(one, "commands") == [3]
    letter = newest(one.dispatcher.dead_letters)[0]
    assert (letter.outcome.reason, letter.message.address) == (
        Reason.TOO_LARGE,
        fast_address("queue", "commands"),
    )
    assert [one.lost_part for one in newest(one.dispatcher.dead_letters)] == ["the body was not stored"] * 2
    assert one.link.downs == []


async def test_a_malformed_head_is_a_dead_letter(one: LinkRig, shelf: Shelf) -> None:
    headers = b"\0\x05\x01aI\0\0"  # cut short
    notify(one, "commands", b"1", b"2", head=TRANSIENT[:-2] + headers)
    assert shelf.messages == []
    assert acks(one, "commands") == [2]
    letter = newest(one.dispatcher.dead_letters)[0]
    assert (letter.outcome.reason, letter.lost_part) == (Reason.MALFORMED, "the properties were not stored")


async def test_a_source_that_is_missing_is_asked_for_again(
    tmp_path: Path, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    one = rig(tmp_path, shelf)
    one.lose()
    one.world.missing.add("commands")
    one.connect()
    assert one.link.ups == 2
    assert {consumer.name for consumer in one.remote.consumers} == {"plant.", "jobs."}
    one.world.missing.clear()
    await trio.sleep(1.5)
    one.tick()
    notify(one, "commands", b"1")
    assert acks(one, "commands") == [1]


@pytest.mark.parametrize("channel", [False, True])
async def test_a_source_that_goes_away_is_consumed_again(
    one: LinkRig, shelf: Shelf, channel: bool, autojump_clock: trio.testing.MockClock
) -> None:
    shelf.outcome = None
    notify(one, "commands", b"1")
    found = one.remote.consumer("commands")
    if channel:
        one.remote.machine.close_channel(found.channel, 404, "gone")
    else:
        one.remote.machine.close_handle(found.handle, 404, "gone")
    one.remote.consumers.remove(found)
    one.move()
    shelf.parts[0].settle(ACCEPTED)
    one.move()
    # What was delivered stays with its channel (3.5.16), and is nobody's when that is closed.
    assert one.world.acks == ([] if channel else [(found.channel, 1)])
    assert one.link.downs == []
    await trio.sleep(1.5)
    one.tick()
    shelf.outcome = ACCEPTED
    notify(one, "commands", b"2")
    assert acks(one, "commands")[-1:] == [1 if channel else 2]
    assert one.session.idle


def closes(one: LinkRig) -> tuple[int, int]:
    """How many CLOSE of handles and of channels the server has received."""
    received = one.remote.machine.received
    return received[m.HandleClose.type], received[m.ChannelClose.type]


async def test_a_close_of_a_handle_is_answered_by_one(
    tmp_path: Path, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    """3.5.16, 3.5.17; the channel is that of the next attempt."""
    one = rig(tmp_path, shelf)
    one.lose()
    one.world.missing.add("commands")
    one.connect()
    channels = list(one.remote.machine.channels)
    for attempt in range(1, 4):
        assert closes(one) == (attempt, 0)
        assert one.remote.machine.channels == channels
        await trio.sleep(10)
        one.tick()
    one.world.missing.clear()
    await trio.sleep(10)
    one.tick()
    assert closes(one) == (4, 0)
    notify(one, "commands", b"1")
    assert acks(one, "commands") == [1]


@pytest.mark.parametrize("source, name", [("commands", ""), ("plant.", "plant.b.t")])
async def test_a_source_that_is_closed_and_not_wanted_any_more_leaves_no_channel(
    one: LinkRig, shelf: Shelf, source: str, name: str
) -> None:
    shelf.outcome = None
    notify(one, source, b"1", name=name)
    found = one.remote.consumer(source)
    one.remote.machine.close_handle(found.handle, 403, "no")
    one.move()
    one.session.route(Subscriptions(prefixes=(("queue", "jobs."),)), Targets())
    one.move()
    assert found.channel in one.remote.machine.channels, "its message is not answered yet"
    shelf.parts[0].settle(ACCEPTED)
    one.move()
    assert one.world.acks == [(found.channel, 1)]
    assert found.channel not in one.remote.machine.channels
    assert "gateway.plant." in one.world.cancelled
    assert one.session.idle


async def test_a_closed_handle_takes_nothing_back(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    """UNGET would go to the wrong handle; so what it has delivered is tried again from here."""
    one.dispatcher.memory.short = True
    notify(one, "commands", b"1")
    found = one.remote.consumer("commands")
    one.remote.machine.close_handle(found.handle, 404, "gone")
    one.remote.consumers.remove(found)
    one.move()
    for _ in range(3):  # with the handle closed, and with the next one open
        await trio.sleep(1.5)
        one.tick()
    notify(one, "commands", b"2")
    await trio.sleep(1.5)
    one.tick()
    assert one.world.ungets == [2]
    assert shelf.messages == []
    one.dispatcher.memory.short = False
    await trio.sleep(1.5)
    one.tick()
    assert shelf.accepted == [b"1"]
    assert one.session.idle


@pytest.mark.parametrize("size", [1, 300_000])
async def test_what_is_shown_and_not_delivered_is_neither_processed_nor_acknowledged(
    one: LinkRig, shelf: Shelf, size: int
) -> None:
    """3.5.11: delivered=0 is what BROWSE asks for, and a link asks for none."""
    found = one.remote.consumer("commands")
    shown = Notifier(one.remote.machine, found.handle, delivered=False)
    assert shown.notify(1, False, b"commands", TRANSIENT, b"x" * size)
    one.remote.numbers[found.channel] = 1
    one.move()
    assert one.world.acks == shelf.messages == []
    assert one.stats.protocol_errors.counts == {"not_delivered": 1}
    notify(one, "commands", b"2")
    assert [message.body for message in shelf.messages] == [b"2"]
    assert acks(one, "commands") == [2]
    assert one.session.idle


async def test_a_changed_mapping_consumes_and_leaves(one: LinkRig, shelf: Shelf) -> None:
    shelf.outcome = None
    notify(one, "plant.", b"1", name="plant.b.t")
    before = one.remote.consumer("plant.")
    one.session.route(Subscriptions(prefixes=(("queue", "commands"), ("topic", "new"))), Targets())
    one.move()
    assert one.world.cancelled == ["gateway.plant."]
    assert before.channel in one.remote.machine.channels
    shelf.parts[0].settle(ACCEPTED)
    one.move()
    assert (before.channel, 1) in one.world.acks
    assert before.channel not in one.remote.machine.channels
    assert one.remote.consumer("new").identifier == "gateway.new"
    assert one.session.idle


async def test_what_is_not_wanted_any_more_is_cancelled_at_the_next_connection(one: LinkRig) -> None:
    one.lose()
    one.session.route(Subscriptions(prefixes=(("queue", "commands"),)), Targets())
    one.connect()
    assert one.world.cancelled == ["gateway.plant."]
    assert [consumer.name for consumer in one.remote.consumers] == ["commands"]
    assert one.session.idle
    one.lose()
    one.connect()
    assert one.world.cancelled == ["gateway.plant."]


async def test_what_is_not_wanted_any_more_is_cancelled_although_a_packet_was_lost(one: LinkRig) -> None:
    one.session.route(Subscriptions(prefixes=(("queue", "commands"),)), Targets())
    one.lose()
    assert one.world.cancelled == []
    one.connect()
    assert one.world.cancelled == ["gateway.plant."]
    one.lose()
    one.connect()
    assert one.world.cancelled == ["gateway.plant."]
    assert one.session.idle


async def test_an_exact_name_is_never_taken_for_a_prefix(one: LinkRig) -> None:
    opened = {said.handle_id: said.dest_name for said in one.world.said if isinstance(said, m.HandleOpen)}
    consumed = {
        opened[said.handle_id] + "|" + said.dest_name
        for said in one.world.said
        if isinstance(said, m.HandleConsume)
    }
    assert consumed == {"|commands", "plant.|", "jobs.|"}


async def test_while_memory_is_short_a_queue_has_its_messages_back_and_a_topic_waits(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    one.dispatcher.memory.short = True
    notify(one, "commands", b"1")
    notify(one, "plant.", b"2", name="plant.b.t")
    for _ in range(2):
        await trio.sleep(1.5)
        one.tick()
    assert shelf.messages == acks(one, "plant.") == []
    assert one.world.ungets == [1]
    one.dispatcher.memory.short = False
    await trio.sleep(1.5)
    one.tick()
    assert shelf.accepted == [b"2"]
    assert acks(one, "plant.") == [1]
    assert one.session.idle
