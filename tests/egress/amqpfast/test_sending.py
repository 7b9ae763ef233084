"""What an AMQP/Fast link sends: every message is settled once, as the server says, and none is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.egress.amqpfast.publisher import REFUSED_SECS
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Reason, Verdict
from gateway.model.properties import Properties, PropertySet, property_set, string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_head_properties, encode_command
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.settings import Limits
from tests.broker.outbox.bench import Bench
from tests.egress.amqp091.remote import Settled
from tests.egress.amqpfast.remote import LinkRig

pytestmark = pytest.mark.interpreted  # the stream is one in memory

OUTBOX_WAIT_SECS_MAX = 30.0
OUTBOX = """
version: 1
routes:
  - {name: out, from: {endpoint: mqtt, topic: "out/#"}, to: {endpoint: erp, service: queue, destination: q},
     settle: stored, attempts_max: 1}
"""


def bodies(start: int, stop: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, stop)]


def rig(replies: bool = True, **settings: Any) -> tuple[LinkRig, Settled]:
    made = LinkRig(**settings)
    made.world.replies = replies
    made.connect()
    return made, Settled()


def accepted(source: Settled) -> list[object]:
    return [receipt for receipt in source.order if source.outcomes[receipt] is ACCEPTED]


def refused(source: Settled) -> set[object]:
    return {receipt for receipt, outcome in source.outcomes.items() if outcome is not ACCEPTED}


async def test_the_greeting_says_who_we_are_and_where_we_want_to_be() -> None:
    one, _ = rig()
    world = one.world
    assert (world.client_name, world.virtual_path, world.credentials) == ("gw-1", "prod", ("fast", "secret"))
    assert one.link.ups == 1
    assert one.stats.frames()["0.7c0", "out", "connection.open"] == 1


async def test_messages_arrive_in_order_at_exactly_their_destinations() -> None:
    one, source = rig()
    names = ("q", "plant.line.t", "plant.line.u", "plant.", "plant")
    one.publish(source, bodies(0, 50), *names)
    assert accepted(source) == bodies(0, 50)
    for at, name in enumerate(names):
        assert [sent.body for sent in one.world.sent if sent.name == name] == bodies(0, 50)[at::5]
    opened = [said.dest_name for said in one.world.said if isinstance(said, m.HandleOpen)]
    assert opened == ["", "plant.line.", "plant.line.", "", ""]  # never a whole name, which may be a prefix
    assert one.session.idle


@pytest.mark.parametrize("counts", [[10], [1, 2, 3, 4], [3, 3, 4], [1] * 10])
async def test_replies_settle_in_their_order(counts: list[int]) -> None:
    one, source = rig(replies=False)
    for part in (bodies(0, 1), bodies(1, 5), bodies(5, 10)):
        one.publish(source, part, "a", "b")
    assert source.order == []
    done = 0
    for count in counts:
        one.remote.confirm(count)
        one.move()
        done += count
        assert accepted(source) == bodies(0, done)
        assert one.stats.in_flight == 10 - done
    assert one.session.idle


@pytest.mark.needs("time")
async def test_tags_wrap_at_65_535() -> None:
    one, source = rig(in_flight_max=50_000)
    for start in range(0, 140_000, 20_000):
        one.publish(source, bodies(start, start + 20_000))
    assert accepted(source) == bodies(0, 140_000)
    assert one.world.bodies == bodies(0, 140_000)


async def test_what_was_not_confirmed_is_sent_again_in_order_before_what_waited() -> None:
    one, source = rig(replies=False)
    one.publish(source, bodies(0, 6))
    one.remote.confirm(2)
    one.move()
    one.lose()
    assert one.link.downs == ["broken"]
    outgoing = one.session.publisher
    outgoing.publish(source.part([Message(fast_address("queue", "q"), b"6")], outgoing))
    one.world.sent.clear()
    one.world.replies = True
    one.connect()
    assert one.world.bodies == bodies(2, 7)
    assert accepted(source) == bodies(0, 7)
    assert one.session.idle
    assert one.link.ups == 2


async def test_no_more_is_on_its_way_than_the_window_allows() -> None:
    one, source = rig(replies=False, in_flight_max=10)
    one.publish(source, bodies(0, 25))
    assert len(one.world.sent) == 10
    one.remote.confirm(4)
    one.move()
    assert len(one.world.sent) == 14
    assert one.stats.in_flight == 10
    for _ in range(3):
        one.remote.confirm(10)
        one.move()
    assert accepted(source) == bodies(0, 25)


async def test_beyond_its_limits_a_link_that_is_down_takes_nothing() -> None:
    one = LinkRig(limits=Limits(queue_messages_max=5))
    source = Settled()
    outgoing = one.session.publisher
    address = fast_address("queue", "q")
    outgoing.publish(source.part([Message(address, body) for body in bodies(0, 5)], outgoing))
    outgoing.publish(source.part([Message(address, b"5")], outgoing))
    assert source.outcomes[b"5"].reason is Reason.TARGET_DOWN
    assert not one.session.idle
    one.connect()
    assert one.world.bodies == bodies(0, 5)


async def test_a_congested_stream_gets_nothing_until_it_has_drained() -> None:
    one, source = rig()
    one.stream.congested = True
    one.publish(source, bodies(0, 2))
    assert one.world.sent == []
    one.stream.congested = False
    one.connection.resume_writing()
    one.move()
    assert accepted(source) == bodies(0, 2)


@pytest.mark.parametrize(
    "which, busy_code, verdict, reason",
    [
        ("missing", 0, Verdict.REJECTED, Reason.NO_ROUTE),
        ("busy", 506, Verdict.RELEASED, Reason.QUOTA),
        ("busy", 507, Verdict.RELEASED, Reason.TARGET_REFUSED),
        ("busy", 403, Verdict.REJECTED, Reason.NOT_AUTHORIZED),
    ],
)
@pytest.mark.parametrize("harsh", [False, True])
async def test_a_destination_that_is_refused_costs_its_own_messages_only(
    which: str, busy_code: int, verdict: Verdict, reason: Reason, harsh: bool
) -> None:
    one, source = rig()
    one.world.harsh, one.world.busy_code = harsh, busy_code
    getattr(one.world, which).add("gone")
    one.publish(source, bodies(0, 12), "q", "gone", "other")
    assert refused(source) == set(bodies(0, 12)[1::3])
    outcome = source.outcomes[b"1"]
    assert (outcome.verdict, outcome.reason) == (verdict, reason)
    assert set(accepted(source)) == set(bodies(0, 12)) - refused(source)
    assert one.session.idle
    assert one.link.downs == []


@pytest.mark.parametrize("code", [506, 507])
async def test_an_outbox_tries_again_what_a_busy_destination_refused(
    code: int, tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Nothing becomes a dead letter, though the route allows one attempt after a rejection."""
    one, _ = rig()
    one.world.busy, one.world.busy_code = {"q"}, code
    router = Router([parse(OUTBOX)], {"mqtt": "mqtt", "erp": "amqpfast"})
    bench = Bench(tmp_path, router, link=one.session)
    assert bench.stored(0, 1, 2).outcomes == [ACCEPTED] * 3
    for _ in range(5):
        one.move()
        one.tick()
        bench.commit()
        assert bench.state.messages == 3
        bench.after(OUTBOX_WAIT_SECS_MAX)
    one.world.busy = set()
    while bench.state.messages:
        bench.after(OUTBOX_WAIT_SECS_MAX)
        await trio.sleep(REFUSED_SECS)
        one.tick()
        bench.commit()
    assert set(one.world.bodies) == {b"0", b"1", b"2"}
    assert bench.dead() == []
    bench.one.end(True, bench.outboxes)


async def test_a_destination_that_appears_is_used_again(autojump_clock: trio.testing.MockClock) -> None:
    one, source = rig()
    one.world.missing.add("late")
    one.publish(source, [b"early"], "late")
    opened = len(one.world.said)
    one.publish(source, [b"still early"], "late")
    assert refused(source) == {b"early", b"still early"}
    assert len(one.world.said) == opened  # the server was not even asked
    one.world.missing.clear()
    await trio.sleep(1.5)
    one.tick()
    one.publish(source, [b"in time"], "late")
    assert source.outcomes[b"in time"] is ACCEPTED


@pytest.mark.parametrize("culprits", [{3}, {0, 1}, {9}, {2, 7}])
@pytest.mark.parametrize("harsh", [False, True])
async def test_a_message_that_closes_its_handle_or_channel_is_found_out(
    culprits: set[int], harsh: bool
) -> None:
    one, source = rig()
    one.world.harsh = harsh
    one.world.poison = {b"%d" % at for at in culprits}
    one.publish(source, bodies(0, 10), "a", "b")
    assert refused(source) == one.world.poison
    assert all(source.outcomes[receipt].reason is Reason.MALFORMED for receipt in refused(source))
    assert len(source.order) == 10
    assert one.session.idle
    for name in ("a", "b"):
        arrived = dict.fromkeys(sent.body for sent in one.world.sent if sent.name == name)
        wanted = [body for body in bodies(0, 10)["ab".index(name) :: 2] if body not in one.world.poison]
        assert list(arrived) == wanted


async def test_a_message_is_found_out_while_others_keep_coming() -> None:
    one, source = rig(replies=False)
    one.world.poison = {b"13"}
    for start in range(0, 400, 20):
        one.publish(source, bodies(start, start + 20), "a", "b", "c")
        one.remote.confirm(15)
        one.move()
    for _ in range(400):
        one.remote.confirm(20)
        one.move()
    assert refused(source) == {b"13"}
    assert len(source.order) == 400


async def test_more_destinations_than_the_server_has_handles() -> None:
    one = LinkRig()
    one.world.limits = {"handle_max": 7}
    one.connect()
    source = Settled()
    one.publish(source, bodies(0, 50), *[f"q{number}" for number in range(25)])
    assert accepted(source) == bodies(0, 50)
    assert {sent.name for sent in one.world.sent} == {f"q{number}" for number in range(25)}


async def test_what_cannot_be_said_is_refused_alone() -> None:
    one = LinkRig()
    one.world.limits = {"frame_max": 1024}
    one.connect()
    source = Settled()
    outgoing = one.session.publisher
    address = fast_address("queue", "q")
    sets = {
        b"malformed": PropertySet("amqpfast", b"\0\0\0\0\0\0\xff"),
        b"long": property_set(Properties(headers=(("a", string("x" * 2_000)),))),
        b"large and long" * 100_000: property_set(Properties(headers=(("a", string("x" * 2_000)),))),
    }
    messages = [Message(address, body) for body in bodies(0, 3)]
    messages[1:1] = [Message(address, body, said) for body, said in sets.items()]
    outgoing.publish(source.part(messages, outgoing))
    one.move()
    one.tick()
    assert refused(source) == set(sets)
    reasons = [source.outcomes[body].reason for body in sets]
    assert reasons == [Reason.MALFORMED, Reason.TOO_LARGE, Reason.TOO_LARGE]
    assert accepted(source) == bodies(0, 3)


async def test_what_the_message_says_is_in_the_head() -> None:
    one, source = rig()
    outgoing = one.session.publisher
    address = fast_address("topic", "a.b")
    said = property_set(Properties(priority=7, message_id="id-1", headers=(("n", string("v")),)))
    message = Message(address, b"x", said, durable=True, expires=4e9, hops=2, retain=True)
    outgoing.publish(source.part([message], outgoing))
    one.move()
    head = decode_head_properties(one.world.sent[0].head)
    assert (head.persistent, head.priority, head.expiration) == (True, 7, 4_000_000_000)
    assert head.identifier == "id-1"
    headers = {name: value.value for name, value in head.headers}
    assert headers == {"n": "v", "HOPS": 2, "RETAIN": 1}


async def test_a_connection_that_is_closed_over_a_message_does_not_lose_the_others() -> None:
    one, source = rig(replies=False)
    one.publish(source, bodies(0, 4))
    one.remote.machine.close(541, "oops")
    one.move()
    one.lose()
    one.world.replies = True
    one.connect()
    assert accepted(source) == bodies(0, 4)
    assert one.stats.protocol_errors.counts == {"internal_error": 1}


async def test_a_sending_channel_that_is_closed_for_nothing_is_opened_again_later(
    autojump_clock: trio.testing.MockClock,
) -> None:
    one, source = rig()
    one.remote.machine.close_channel(1, 506, "no room")
    one.move()
    one.publish(source, [b"waits"])
    assert source.order == []
    await trio.sleep(1.5)
    one.tick()
    assert accepted(source) == [b"waits"]


@pytest.mark.parametrize("compatibility, heard", [("rfc", False), ("rfc", True), ("openamq-2005", True)])
async def test_heartbeats_go_both_ways_and_silence_ends_the_connection(
    compatibility: str, heard: bool, autojump_clock: trio.testing.MockClock
) -> None:
    """3.2.7, 2.2.12. A server of 2005 that sends PING all the same bears it."""
    one = LinkRig(heartbeat_secs=10, compatibility=compatibility)
    one.world.limits = {"heartbeat": 10}
    one.connect()
    if heard:
        one.remote.machine.tick(trio.current_time() + 5)  # the server says PING
        one.move()
    for _ in range(31):
        await trio.sleep(1)
        if not one.stream.closed:
            one.connection.tick(trio.current_time())
            one.connection.data_to_send()
    assert one.link.downs == ["heartbeat timeout"]
    assert one.stats.frames()["0.7c0", "out", "connection.ping"] >= 3


@pytest.mark.parametrize("heartbeat", [0, 10])
async def test_a_server_that_only_answers_pings_is_alive(
    heartbeat: int, autojump_clock: trio.testing.MockClock
) -> None:
    one, source = LinkRig(heartbeat_secs=10), Settled()
    one.world.limits = {"heartbeat": heartbeat}
    one.connect()
    for _ in range(100):
        await trio.sleep(1)
        one.connection.tick(trio.current_time())
        one.move()
    assert one.link.downs == []
    assert one.stats.frames()["0.7c0", "in", "connection.ping"] >= 3
    one.publish(source, [b"after all that time"])
    assert accepted(source) == [b"after all that time"]


@pytest.mark.parametrize("heartbeat", [0, 10])
async def test_a_server_of_2005_hears_no_ping_and_may_be_silent(
    heartbeat: int, autojump_clock: trio.testing.MockClock
) -> None:
    """Behind a PING the server of 2005 hears nothing any more; it never says one, whatever it asks for."""
    one, source = LinkRig(heartbeat_secs=10, compatibility="openamq-2005"), Settled()
    one.world.limits = {"heartbeat": heartbeat}
    one.connect()
    for _ in range(100):
        await trio.sleep(1)
        one.connection.tick(trio.current_time())
        one.move()
    assert one.link.downs == []
    assert ("0.7c0", "out", "connection.ping") not in one.stats.frames()
    one.publish(source, [b"after all that time"])
    assert accepted(source) == [b"after all that time"]
    one.remote.machine._ping(encode_command(m.ConnectionPing(respond=True)))
    one.move()
    assert one.stats.frames()["0.7c0", "out", "connection.ping"] == 1, "one that asks is answered"


@pytest.mark.parametrize(
    "mechanisms, credentials",
    [("NONE", None), ("x none", None), ("NONE PLAIN", ("fast", "secret")), ("plain", ("fast", "secret"))],
)
async def test_a_server_that_offers_none_only_is_told_nothing(
    mechanisms: str, credentials: tuple[str, str] | None
) -> None:
    one, source = LinkRig(), Settled()
    one.world.limits = {"mechanisms": mechanisms}
    one.connect()
    one.publish(source, [b"in"])
    assert accepted(source) == [b"in"]
    assert one.world.credentials == credentials


@pytest.mark.parametrize("mechanisms", ["", "TLS", "NONEX"])
async def test_a_server_that_offers_what_we_do_not_know(mechanisms: str) -> None:
    one = LinkRig()
    one.world.limits = {"mechanisms": mechanisms}
    one.connect()
    assert not one.connection.open
    assert one.stats.protocol_errors.counts == {"bad_field_value": 1}
    assert one.world.credentials is None


async def test_stopping_says_goodbye() -> None:
    one, _ = rig()
    one.connection.shut_down()
    assert one.link.downs == ["the gateway is stopping"]
