"""Back-pressure: what is full tells its sources to stop reading, and calls them when it has room again."""

from __future__ import annotations

from collections.abc import Callable

from gateway.model.batch import Part
from gateway.model.outcome import Outcome, Reason, Verdict

FULL = Outcome(Verdict.RELEASED, Reason.QUOTA, "the queue is full")


class Pressure:
    """Remembers whom to call when a full queue has drained."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def hold_sources(self, part: Part) -> None:
        """Have the connections that published `part` stop reading until `relieve`."""
        senders = {message.sender for message in part.messages}
        self._waiting += part.batch.source.hold(senders)

    def relieve(self) -> None:
        """There is room again."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for release in waiting:
                release()

    def __bool__(self) -> bool:
        return bool(self._waiting)
