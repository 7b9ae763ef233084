"""Numbers of returns of the messages in a quorum queue, which the delivery limit applies to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.store.store import Store

DELIVERIES: Final = "queue_deliveries"  # a record for each message that was returned


class DeliveryCounts:
    """Number of returns of each message in one quorum queue, by position.

    They are stored if the queue is durable.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._store: Store | None = None
        self._key = ""

    def persist(self, store: Store, key: str, counts: Mapping[int, int], stored: range) -> None:
        """Restore recorded counts, and store changes from now on under keys that begin with `key`.

        Counts of positions that are not in `stored` are deleted, because new messages may get these
        positions.
        """
        self._store, self._key = store, key
        self._counts.update(counts)
        self.forget([position for position in counts if position not in stored])

    def __bool__(self) -> bool:
        return bool(self._counts)

    def of(self, position: int) -> int:
        """Return how often consumers have returned the message at `position`."""
        return self._counts.get(position, 0)

    def count(self, position: int) -> int:
        """Count one more return of the message at `position`. Return the new count."""
        found = self._counts[position] = self.of(position) + 1
        if self._store is not None:
            self._store.put(DELIVERIES, f"{self._key}{position}]", json.dumps(found).encode())
        return found

    def forget(self, positions: Iterable[int]) -> None:
        """Delete the counts of settled messages at these positions."""
        if not self._counts:
            return
        for position in positions:
            if self._counts.pop(position, None) is not None and self._store is not None:
                self._store.delete(DELIVERIES, f"{self._key}{position}]")

    def forget_from(self, first: int) -> None:
        """Delete the counts of all messages from position `first` on."""
        self.forget([position for position in self._counts if position >= first])

    def clear(self) -> None:
        """Delete all counts, because the queue is deleted."""
        self._counts.clear()
        if self._store is not None:
            self._store.delete_all(DELIVERIES, self._key)
