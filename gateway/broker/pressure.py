"""Back-pressure: what is full tells its sources to stop reading, and calls them when it has room again.

What our own disk would not take is `Held` by the source that cannot say so to its sender: a link, or a client
of an older MQTT. Given back to a remote broker, or tried again after a while, such messages would come behind
those that were taken meanwhile. So what arrives from then on is not sent on its way either: all of it waits,
as much as the sender sends without an answer, and goes in the order in which it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeVar

from gateway.model.batch import SubBatch
from gateway.model.outcome import Outcome, Reason, Verdict

FULL = Outcome(Verdict.RELEASED, Reason.QUOTA, "the queue is full")
PACE_SECS: Final = 0.01  # between two looks at how fast somebody takes what waits for him
SLOW_SECS: Final = 0.05  # who takes longer for the least that may wait is slow
DEEP_SECS: Final = 1.0  # what takes longer than that to take is a store, and no delay
FLOOR: Final = 65_536  # octets that whoever is restrained may hold in any case
R = TypeVar("R")
MayHold = Callable[[str | None], bool]
"""Return True if a full queue or session of this user may make publishers wait, or have their messages
refused. None stands for the operator, who declared it in the configuration."""


def everybody_may_hold(user: str | None) -> bool:
    """Return True: no roles are configured."""
    return True


class FullQueues:
    """Rights and counters of full queues, shared by all queues of a gateway."""

    __slots__ = ("dropped", "may_hold", "refused")

    def __init__(self, may_hold: MayHold = everybody_may_hold) -> None:
        self.may_hold = may_hold
        self.refused = 0  # messages whose publisher was told that the queue is full
        self.dropped = 0  # copies that a queue lost which may not hold its publishers


def lowered(allowed: int, octets: int) -> int:
    """The limit, until its owner has less, of what may hold `allowed` octets and holds `octets`: it is full.
    Whoever cannot be stopped is refused when there is a quarter more, for that is at twice the limit.
    """
    return min(allowed, max(octets * 5 // 8, FLOOR))


def hold_sources(part: SubBatch) -> list[Callable[[], None]]:
    """Have the connections that published `part` stop reading; returns what lets each go on."""
    return part.batch.source.hold({message.sender for message in part.messages})


class Pressure:
    """Remembers whom to call when a full queue has drained."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def hold_sources(self, part: SubBatch) -> None:
        """Have the connections that published `part` stop reading until `relieve`."""
        self._waiting += hold_sources(part)

    def relieve(self) -> None:
        """There is room again."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for release in waiting:
                release()

    def __bool__(self) -> bool:
        return bool(self._waiting)


class Pace:
    """How fast somebody takes what waits for him, and whether more should come: what is behind others waits
    until they have been taken, so publishers that are faster than he fill the whole queue, and every message
    waits for all of it. They are held while what waits takes longer than `delay_secs`.

    Who is slow, or has been away and has more before him than he takes in DEEP_SECS, has a queue to be late
    in, and publishers do not pay for that.
    """

    __slots__ = ("_at", "_before", "_delay_secs", "_least", "_per_sec", "on", "taken")

    def __init__(self, delay_secs: float, least: int, now: float) -> None:
        """So many messages may wait in any case, whatever the delay. `now`: seconds of any clock, always of
        the same one."""
        self.on = False  # publishers are held
        self.taken = 0  # messages; whoever hands them out counts
        self._delay_secs = delay_secs
        self._least = least
        self._per_sec = 0.0
        self._before = 0
        self._at = now

    def behind(self, waiting: int, now: float) -> bool:
        """Whether publishers should wait for him, or as long as they do, go on to wait."""
        elapsed = now - self._at
        if elapsed >= PACE_SECS:
            per_sec = (self.taken - self._before) / elapsed
            self._per_sec = (self._per_sec + per_sec) / 2 if self._per_sec else per_sec
            self._before = self.taken
            self._at = now
        most = max(self._per_sec * self._delay_secs, self._least)
        if self._least > self._per_sec * SLOW_SECS or waiting > self._per_sec * DEEP_SECS:
            return False
        return waiting > (most / 2 if self.on else most)


class Held(Generic[R]):
    """The receipts of one source that wait for the disk. As long as `on`, all that arrives goes `behind`."""

    __slots__ = ("_behind", "_healthy", "_refused", "on")

    def __init__(self, healthy: Callable[[], bool]) -> None:
        """`healthy`: whether the disk takes messages."""
        self.on = False
        self._healthy = healthy
        self._refused: list[R] = []
        self._behind: list[R] = []

    def refused(self, receipt: R) -> None:
        """The disk did not take a message. A source hears of its refusals in its messages' order."""
        self._refused.append(receipt)
        self.on = True

    def behind(self, receipt: R) -> None:
        """A message came while others wait."""
        self._behind.append(receipt)

    def due(self) -> list[R]:
        """All of them, in order, to be sent on their way once more; none as long as the disk fails."""
        return self.give_up() if self.on and self._healthy() else []

    def give_up(self) -> list[R]:
        """All of them: nobody waits any more, or their sender sends them again by itself."""
        taken = self._refused + self._behind
        self.on = False
        self._refused, self._behind = [], []
        return taken
