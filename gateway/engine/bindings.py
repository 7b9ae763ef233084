"""Binding keys of this replica's queue: the union of its clients' topic filters, with reference counts.

The queue and its bindings outlive a lost connection. So the bindings that the broker has confirmed are
remembered, and only the difference is requested over the next connection: a broker needs half a minute for
ten thousand bindings.
"""

from __future__ import annotations

from collections.abc import Iterator

from gateway.broker.mqtt.system import SYS
from gateway.engine.names import binding_of


class Bindings:
    """Binding keys of the replica's queue, each with the number of subscriptions that need it.

    A key is confirmed once the broker has replied to its queue.bind. Filters that begin with `$SYS` are
    served by this replica alone and get no binding, nor do filters that match no topic that fits into a
    routing key.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._standing: set[str] = set()  # keys that the broker has confirmed

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, levels: list[str]) -> str | None:
        """Count a new subscription. `levels` are the levels of its filter.

        Return the key to bind if this is the first subscription that needs it, else None.
        """
        key = None if levels[0] == SYS else binding_of(levels)
        if key is None:
            return None
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return key if count == 1 else None

    def remove(self, levels: list[str]) -> str | None:
        """Stop counting a subscription that has ended. `levels` are the levels of its filter.

        Return the key to unbind if no other subscription needs it, else None.
        """
        key = None if levels[0] == SYS else binding_of(levels)
        if key is None:
            return None
        self._counts[key] -= 1
        if self._counts[key]:
            return None
        del self._counts[key]
        return key

    def set_bound(self, key: str, on: bool) -> None:
        """Record that the broker has confirmed the binding of `key` (`on` True) or its removal (False)."""
        if on:
            self._standing.add(key)
        else:
            self._standing.discard(key)

    def reset(self) -> None:
        """Forget the confirmed bindings, because the queue was declared again."""
        self._standing.clear()

    def pending_changes(self) -> Iterator[tuple[str, bool]]:
        """Yield the keys to request from the broker, each with True to bind or False to unbind it."""
        yield from [(key, True) for key in self._counts if key not in self._standing]
        yield from [(key, False) for key in self._standing if key not in self._counts]
