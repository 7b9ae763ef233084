"""What an MQTT link owes its broker: settled when confirmed, in order, within the window, over reconnects."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest
import trio
from structlog.testing import capture_logs

from gateway.egress.mqtt.publisher import BARREN_MAX, NUMBERS_MAX, PACKET_IDS, SWEEP_SECS, SWEEPS_MAX
from gateway.egress.mqtt.session import MqttLinkConnection
from gateway.model.message import MESSAGE_BYTES
from gateway.model.outcome import ACCEPTED, Reason, Verdict
from gateway.model.properties import Properties, Value, ValueType, property_set
from gateway.protocols.mqtt.runs import PublishRow
from gateway.protocols.mqtt.spec import DUP, PacketType, Property, ReasonCode
from gateway.protocols.mqtt.translate import publish_essentials
from tests.egress.mqtt.remote import World, broken, message
from tests.egress.mqtt.remote import row as publish_row
from tests.idle import idle_report

pytestmark = pytest.mark.interpreted  # the stream is one in memory

EVERY_ID: Final = range(1, PACKET_IDS + 1)


def verdict(world: World, body: bytes) -> tuple[Verdict, Reason]:
    outcome = world.outcomes[body]
    return outcome.verdict, outcome.reason


@pytest.mark.parametrize("version", ["5.0", "3.1.1", "3.1"])
async def test_each_qos_is_settled_by_its_last_acknowledgement(version: str) -> None:
    world = World(version=version)
    remote = world.connect()
    remote.acks = False
    world.publish(message("zero", 0), message("one", 1), message("two", 2))
    assert world.outcomes == {b"zero": ACCEPTED}
    world.talk()
    swept = PACKET_IDS if version == "3.1" else 0  # MQTT 3.1 does not say whether there was a session
    if swept:
        assert world.sent() == [(0, b"zero"), (2, b"one")]
        remote.machine.acknowledge(PacketType.PUBCOMP, EVERY_ID)
        world.talk()
    assert world.sent() == [(0, b"zero"), (2, b"one"), (4, b"two")]
    assert world.stats.in_flight == 2
    _, one, two = [row[2] for row in remote.rows]
    remote.machine.acknowledge(PacketType.PUBACK, [one])
    remote.machine.acknowledge(PacketType.PUBREC, [two])
    world.talk()
    assert world.outcomes == {b"zero": ACCEPTED, b"one": ACCEPTED}
    released = remote.acks_of(PacketType.PUBREL)
    assert (len(released), released[-1]) == (swept + 1, (two, 0))
    remote.machine.acknowledge(PacketType.PUBCOMP, [two])
    world.talk()
    assert world.outcomes[b"two"] is ACCEPTED
    assert world.stats.in_flight == 0
    assert world.stats.messages_out == 3
    assert world.session.idle


async def test_aliases_stand_for_the_first_topics_as_the_broker_allows() -> None:
    """5: 3.3.2.3.4; they end with the connection, and what is sent again introduces them anew."""
    world = World()
    world.topic_alias_max = 2
    for present in (False, True):
        world.present = present
        remote = world.connect()
        remote.acks = False
        if not present:
            topics = [f"to/{letter}" for letter in "abcabc"]
            world.publish(*[message(str(at), topic=topic) for at, topic in enumerate(topics)])
            world.talk()
        assert [row[1] for row in remote.rows] == 2 * [b"to/a", b"to/b", b"to/c"]
        assert sorted(remote.machine._aliases.items()) == [(1, b"to/a"), (2, b"to/b")]
        world.drop()


async def test_no_alias_without_the_brokers_leave() -> None:
    world = World()
    remote = world.connect()
    world.publish(message("one", topic="a"), message("two", topic="a"))
    world.talk()
    assert [row[1] for row in remote.rows] == [b"a", b"a"]
    assert remote.machine._aliases == {}


@pytest.mark.parametrize(
    "receive_max, in_flight_max, window", [(2, 10_000, 2), (65_535, 3, 3), (1, 10_000, 1)]
)
async def test_the_window_bounds_what_is_in_flight(receive_max: int, in_flight_max: int, window: int) -> None:
    world = World(in_flight_max=in_flight_max)
    world.receive_max = receive_max
    remote = world.connect()
    remote.acks = False
    bodies = [str(number) for number in range(7)]
    world.publish(*[message(body) for body in bodies[:4]])
    world.publish(*[message(body) for body in bodies[4:]])
    world.talk()
    done = 0
    while done < 7:
        assert len(remote.rows) == min(done + window, 7)
        remote.ack(remote.rows[done : done + 1])
        done += 1
        world.talk()
        assert len(world.outcomes) == done
    assert [body.decode() for _, body in world.sent()] == bodies


@pytest.mark.parametrize(
    "code, reason, said",
    [
        (ReasonCode.NOT_AUTHORIZED, Reason.NOT_AUTHORIZED, Verdict.REJECTED),
        (ReasonCode.TOPIC_NAME_INVALID, Reason.NAME_INVALID, Verdict.REJECTED),
        (ReasonCode.UNSPECIFIED_ERROR, Reason.TARGET_REFUSED, Verdict.REJECTED),
        (ReasonCode.QUOTA_EXCEEDED, Reason.QUOTA, Verdict.RELEASED),
    ],
)
@pytest.mark.parametrize("qos", [1, 2])
async def test_a_refusal_of_the_broker_is_for_good_or_for_now(
    code: int, reason: Reason, said: Verdict, qos: int
) -> None:
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("no", qos), message("yes", 1))
    world.talk()
    kind = PacketType.PUBACK if qos == 1 else PacketType.PUBREC
    remote.machine.send_ack(kind, remote.rows[0][2], code)
    remote.ack(remote.rows[1:])
    world.talk()
    assert verdict(world, b"no") == (said, reason)
    assert world.outcomes[b"yes"] is ACCEPTED
    assert world.session.idle


async def test_no_matching_subscribers_is_a_success() -> None:
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("x"))
    world.talk()
    remote.machine.send_ack(PacketType.PUBACK, remote.rows[0][2], ReasonCode.NO_MATCHING_SUBSCRIBERS)
    world.talk()
    assert world.outcomes[b"x"] is ACCEPTED


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
async def test_a_kept_session_resumes_with_dup_and_pubrel(version: str) -> None:
    world = World(version=version)
    first = world.connect()
    first.acks = False
    world.publish(message("a", 1), message("b", 2), message("c", 2), message("d", 1))
    world.talk()
    ids = [row[2] for row in first.rows]
    first.machine.acknowledge(PacketType.PUBREC, [ids[1]])
    world.talk()
    world.drop()
    world.publish(message("e", 1), message("f", 0))
    assert world.outcomes == {}
    world.present = True
    world.acks = False
    again = world.connect()
    assert again.acks_of(PacketType.PUBREL) == [(ids[1], 0)]
    assert world.sent() == [(10, b"a"), (12, b"c"), (10, b"d"), (2, b"e"), (0, b"f")]
    assert [row[2] for row in again.rows[:3]] == [ids[0], ids[2], ids[3]]
    again.acks = True
    again.machine.acknowledge(PacketType.PUBCOMP, [ids[1]])
    again.ack(again.rows)
    world.talk()
    assert world.outcomes == dict.fromkeys([b"a", b"b", b"c", b"d", b"e", b"f"], ACCEPTED)
    assert world.session.idle


async def test_ids_of_an_earlier_life_are_released_before_qos_2() -> None:
    """And until that was heard nothing is said under any of them: what it meant would be in doubt."""
    world = World()
    world.present = True
    remote = world.connect()
    world.publish(message("one", 1), message("with it", 1), message("found", 2), message("behind", 1))
    world.acks = False
    remote.acks = False
    for _ in range(SWEEPS_MAX):
        world.talk()
        remote.ack(remote.rows)
        world.talk()
        assert world.outcomes == dict.fromkeys([b"one", b"with it"], ACCEPTED)
        assert [one for one, _ in remote.acks_of(PacketType.PUBREL)] == list(EVERY_ID)
        world.publish(message("again", 2), receipts=[object()])
        remote.machine.acknowledge(PacketType.PUBCOMP, EVERY_ID[:-1])
        world.talk()
        assert all(flags < 4 for flags, _ in world.sent())
        assert len(remote.acks_of(PacketType.PUBREL)) == PACKET_IDS
        if world.stats.connects == SWEEPS_MAX:
            break
        world.drop()
        remote = world.connect()
    remote.machine.acknowledge(PacketType.PUBCOMP, EVERY_ID[-1:])
    world.talk()
    assert world.sent()[:3] == [(4, b"found"), (2, b"behind"), (4, b"again")]
    remote.ack(remote.rows)
    world.talk()
    assert world.outcomes[b"behind"] is ACCEPTED
    remote.machine.acknowledge(PacketType.PUBCOMP, [row[2] for row in remote.rows])
    world.talk()
    assert world.outcomes[b"found"] is ACCEPTED
    assert world.session.idle
    world.drop()
    world.acks = True
    remote = world.connect()
    world.publish(message("two", 2))
    world.talk()
    assert len(remote.acks_of(PacketType.PUBREL)) == 1


async def test_a_broker_that_answers_no_pubrel_has_no_ids_to_release() -> None:
    """One that does not know QoS 2 hears nothing more behind it. Whoever is slow is waited for, and who has
    answered before it was lost is asked again."""
    world = World()
    world.present, world.acks = True, False
    for at in range(SWEEPS_MAX + 1):
        remote = world.connect()
        if not at:
            world.publish(message("one", 2))
            world.talk()
            now = trio.current_time() + SWEEP_SECS - 1
            world.session.tick(now)
            remote.machine.acknowledge(PacketType.PUBCOMP, EVERY_ID[:3])
            world.talk()
        assert len(remote.acks_of(PacketType.PUBREL)) == PACKET_IDS
        assert not world.stream.closed
        with capture_logs() as lines:
            world.session.tick(trio.current_time() + SWEEP_SECS)
        assert world.stream.why == "the broker does not acknowledge PUBREL"
        assert len(lines) == (at == SWEEPS_MAX)
    assert lines[0]["event"] == "broker left PUBREL unacknowledged"
    world.acks = True
    remote = world.connect()
    assert world.sent() == [(4, b"one")]
    assert world.outcomes == {b"one": ACCEPTED}
    assert len(remote.acks_of(PacketType.PUBREL)) == 1


async def test_what_the_broker_says_that_it_has_is_not_sent_again() -> None:
    """Some repeat PUBREC by themselves, before what it is about could be repeated."""
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("a", 2), message("b", 2), message("c", 1), message("d", 2))
    world.talk()
    a, b, c, d = [row[2] for row in remote.rows]
    world.drop()
    world.present, world.acks, world.receive_max = True, False, 1
    remote = world.connect()
    assert [row[2] for row in remote.rows] == [a]
    remote.machine.acknowledge(PacketType.PUBREC, [a, b, c, PACKET_IDS])
    world.talk()
    unknown = int(ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)
    told = dict(remote.acks_of(PacketType.PUBREL))
    assert told == {a: 0, b: 0, c: unknown, PACKET_IDS: unknown}
    remote.machine.acknowledge(PacketType.PUBCOMP, [a, b])
    world.talk()
    assert world.outcomes == dict.fromkeys([b"a", b"b"], ACCEPTED)
    assert world.sent() == [(4 | DUP, b"a"), (2 | DUP, b"c")]
    remote.machine.acknowledge(PacketType.PUBACK, [c])
    world.talk()
    assert world.sent()[2:] == [(4 | DUP, b"d")]
    assert remote.rows[2][2] == d


async def test_a_lost_session_gets_everything_anew() -> None:
    world = World()
    first = world.connect()
    first.acks = False
    world.publish(message("a", 1), message("b", 2), message("c", 2))
    world.talk()
    first.machine.acknowledge(PacketType.PUBREC, [first.rows[1][2]])
    world.talk()
    world.drop()
    world.connect()
    assert world.sent() == [(2, b"a"), (4, b"b"), (4, b"c")]
    assert world.outcomes == dict.fromkeys([b"a", b"b", b"c"], ACCEPTED)


async def test_a_reconnect_does_not_flood() -> None:
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("before"), *[message(str(number)) for number in range(10)])
    world.talk()
    remote.ack(remote.rows[:1])
    world.talk()
    world.drop()
    world.present, world.acks, world.receive_max = True, False, 3
    remote = world.connect()
    assert [body for _, body in world.sent()] == [b"0", b"1", b"2"]
    remote.ack(remote.rows[:2])
    world.talk()
    assert [body for _, body in world.sent()] == [b"0", b"1", b"2", b"3", b"4"]
    world.drop()  # in the middle of it
    world.acks = True
    world.connect()
    assert [body for _, body in world.sent()] == [b"%d" % number for number in range(2, 10)]
    assert len(world.outcomes) == 11


async def test_a_message_over_the_packet_limit_is_rejected_and_the_rest_goes() -> None:
    world = World()
    world.packet_bytes_max = 1_000
    world.connect()
    world.publish(message("a"), message("x" * 1_000), message("b"), message("y" * 1_000, 0), message("c", 0))
    world.talk()
    assert [body for _, body in world.sent()] == [b"a", b"b", b"c"]
    assert verdict(world, b"x" * 1_000) == (Verdict.REJECTED, Reason.TOO_LARGE)
    assert verdict(world, b"y" * 1_000) == (Verdict.REJECTED, Reason.TOO_LARGE)
    assert [world.outcomes[body] for body in (b"a", b"b", b"c")] == [ACCEPTED] * 3
    assert world.link.downs == []


@pytest.mark.parametrize(
    "limits, kept",
    [
        ({"queue_messages_max": 3}, 3),
        ({"queue_bytes_max": 5 * (1 + MESSAGE_BYTES)}, 5),
        ({"queue_bytes_max": 1 + MESSAGE_BYTES}, 1),
    ],
)
async def test_what_waits_is_bounded_and_the_newest_is_released(limits: dict[str, int], kept: int) -> None:
    world = World(limits=limits)
    bodies = [b"%d" % number for number in range(8)]
    world.publish(*[message(body, at % 2) for at, body in enumerate(bodies[:4])])
    world.publish(*[message(body) for body in bodies[4:]])
    assert world.session.publisher.waiting_messages == kept
    assert set(world.outcomes) == set(bodies[kept:])
    assert {verdict(world, body) for body in bodies[kept:]} == {(Verdict.RELEASED, Reason.TARGET_DOWN)}
    world.connect()
    assert [body for _, body in world.sent()] == bodies[:kept]


async def test_the_limits_are_for_what_waits_not_for_what_is_sent() -> None:
    world = World(limits={"queue_messages_max": 1})
    world.connect()
    world.publish(*[message(str(number)) for number in range(600)])
    world.talk()
    assert set(world.outcomes.values()) == {ACCEPTED}


@pytest.mark.parametrize("most, sent", [(1, [0, 2, 2]), (0, [0, 0, 0])])
async def test_qos_above_the_brokers_is_lowered_and_counted(most: int, sent: list[int]) -> None:
    world = World()
    world.connack_properties = {Property.MAXIMUM_QOS: most, Property.RETAIN_AVAILABLE: 0}
    world.connect()
    world.publish(message("a", 0, retain=True), message("b", 1), message("c", 2))
    world.talk()
    assert [flags for flags, _ in world.sent()] == sent
    assert set(world.outcomes.values()) == {ACCEPTED}
    assert world.stats.degraded.counts == {"qos": 2 - most, "retain": 1}


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
async def test_an_expired_message_is_not_sent(version: str) -> None:
    world = World(version=version)
    past, future = time.time() - 5, time.time() + 500
    world.publish(message("a"), message("late", expires=past), message("b", expires=future), message("c"))
    world.connect()
    assert [body for _, body in world.sent()] == [b"a", b"b", b"c"]
    assert verdict(world, b"late") == (Verdict.REJECTED, Reason.EXPIRED)
    facts = [publish_essentials(row[3]) for row in world.remote.rows]
    assert [fact.expiry is not None for fact in facts] == [False, version == "5.0", False]


async def test_properties_nobody_can_read_reject_one_message() -> None:
    world = World()
    world.connect()
    bad = broken()
    world.publish(
        message("a"), message("bad", properties=bad), message("b"), message("bad0", 0, properties=bad)
    )
    world.talk()
    assert [body for _, body in world.sent()] == [b"a", b"b"]
    assert verdict(world, b"bad") == (Verdict.REJECTED, Reason.MALFORMED)
    assert verdict(world, b"bad0") == (Verdict.REJECTED, Reason.MALFORMED)


async def test_properties_hops_and_retain_travel() -> None:
    world = World()
    world.connect()
    headers = (("k", Value(ValueType.STRING, "1")), ("k", Value(ValueType.INT32, 2)))
    properties = property_set(Properties(content_type="text/plain", headers=headers))
    for _ in range(2):  # encoded, then remembered
        world.publish(message("x", properties=properties, hops=3, retain=True), receipts=[object()])
    world.talk()
    assert [flags for flags, _ in world.sent()] == [3, 3]
    for row in world.remote.rows:
        facts = publish_essentials(row[3])
        assert facts.hops == 3
        assert facts.properties.headers == headers
        assert facts.properties.content_type == "text/plain"


async def test_a_congested_connection_waits_until_it_has_drained() -> None:
    world = World()
    world.connect()
    world.stream.congested = True
    world.publish(message("a", 0), message("b"))
    world.talk()
    assert (world.sent(), world.outcomes) == ([], {})
    world.stream.congested = False
    world.connection.resume_writing()
    world.talk()
    assert len(world.outcomes) == 2


async def test_large_messages_go_in_bounded_pieces() -> None:
    world = World()
    world.packet_bytes_max = 1 << 22
    world.connect()
    bodies = [bytes([number]) * 600_000 for number in range(6)]
    seen: list[int] = []
    sending = world.connection.send

    def watched(rows: list[tuple[int, bytes, int, bytes, bytes]]) -> object:
        seen.append(sum(len(row[4]) for row in rows))
        return sending(rows)

    world.connection.send = watched  # type: ignore[method-assign, assignment]
    world.publish(*[message(body) for body in bodies])
    world.talk()
    assert seen == [600_000] * 6
    assert [body for _, body in world.sent()] == bodies


async def test_packet_ids_are_unique_among_those_in_flight() -> None:
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("stuck", 2), message("stuck too", 1))
    world.talk()
    stuck = {row[2] for row in remote.rows}
    remote.acks = True
    batch = [message("x") for _ in range(1_000)]
    for turn in range(PACKET_IDS // 1_000 + 2):
        world.publish(*batch, receipts=[(turn, at) for at in range(1_000)])
        world.talk()
        assert not stuck & {row[2] for row in remote.rows[2:]}
        assert len({row[2] for row in remote.rows[2:]}) == 1_000
        del remote.rows[2:]
    assert world.stats.in_flight == 2


@pytest.mark.parametrize(
    "ends, most, reason",
    [
        (None, BARREN_MAX, Reason.TARGET_REFUSED),
        (ReasonCode.NOT_AUTHORIZED, BARREN_MAX, Reason.TARGET_REFUSED),
        (ReasonCode.PACKET_TOO_LARGE, 2, Reason.TOO_LARGE),
    ],
)
async def test_a_message_that_the_broker_hangs_up_on_is_rejected_in_the_end(
    ends: int | None, most: int, reason: Reason
) -> None:
    world = World()
    world.present, world.acks = True, False
    world.publish(message("a"), message("poison"), message("b"))
    for _ in range(most + 3):
        remote = world.connect()
        for row in list(remote.rows):
            if row[4] == b"poison":
                break
            remote.ack([row])
            world.talk()
        if not any(row[4] == b"poison" for row in remote.rows):
            break
        if ends is not None:
            remote.machine.send_disconnect(ends)
            world.talk()
        world.drop()
    assert verdict(world, b"poison") == (Verdict.REJECTED, reason)
    remote = world.remote
    remote.ack([row for row in remote.rows if row[4] == b"b"])
    world.talk()
    assert world.outcomes[b"a"] is ACCEPTED
    assert world.outcomes[b"b"] is ACCEPTED
    assert len(world.link.downs) == most + 1  # once more, for "a" was acknowledged the first time


# 0x88, 0x89, 0x8B, 0x8E, 0x96, 0x97, 0x98, 0x9C: docs/reference/guarantees.md has the same list.
FOR_NOW = (
    ReasonCode.SERVER_UNAVAILABLE,
    ReasonCode.SERVER_BUSY,
    ReasonCode.SERVER_SHUTTING_DOWN,
    ReasonCode.SESSION_TAKEN_OVER,
    ReasonCode.MESSAGE_RATE_TOO_HIGH,
    ReasonCode.QUOTA_EXCEEDED,
    ReasonCode.ADMINISTRATIVE_ACTION,
    ReasonCode.USE_ANOTHER_SERVER,
)


@pytest.mark.parametrize("reason", FOR_NOW, ids=lambda code: code.name)
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("bodies", [["one"], ["one", "two", "three"]], ids=["alone", "with others"])
async def test_a_broker_that_is_busy_holds_nothing_against_a_message(
    bodies: list[str], qos: int, reason: ReasonCode
) -> None:
    world = World()
    world.connect()
    world.drop()
    world.present, world.acks = True, False
    world.publish(*[message(body, qos) for body in bodies])
    for _ in range(BARREN_MAX + 3):
        world.connect()
        assert [body for _, body in world.sent()] == [body.encode() for body in bodies]
        world.connection.receive(bytes((0xE0, 1, reason)), 0.0)
        world.drop()
    assert world.outcomes == {}
    world.acks = True
    world.connect()
    assert world.outcomes == dict.fromkeys([body.encode() for body in bodies], ACCEPTED)
    assert world.session.idle


@pytest.mark.parametrize("qos", [1, 2])
async def test_no_message_is_to_blame_for_connections_that_the_gateway_ends(qos: int) -> None:
    """An operator pauses the link again and again, while a route at the next gateway is paused, too."""
    world = World()
    world.acks = False
    world.connect()
    world.publish(message("one", qos))
    world.present = True
    for _ in range(BARREN_MAX + 3):
        world.connection.shut_down()
        world.drop()
        world.connect()
    assert world.outcomes == {}
    world.acks = True
    world.connection.shut_down()
    world.drop()
    world.connect()
    assert world.outcomes == {b"one": ACCEPTED}


@pytest.mark.parametrize("qos", [1, 2])
async def test_acknowledgements_right_before_disconnect_count_and_nothing_is_sent_behind_it(qos: int) -> None:
    world = World(in_flight_max=2)
    world.subscribe("up/#")
    remote = world.connect()
    remote.acks = False
    world.publish(*[message(body, qos) for body in ("one", "two", "three")])
    world.talk()
    world.deliver(publish_row("back", 2, 7))
    remote.ack(remote.rows[:1])
    remote.machine.acknowledge(PacketType.PUBREL, [7])
    remote.machine.acknowledge(PacketType.PUBREC, [9_999])  # a packet id that the link has not used
    remote.machine.send_disconnect(ReasonCode.SERVER_BUSY)
    world.talk()
    assert "server_busy" in world.stream.why
    world.present = True
    world.connect()
    assert [body for _, body in world.sent()] == [b"two", b"three"]
    assert world.outcomes == dict.fromkeys([b"one", b"two", b"three"], ACCEPTED)


async def test_what_an_acknowledgement_right_before_disconnect_makes_a_source_publish_waits() -> None:
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("one"))
    world.talk()
    settle = world.source.settle

    def publish_next(*outcome: Any) -> None:
        settle(*outcome)
        world.source.settle = settle  # type: ignore[method-assign]
        world.publish(message("two"))

    world.source.settle = publish_next  # type: ignore[method-assign]
    remote.ack(remote.rows)
    remote.machine.send_disconnect(ReasonCode.SERVER_BUSY)
    world.talk()
    assert world.stream.why.startswith("the broker disconnected the link")
    assert world.outcomes == {b"one": ACCEPTED}
    world.connect()
    assert world.outcomes == dict.fromkeys([b"one", b"two"], ACCEPTED)


async def test_only_the_connections_that_a_busy_broker_did_not_end_count_against_a_message() -> None:
    world = World()
    world.present, world.acks = True, False
    world.publish(message("poison"))
    for blames in range(BARREN_MAX):
        assert world.outcomes == {}
        for reason in (ReasonCode.SERVER_BUSY, None) if blames % 2 else (None,):
            remote = world.connect()
            if reason is not None:
                remote.machine.send_disconnect(reason)
                world.talk()
            world.drop()
    assert verdict(world, b"poison") == (Verdict.REJECTED, Reason.TARGET_REFUSED)


@pytest.mark.needs("time")
async def test_one_that_is_never_acknowledged_does_not_keep_what_came_behind_it() -> None:
    """Nor is it lost when numbers begin anew."""
    world = World()
    remote = world.connect()
    remote.acks = False
    world.publish(message("stuck", 2), message("stuck too", 1))
    world.publish(message("stuck as well", 1))
    world.publish(message("and stuck", 1))
    world.talk()
    stuck = list(remote.rows)
    remote.acks = True
    batch = [message("x") for _ in range(1_000)]
    publisher = world.session.publisher
    for turn in range(NUMBERS_MAX // 1_000 + 2):
        world.publish(*batch, receipts=[(turn, at) for at in range(1_000)])
        world.talk()
        del remote.rows[:]
    assert len(publisher._runs) < 10
    assert world.stats.in_flight == 4
    assert len(publisher._early) < PACKET_IDS
    for row in reversed(stuck[1:]):  # each packet id still stands for its own message
        remote.ack([row])
        world.talk()
        assert world.outcomes[row[4]] is ACCEPTED
        assert publisher.unconfirmed(row[2]) is None
    assert b"stuck" not in world.outcomes
    for kind in (PacketType.PUBREC, PacketType.PUBCOMP):
        remote.machine.acknowledge(kind, [stuck[0][2]])
        world.talk()
    assert world.outcomes[b"stuck"] is ACCEPTED
    assert world.session.idle


async def test_what_waits_without_a_qos_is_not_held_up_by_a_full_window() -> None:
    world = World(in_flight_max=1)
    remote = world.connect()
    remote.acks = False
    world.publish(message("one", 1), message("zero", 0), message("two", 1), message("nought", 0))
    world.talk()
    assert world.sent() == [(2, b"one"), (0, b"zero")]
    assert world.outcomes == {b"zero": ACCEPTED}


async def test_unknown_acknowledgements_do_no_harm() -> None:
    for version, code in (("5.0", ReasonCode.PACKET_IDENTIFIER_NOT_FOUND), ("3.1.1", 0)):
        world = World(version=version)
        remote = world.connect()
        for kind in (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBCOMP, PacketType.PUBREL):
            remote.machine.acknowledge(kind, [77])
        world.talk()
        assert remote.acks_of(PacketType.PUBREL) == [(77, code)]
        assert remote.acks_of(PacketType.PUBCOMP) == [(77, code)]
        assert world.link.downs == []


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_happens_each_message_is_settled_once_and_arrives_in_order(seed: int) -> None:
    """Publish, acknowledge, lose the connection and the session at random; then let everything finish."""
    chance = random.Random(seed)
    world = World(version=chance.choice(["5.0", "3.1.1"]), in_flight_max=chance.choice([1, 3, 40]))
    world.acks = False
    published: list[bytes] = []
    arrived: list[bytes] = []
    connected = False
    for _ in range(120):
        match chance.randrange(5):
            case 0:
                bodies = [b"%d" % (len(published) + at) for at in range(chance.randrange(1, 9))]
                published += bodies
                world.publish(*[message(body, chance.randrange(3)) for body in bodies])
            case 1 if not connected:
                world.receive_max = chance.choice([1, 4, 65_535])
                world.connect()
                connected = True
            case 2 if connected and chance.random() < 0.3:
                world.drop()
                arrived += [row[4] for row in world.remote.rows]
                connected, world.present = False, chance.random() < 0.7
            case _ if connected:
                _answer_some(world, chance)
        if connected:
            world.talk()
    if connected:
        world.drop()
        arrived += [row[4] for row in world.remote.rows]
    world.acks, world.present = True, True
    world.connect()
    arrived += [row[4] for row in world.remote.rows]
    assert set(world.outcomes) == set(published)
    assert set(world.outcomes.values()) <= {ACCEPTED}
    assert list(dict.fromkeys(arrived)) == published
    assert world.session.idle
    assert idle_report(world.session) == []


def _answer_some(world: World, chance: random.Random) -> None:
    """Acknowledge from the oldest on, as far as chance goes; in MQTT order is kept."""
    remote = world.remote
    released = [one for one, _ in remote.acks_of(PacketType.PUBREL)]
    while remote.answered < len(remote.rows) and chance.random() < 0.7:
        remote.ack([remote.rows[remote.answered]])
        remote.answered += 1
    if remote.completed < len(released):
        remote.machine.acknowledge(PacketType.PUBCOMP, released[remote.completed :])
        remote.completed = len(released)


async def test_what_the_broker_has_received_does_not_hide_the_one_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message waits for its PUBCOMP while another cannot be sent, for a reason nobody foresaw: that one is
    found out at once, and leaves no trace."""
    world = World()
    world.acks = False
    remote = world.connect()
    world.present = True
    world.publish(message("received", 2))
    world.talk()
    remote.ack(remote.rows)
    world.talk()
    world.drop()
    real = MqttLinkConnection.send

    def send(self: MqttLinkConnection, rows: list[PublishRow]) -> Sequence[int]:
        if any(row[4] == b"poison" for row in rows):
            raise ValueError("nobody foresaw it")
        return real(self, rows)

    monkeypatch.setattr(MqttLinkConnection, "send", send)
    world.publish(message("poison"))
    for _ in range(4):
        remote = world.connect()
        world.talk()
        if world.stream.pending_error is None:
            break
        world.drop()
    assert verdict(world, b"poison") == (Verdict.REJECTED, Reason.INTERNAL)
    assert set(world.outcomes) == {b"poison"}
    assert world.session.publisher._packet_ids == {}
    world.publish(message("sound"))
    world.talk()
    remote.machine.acknowledge(PacketType.PUBCOMP, [one for one, _ in remote.acks_of(PacketType.PUBREL)[-1:]])
    world.talk()
    remote.ack(remote.rows)
    world.talk()
    assert world.outcomes[b"sound"] is ACCEPTED
    assert world.outcomes[b"received"] is ACCEPTED
    assert world.session.idle


async def test_a_message_that_was_found_out_leaves_its_packet_id() -> None:
    world = World()
    world.present, world.acks = True, False
    world.publish(message("poison"))
    while b"poison" not in world.outcomes:
        world.connect()
        world.talk()
        world.drop()
    publisher = world.session.publisher
    assert (publisher._packet_ids, publisher._numbers) == ({}, {})
