"""What keeps messages back that the disk is about to refuse.

A commit that fails is heard of message by message, and so is what had been handed in behind it: that is all
refused, too, and comes again in its order. Until the last of it has been heard of, whoever hands out what is
not on disk yet would hand out a later message before an earlier one that has just been taken from him.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.containment import contained


class Gate:
    """Shut from the first refusal that is heard of to the last of what was handed in before that."""

    __slots__ = ("_waiting", "shut")

    def __init__(self) -> None:
        self.shut = False
        self._waiting: dict[Callable[[], None], None] = {}

    def wait(self, then: Callable[[], None]) -> None:
        """It is shut: call `then`, once, when it opens."""
        self._waiting.setdefault(then)

    def close(self) -> None:
        """Refusals begin to be heard of."""
        self.shut = True

    def open(self) -> None:
        """All have been."""
        self.shut = False
        waiting, self._waiting = self._waiting, {}
        for then in waiting:
            try:
                then()
            except Exception as error:  # it is the business of one queue or session
                contained("store", error)
