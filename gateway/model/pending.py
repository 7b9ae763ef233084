"""Commands that cannot be completed yet, because a result that they need is pending.

A check or a lookup raises Pending when its result has to come from elsewhere: an authorizer, the cluster, the
disk. The caller that runs commands suspends them, waits, and runs the same command again, which then finds
the result. A listener does so with `ListenerSource.suspend`, and preserves the order of its client's
commands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

# Results for one command. If a cache dropped results at once, the command would otherwise wait for ever.
RESULTS_MAX: Final = 10_000


class Awaited(Protocol):
    """Object whose `wait` returns once a pending result is available, such as a `trio.Event`."""

    async def wait(self) -> None:
        """Wait until the result is available."""


class Superseded(Exception):
    """Signal that a command must not run here: another replica now has the client's session."""


class Pending(Exception):
    """Signal that a command needs a result that is not available yet.

    The caller waits for `awaited` and then runs the command again.
    """

    def __init__(self, awaited: Awaited) -> None:
        super().__init__(awaited)
        self.awaited = awaited


async def completed(command: Callable[[], None]) -> bool:
    """Run `command` again and again until it does not raise Pending, and then return True.

    After each Pending, wait for its result first. Return False if RESULTS_MAX runs have all raised Pending.
    """
    for _ in range(RESULTS_MAX):
        try:
            command()
        except Pending as pending:
            await pending.awaited.wait()
        else:
            return True
    return False
