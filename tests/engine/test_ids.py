"""Ids of deduplicating routes that replicas have in common: each crosses once, wherever it comes."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.deduplication import UNSETTLED
from gateway.broker.dispatcher import Dispatcher, Surroundings
from gateway.engine.ids import AGAIN_SECS, ALIVE_SECS, AWAY, SILENT_SECS, IdsReader, SharedIds
from gateway.model.batch import Batch
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import NO_PROPERTIES, Properties, property_set
from gateway.model.times import Monotonic, WallTime
from tests.broker.parts import Answers, mqtt, unreadable
from tests.broker.test_deduplication import DOWN, REFUSED, Target, mapping
from tests.engine.streams import Stream

ENGINE_TIMEOUT_SECS = 60.0


class Heard(Answers):
    """What the source of a batch was told, by receipt."""

    @property
    def heard(self) -> dict[object, Outcome]:
        assert len(dict(self.told)) == len(self.told), "told twice"
        return dict(self.told)


class Replica:
    """A route that deduplicates, at one replica."""

    def __init__(self, stream: Stream, utc: list[float], *, connect: bool = True, **more: Any) -> None:
        self.log = stream.log()
        self.ids = SharedIds(self.log, ENGINE_TIMEOUT_SECS, lambda: utc[0])
        self.log.use(IdsReader(self.ids))
        self.target = more.pop("target", None) or Target()
        self.router = mapping(**more)
        self.ids.use(self.router.routes)
        self.dispatcher = Dispatcher(
            self.router,
            DeadLetters(),
            Surroundings(self.ids, links={"erp"}, namespaces={"mqtt": Target(0), "erp": self.target}),
        )
        if connect:
            stream.connect(self.log)

    def publish(self, *rows: tuple[str | None, bytes]) -> Heard:
        """(message id, body) each; receipts are bodies."""
        source = Heard()
        batch = Batch(source, Monotonic(0.0))
        for id, body in rows:
            said = NO_PROPERTIES if id is None else property_set(Properties(message_id=id))
            message = mqtt("a", body, properties=said)
            entry = self.dispatcher.entry("mqtt", self.dispatcher.namespaces["mqtt"], message.address)
            assert self.dispatcher.publish(batch, entry, message, body)
        batch.send()
        return source

    @property
    def duplicates(self) -> int:
        return self.router.routes[0].duplicates


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    given = [1_000.0]
    monkeypatch.setattr("gateway.clock.utc", lambda: WallTime(given[0]))
    return given


async def test_what_one_has_accepted_another_knows(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    first = one.publish(("i", b"1"), (None, b"2"))
    assert one.target.bodies == [b"2"]  # nobody has to be asked
    stream.settle()
    assert sorted(one.target.bodies) == [b"1", b"2"]
    one.target.settle()
    assert first.heard == {b"2": ACCEPTED}  # before the log has it the other one could not know
    stream.settle()
    assert first.heard == {b"1": ACCEPTED, b"2": ACCEPTED}
    for replica in (one, other, Replica(stream, utc)):
        assert replica.publish(("i", b"again")).heard == {b"again": ACCEPTED}
        stream.settle()
        assert (replica.duplicates, replica.target.bodies) == (1, [])


async def test_of_two_in_one_moment_one_crosses(utc: list[float]) -> None:
    """Neither has heard of the other when it asks."""
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    second, first = other.publish(("i", b"other")), one.publish(("i", b"one"))
    stream.settle()
    assert (one.target.bodies, other.target.bodies) == ([], [b"other"])
    assert (first.heard, second.heard) == ({b"one": UNSETTLED}, {})
    assert one.publish(("i", b"too")).heard == {b"too": UNSETTLED}
    assert other.publish(("i", b"too")).heard == {b"too": UNSETTLED}
    other.target.settle()
    stream.settle()
    assert one.publish(("i", b"again")).heard == {b"again": ACCEPTED}


@pytest.mark.parametrize("outcome", [DOWN, REFUSED])
async def test_what_was_not_accepted_may_cross_elsewhere(utc: list[float], outcome: Outcome) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    told = one.publish(("i", b"1"))
    stream.settle()
    one.target.settle(outcome)
    assert told.heard == {b"1": outcome}
    stream.settle()
    other.publish(("i", b"2"))
    stream.settle()
    assert other.target.bodies == [b"2"]


async def test_a_window_ends(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    one.publish(("i", b"1"))
    stream.settle()
    one.target.settle()
    stream.settle()
    utc[0] += 601
    other.ids.tick()
    assert not other.ids.of("once").accepted
    one.publish(("i", b"2"))  # which has not been told to forget it
    stream.settle()
    assert one.target.bodies == [b"2"]


async def test_the_oldest_are_forgotten_and_counted_once(utc: list[float]) -> None:
    stream = Stream()
    one, other = (Replica(stream, utc, options="window: 10m, ids_max: 2") for _ in range(2))
    one.publish(*((f"{at}", b"%d" % at) for at in range(5)))
    stream.settle()
    one.target.settle()
    stream.settle()
    assert [len(replica.ids.of("once").accepted) for replica in (one, other)] == [2, 2]
    assert [replica.ids.of("once").forgotten for replica in (one, other)] == [3, 0]


async def test_claims_of_a_lost_replica_end_and_those_of_a_living_one_do_not(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    one.publish(("lost", b"1"))
    living = Replica(stream, utc)
    living.publish(("held", b"2"))
    stream.settle()
    one.log.disconnected()
    for _ in range(20):
        utc[0] += ALIVE_SECS
        living.log.reader.tick(Monotonic(trio.current_time() + utc[0]))
        stream.settle()
        told = other.publish(("held", b"x"))
        stream.settle()
        assert told.heard == {b"x": UNSETTLED}
    assert 20 * ALIVE_SECS > ENGINE_TIMEOUT_SECS + SILENT_SECS
    other.publish(("lost", b"again"))
    stream.settle()
    assert other.target.bodies == [b"again"]


async def test_a_replica_that_stops_frees_what_it_has(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    one.publish(("i", b"1"))
    stream.settle()
    one.log.reader.stop()
    stream.settle()
    other.publish(("i", b"2"))
    stream.settle()
    assert other.target.bodies == [b"2"]


async def test_who_begins_later_hears_of_old_claims(utc: list[float]) -> None:
    """Though what was said then is read by nobody any more."""
    stream = Stream()
    one = Replica(stream, utc)
    one.publish(("i", b"1"))
    stream.settle()
    count = len(stream.rows)
    utc[0] += AGAIN_SECS
    one.log.reader.tick(Monotonic(trio.current_time() + 1_000))
    other = Replica(stream, utc, connect=False)
    stream.read[other.log] = count
    stream.connect(other.log)
    assert other.publish(("i", b"2")).heard == {b"2": UNSETTLED}


async def test_without_the_cluster_nothing_with_an_id_crosses(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    waiting = one.publish(("i", b"1"))
    one.log.disconnected()
    assert waiting.heard == {b"1": AWAY}
    assert one.publish(("j", b"2"), (None, b"3")).heard == {b"2": AWAY}
    assert one.target.bodies == [b"3"]
    stream.connect(one.log)
    stream.settle()  # the claim had reached the log: nobody wants it any more
    assert one.target.bodies == [b"3"]
    other.publish(("i", b"4"))
    stream.settle()
    assert other.target.bodies == [b"4"]


async def test_what_was_accepted_while_the_cluster_was_away_is_told_then(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc), Replica(stream, utc)
    told = one.publish(("i", b"1"))
    stream.settle()
    one.log.disconnected()
    one.target.settle()
    assert not told.heard
    stream.connect(one.log)
    stream.settle()
    assert told.heard == {b"1": ACCEPTED}
    assert other.publish(("i", b"2")).heard == {b"2": ACCEPTED}


async def test_odd_ids_and_malformed_ones(utc: list[float]) -> None:
    stream = Stream()
    one = Replica(stream, utc)
    one.publish(("\ud800", b"1"), ("x" * 300, b"2"), ("once/x", b"3"))
    stream.settle()
    assert one.target.bodies == [b"1", b"2", b"3"]
    source = Heard()
    batch = Batch(source, Monotonic(0.0))
    message = mqtt("a", b"4", properties=unreadable())
    entry = one.dispatcher.entry("mqtt", one.dispatcher.namespaces["mqtt"], message.address)
    one.dispatcher.publish(batch, entry, message, b"4")
    batch.send()
    assert source.heard[b"4"].reason is Reason.MALFORMED


async def test_what_nobody_takes_is_free_again(utc: list[float]) -> None:
    stream = Stream()
    one, other = Replica(stream, utc, target=Target(0)), Replica(stream, utc)
    told = one.publish(("i", b"1"))
    stream.settle()
    assert told.heard[b"1"].verdict is Verdict.REJECTED
    other.publish(("i", b"2"))
    stream.settle()
    assert other.target.bodies == [b"2"]


@pytest.mark.parametrize("body", [b"C", b"C" * 11, b"T\0\0\0\0\0\0\0\0\0\xff", b"X" * 40])
async def test_what_is_no_record_costs_itself(utc: list[float], body: bytes) -> None:
    stream = Stream()
    one, writer = Replica(stream, utc), Replica(stream, utc)
    writer.log.put(body)
    writer.publish(("i", b"1"))
    while stream.read[one.log] < len(stream.rows):
        try:
            stream.step(one.log)
        except Exception:  # the connection contains it
            assert body[:1] in b"CTX"
    assert one.publish(("i", b"2")).heard == {b"2": UNSETTLED}
