"""Gate that holds messages back while the refusals after a failed commit are being reported.

A failed commit is reported for each append. Everything that is appended after it is refused as well, and
redelivered in its order. A queue that delivers messages before they are on disk must wait until the last
refusal is reported. Otherwise it would deliver a later message before an earlier one that was just refused.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.containment import contained


class Gate:
    """Gate that holds messages back while a failed commit is being reported to the sources.

    It is shut from the first refusal until all messages are refused that were appended before the event loop
    got to know the failure.
    """

    __slots__ = ("_waiting", "shut")

    def __init__(self) -> None:
        self.shut = False
        self._waiting: dict[Callable[[], None], None] = {}

    def wait(self, then: Callable[[], None]) -> None:
        """Call `then` once when the gate opens. May only be called while the gate is shut."""
        self._waiting.setdefault(then)

    def close(self) -> None:
        """Shut the gate, because the first refusal is about to be reported."""
        self.shut = True

    def open(self) -> None:
        """Open the gate, because all refusals are reported. Call the functions that `wait` got."""
        self.shut = False
        waiting, self._waiting = self._waiting, {}
        for then in waiting:
            try:
                then()
            except Exception as error:  # a failure of one queue or session alone
                contained("store", error)
