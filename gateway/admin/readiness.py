"""Whether this process should be sent traffic, and if not, why.

What the process needs is registered once, as not ready; whoever provides it says when it is there and when it
is gone. What is known elsewhere (the disk takes nothing, memory is short) is watched: asked for each time.
Draining makes the whole unready, so that Kubernetes sends new connections elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

NOT_YET: Final = "not started"


class Readiness:
    """The conditions that must hold: listeners open, required links up."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}
        self._watched: dict[str, Callable[[], str]] = {}
        self._draining = False

    def require(self, condition: str) -> None:
        """`condition` (such as `listener mqtt`) must be met; it is not yet."""
        self._missing[condition] = NOT_YET

    def met(self, condition: str) -> None:
        """`condition` holds now."""
        self._missing.pop(condition, None)

    def lost(self, condition: str, reason: str) -> None:
        """`condition` does not hold any more, or its first attempt failed."""
        self._missing[condition] = reason

    def watch(self, condition: str, why_not: Callable[[], str]) -> None:
        """`condition` is met as long as `why_not()` is empty; it is asked at each look."""
        self._watched[condition] = why_not

    def drain(self) -> None:
        """The process is about to stop."""
        self._draining = True

    def reasons(self) -> list[str]:
        """Why it is not ready; empty: it is."""
        watched = {condition: reason for condition, ask in self._watched.items() if (reason := ask())}
        missing = sorted((self._missing | watched).items())
        found = [f"{condition}: {reason}" for condition, reason in missing]
        return ["draining", *found] if self._draining else found
