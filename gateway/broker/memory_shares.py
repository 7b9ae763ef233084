"""Whose messages occupy the memory, and who has to wait before everybody does.

Above the mark of memory.py all who publish wait. Well below it already, whoever holds more than a share of
the mark is restrained, so that one user or address alone does not bring the others to that. What counts is
what waits in memory in somebody's queues and sessions, and what somebody's clients have not acknowledged:
whoever published it may be another. Restrained, a durable queue or session leaves what comes on disk; any
other is full with about what it holds, in the words and by the policy of a full one.

There may be a hundred thousand holders. They are looked at in slices, and not at all while there is plenty.
Several times a second, and as soon as much has come: in a quarter of a second a fast publisher could fill
what is between here and the mark, above which nothing restrains him alone any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, Protocol

import trio

from gateway.access.places import LOOPBACK
from gateway.broker.memory import TICK_SECS, Memory
from gateway.containment import contained

NEAR: Final = 0.75  # of the mark: the rest is for what comes until somebody looks, and for the others
FAR: Final = 0.7  # below it nobody is restrained
LESS: Final = 0.95  # of its share: below it a holder is restrained no longer
SLICE: Final = 500  # holders that are looked at in one go: some milliseconds


class Holder(Protocol):
    """A queue or a session."""

    def restrain(self, on: bool) -> None:
        """It may hold no more than it does; or as much as ever. A repeated call is ignored."""


Owner = tuple[Literal["user", "address"], str]
Claim = tuple[Holder | None, int, str, str]
"""What holds messages, if that can be restrained; octets in memory; whose: user and place, "" if nobody's."""


class MemoryShares:
    """`claims` are all there are; the shares are parts of the mark."""

    def __init__(
        self,
        memory: Memory,
        claims: Callable[[], Iterator[Claim]],
        *,
        per_user: float,
        per_address: float,
    ) -> None:
        self.over: set[Owner] = set()
        self._memory = memory
        self._claims = claims
        self._shares = {"user": per_user, "address": per_address}
        self._restrained: dict[Holder, None] = {}
        self._near = False
        self._rise = trio.Event()
        memory.tell_rising(self._look_soon)

    def _look_soon(self) -> None:
        self._rise.set()

    async def look(self) -> None:
        """Find out who holds too much, and act on it."""
        memory = self._memory
        self._near = memory.used > memory.mark * (FAR if self._near else NEAR)
        held: dict[Owner, int] = {}

        def count(holder: Holder | None, octets: int, owners: list[Owner]) -> None:
            for owner in owners:
                held[owner] = held.get(owner, 0) + octets

        if self._near:
            await self._each(count)
        self.over = {owner for owner, octets in held.items() if octets > self._most(owner)}
        wanted: set[Holder] = set()

        def restrain(holder: Holder | None, octets: int, owners: list[Owner]) -> None:
            if holder is not None and not self.over.isdisjoint(owners):
                wanted.add(holder)
                self._restrained[holder] = None
                _act(holder, on=True)

        if self.over:
            await self._each(restrain)
        for number, holder in enumerate([one for one in self._restrained if one not in wanted], 1):
            del self._restrained[holder]
            _act(holder, on=False)
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()

    def _most(self, owner: Owner) -> float:
        most = self._memory.mark * self._shares[owner[0]]
        return most * LESS if owner in self.over else most

    async def _each(self, act: Callable[[Holder | None, int, list[Owner]], None]) -> None:
        for number, (holder, octets, user, place) in enumerate(self._claims(), 1):
            owners: list[Owner] = [("user", user)] if user else []
            if place and place != LOOPBACK:
                owners.append(("address", place))
            act(holder, octets, owners)
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {"gateway_memory_shares_full": lambda: len(self.over)}

    async def run(self, flush: Callable[[], None]) -> None:
        """Look several times a second, and when memory rises, until cancelled; `flush` writes what came of
        it.
        """
        while True:
            with trio.move_on_after(TICK_SECS):
                await self._rise.wait()
            self._rise = trio.Event()
            try:
                await self.look()
            except Exception as error:
                contained("timer", error)
            flush()


def _act(holder: Holder, *, on: bool) -> None:
    try:
        holder.restrain(on)
    except Exception as error:  # of whoever is let go on by it; the other holders are seen to
        contained("timer", error)
