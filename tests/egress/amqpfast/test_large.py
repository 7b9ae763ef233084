"""Large messages of an AMQP/Fast link: alone, in fragments, from where they broke off (3.5.13, 3.5.14)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
import trio

from gateway.egress.amqpfast import large
from gateway.egress.amqpfast.upload import content_hash
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Reason
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.dialect import fast_address
from tests.egress.amqp091.remote import Settled
from tests.egress.amqpfast.remote import LinkRig

pytestmark = pytest.mark.interpreted  # the stream is one in memory

BIG = bytes(range(256)) * 80  # 20 480 bytes


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """What counts as large, for a test's patience."""
    patch = pytest.MonkeyPatch()
    patch.setattr("gateway.egress.amqpfast.publisher.LARGE_BYTES", 2_000)
    yield
    patch.undo()
    assert large.LARGE_BYTES == 1_048_576


def message(body: bytes) -> Message:
    return Message(fast_address("queue", "q"), body, durable=True)


def rig(**world: object) -> tuple[LinkRig, Settled]:
    made = LinkRig()
    made.world.limits = {"frame_max": 1024}
    for name, value in world.items():
        setattr(made.world, name, value)
    made.connect()
    return made, Settled()


@pytest.mark.parametrize("restartable", [True, False])
async def test_large_and_small_keep_their_order(restartable: bool) -> None:
    one, source = rig(restartable=restartable)
    bodies = [b"1", BIG, b"2", BIG + b"!", BIG + b"?", b"3"]
    one.publish(source, bodies)
    assert one.world.bodies == bodies
    assert all(source.outcomes[body] is ACCEPTED for body in bodies)
    assert one.session.idle
    hashes = [digest for _, digest in one.world.prepared]
    expected = [hashlib.sha1(body).hexdigest().encode() for body in bodies if len(body) > 1]
    assert hashes == (expected if restartable else [])
    assert len([said for said in one.world.said if isinstance(said, m.HandleClose)]) == 0


async def test_it_goes_on_where_the_connection_broke() -> None:
    one, source = rig(break_at=8_000)
    one.publish(source, [BIG, b"after"])
    held = one.world.held[next(iter(one.world.held))]
    assert 8_000 <= len(held) < len(BIG)
    one.lose()
    one.world.break_at = 0
    one.connect()
    assert one.world.bodies == [BIG, b"after"]
    assert source.order == [BIG, b"after"]
    fragments = one.stats.frames()["0.7c0", "out", "handle.send"]
    assert fragments <= -(-len(BIG) // 1_000) + 3 + 12  # it was not sent twice


async def test_a_server_that_lost_what_it_held_gets_all_of_it() -> None:
    one, source = rig(break_at=8_000)
    one.publish(source, [BIG])
    one.lose()
    one.world.break_at = 0
    one.world.held.clear()
    one.connect()
    assert one.world.bodies == [BIG]
    assert source.outcomes[BIG] is ACCEPTED


async def test_a_server_that_drops_connections_on_prepare_is_sent_large_messages_plainly() -> None:
    one, source = rig(ignores_prepare=True)
    one.publish(source, [b"1", BIG, b"2", BIG + b"!"])
    assert len(one.world.prepared) == 1
    assert one.world.bodies == [b"1"]
    one.lose()
    one.connect()
    assert len(one.world.prepared) == 1, "once is enough"
    assert one.world.bodies == [b"1", BIG, b"2", BIG + b"!"]
    assert source.order == one.world.bodies
    one.lose()
    one.connect()
    one.publish(source, [BIG + b"?"])  # what was learnt outlives the connection
    assert source.outcomes[BIG + b"?"] is ACCEPTED
    assert len(one.world.prepared) == 1


async def test_a_server_that_has_answered_prepare_is_asked_again_however_often_it_goes_away() -> None:
    one, source = rig(break_at=1)
    one.publish(source, [BIG])
    for _ in range(4):
        one.lose()
        one.connect()
    one.world.break_at = 0
    one.lose()
    one.connect()
    assert source.outcomes[BIG] is ACCEPTED
    assert len(one.world.prepared) == 6


async def test_a_server_that_has_answered_prepare_may_go_away_behind_one() -> None:
    one, source = rig()
    one.publish(source, [BIG])
    one.world.ignores_prepare = True
    one.publish(source, [BIG + b"!"])
    one.lose()
    one.world.ignores_prepare = False
    one.connect()
    assert source.outcomes[BIG + b"!"] is ACCEPTED
    assert [digest for _, digest in one.world.prepared[1:]] == [content_hash(BIG + b"!")] * 2


async def test_a_server_that_never_answers_prepare(autojump_clock: object) -> None:
    one, source = rig(ignores_prepare=True)
    one.publish(source, [BIG, b"behind"])
    await trio.sleep(large.READY_SECS - 1)
    one.tick()
    assert source.order == []
    await trio.sleep(1)
    one.tick()
    assert source.order == one.world.bodies == [BIG, b"behind"]
    assert len(one.world.prepared) == 1


@pytest.mark.parametrize("harsh", [False, True])
@pytest.mark.parametrize(
    "which, value, reason", [("poison", BIG, Reason.MALFORMED), ("missing", "q", Reason.NO_ROUTE)]
)
async def test_a_large_message_may_be_refused(harsh: bool, which: str, value: object, reason: Reason) -> None:
    one, source = rig(harsh=harsh)
    getattr(one.world, which).add(value)
    one.publish(source, [b"small", BIG, b"other"], "other", "q", "other")
    assert source.outcomes[BIG].reason is reason
    assert source.outcomes[b"small"] is source.outcomes[b"other"] is ACCEPTED
    assert one.session.idle


async def test_it_is_written_as_the_stream_drains() -> None:
    one, source = rig(restartable=False)
    sink = one.session.publisher
    sink.publish(source.part([message(BIG)], sink))
    one.stream.congested = True  # the handle is open, and the first bytes are encoded
    one.move()
    one.connection.resume_writing()
    one.move()
    assert ("0.7c0", "out", "handle.send") not in one.stats.frames()
    one.stream.congested = False
    one.connection.resume_writing()
    one.move()
    assert one.world.bodies == [BIG]
    assert source.outcomes[BIG] is ACCEPTED
