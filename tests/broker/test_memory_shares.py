"""Shares of the memory: who is restrained, what that means for queues and sessions, and that it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from gateway.access.places import LOOPBACK
from gateway.broker.memory import Memory
from gateway.broker.memory_shares import FAR, LESS, NEAR, SLICE, Claim, MemoryShares
from gateway.broker.pressure import FLOOR, FULL, reduced_limit
from gateway.broker.queue import Queue
from gateway.containment import counted
from gateway.model.message import weight_of
from gateway.model.outcome import ACCEPTED
from tests.broker.parts import Space, Taker, amqp, connected, mqtt, publish

MARK = 1_000
THERE, ELSEWHERE = "192.0.2.7", "192.0.2.8"


class Held:
    """What somebody holds."""

    def __init__(self, byte_count: int, user: str = "", place: str = "") -> None:
        self.byte_count, self.user, self.place = byte_count, user, place
        self.restrained = False

    def restrain(self, on: bool) -> None:
        self.restrained = on


class Site:
    def __init__(self, *held: Held, used: float = MARK) -> None:
        self.held = list(held)
        self.used = int(used)
        self.memory = Memory(MARK, lambda: self.used)
        self.memory.used = int(used)
        self.walked = 0
        self.shares = MemoryShares(self.memory, self.claims, per_user=0.25, per_address=0.5)

    def claims(self) -> Iterator[Claim]:
        for one in list(self.held):
            self.walked += 1
            yield one, one.byte_count, one.user, one.place

    async def look(self, used: float | None = None) -> list[bool]:
        if used is not None:
            self.memory.used = int(used)
        await self.shares.enforce()
        return [one.restrained for one in self.held]


async def test_who_has_more_than_its_share_is_restrained_in_all_it_has_and_nobody_else() -> None:
    eve = [Held(1, "eve"), Held(249, "eve"), Held(1, "eve")]
    site = Site(*eve, Held(250, "ann"), Held(900, ""), Held(900, "", LOOPBACK))
    assert await site.look() == [True] * 3 + [False] * 3
    assert site.shares.owners_over_share == {("user", "eve")}
    assert site.shares.gauges()["gateway_memory_shares_full"]() == 1


async def test_an_address_has_one_whoever_its_users_are() -> None:
    site = Site(Held(200, "a", THERE), Held(200, "b", THERE), Held(101, "", THERE), Held(250, "a", ELSEWHERE))
    assert await site.look() == [True] * 4  # the last one for its user
    assert site.shares.owners_over_share == {("address", THERE), ("user", "a")}


async def test_nobody_is_looked_at_while_there_is_plenty() -> None:
    site = Site(Held(900, "eve"))
    assert await site.look(MARK * NEAR) == [False]
    assert site.walked == 0
    assert await site.look(MARK * NEAR + 1) == [True]
    assert await site.look(MARK * FAR + 1) == [True]
    assert await site.look(MARK * FAR) == [False]
    assert await site.look(MARK * FAR + 1) == [False]


async def test_they_are_looked_at_as_soon_as_memory_rises(autojump_clock: trio.testing.MockClock) -> None:
    """Long before the tick, whose time does not come here: nothing has to wait for it."""
    eve = Held(2 * MARK, "eve")
    site = Site(eve, used=0)
    begin = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(site.shares.run, lambda: None)
        await trio.testing.wait_all_tasks_blocked()
        for used in (NEAR * MARK + 1, NEAR * MARK + 0.1 * MARK):
            eve.restrained = False
            site.used = int(used)
            site.memory.measure()
            await trio.testing.wait_all_tasks_blocked()
            assert eve.restrained
        assert trio.current_time() == begin
        nursery.cancel_scope.cancel()


async def test_it_ends_when_there_is_less_though_memory_stays_in_use() -> None:
    eve = Held(251, "eve")
    site = Site(eve)
    steps = []
    for byte_count in (251, 250, int(250 * LESS) + 1, int(250 * LESS), 250, 251):
        eve.byte_count = byte_count
        steps += await site.look()
    assert steps == [True, True, True, False, False, True]


async def test_it_ends_for_what_changes_hands_or_is_gone() -> None:
    one, other = Held(300, "eve"), Held(300, "eve")
    site = Site(one, other, Held(300, "eve"))
    await site.look()
    one.user = "ann"
    one.byte_count = 10
    site.held.remove(other)
    assert await site.look() == [False, True]
    assert not other.restrained


async def test_one_that_fails_keeps_the_others_from_nothing() -> None:
    class Broken(Held):
        def restrain(self, on: bool) -> None:
            raise RuntimeError

    before = counted["timer"]
    site = Site(Broken(300, "eve"), Held(1, "eve"))
    assert await site.look() == [False, True]
    assert await site.look(0) == [False, False]
    assert counted["timer"] == before + 2


async def test_others_have_their_turn_between_two_slices() -> None:
    site = Site(*[Held(1, f"u{number}") for number in range(5 * SLICE)])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        await trio.lowlevel.checkpoint()
        await site.look()
        nursery.cancel_scope.cancel()
    assert turns >= 5


# What it means.


@pytest.mark.parametrize(
    ("allowed", "byte_count", "limit"),
    [(1 << 30, 0, FLOOR), (1 << 30, 8 << 20, 5 << 20), (100, 0, 100), (6 << 20, 16 << 20, 6 << 20)],
)
def test_what_is_restrained_may_hold_so_much(allowed: int, byte_count: int, limit: int) -> None:
    assert reduced_limit(allowed, byte_count) == limit


def test_a_restrained_queue_is_full_holds_its_publishers_then_refuses_and_lets_go() -> None:
    queue = Queue("q")
    body = bytes(FLOOR)
    assert publish(queue, [amqp(body)] * 4).held == []
    queue.restrain(True)
    queue.restrain(True)
    assert queue.full
    said = publish(queue, [amqp(body)])
    assert (said.outcomes, len(said.held), said.released) == ([ACCEPTED], 1, 0)
    assert publish(queue, [amqp(body)]).outcomes == [FULL]
    queue.restrain(False)
    queue.restrain(False)
    assert said.released == 1
    assert (queue.full, queue.bytes_max, queue.in_memory) == (False, 1 << 30, weight_of([amqp(body)] * 5))


def test_a_restrained_queue_lets_go_by_itself_when_it_is_drained() -> None:
    queue = Queue("q")
    publish(queue, [amqp(bytes(FLOOR))] * 4)
    queue.restrain(True)
    said = publish(queue, [amqp()])
    queue.add(Taker(100))
    assert said.released == 1
    assert publish(queue, [amqp()]).held == []


def test_an_emptied_and_deleted_queue_keeps_nobody_waiting() -> None:
    queue = Queue("q")
    publish(queue, [amqp(bytes(FLOOR))])
    queue.restrain(True)
    said = publish(queue, [amqp()])
    assert said.held
    queue.delete()
    assert said.released == 1
    queue.restrain(False)


def test_a_restrained_session_holds_publishers_and_lets_them_go() -> None:
    space = Space()
    session = space.session("c", "#")
    connected(session, receive_maximum=1)
    before = session.limits
    body = bytes(FLOOR)
    assert not space.give(*[mqtt(body=body)] * 4).held
    session.restrain(True)
    session.restrain(True)
    said = space.give(mqtt(body=body))
    assert (len(said.held), space.tally.queue_full) == (1, 0)
    session.restrain(False)
    session.restrain(False)
    assert said.released == 1
    assert session.limits is before
    assert not space.give(mqtt(body=body)).held


def test_a_restrained_session_of_an_absent_client_drops_the_newest() -> None:
    space = Space()
    session, other = space.session("c", "#"), space.session("other", "#")
    body = bytes(FLOOR)
    space.give(*[mqtt(body=body)] * 4)
    session.restrain(True)
    space.give(mqtt(body=body))
    assert (len(session), len(other), space.tally.queue_full) == (4, 5, 1)
    session.restrain(False)
    space.give(mqtt(body=body))
    assert (len(session), len(other)) == (5, 6)
