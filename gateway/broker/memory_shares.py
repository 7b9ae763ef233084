"""Memory limits of each user and address, which apply before memory is short for all.

Above the watermark of memory.py all publishers wait. Well below it, an owner (user or address) that occupies
more than its part of the watermark is restrained: the memory that it occupies may hardly grow. So one owner
alone does not affect the others. These bytes count: messages that wait in memory in the owner's queues and
sessions, and those that its clients have not acknowledged, from all publishers; messages that its clients
have published in transactions that are not committed, or have not sent completely; and entries that are
cached for one client alone. A restrained durable queue or session leaves new messages on disk; any other
counts as full at about its present size, and behaves as a full one does; a transaction may be committed, but
not grow; a cache is cleared; a connection with more than BEGUN_BYTES_MAX of an incomplete message is closed.

There may be a hundred thousand holders. They are examined in slices, and not at all while there is plenty of
memory. This happens several times a second, and as soon as memory use has risen: in a quarter of a second a
fast publisher could fill the space up to the watermark, above which nothing restrains that publisher alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, Protocol

import trio

from gateway.access.places import LOOPBACK
from gateway.broker.memory import TICK_SECS, HeldPublisher, Memory
from gateway.containment import contained

NEAR: Final = 0.75  # of the watermark: the rest is for what arrives until the next check, and for the others
FAR: Final = 0.7  # below it no owner is restrained
LESS: Final = 0.95  # of its share: below it an owner is no longer restrained
SLICE: Final = 500  # holders examined at once, which takes some milliseconds
BEYOND_SHARE: Final = (
    "memory is short, and limits.memory_per_user_share or limits.memory_per_address_share is reached"
)


class Holder(Protocol):
    """Object that occupies memory for one or more owners: a queue, session, transaction or cache.

    An owner is a user or an address.
    """

    def restrain(self, on: bool) -> None:
        """Prevent the holder from growing, because its owner occupies too much memory (`on`), or end that.

        A repeated call has no effect.
        """


class IncompleteMessages(NamedTuple):
    """Incomplete messages of one connection. Only the end of the connection frees their memory."""

    publisher: HeldPublisher

    def restrain(self, on: bool) -> None:
        """Close the connection if `on`, because its owner occupies too much memory."""
        if on:
            self.publisher.close_for_memory()


class CachingClient(Protocol):
    """Connection for whose client alone routing entries are cached."""

    def forget_entries(self) -> None:
        """Drop the routing entries that are cached for the client."""


class CachedEntries(NamedTuple):
    """Routing entries that are cached for one connection alone."""

    client: CachingClient

    def restrain(self, on: bool) -> None:
        """Drop the entries if `on`, because their owner occupies too much memory."""
        if on:
            self.client.forget_entries()


Owner = tuple[Literal["user", "address"], str]
Claim = tuple[Holder | None, int, str, str]
"""Memory of a holder: the holder if it can be restrained, bytes, user and address ("" if none)."""


class MemoryShares:
    """Limits of the memory that one user or one address may occupy, as fractions of the memory watermark.

    `claims` yields (holder, bytes, user, address) for all holders of messages and caches. The growth of
    holders is stopped while their user or address exceeds its limit.
    """

    def __init__(
        self,
        memory: Memory,
        claims: Callable[[], Iterator[Claim]],
        *,
        per_user: float,
        per_address: float,
    ) -> None:
        self.owners_over_share: set[Owner] = set()
        self._memory = memory
        self._claims = claims
        self._shares = {"user": per_user, "address": per_address}
        self._restrained: dict[Holder, None] = {}
        self._near = False
        self._rise = trio.Event()
        memory.set_rise_callback(self._wake)

    def _wake(self) -> None:
        self._rise.set()

    async def enforce(self) -> None:
        """Find the users and addresses that occupy too much memory, and restrain their holders.

        Restraints end for holders whose owners no longer occupy too much.
        """
        memory = self._memory
        self._near = memory.used > memory.watermark * (FAR if self._near else NEAR)
        held_bytes: dict[Owner, int] = {}

        def count(holder: Holder | None, byte_count: int, owners: list[Owner]) -> None:
            for owner in owners:
                held_bytes[owner] = held_bytes.get(owner, 0) + byte_count

        if self._near:
            await self._for_each_claim(count)
        self.owners_over_share = {
            owner for owner, byte_count in held_bytes.items() if byte_count > self._bytes_max(owner)
        }
        to_restrain: set[Holder] = set()

        def restrain(holder: Holder | None, byte_count: int, owners: list[Owner]) -> None:
            if holder is not None and not self.owners_over_share.isdisjoint(owners):
                to_restrain.add(holder)
                self._restrained[holder] = None
                _restrain(holder, on=True)

        if self.owners_over_share:
            await self._for_each_claim(restrain)
        for number, holder in enumerate([one for one in self._restrained if one not in to_restrain], 1):
            del self._restrained[holder]
            _restrain(holder, on=False)
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()

    def _bytes_max(self, owner: Owner) -> float:
        most = self._memory.watermark * self._shares[owner[0]]
        return most * LESS if owner in self.owners_over_share else most

    async def _for_each_claim(self, act: Callable[[Holder | None, int, list[Owner]], None]) -> None:
        for number, (holder, byte_count, user, place) in enumerate(self._claims(), 1):
            owners: list[Owner] = [("user", user)] if user else []
            if place and place != LOOPBACK:
                owners.append(("address", place))
            act(holder, byte_count, owners)
            if number % SLICE == 0:
                await trio.lowlevel.checkpoint()

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return functions that read the number of users and addresses beyond their limit, by metric name."""
        return {"gateway_memory_shares_full": lambda: len(self.owners_over_share)}

    async def run(self, flush: Callable[[], None]) -> None:
        """Enforce the limits several times a second and when memory use rises, until cancelled.

        `flush` is called afterwards to write the results.
        """
        while True:
            with trio.move_on_after(TICK_SECS):
                await self._rise.wait()
            self._rise = trio.Event()
            try:
                await self.enforce()
            except Exception as error:
                contained("timer", error)
            flush()


def _restrain(holder: Holder, *, on: bool) -> None:
    try:
        holder.restrain(on)
    except Exception as error:  # a failure of one holder alone; the others are processed
        contained("timer", error)
