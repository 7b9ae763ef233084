"""What a link took in and our own disk would not take: kept in order until it does.

Given back to the remote broker, these messages would come again behind those that were taken meanwhile. So
the link settles nothing of what arrives from then on either: it all waits here, as much as the broker sends
without an answer, and is sent on its way in the order in which it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class Held(Generic[R]):
    """The receipts of messages that wait for the disk; as long as there are some, `add` all that arrives.

    `order` tells which of two receipts came first, `healthy` whether the disk takes messages.
    """

    __slots__ = ("_healthy", "_order", "waiting")

    def __init__(self, order: Callable[[R], Any], healthy: Callable[[], bool]) -> None:
        self.waiting: list[R] = []  # always the same list
        self._order = order
        self._healthy = healthy

    def add(self, receipt: R) -> None:
        """A message was refused for the disk's sake, or came while others wait."""
        self.waiting.append(receipt)

    def take(self) -> list[R]:
        """Everything, in order, to be sent on its way once more; nothing as long as the disk fails."""
        if not self.waiting or not self._healthy():
            return []
        taken = sorted(self.waiting, key=self._order)
        self.waiting.clear()
        return taken

    def clear(self) -> None:
        """The connection that brought them is gone: they come again."""
        self.waiting.clear()
