"""Readiness of this process for traffic, with the reasons if it is not ready.

A condition, such as an open listener, is registered once, as not met; the part that provides it reports when
it is met or lost. Conditions that other parts know at any time (the store cannot be written, memory is short)
are checked at each request. Draining makes the process not ready, so that Kubernetes sends new connections
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

NOT_YET: Final = "not started"


class Readiness:
    """Conditions that must be met before the process is ready, such as open listeners and required links."""

    def __init__(self) -> None:
        self._missing: dict[str, str] = {}
        self._watched: dict[str, Callable[[], str]] = {}
        self._draining = False

    def require(self, condition: str) -> None:
        """Register a condition, such as `listener mqtt`, as required and not yet met."""
        self._missing[condition] = NOT_YET

    def mark_met(self, condition: str) -> None:
        """Record that `condition` is met."""
        self._missing.pop(condition, None)

    def mark_unmet(self, condition: str, reason: str) -> None:
        """Record that `condition` is not met, with the reason."""
        self._missing[condition] = reason

    def watch(self, condition: str, why_not: Callable[[], str]) -> None:
        """Register a condition that is checked by calling `why_not` whenever the reasons are requested.

        The condition is met if `why_not()` returns ""; any other text is the reason why it is not met.
        """
        self._watched[condition] = why_not

    def drain(self) -> None:
        """Make the process not ready from now on, because it is about to stop."""
        self._draining = True

    def reasons(self) -> list[str]:
        """Return the reasons why the process is not ready. The list is empty if the process is ready."""
        watched = {condition: reason for condition, ask in self._watched.items() if (reason := ask())}
        missing = sorted((self._missing | watched).items())
        found = [f"{condition}: {reason}" for condition, reason in missing]
        return ["draining", *found] if self._draining else found
