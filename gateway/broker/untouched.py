"""What a process noted as it came to its end: which messages of its durable queues nobody had been handed.

The next process does not call these redelivered. It forgets the notes as it reads them, for they are true
until something is delivered: after a kill there are none, and nobody knows.
"""

from __future__ import annotations

import json

from gateway.broker.queue import Storage
from gateway.broker.storage import QueueStorage, Range
from gateway.store.restoring import set_aside
from gateway.store.store import Store


class Untouched:
    """The notes of one virtual host, in records of `kind`, by the words that name a queue."""

    def __init__(self, store: Store, kind: str, host: str) -> None:
        """Before the store starts."""
        self._store = store
        self._kind = kind
        self._host = host
        self._noted: dict[tuple[str, ...], list[Range]] = {}
        for key, value in store.things(kind):
            assert isinstance(value, bytes)
            with set_aside(kind, key):
                owner, *words = json.loads(key)
                if owner == host:
                    positions = json.loads(value)["positions"]
                    self._noted[tuple(words)] = [(first, end) for first, end in positions]
        store.delete_all(kind, json.dumps([host])[:-1])

    def recall(self, kept: QueueStorage, *words: str) -> None:
        """Tell a queue what was noted of it."""
        kept.recall(self._noted.pop(words, []))

    def note(self, kept: Storage | None, *words: str) -> None:
        """The process ends: note what of this queue, if any of it is on disk, nobody has been handed."""
        if kept is not None and (positions := kept.untouched()):
            given = json.dumps({"positions": positions})
            self._store.put(self._kind, json.dumps([self._host, *words]), given.encode())
