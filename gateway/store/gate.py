"""Gate that holds messages back while a failed commit is being reported.

A failed commit is reported message by message, and everything handed in after it is refused, too, and
redelivered in its order. A queue that delivers messages before they are on disk must wait until the last
refusal is reported. Otherwise it would deliver a later message before an earlier one that was just refused.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.containment import contained


class Gate:
    """Gate that is shut from the first reported refusal to the last of what was handed in before it."""

    __slots__ = ("_waiting", "shut")

    def __init__(self) -> None:
        self.shut = False
        self._waiting: dict[Callable[[], None], None] = {}

    def wait(self, then: Callable[[], None]) -> None:
        """Call `then` once when the gate opens. May only be called while it is shut."""
        self._waiting.setdefault(then)

    def close(self) -> None:
        """Shut the gate, because refusals begin to be reported."""
        self.shut = True

    def open(self) -> None:
        """Open the gate, because all refusals are reported, and call the waiting callbacks."""
        self.shut = False
        waiting, self._waiting = self._waiting, {}
        for then in waiting:
            try:
                then()
            except Exception as error:  # a failure of one queue or session alone
                contained("store", error)
