"""Dead letters that replicas have in common: read alike, redriven by one, kept within limits."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gateway import containment
from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.engine.letters import CLAIM_SECS, SharedLetters
from gateway.engine.logs import RETURN_SECS
from gateway.model.message import MESSAGE_OCTETS
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic, WallTime
from tests.broker.parts import amqp
from tests.engine.streams import Stream

REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no \ud800")


class Replica:
    """The letters of one replica."""

    def __init__(self, stream: Stream, *, connect: bool = True, **limits: int) -> None:
        self.log = stream.log()
        given = {"messages_max": 100, "octets_max": 1_000_000, "stream_octets_max": 4_000_000} | limits
        self.common = SharedLetters(self.log, **given)
        self.log.use(self.common)
        self.letters = DeadLetters(common=self.common)
        if connect:
            stream.connect(self.log)

    def bodies(self, count: int = 100) -> list[bytes]:
        found: list[Letter] = []
        self.letters.newest(count, found.extend)
        return [letter.message.body for letter in found]

    def ids(self, route: str | None = None) -> list[str]:
        found: list[str] = []
        self.letters.ids(route, found.extend)
        return found

    def claim(self, *ids: str) -> list[tuple[list[str], list[str]]]:
        """The answers: which of them are this replica's, and which are not."""
        told: list[tuple[list[str], list[str]]] = []
        found: list[Letter] = []
        self.letters.find(ids, found.extend)
        self.letters.claim(
            found, lambda ours, others: told.append(([a.id for a in ours], [b.id for b in others]))
        )
        return told


async def test_every_replica_knows_them_also_one_that_begins_later() -> None:
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    told: list[str] = []
    one.letters.add([amqp(b"1"), amqp(b"2")], "up", REFUSED, lambda: told.append("one"), crossed=True)
    assert not told  # the source waits for the cluster
    stream.settle()
    other.letters.add([amqp(b"3")], "down", REFUSED)
    stream.settle()
    later = Replica(stream)
    assert told == ["one"]
    for replica in (one, other, later):
        assert replica.bodies() == [b"3", b"2", b"1"]
        assert replica.bodies(1) == [b"3"]
        assert (len(replica.letters), replica.letters.octets) == (3, 3 * (1 + MESSAGE_OCTETS))
        found: list[Letter] = []
        replica.letters.find(replica.ids("up"), found.extend)
        assert [(letter.route, letter.crossed, letter.outcome.text) for letter in found] == [
            ("up", True, "no ?")
        ] * 2


async def test_what_nobody_wanted_stays_in_memory() -> None:
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1")], "", Outcome(Verdict.REJECTED, Reason.NO_ROUTE))
    stream.settle()
    assert (one.bodies(), other.bodies()) == ([b"1"], [])


async def test_what_one_purges_is_gone_everywhere() -> None:
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1"), amqp(b"2")], "up", REFUSED)
    stream.settle()
    told: list[Outcome] = []
    other.letters.delete([one.ids()[0], "m1", "000000000009-1"], told.append)
    assert not told
    stream.settle()
    assert told == [ACCEPTED]
    assert one.bodies() == other.bodies() == Replica(stream).bodies() == [b"2"]


async def test_of_two_that_redrive_a_letter_one_does() -> None:
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1")], "up", REFUSED)
    stream.settle()
    (id,) = one.ids()
    first, second = other.claim(id), one.claim(id)  # in this order on the log
    stream.settle()
    assert (first, second) == ([([id], [])], [([], [id])])
    other.letters.free([id])
    again = one.claim(id)
    stream.settle()
    assert again == [([id], [])]


async def test_what_is_gone_meanwhile_is_nobodys_to_redrive() -> None:
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1")], "up", REFUSED)
    stream.settle()
    (id,) = one.ids()
    one.letters.delete([id])
    told = other.claim(id)
    stream.settle()
    assert told == [([], [id])]


async def test_the_claim_of_a_lost_replica_runs_out_and_that_of_a_living_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    utc = [1_000.0]
    monkeypatch.setattr("gateway.clock.utc", lambda: WallTime(utc[0]))
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1"), amqp(b"2")], "up", REFUSED)
    stream.settle()
    lost, held = one.ids()
    dying = Replica(stream)
    for replica, id in ((dying, lost), (one, held)):
        assert replica.claim(id) is not None
    stream.settle()
    dying.log.disconnected()
    utc[0] += CLAIM_SECS / 2
    one.common.tick(Monotonic(trio.current_time() + 1_000))  # says that it still does
    assert not any(other.claim(lost, held))
    stream.settle()
    utc[0] += CLAIM_SECS / 2 + 1
    told = other.claim(lost, held)
    stream.settle()
    assert told == [([lost], [held])]


async def test_a_claim_that_the_cluster_heard_too_late_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    utc = [1_000.0]
    monkeypatch.setattr("gateway.clock.utc", lambda: WallTime(utc[0]))
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1")], "up", REFUSED)
    stream.settle()
    one.log.disconnected()
    told = one.claim(*one.ids())
    utc[0] += CLAIM_SECS
    stream.connect(one.log)
    stream.settle()
    assert told == [([], one.ids())]
    again = other.claim(*one.ids())
    stream.settle()
    assert again == [(one.ids(), [])]


async def test_the_oldest_go_and_are_counted_once() -> None:
    stream = Stream()
    one, other = Replica(stream, messages_max=2), Replica(stream, messages_max=2)
    for number in range(5):
        one.letters.add([amqp(b"%d" % number)], "up", REFUSED)
        stream.settle()
    later = Replica(stream, messages_max=2)
    for replica in (one, other, later):
        assert replica.bodies() == [b"4", b"3"]
    assert [replica.letters.crowded_out for replica in (one, other, later)] == [3, 0, 0]


async def test_while_the_cluster_is_away_letters_wait_within_limits() -> None:
    stream = Stream()
    one, other = Replica(stream, messages_max=3), Replica(stream)
    one.letters.add([amqp(b"purged")], "up", REFUSED)
    stream.settle()
    purged = one.ids()
    one.log.disconnected()
    one.letters.delete(purged)  # which is not what makes room
    told: list[int] = []
    for number in range(4):
        one.letters.add([amqp(b"%d" % number)], "up", REFUSED, lambda number=number: told.append(number))
    assert told == [0, 1]  # crowded out
    assert one.letters.crowded_out == 2
    stream.connect(one.log)
    stream.settle()
    assert told == [0, 1, 2, 3]
    assert one.bodies() == other.bodies() == [b"3", b"2"]


async def test_what_comes_twice_is_one_and_what_is_deleted_does_not_come_again() -> None:
    stream = Stream()
    one, other = Replica(stream), Replica(stream)
    one.letters.add([amqp(b"1"), amqp(b"2")], "up", REFUSED)
    stream.settle()
    written = stream.rows[-2:]
    stream.rows += written
    stream.settle()
    assert one.bodies() == other.bodies() == [b"2", b"1"]
    one.letters.delete(one.ids()[:1])
    stream.settle()
    stream.rows += written
    stream.settle()
    assert one.bodies() == other.bodies() == [b"2"]


async def test_what_is_far_behind_is_written_again() -> None:
    """And so is not lost with the beginning of the stream."""
    stream = Stream()
    one = Replica(stream, stream_octets_max=4_000)
    one.letters.add([amqp(b"kept")], "up", REFUSED)
    stream.settle()
    kept = one.ids()
    for _ in range(30):
        one.letters.add([amqp(b"gone")], "up", REFUSED)
        stream.settle()
        one.letters.delete([id for id in one.ids() if id not in kept])
        stream.settle()
    count = len(stream.rows) + 1
    one.common.tick(Monotonic(trio.current_time() + 1_000))
    assert len(stream.rows) == count  # a mark: first it reads what others have done to letters
    stream.settle()
    assert len(stream.rows) == count + 1
    other = Replica(stream, connect=False)
    stream.read[other.log] = count  # the rest is forgotten
    stream.connect(other.log)
    assert (other.ids(), other.bodies()) == (kept, [b"kept"])


@pytest.mark.parametrize(
    "body",
    [
        b"L",
        b"L\0\0\0\x02{}",
        b"L\xff\xff\xff\xff{}",
        b"D",
        b"Dnull",
        b"D[[]]",
        b"C{",
        b"X",
        b"C" + b"\xff" * 9,
    ],
)
async def test_what_is_no_record_costs_itself(body: bytes) -> None:
    stream = Stream()
    one, writer = Replica(stream), Replica(stream)
    writer.log.put(body)
    writer.letters.add([amqp(b"1")], "up", REFUSED)
    while stream.read[one.log] < len(stream.rows):
        try:
            stream.step(one.log)
        except Exception:  # the connection contains it
            assert body[:1] in b"LDC"
    assert one.bodies() == [b"1"]


async def test_who_waits_for_one_record_and_fails_costs_no_other() -> None:
    stream = Stream()
    one = Replica(stream)
    told: list[int] = []

    def fail() -> None:
        raise RuntimeError("of one record")

    before = containment.counted["batch"]
    one.letters.add([amqp(b"1")], "up", REFUSED, fail)
    one.letters.add([amqp(b"2")], "up", REFUSED, lambda: told.append(2))
    stream.settle()
    assert told == [2]
    assert containment.counted["batch"] == before + 1


async def test_a_later_version_is_passed_over() -> None:
    stream = Stream()
    one = Replica(stream)
    stream.rows.append(b"\x02" + b"later")
    stream.rows.append(b"")
    stream.settle()
    assert one.log.passed_over == 2


async def test_records_that_do_not_come_back_have_the_connection_given_up() -> None:
    stream = Stream()
    one = Replica(stream)
    one.letters.add([amqp(b"1")], "up", REFUSED)
    now = Monotonic(trio.current_time())
    assert not one.log.tick(now, blocked=False)
    assert not one.log.tick(now + RETURN_SECS + 1, blocked=True)
    assert "did not come back" in one.log.tick(now + RETURN_SECS + 1, blocked=False)


def test_ids_are_told_from_others() -> None:
    letters = SharedLetters.__new__(SharedLetters)
    assert letters.is_one("0123456789ab-7")
    assert not any(letters.is_one(id) for id in ("m1", "17", "", "0123456789ab", "0123456789abc"))


async def test_who_has_not_read_that_a_letter_is_purged_does_not_write_it_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """As one that was frozen: it reads first."""
    stream = Stream()
    one, other = Replica(stream, stream_octets_max=10), Replica(stream)
    one.letters.add([amqp(b"gone")], "up", REFUSED)
    stream.settle()
    other.letters.delete(other.ids())
    one.common.tick(Monotonic(trio.current_time() + 1_000))
    count = len(stream.rows)
    await trio.sleep(RETURN_SECS + 1)  # and what it reads is old by then
    stream.settle()
    one.common.tick(Monotonic(trio.current_time() + 2_000))
    stream.settle()
    assert len(stream.rows) == count + 1
    assert not one.bodies()
