"""How much memory the process has, and who has to wait when it is nearly used up.

Every holder has limits of its own; this one is on their sum, and on all that nobody counts. Above the *mark*
memory is `short`: a connection that publishes is not read from its first publish on, and links give back what
they are brought, until consumers have made room. Whoever only consumes notices nothing. A connection that
must not be stopped, for its client consumes, too, and has to acknowledge, goes on; above the second mark,
`scarce`, what it publishes is refused.

A message that has only begun, or is not committed, can be consumed by nobody. Whoever has much of that counts
as a publisher, and is let go when memory stays short: else a few clients that stop in the middle could keep
it short for ever.

What counts is what the system says that the process occupies, not what is believed to be held: that is read
several times a second and, as much can come in between, once in some wake-ups. It goes down again with what
was freed only if the allocator gives that back, so it is asked to as long as memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import trio

from gateway.containment import contained
from gateway.model.outcome import Outcome, Reason, Verdict

TICK_SECS: Final = 0.25
TURNS: Final = 16  # wake-ups between two readings: each has read a mebibyte at the most
LOW: Final = 0.95  # of the mark: below it publishers go on
SCARCE: Final = 4 / 3  # of the mark: with the mark at six tenths of all there is, eight tenths
TRIM_SECS: Final = 1.0
TRIM_SECS_MAX: Final = 4.0  # with a gibibyte in holes it takes half a second: less often when it is of no use
BEGUN_OCTETS_MAX: Final = 65_536  # of one connection, that do not make it a publisher
BEGUN_SECS: Final = 10.0  # of shortage, that it may take to finish: it is not read
RISE: Final = 1 / 64  # of the mark: after so much more something is looked for before the tick
LOW_ON_MEMORY: Final = Outcome(Verdict.RELEASED, Reason.QUOTA, "the gateway is low on memory")


class Publisher(Protocol):
    """A connection whose client publishes."""

    def hold(self) -> Callable[[], None] | None:
        """Stop reading; returns what undoes it, None when this must not be stopped."""

    def told_of_memory(self, short: bool) -> None:
        """It is to wait, or may go on: say so if the protocol has a word for it."""

    @property
    def begun(self) -> int:
        """Octets of messages that have not come whole, or are not committed."""

    def let_go_for_memory(self) -> None:
        """End it: there is no memory for what it has begun."""


class Memory:
    """The watermark of one process. `mark` in octets; `resident` reads what is used, 0 if nobody knows.

    `trim` has the allocator return what is free. `changed` hears when memory gets short, and when not.
    `connections` are all that may publish.
    """

    __slots__ = (
        "_resident",
        "_risen",
        "_rising",
        "_seen",
        "_since",
        "_stopped",
        "_trim",
        "_trim_at",
        "_trim_wait",
        "_turns",
        "changed",
        "connections",
        "mark",
        "refused",
        "scarce",
        "short",
        "used",
    )

    def __init__(
        self,
        mark: int,
        resident: Callable[[], int],
        *,
        trim: Callable[[], None] | None = None,
        changed: Callable[[bool], None] | None = None,
        connections: Callable[[], Iterable[Publisher]] = list,
    ) -> None:
        self.mark = mark
        self.used = 0
        self.short = False
        self.scarce = False
        self.refused = 0  # messages
        self.changed = changed
        self.connections = connections
        self._seen = 0  # octets in use when those that have begun were last looked for
        self._risen = 0  # the least since it was said that they rise
        self._rising: Callable[[], None] | None = None
        self._since: float | None = None  # that it has been short
        self._resident = resident
        self._trim = trim
        self._trim_at = 0.0
        self._trim_wait = TRIM_SECS
        self._turns = 0
        self._stopped: dict[Publisher, Callable[[], None] | None] = {}

    def tell_rising(self, told: Callable[[], None]) -> None:
        """Call `told` whenever a section `RISE` of the mark more is used than when it was called last."""
        self._rising = told

    # What publishing connections ask, while memory is short.

    def admits(self, publisher: Publisher, count: int) -> bool:
        """It brings `count` messages: stop it, if it may be. False: they have to be refused."""
        release = self._stopped.get(publisher)
        if release is None:
            known = publisher in self._stopped
            release = self._stopped[publisher] = publisher.hold()
            if not known:
                publisher.told_of_memory(True)
        if release is None and self.scarce:
            self.refused += count
            return False
        return True

    def forget(self, publisher: Publisher) -> None:
        """It is no more."""
        self._stopped.pop(publisher, None)

    # Readings.

    def turned(self) -> None:
        """A wake-up ends."""
        self._turns += 1
        if self._turns >= TURNS:
            self.look()

    def look(self) -> None:
        """Read what is used, and do what follows from it."""
        self._turns = 0
        self.used = used = self._resident()
        self.scarce = used > self.mark * SCARCE
        if used < self._risen:
            self._risen = used
        elif used > self._risen + self.mark * RISE:
            self._risen = used
            if self._rising is not None:
                self._rising()
        if not self.short:
            if used > self.mark:
                self.short = True
                self._tell()
                self._stop_begun()
        elif used < self.mark * LOW:
            self.short = False
            self._since = None
            self._tell()
            self._go_on()
        elif used > self._seen + self.mark * RISE:
            self._stop_begun()

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed(self.short)

    def _go_on(self) -> None:
        stopped, self._stopped = self._stopped, {}
        for publisher, release in stopped.items():
            try:
                if release is not None:
                    release()
                publisher.told_of_memory(False)
            except Exception as error:
                contained("connection", error)

    def _stop_begun(self, *, late: bool = False) -> None:
        """Stop whoever has begun much; `late`: let it go."""
        self._seen = self.used
        for publisher in list(self.connections()):
            if publisher.begun > BEGUN_OCTETS_MAX and (not self.admits(publisher, 0) or late):
                publisher.let_go_for_memory()

    def tick(self, now: float) -> None:
        """Several times a second."""
        if self.short and self._trim is not None and now >= self._trim_at:
            self._return_free(self._trim, now)
        self.look()
        if self.short:
            if self._since is None:
                self._since = now
            self._stop_begun(late=now - self._since >= BEGUN_SECS)

    def _return_free(self, trim: Callable[[], None], now: float) -> None:
        """What is free goes back to the system; when that was hardly anything, next time is later."""
        before = self._resident()
        trim()
        useful = before - self._resident() > self.mark * RISE
        self._trim_wait = TRIM_SECS if useful else min(2 * self._trim_wait, TRIM_SECS_MAX)
        self._trim_at = now + self._trim_wait

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Its share of the broker's gauges."""
        return {
            "gateway_memory_blocked": lambda: self.short,
            "gateway_memory_bytes": self._resident,
            "gateway_memory_limit_bytes": lambda: self.mark,
        }

    async def run(self, flush: Callable[[], None]) -> None:
        """Tick until cancelled; `flush` writes what came of it."""
        while True:
            await trio.sleep(TICK_SECS)
            try:
                self.tick(trio.current_time())
            except Exception as error:
                contained("timer", error)
            flush()


def plenty() -> Memory:
    """Of a process that nobody watches."""
    return Memory(1 << 62, lambda: 0)
