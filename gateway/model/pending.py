"""Commands that cannot be done yet, because something that they need is not known.

A check or a lookup raises Pending when its result has to come from elsewhere: an authorizer, the cluster, the
disk. Whoever runs commands suspends them, waits, and runs the same command again, which then finds the
result. A listener does so with `ListenerSource.suspend`, and keeps the order of its client's commands.
"""

from __future__ import annotations

from typing import Protocol


class Awaited(Protocol):
    """A result that will be known, as `trio.Event` is one."""

    async def wait(self) -> None:
        """Return when it is known."""


class Pending(Exception):
    """A command needs a result that is not known: wait for `awaited`, and run the command again."""

    def __init__(self, awaited: Awaited) -> None:
        super().__init__(awaited)
        self.awaited = awaited
