"""Commands that cannot be completed yet, because a result that they need is pending.

A check or a lookup raises Pending when its result has to come from elsewhere: an authorizer, the cluster, the
disk. The caller that runs commands suspends them, waits, and runs the same command again, which then finds
the result. A listener does so with `ListenerSource.suspend`, and preserves the order of its client's
commands.
"""

from __future__ import annotations

from typing import Protocol


class Awaited(Protocol):
    """Result that will become available; a `trio.Event` is one."""

    async def wait(self) -> None:
        """Return once the result is available."""


class Superseded(Exception):
    """Signal that a command must not run: another owner has the client's session, and runs it there."""


class Pending(Exception):
    """Signal that a command needs a pending result: wait for `awaited`, then run the command again."""

    def __init__(self, awaited: Awaited) -> None:
        super().__init__(awaited)
        self.awaited = awaited
