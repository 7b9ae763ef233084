"""Which topics this replica's queue is bound to: the union of its clients' filters, each counted.

The queue outlives a lost connection, and its bindings with it. So what the broker has confirmed stands, and
only the difference is asked for over the next connection: ten thousand bindings take a broker half a minute.
"""

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
        self._standing: set[str] = set()  # that the broker has confirmed

    def __len__(self) -> int:
        return len(self._counts)

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

    def stands(self, key: str, on: bool) -> None:
        """The broker has bound a key, or unbound it."""
        if on:
            self._standing.add(key)
        else:
            self._standing.discard(key)

    def anew(self) -> None:
        """The queue is another one."""
        self._standing.clear()

    def lacking(self) -> Iterator[tuple[str, bool]]:
        """Keys that have to be bound, or unbound (False)."""
        yield from [(key, True) for key in self._counts if key not in self._standing]
        yield from [(key, False) for key in self._standing if key not in self._counts]
