"""Replicas, leases, identifiers of deduplicating routes, and dead letters."""

from __future__ import annotations

from gateway.state.interface import (
    CLAIM_SECS,
    AcceptIds,
    AcquireLease,
    AddLetter,
    Claim,
    ClaimIds,
    ClaimLetters,
    DeadLetter,
    DeleteLetters,
    FindLetters,
    FreeIds,
    FreeLetters,
    Heartbeat,
    JoinReplica,
    Lease,
    ListLetters,
    ListReplicas,
    OperationOutcome,
    QuitReplica,
    Reap,
    ReleaseLease,
    WeighLetters,
)
from tests.state.conftest import Replica, World


def joins(*replicas: Replica) -> None:
    for replica in replicas:
        replica.do(JoinReplica(replica.name, replica.name, "host:1883", "1"))


def test_replicas_are_listed_while_they_live(world: World, one: Replica, two: Replica) -> None:
    joins(one, two)
    world.advance(30)
    two.do(Heartbeat("two"))
    found = {view.replica: view for view in one.ask(ListReplicas())}
    assert found["one"][:4] == ("one", "one", "host:1883", "1")
    assert 29 < found["one"].silent_secs < 60
    assert found["two"].silent_secs < 20
    two.do(Reap(20.0))
    assert [view.replica for view in one.ask(ListReplicas())] == ["two"]
    assert one.reply(JoinReplica("one", "one", "", "1")).verdict is OperationOutcome.FENCED
    two.do(QuitReplica("two"))
    assert one.ask(ListReplicas()) == []
    assert one.reply(Heartbeat("unknown")).verdict is OperationOutcome.FENCED


def test_a_step_of_the_clock_since_the_reaper_s_heartbeat_declares_nobody_dead(
    world: World, one: Replica, two: Replica
) -> None:
    joins(one, two)
    for step in (3_600.0, -7_200.0):
        heard_at = two.do(Heartbeat("two"))
        world.advance(step)
        two.do(Reap(20.0, replica="two", heard_at=heard_at))
        two.do(Heartbeat("two"))
        two.do(Reap(20.0, replica="two", heard_at=heard_at))  # it was submitted before that
        assert len(one.ask(ListReplicas())) == 2
        one.do(Heartbeat("one"))
    world.advance(-3_600.0)
    two.do(Reap(20.0, replica="two", heard_at=two.do(Heartbeat("two"))))
    assert [view.replica for view in one.ask(ListReplicas())] == ["two"]


def test_a_lease_has_one_holder(world: World, one: Replica, two: Replica) -> None:
    assert one.do(AcquireLease("link", "one", 10.0)) == Lease("one", 1)
    assert two.do(AcquireLease("link", "two", 10.0)) == Lease("one", 1)
    world.advance(8)
    assert one.do(AcquireLease("link", "one", 10.0)) == Lease("one", 1)
    world.advance(8)
    assert two.do(AcquireLease("link", "two", 10.0)) == Lease("one", 1)
    world.advance(3)
    assert two.do(AcquireLease("link", "two", 10.0)) == Lease("two", 2)
    assert one.reply(ReleaseLease("link", "one")).verdict is OperationOutcome.FENCED
    two.do(ReleaseLease("link", "two"))
    assert one.do(AcquireLease("link", "one", 10.0)) == Lease("one", 3)
    assert two.do(AcquireLease("other", "two", 10.0)) == Lease("two", 1)


def test_a_clock_that_is_set_back_prolongs_no_lease(world: World, one: Replica, two: Replica) -> None:
    """The holder still has it for as long as it believes, and can renew it."""
    one.do(AcquireLease("dead", "one", 10.0))
    one.do(AcquireLease("alive", "one", 10.0))
    world.advance(-3_600)
    for name in ("dead", "alive"):
        assert two.do(AcquireLease(name, "two", 10.0)) == Lease("one", 1)
    world.advance(8)
    assert one.do(AcquireLease("alive", "one", 10.0)) == Lease("one", 1)
    world.advance(3)
    assert two.do(AcquireLease("dead", "two", 10.0)) == Lease("two", 2)
    assert two.do(AcquireLease("alive", "two", 10.0)) == Lease("one", 1)


def test_of_two_who_want_a_lease_at_once_one_has_it(one: Replica, two: Replica) -> None:
    waits = [
        replica.send(AcquireLease(f"link-{number}", replica.name, 60.0))
        for number in range(50)
        for replica in (one, two)
    ]
    found = [wait.result(30).value for wait in waits]
    assert all(mine == other for mine, other in zip(found[::2], found[1::2], strict=True))


def test_an_identifier_crosses_once(world: World, one: Replica, two: Replica) -> None:
    joins(one, two)
    ids = (b"a", b'\0\\"', b"")
    assert one.do(ClaimIds("route", ids, "one")) == [Claim.OURS] * 3
    assert two.do(ClaimIds("route", ids, "two")) == [Claim.OPEN] * 3
    assert two.do(ClaimIds("other", ids, "two")) == [Claim.OURS] * 3
    one.do(AcceptIds("route", ids[:1], "one", 60.0))
    one.do(FreeIds("route", ids[1:2], "one"))
    two.do(FreeIds("route", ids[2:], "two"))  # it is not its own
    assert two.do(ClaimIds("route", ids, "two")) == [Claim.ACCEPTED, Claim.OURS, Claim.OPEN]
    world.advance(61)
    one.do(Heartbeat("one"))
    two.do(Heartbeat("two"))
    assert two.do(ClaimIds("route", ids[:1], "two")) == [Claim.OURS]


def test_claims_of_a_dead_replica_count_no_longer(world: World, one: Replica, two: Replica) -> None:
    joins(one, two)
    one.do(ClaimIds("route", (b"a", b"b"), "one"))
    one.do(AcceptIds("route", (b"b",), "one", 600.0))
    world.advance(61)
    two.do(Heartbeat("two"))
    two.do(Reap(60.0))
    assert two.do(ClaimIds("route", (b"a", b"b"), "two")) == [Claim.OURS, Claim.ACCEPTED]
    assert (
        one.reply(ClaimIds("route", (b"c",), "one")).verdict is OperationOutcome.FENCED
    )  # nor does it get others
    assert two.do(ClaimIds("route", (b"c",), "two")) == [Claim.OURS]


def test_of_two_claims_at_once_one_counts(one: Replica, two: Replica) -> None:
    joins(one, two)
    waits = [
        replica.send(ClaimIds("route", (str(number).encode(), b"-%d" % number), replica.name))
        for number in range(50)
        for replica in (one, two)
    ]
    found = [wait.result(30).value or [] for wait in waits]
    if one.store is two.store:
        pairs = zip(found[::2], found[1::2], strict=True)
        assert all(mine == [Claim.OURS] * 2 and other == [Claim.OPEN] * 2 for mine, other in pairs)
    for mine, other in zip(found[::2], found[1::2], strict=True):
        assert all({*pair} == {Claim.OURS, Claim.OPEN} for pair in zip(mine, other, strict=True))


def letter(id: str) -> DeadLetter:
    return DeadLetter(id, "route", b'{"why": 1}', b"\0message")


def test_a_letter_is_redriven_by_one(world: World, one: Replica, two: Replica) -> None:
    for id in ("a", "b", "c"):
        one.do(AddLetter(letter(id)))
    one.do(AddLetter(letter("a")))  # repeated, for nobody knew
    found = two.ask(ListLetters())
    assert [one[:4] for one in found] == [(id, "route", b"", b"") for id in "abc"]
    whole = two.ask(FindLetters(("a", "b", "c")))
    assert sorted(one._replace(at=0.0) for one in whole) == [letter("a"), letter("b"), letter("c")]
    assert sorted(two.ask(FindLetters(("a", "b", "c"), has_contents=False))) == found
    assert [one.id for one in two.ask(ListLetters(after=(found[0].at, "a"), limit=1))] == ["b"]
    assert one.do(ClaimLetters(("a", "b", "none"), "one")) == ["a", "b"]
    assert two.do(ClaimLetters(("a", "b", "c"), "two")) == ["c"]
    one.do(FreeLetters(("a", "c"), "one"))
    assert two.do(ClaimLetters(("a", "b"), "two")) == ["a"]
    world.advance(CLAIM_SECS / 2)
    assert one.do(ClaimLetters(("b",), "one")) == ["b"]  # renewed
    world.advance(CLAIM_SECS / 2 + 1)
    assert two.do(ClaimLetters(("b",), "two")) == []
    assert one.do(ClaimLetters(("c",), "one")) == ["c"]
    assert two.do(DeleteLetters(("a", "b", "none"), "two")) == ["a", "b"]
    assert two.do(DeleteLetters(("a",), "two")) == []
    assert [one.id for one in one.ask(ListLetters())] == ["c"]


def test_letters_in_one_group(one: Replica) -> None:
    waits = [
        one.send(AddLetter(letter("a"))),
        one.send(ClaimLetters(("a",), "one")),
        one.send(DeleteLetters(("a",), "one")),
        one.send(AddLetter(letter("a"))),
    ]
    replies = [wait.result(30) for wait in waits]
    assert replies[1].value == ["a"]
    assert [one.id for one in one.ask(ListLetters())] == ["a"]
    assert one.do(ClaimLetters(("a",), "two")) == ["a"]


def test_letters_are_listed_by_route_and_user_from_either_end(
    world: World, one: Replica, two: Replica
) -> None:
    rows = [("a", "up", "ann", 3), ("b", "down", "bob", 5), ("c", "up", "bob", 7), ("d", "up", "ann", 0)]
    for id, route, user, weight in rows:
        one.do(AddLetter(DeadLetter(id, route, b"why", b"what", user, weight)))
        world.advance(1)

    def ids(query: ListLetters) -> list[str]:
        return [found.id for found in two.ask(query)]

    assert ids(ListLetters(newest_first=True)) == ["d", "c", "b", "a"]
    assert ids(ListLetters("up", newest_first=True, limit=2)) == ["d", "c"]
    third = two.ask(FindLetters(("c",)))[0]
    assert third[:6] == ("c", "up", b"why", b"what", "bob", 7)
    behind = (third.at, third.id)
    assert ids(ListLetters("up", newest_first=True, after=behind)) == ["a"]
    assert ids(ListLetters(user="bob")) == ["b", "c"]
    assert ids(ListLetters("up", "bob")) == ["c"]
    assert ids(ListLetters("up", after=behind)) == ["d"]
    assert ids(ListLetters("none")) == ids(ListLetters(user="")) == []


def test_letters_are_found_by_ids_and_weighed_by_user(one: Replica, two: Replica) -> None:
    assert two.ask(WeighLetters()) == {}
    for id, user, weight in (("a", "ann", 3), ("b", "", 1 << 40), ("c", "ann", 4)):
        one.do(AddLetter(DeadLetter(id, "route", b"", b"", user, weight)))
    one.do(AddLetter(DeadLetter("a", "route", b"", b"", "ann", 3)))  # repeated
    assert sorted(found.id for found in two.ask(FindLetters(("c", "none", "a")))) == ["a", "c"]
    assert two.ask(FindLetters(())) == []
    assert two.ask(WeighLetters()) == {"ann": (2, 7), "": (1, 1 << 40)}
    one.do(DeleteLetters(("a", "b"), "one"))
    assert two.ask(WeighLetters()) == {"ann": (1, 4)}


def test_letters_that_are_added_at_once_keep_their_order(one: Replica) -> None:
    wanted = [f"{number:04}" for number in range(300)]
    waits = [one.send(AddLetter(letter(id))) for id in wanted]
    assert all(wait.result(30).verdict is OperationOutcome.DONE for wait in waits)
    assert [found.id for found in one.ask(ListLetters())] == wanted
