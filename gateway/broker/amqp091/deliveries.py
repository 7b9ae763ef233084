"""How often messages of a quorum queue have come back, by position: recorded, if the queue is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

from gateway.store.store import Store

DELIVERIES: Final = "queue_deliveries"  # a record for each message that has come back


class Deliveries:
    """The counts of one queue."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._store: Store | None = None
        self._key = ""

    def keep(self, store: Store, key: str, counts: Mapping[int, int]) -> None:
        """Record them from now on, under keys that begin with `key`; `counts` were recorded before."""
        self._store, self._key = store, key
        self._counts.update(counts)

    def __bool__(self) -> bool:
        return bool(self._counts)

    def of(self, position: int) -> int:
        """How often the message at `position` has come back."""
        return self._counts.get(position, 0)

    def count(self, position: int) -> int:
        """It comes back once more; returns how often it has."""
        found = self._counts[position] = self.of(position) + 1
        if self._store is not None:
            self._store.put(DELIVERIES, f"{self._key}{position}]", json.dumps(found).encode())
        return found

    def forget(self, positions: Iterable[int]) -> None:
        """These messages are gone."""
        if not self._counts:
            return
        for position in positions:
            if self._counts.pop(position, None) is not None and self._store is not None:
                self._store.delete(DELIVERIES, f"{self._key}{position}]")

    def clear(self) -> None:
        """The queue is gone."""
        self._counts.clear()
        if self._store is not None:
            self._store.delete_all(DELIVERIES, self._key)
