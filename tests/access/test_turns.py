"""Turns at hashing: who has fewer in the queue does not wait behind who has more."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from gateway.access.login_queue import LoginQueue, LoginQueueFull


class Line:
    """Everybody who came, and in which order they had their turn."""

    def __init__(self, turns: LoginQueue, nursery: trio.Nursery) -> None:
        self.served: list[str] = []
        self.crowded: list[str] = []
        self._turns = turns
        self._nursery = nursery

    async def come(self, who: str, *, trusted: bool = False) -> trio.CancelScope:
        """`who` is place/user/number, and has come when this returns."""
        scope = trio.CancelScope()
        self._nursery.start_soon(self._wait, scope, who, trusted)
        await trio.testing.wait_all_tasks_blocked()
        return scope

    async def _wait(self, scope: trio.CancelScope, who: str, trusted: bool) -> None:
        place, user, _ = who.split("/")
        with scope:
            try:
                await self._turns.acquire(place, user, trusted=trusted)
            except LoginQueueFull:
                self.crowded.append(who)
            else:
                self.served.append(who)

    async def serve(self, count: int) -> list[str]:
        """`count` turns later."""
        before = len(self.served)
        for _ in range(count):
            self._turns.release()
            await trio.testing.wait_all_tasks_blocked()
        return self.served[before:]


async def test_places_take_turns_and_at_a_place_its_users() -> None:
    turns = LoginQueue(1, 100)
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        for who in ("a/eve/1", "a/eve/2", "a/eve/3", "a/ann/4", "b/bob/5", "b/bob/6"):
            await line.come(who)
        assert await line.serve(6) == ["a/eve/1", "b/bob/5", "a/ann/4", "b/bob/6", "a/eve/2", "a/eve/3"]


async def test_a_thousand_of_one_place_delay_another_by_one() -> None:
    turns = LoginQueue(2, 2_000)
    await turns.acquire("x", "x")
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        for number in range(1_000):
            nursery.start_soon(line.come, f"a/eve{number}/1")
        await trio.testing.wait_all_tasks_blocked()
        await line.come("b/bob/1")
        assert "b/bob/1" in await line.serve(2)
        nursery.cancel_scope.cancel()


async def test_who_was_right_before_goes_first() -> None:
    turns = LoginQueue(1, 100)
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        await line.come("a/eve/1")
        await line.come("a/ann/2", trusted=True)
        assert await line.serve(2) == ["a/ann/2", "a/eve/1"]


async def test_a_full_queue_loses_the_last_of_whoever_has_most() -> None:
    turns = LoginQueue(1, 4)
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        for number in range(5):
            await line.come(f"a/eve/{number}")
        assert line.crowded == ["a/eve/4"]
        await line.come("a/ann/5")
        await line.come("b/bob/6")
        assert line.crowded[1:] == ["a/eve/3", "a/eve/2"]
        await line.come("c/joe/7", trusted=True)
        assert turns.waiting == 4
        assert await line.serve(4) == ["c/joe/7", "a/eve/0", "b/bob/6", "a/ann/5"]
        assert turns.waiting == 0


async def test_nobody_goes_for_somebody_who_has_as_many() -> None:
    turns = LoginQueue(1, 2)
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        for who in ("a/eve/1", "b/bob/1", "c/joe/1"):
            await line.come(who)
        assert line.crowded == ["c/joe/1"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("trusted", [False, True])
async def test_who_leaves_takes_nothing_along(trusted: bool) -> None:
    turns = LoginQueue(1, 100)
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        scopes = [await line.come(f"a/eve/{number}", trusted=trusted) for number in range(50)]
        for scope in scopes[:-1]:
            scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert turns.waiting == 1
        assert await line.serve(1) == ["a/eve/49"]


async def test_a_turn_that_comes_as_its_owner_leaves_goes_to_the_next() -> None:
    turns = LoginQueue(1, 100)
    await turns.acquire("x", "x")
    async with trio.open_nursery() as nursery:
        line = Line(turns, nursery)
        scope = await line.come("a/eve/1")
        await line.come("b/bob/1")
        scope.cancel()
        turns.release()  # before eve's task has run
        await trio.testing.wait_all_tasks_blocked()
        assert line.served in (["b/bob/1"], ["a/eve/1"])
        await line.serve(1)
        assert turns.waiting == 0
