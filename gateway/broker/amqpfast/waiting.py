"""What is not known yet, and has to be waited for: where destinations are on a cluster, it answers later."""

from __future__ import annotations

from typing import Protocol


class Awaited(Protocol):
    """Something that will be known."""

    async def ask(self) -> None:
        """Wait for it."""


class NotKnown(Exception):
    """A command cannot be done yet: `ask`, and do it again."""

    def __init__(self, awaited: Awaited) -> None:
        super().__init__(awaited)
        self._awaited = awaited

    async def ask(self) -> None:
        """Wait until it can."""
        await self._awaited.ask()
