"""Dead letters that replicas have in common: redriven by one, kept within limits, safe while the database is
away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from gateway import clock, containment
from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.letters import SharedLetters
from gateway.model.message import MESSAGE_BYTES, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.shares import UserShares
from gateway.model.times import Monotonic
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.state.interface import CLAIM_SECS, AddLetter, DeadLetter, DeleteLetters, FindLetters
from gateway.state.interface import REFUSED as REJECTS
from tests.broker.parts import amqp
from tests.engine.local_state import LocalDatabase, joined
from tests.store.parts import Opened, accepted

REFUSED = Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, "no \ud800\0")
HOUR = 3_600
SINCE = 1_000.0  # from now on by the clock of the loop, so that everything is due


class Replica:
    """The letters of one replica."""

    def __init__(
        self, local: LocalDatabase, *, count_max: int = 100, bytes_max: int = 1_000_000, share: float = 1.0
    ) -> None:
        self.time = ClusterClock()
        self.local = local
        self.state, self.membership = joined(local, "one")
        shares = UserShares("letters", count_max=count_max, bytes_max=bytes_max, user_share=share)
        self.common = SharedLetters(self.state, self.membership, shares, self.time)
        self.letters = DeadLetters(common=self.common)

    def tick(self, secs: float = SINCE) -> None:
        self.common.tick(Monotonic(trio.current_time() + secs))
        self.local.settle()

    def add(self, *bodies: bytes, route: str = "up", user: str = "") -> list[str]:
        """Add letters as one that has no other choice, and return what was told at once."""
        told: list[str] = []
        self.local.utc += 1.0
        messages = [sent(body, user) for body in bodies]
        self.letters.add(messages, route, REFUSED, lambda: told.append("kept"), crossed=True)
        return told

    def bodies(self, count: int = 100, route: str | None = None) -> list[bytes]:
        found: list[Letter] = []
        self.letters.newest(count, found.extend, route=route)
        self.local.settle()
        return [letter.message.body for letter in found]

    def ids(self, route: str | None = None) -> list[str]:
        found: list[str] = []
        self.letters.ids(route, found.extend)
        self.local.settle()
        return found

    def find(self, *ids: str) -> list[Letter]:
        found: list[Letter] = []
        self.letters.find(ids, found.extend)
        self.local.settle()
        return found

    def claim(self, *ids: str) -> list[tuple[list[str], list[str]]]:
        """The replies, when the database has settled: which are this replica's, and which are not."""
        told: list[tuple[list[str], list[str]]] = []
        self.letters.claim(
            self.find(*ids),
            lambda ours, others: told.append(([a.id for a in ours], [b.id for b in others])),
        )
        return told

    def claims(self, *ids: str) -> list[tuple[list[str], list[str]]]:
        told = self.claim(*ids)
        self.local.settle()
        return told


def sent(body: bytes, user: str = "") -> Message:
    return Message(amqp_address("", "key"), body, sender=Sender("amqp", "client", user))


@pytest.fixture
def local(tmp_path: Path) -> LocalDatabase:
    return LocalDatabase(tmp_path)


async def test_they_expire_by_the_time_of_the_cluster(local: LocalDatabase) -> None:
    """A replica that began with a wrong clock, which was set right, still has a wrong one of its own."""
    wrong, right = Replica(local), Replica(local)
    wrong.time.apply_reply(int(clock.utc()) - HOUR, clock.now(), clock.now())
    expires = clock.utc() + 60.0
    for replica in (wrong, right):
        message = Message(amqp_address("", "key"), b"x", expires=expires)
        replica.letters.add([message], "up", REFUSED, lambda: None, crossed=True)
        local.settle()
    for replica, ahead in ((wrong, HOUR), (right, 0.0)):
        found = replica.find(*replica.ids())
        times = sorted(letter.message.expires - ahead for letter in found)
        assert times == pytest.approx([expires - HOUR, expires], abs=1.0)


async def test_every_replica_has_them_also_one_that_begins_later(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    told = one.add(b"1", b"2")
    assert not told  # the source waits for the database
    local.settle()
    other.add(b"3", route="down")
    local.settle()
    later = Replica(local)
    assert told == ["kept"]
    for replica in (one, other, later):
        replica.tick()
        assert replica.bodies() == [b"3", b"2", b"1"]
        assert replica.bodies(1) == [b"3"]
        assert replica.bodies(route="up") == [b"2", b"1"]
        assert (len(replica.letters), replica.letters.byte_count) == (3, 3 * (1 + MESSAGE_BYTES))
        found = replica.find(*replica.ids("up"))
        assert [(letter.route, letter.crossed, letter.outcome.text) for letter in found] == [
            ("up", True, "no ?")
        ] * 2


async def test_many_letters_are_read_in_pages_and_in_order(
    local: LocalDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of one moment."""
    monkeypatch.setattr("gateway.engine.letters.PAGE_LETTERS", 200)
    one = Replica(local, count_max=1_000)
    bodies = [b"%d" % number for number in range(250)]
    one.add(*bodies)
    local.settle()
    assert one.bodies(1_000) == bodies[::-1]
    assert one.bodies(220) == bodies[:-221:-1]
    assert [letter.message.body for letter in one.find(*one.ids())] == bodies


async def test_what_nobody_wanted_stays_in_memory(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.letters.add([amqp(b"1")], "", Outcome(Verdict.REJECTED, Reason.NO_ROUTE))
    one.add(b"2")
    local.settle()
    assert (one.bodies(), other.bodies()) == ([b"2", b"1"], [b"2"])
    assert len(one.ids()) == len(one.find(*one.ids())) == 2


async def test_what_one_purges_is_gone_everywhere(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.add(b"1", b"2")
    local.settle()
    told: list[Outcome] = []
    other.letters.delete([one.ids()[0], "m1", "000000000009-1"], told.append)
    assert not told
    local.settle()
    assert told == [ACCEPTED]
    assert one.bodies() == other.bodies() == Replica(local).bodies() == [b"2"]
    assert len(other.letters) == 1


@pytest.mark.parametrize("how", ["delete", "purge"])
async def test_what_was_committed_unheard_and_deleted_is_not_added_again(
    local: LocalDatabase, how: str
) -> None:
    one, other = Replica(local), Replica(local)
    one.state.is_deaf = True
    told = one.add(b"1")
    one.add(b"2")
    local.settle()
    first, _ = other.ids()
    if how == "delete":
        other.letters.delete([first])
    else:
        other.letters.purge([first], lambda *found: None)
    local.settle()
    one.state.is_deaf = False
    one.tick()
    assert told == ["kept"]
    assert one.bodies() == other.bodies() == [b"2"]


async def test_what_another_replica_redrives_is_not_purged(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.add(b"1", b"2", b"3")
    local.settle()
    first, second, third = one.ids()
    assert one.claims(first, second) == [([first, second], [])]
    told: list[tuple[Outcome, list[str]]] = []
    other.letters.purge([first, third, "m1"], lambda *found: told.append(found))
    local.settle()
    assert told == [(ACCEPTED, [first])]
    assert one.ids() == [first, second]
    one.letters.release_claims([first, second])
    local.settle()
    other.state.is_deaf = True  # it is repeated until the reply is there
    other.letters.purge([first, second], lambda *found: told.append(found))
    local.settle()
    assert told[1:] == []
    other.state.is_deaf = False
    other.tick()
    local.settle()
    assert told[1:] == [(ACCEPTED, [])]
    assert not one.ids()


async def test_of_two_that_redrive_a_letter_one_does(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.add(b"1")
    local.settle()
    (id,) = one.ids()
    first, second = other.claim(id), one.claim(id)
    local.settle()
    assert (first, second) == ([([id], [])], [([], [id])])
    other.letters.release_claims([id])
    assert one.claims(id) == [([id], [])]
    one.common.stop()  # the process ends
    assert other.claims(id) == [([id], [])]


async def test_what_is_gone_meanwhile_is_nobodys_to_redrive(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.add(b"1")
    local.settle()
    (found,) = other.find(*one.ids())
    one.letters.delete([found.id])
    told: list[tuple[int, int]] = []
    other.letters.claim([found], lambda ours, others: told.append((len(ours), len(others))))
    local.settle()
    assert told == [(0, 1)]


async def test_the_claim_of_a_lost_replica_runs_out_and_that_of_a_living_one_does_not(
    local: LocalDatabase,
) -> None:
    one, other, dying = Replica(local), Replica(local), Replica(local)
    one.add(b"1", b"2")
    local.settle()
    lost, held = one.ids()
    dying.claim(lost)
    one.claim(held)
    local.settle()
    dying.state.is_away = True
    local.utc += CLAIM_SECS / 2
    one.tick()  # renews
    assert other.claims(lost, held) == [([], [lost, held])]
    local.utc += CLAIM_SECS / 2 + 1
    assert other.claims(lost, held) == [([lost], [held])]


async def test_a_claim_whose_reply_comes_too_late_is_none(
    local: LocalDatabase, autojump_clock: trio.testing.MockClock
) -> None:
    """As at a process that was frozen: it gives the claim up."""
    one, other = Replica(local), Replica(local)
    one.add(b"1")
    local.settle()
    told = one.claim(*one.ids())
    await trio.sleep(CLAIM_SECS / 2)
    local.settle()
    assert told == [([], one.ids())]
    assert other.claims(*one.ids()) == [(one.ids(), [])]


async def test_a_claim_while_the_database_is_away_is_none_and_is_given_up(local: LocalDatabase) -> None:
    one, other = Replica(local), Replica(local)
    one.add(b"1")
    local.settle()
    (id,) = one.ids()
    told = one.claim(id)
    one.state.is_away = True  # and it may have been committed
    local.settle()
    assert told == [([], [id])]
    one.state.is_away = False
    assert one.claims(id) == [([id], [])]
    one.tick()  # what is repeated does not end the later claim
    assert other.claims(id) == [([], [id])]


async def test_the_oldest_go_and_are_counted_once(local: LocalDatabase) -> None:
    one, other = Replica(local, count_max=2), Replica(local, count_max=2)
    for number in range(5):
        one.add(b"%d" % number)
        local.settle()
    later = Replica(local, count_max=2)
    for replica in (one, other, later):
        replica.tick()
        assert replica.bodies() == [b"4", b"3"]
    assert [replica.letters.evicted_count for replica in (one, other, later)] == [3, 0, 0]


async def test_replicas_that_push_out_at_once_count_each_letter_once(local: LocalDatabase) -> None:
    one, other = Replica(local, count_max=3), Replica(local, count_max=3)
    for replica in (one, other):
        replica.add(b"old", b"old")
    local.settle()
    for replica in (one, other):
        replica.tick()
        replica.add(b"1", b"2")
    local.settle()
    for replica in (one, other):
        replica.tick(2 * SINCE)
        assert len(replica.bodies()) == len(replica.letters) == 3
    assert one.letters.evicted_count + other.letters.evicted_count == 5


async def test_a_letter_that_the_database_rejects_is_counted(
    local: LocalDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source is told: it would send the same again for ever."""
    one = Replica(local)
    with monkeypatch.context() as patch:
        patch.setattr(one.state, "submit", lambda operation, done: done(REJECTS))
        assert one.add(b"1") == ["kept"]
    assert (len(one.letters), one.letters.byte_count, one.letters.evicted_count) == (0, 0, 1)
    one.add(b"2")
    local.settle()
    assert one.bodies() == [b"2"]


async def test_letters_go_by_bytes_and_of_the_user_who_has_most(local: LocalDatabase) -> None:
    """And not of one who has little, however old that is."""
    each = 1 + MESSAGE_BYTES
    one, other = Replica(local, bytes_max=4 * each), Replica(local, bytes_max=4 * each)
    one.add(b"a", user="ann")
    local.settle()
    other.add(b"1", b"2", b"3", user="bob")
    local.settle()
    other.tick()
    other.add(b"4", b"5", user="bob")
    local.settle()
    assert one.bodies() == [b"5", b"4", b"3", b"a"]
    assert other.letters.evicted_count == 2


async def test_at_a_limit_a_message_stays_with_its_source(local: LocalDatabase) -> None:
    one, other = Replica(local, count_max=4, share=0.5), Replica(local, count_max=4, share=0.5)
    one.add(b"1", b"2", user="bob")
    local.settle()
    other.tick()
    refused: list[Outcome] = []
    other.letters.add([sent(b"3", "bob")], "up", REFUSED, full=refused.append)
    assert [outcome.reason for outcome in refused] == [Reason.QUOTA]  # of bob's share
    local.utc += 1.0
    other.letters.add([sent(b"4", "ann"), sent(b"5", "ann")], "up", REFUSED, full=refused.append)
    other.letters.add([sent(b"6", "eve")], "up", REFUSED, full=refused.append)  # those are on their way
    assert (len(refused), other.letters.refused) == (2, 2)
    local.settle()
    assert other.bodies() == [b"5", b"4", b"2", b"1"]
    other.letters.delete(other.ids()[:1])
    local.settle()
    assert other.letters.has_room_for([sent(b"7", "bob")])


async def test_while_the_database_is_away_letters_wait_within_limits(local: LocalDatabase) -> None:
    one, other = Replica(local, count_max=3), Replica(local)
    one.add(b"purged")
    local.settle()
    purged = one.ids()
    one.state.is_away = True
    one.letters.delete(purged)
    told = [one.add(b"%d" % number) for number in range(4)]
    local.settle()
    assert told == [["kept"], [], [], []]  # crowded out
    assert one.letters.evicted_count == 1
    one.tick()
    assert sum(map(len, told)) == 1
    one.state.is_away = False
    one.tick()
    assert told == [["kept"]] * 4
    assert one.bodies() == other.bodies() == [b"3", b"2", b"1"]
    one.tick(2 * SINCE)
    assert len(one.letters) == 3


async def test_a_source_waits_until_all_letters_of_one_call_are_stored(local: LocalDatabase) -> None:
    one = Replica(local)
    told = one.add(b"1", b"2")
    one.state.is_away = True
    assert one.state.step()  # the first one has to be repeated
    one.state.is_away = False
    local.settle()
    assert (one.bodies(), told) == ([b"2"], [])
    one.tick()
    assert (one.bodies(), told) == ([b"2", b"1"], ["kept"])
    one.common.add([], "up", REFUSED, crossed=True, then=lambda: told.append("none"))
    assert told == ["kept", "none"]


async def test_what_is_read_while_the_database_is_away_has_no_answer(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(b"1")
    local.settle()
    ids = one.ids()
    one.state.is_away = True
    assert one.bodies() == one.ids() == one.find(*ids) == []


async def test_only_so_many_bytes_are_read_for_one_result(
    local: LocalDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page of a list goes on where the one before has ended; ids are read without messages."""
    one = Replica(local)
    bodies = [b"%d" % number * 1_000 for number in range(10)]
    for body in bodies:
        one.add(body)
    local.settle()
    monkeypatch.setattr("gateway.broker.dead_letters.letters.READ_BYTES_MAX", 3 * (1_000 + MESSAGE_BYTES))
    read = list[bytes]()
    decode = one.common._decoded

    def decode_counted(letters: list[DeadLetter]) -> Iterator[Letter]:
        read.extend(letter.message for letter in letters)
        return decode(letters)

    monkeypatch.setattr(one.common, "_decoded", decode_counted)
    ids = one.ids()
    assert one.bodies() == bodies[:-4:-1]
    assert [letter.message.body for letter in one.find(*ids)] == bodies[:3]
    assert [letter.message.body for letter in one.find("none", *ids[8:])] == bodies[8:]
    assert len(read) == 8
    existing: list[str] = []
    one.letters.existing([ids[3], "none", ids[0]], existing.extend)
    local.settle()
    assert existing == [ids[3], ids[0]]
    assert len(read) == 8


async def test_what_is_no_letter_costs_itself(local: LocalDatabase) -> None:
    one = Replica(local)
    one.add(b"1")
    local.settle()
    (id,) = one.ids()
    found: list[DeadLetter] = []
    one.state.query(FindLetters((id,)), lambda reply: found.extend(reply.value or ()))
    local.settle()
    for at, (reason, message) in enumerate([(b"{", b""), (b"{}", b""), (found[0].reason, b"\xff\xff")]):
        one.state.submit(AddLetter(DeadLetter(f"{id}{at}", "up", reason, message)), lambda reply: None)
    local.settle()
    before = containment.counted["message"]
    assert one.bodies() == [b"1"]
    assert containment.counted["message"] > before
    one.letters.delete(one.ids())  # what cannot be read can be purged
    local.settle()
    assert not one.ids()


async def test_who_waits_for_one_letter_and_fails_costs_no_other(local: LocalDatabase) -> None:
    one = Replica(local)

    def fail() -> None:
        raise RuntimeError("of one letter")

    before = containment.counted["batch"]
    one.letters.add([amqp(b"1")], "up", REFUSED, fail)
    told = one.add(b"2")
    local.settle()
    assert told == ["kept"]
    assert containment.counted["batch"] == before + 1


async def test_letters_of_one_that_was_declared_dead_stay_its_own(local: LocalDatabase) -> None:
    """It has another incarnation then, and no two letters have one id."""
    one = Replica(local)
    one.add(b"1")
    local.settle()
    one.membership.incarnation = "f" * len(one.membership.incarnation)
    one.add(b"2")
    local.settle()
    assert one.bodies() == [b"2", b"1"]
    assert len(set(one.ids())) == 2
    one.state.submit(DeleteLetters(tuple(one.ids()), "another"), lambda reply: None)
    local.settle()
    assert not one.bodies()


def test_ids_are_told_from_others() -> None:
    letters = SharedLetters.__new__(SharedLetters)
    assert letters.is_letter_id("0123456789ab-7")
    assert not any(letters.is_letter_id(id) for id in ("m1", "17", "", "0123456789ab", "0123456789abc"))


@pytest.mark.parametrize("limit", [{"count_max": 4}, {"bytes_max": 4 * (MESSAGE_BYTES + 2)}])
async def test_letters_of_others_stay_while_the_database_is_away(
    local: LocalDatabase, limit: dict[str, int]
) -> None:
    """What waits for the database has the same limits, and the one who fills it loses its own."""
    one = Replica(local, **limit)
    one.tick()
    one.state.is_away = True
    first = one.add(b"m0", user="modest")
    lost = [one.add(b"g%d" % at, user="greedy") for at in range(6)]
    last = one.add(b"m1", user="modest")
    local.settle()
    assert not first
    assert not last
    assert [bool(told) for told in lost] == [True] * 4 + [False] * 2
    assert (one.common.shares.evicted_count, one.common.shares.last_user) == (4, "greedy")
    one.state.is_away = False
    one.tick(SINCE + 10)
    one.tick(SINCE + 20)
    assert first == last == ["kept"]
    assert sorted(one.bodies()) == [b"g4", b"g5", b"m0", b"m1"]


async def test_what_nobody_waits_for_is_on_disk_when_its_queue_has_settled_it(
    local: LocalDatabase, tmp_path: Path
) -> None:
    """Its queue deletes it in the same transaction: a kill while the database is away would lose it."""
    one = Replica(local)
    one.state.is_away = True
    with Opened(tmp_path / "store") as before:
        queue = before.store.log("queue", "q")
        before.store.append(queue, 0, [sent(b"x")], accepted)
        before.commit()
        letters = DeadLetters(store=before.store, common=one.common)
        letters.add([sent(b"x")], "", REFUSED, was_accepted=True)
        before.store.settle(queue, [0])
        before.commit()
    with Opened(tmp_path / "store") as after:
        assert not after.store.extent(after.store.log("queue", "q")).count
        found: list[Letter] = []
        DeadLetters(store=after.store).newest(9, found.extend)
        after.until(lambda: found)
        assert [letter.message.body for letter in found] == [b"x"]
