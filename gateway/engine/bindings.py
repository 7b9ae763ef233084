"""Which topics this replica's queue is bound to: the union of its clients' filters, each counted."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.broker.mqtt.system import SYS
from gateway.engine.names import binding_of


class Bindings:
    """Binding keys, and how many subscriptions ask for each.

    What begins with `$SYS` is this replica's own, and what cannot match any topic that fits into a key is not
    asked for.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def add(self, levels: list[str]) -> str | None:
        """Another subscription; returns the key to bind, None if there is nothing to do."""
        key = None if levels[0] == SYS else binding_of(levels)
        if key is None:
            return None
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return key if count == 1 else None

    def remove(self, levels: list[str]) -> str | None:
        """A subscription less; returns the key to unbind, None if others need it still."""
        key = None if levels[0] == SYS else binding_of(levels)
        if key is None:
            return None
        self._counts[key] -= 1
        if self._counts[key]:
            return None
        del self._counts[key]
        return key
