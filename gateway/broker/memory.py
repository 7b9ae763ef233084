"""Memory use of the process, and the connections that must wait when memory is nearly used up.

Every holder has its own limits; this limit is on their sum and on everything that is not counted. Above the
watermark memory is `short`: a publishing connection is not read any more after its next publish, and links
requeue what they receive, until consumers have made space. Connections that only consume are not affected. A
connection that must not be paused, because its client also consumes and has to acknowledge, continues; above
the second watermark (`is_scarce`) its messages are refused. A message that is incomplete or not committed
cannot be consumed, so a connection with many such bytes counts as a publisher, and is closed if memory stays
short. Otherwise a few clients that stop halfway could keep memory short forever.

The watermark applies to the memory use that the operating system reports for the process, not to an estimate.
The memory use is read several times a second and also after some passes of the event loop, since many
messages can arrive in between. It only falls when the allocator returns freed memory, which is requested
while memory is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import trio

from gateway import clock
from gateway.containment import contained
from gateway.model.outcome import Outcome, Reason, Verdict

TICK_SECS: Final = 0.25
TURNS: Final = 16  # passes between two readings; each has read 1 MiB at most
LOW: Final = 0.95  # of the watermark: below it publishers resume
SCARCE: Final = 4 / 3  # of the watermark: 80 % of all memory if the watermark is 60 %
TRIM_SECS: Final = 1.0
# With 1 GiB in holes it takes half a second, so it is tried less often if it is of no use.
TRIM_SECS_MAX: Final = 4.0
BEGUN_BYTES_MAX: Final = 65_536  # of one connection, that do not make it a publisher
BEGUN_SECS: Final = 10.0  # of shortage that a paused connection may have incomplete messages
RISE: Final = 1 / 64  # of the watermark: a check before the next tick after such an increase
LOW_ON_MEMORY: Final = Outcome(Verdict.RELEASED, Reason.QUOTA, "the gateway is low on memory")


class HeldPublisher(Protocol):
    """Connection that publishes, as Memory uses it."""

    def hold(self) -> Callable[[], None] | None:
        """Stop reading from the connection, and return a function that resumes it.

        Returns None if the connection must not be paused.
        """

    def notify_memory(self, short: bool) -> None:
        """Inform the client that it must wait (`short`) or may continue, if the protocol allows that."""

    @property
    def begun_bytes(self) -> int:
        """Size in bytes of the connection's messages that are incomplete or not committed."""

    def close_for_memory(self) -> None:
        """Close the connection, because there is no memory for its incomplete messages."""


class Memory:
    """Memory use of one process and its watermark.

    `watermark` is the watermark in bytes. `resident` returns the used bytes, 0 if unknown. `trim` makes the
    allocator return free memory. `changed` is called with True when memory gets short and with False when it
    no longer is. `connections` returns all connections that may publish.
    """

    __slots__ = (
        "_checked_bytes",
        "_resident",
        "_risen",
        "_rising",
        "_shortage_start",
        "_stopped",
        "_trim",
        "_trim_at",
        "_trim_wait",
        "_turns",
        "changed",
        "connections",
        "is_scarce",
        "refused",
        "short",
        "used",
        "watermark",
    )

    def __init__(
        self,
        watermark: int,
        resident: Callable[[], int],
        *,
        trim: Callable[[], None] | None = None,
        changed: Callable[[bool], None] | None = None,
        connections: Callable[[], Iterable[HeldPublisher]] = list,
    ) -> None:
        self.watermark = watermark
        self.used = 0
        self.short = False
        self.is_scarce = False
        self.refused = 0  # messages
        self.changed = changed
        self.connections = connections
        self._checked_bytes = 0  # used bytes at the last check for incomplete messages
        self._risen = 0  # lowest use since the last report of a rise
        self._rising: Callable[[], None] | None = None
        self._shortage_start: float | None = None  # since when it has been short
        self._resident = resident
        self._trim = trim
        self._trim_at = 0.0
        self._trim_wait = TRIM_SECS
        self._turns = 0
        self._stopped: dict[HeldPublisher, Callable[[], None] | None] = {}

    def set_rise_callback(self, on_rise: Callable[[], None]) -> None:
        """Set the function to call when memory use has risen by the fraction RISE of the watermark.

        The rise is counted from the lowest use since the last call.
        """
        self._rising = on_rise

    # For publishing connections, while memory is short.

    def admit(self, publisher: HeldPublisher, count: int) -> bool:
        """Pause a connection that publishes `count` messages while memory is short.

        Return False if the messages must be refused, because it cannot be paused and memory is scarce.
        """
        release = self._stopped.get(publisher)
        if release is None:
            is_stopped = publisher in self._stopped
            release = self._stopped[publisher] = publisher.hold()
            if not is_stopped:
                publisher.notify_memory(True)
        if release is None and self.is_scarce:
            self.refused += count
            return False
        return True

    def forget(self, publisher: HeldPublisher) -> None:
        """Remove a closed connection from those that are paused."""
        self._stopped.pop(publisher, None)

    # Readings.

    def count_turn(self) -> None:
        """Count a pass of the event loop, and measure memory use after every TURNS passes."""
        self._turns += 1
        if self._turns >= TURNS:
            self.measure()

    def measure(self) -> None:
        """Read the memory use, and set `short` and `is_scarce`.

        When memory is no longer short, paused connections resume.
        """
        self._turns = 0
        self.used = used = self._resident()
        self.is_scarce = used > self.watermark * SCARCE
        if used < self._risen:
            self._risen = used
        elif used > self._risen + self.watermark * RISE:
            self._risen = used
            if self._rising is not None:
                self._rising()
        if not self.short:
            if used > self.watermark:
                self.short = True
                self._notify_change()
                self._hold_begun()
        elif used < self.watermark * LOW:
            self.short = False
            self._shortage_start = None
            self._notify_change()
            self._resume_publishers()
        elif used > self._checked_bytes + self.watermark * RISE:
            self._hold_begun()

    def _notify_change(self) -> None:
        if self.changed is not None:
            self.changed(self.short)

    def _resume_publishers(self) -> None:
        stopped, self._stopped = self._stopped, {}
        for publisher, release in stopped.items():
            try:
                if release is not None:
                    release()
                publisher.notify_memory(False)
            except Exception as error:
                contained("connection", error)

    def _hold_begun(self, *, close: bool = False) -> None:
        """Pause the connections that have many bytes of incomplete messages.

        With `close`, or if memory is scarce and a connection cannot be paused, the connection is closed.
        """
        self._checked_bytes = self.used
        for publisher in list(self.connections()):
            if publisher.begun_bytes > BEGUN_BYTES_MAX and (not self.admit(publisher, 0) or close):
                publisher.close_for_memory()

    def tick(self, now: float) -> None:
        """Measure memory use; while it is short, return free memory and pause or close connections.

        Called several times a second with `now` in loop-clock seconds.
        """
        if self.short and self._trim is not None and now >= self._trim_at:
            self._return_free(self._trim, now)
        self.measure()
        if self.short:
            if self._shortage_start is None:
                self._shortage_start = now
            self._hold_begun(close=now - self._shortage_start >= BEGUN_SECS)

    def _return_free(self, trim: Callable[[], None], now: float) -> None:
        """Return free memory to the operating system, and set the time of the next attempt.

        If the attempt freed little, the next one is later.
        """
        before = self._resident()
        trim()
        useful = before - self._resident() > self.watermark * RISE
        self._trim_wait = TRIM_SECS if useful else min(2 * self._trim_wait, TRIM_SECS_MAX)
        self._trim_at = now + self._trim_wait

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return functions that read the memory gauges, by metric name."""
        return {
            "gateway_memory_blocked": lambda: self.short,
            "gateway_memory_bytes": self._resident,
            "gateway_memory_limit_bytes": lambda: self.watermark,
        }

    async def run(self, flush: Callable[[], None]) -> None:
        """Call `tick` several times a second until cancelled, and `flush` after it to write results."""
        while True:
            await trio.sleep(TICK_SECS)
            try:
                self.tick(clock.now())
            except Exception as error:
                contained("timer", error)
            flush()


def unlimited_memory() -> Memory:
    """Return a Memory for a process without a memory limit, which is never short."""
    return Memory(1 << 62, lambda: 0)
