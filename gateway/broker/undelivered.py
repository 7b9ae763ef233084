"""Records of a process at its end: messages of its durable queues that were never handed out.

The next process does not mark these as redelivered. It deletes the records when it reads them, because they
are only true until something is delivered. After a kill there are none, and it is unknown.
"""

from __future__ import annotations

import json

from gateway.broker.queue import Storage
from gateway.broker.storage import QueueStorage, Range
from gateway.store.recovery import contain_failure
from gateway.store.store import Store


class UndeliveredRecords:
    """Records of one virtual host, of kind `kind`, by the words that name a queue."""

    def __init__(self, store: Store, kind: str, host: str) -> None:
        """Read and delete the records, before the store starts."""
        self._store = store
        self._kind = kind
        self._host = host
        self._noted: dict[tuple[str, ...], list[Range]] = {}
        for key, value in store.records(kind):
            assert isinstance(value, bytes)
            with contain_failure(kind, key):
                owner, *words = json.loads(key)
                if owner == host:
                    positions = json.loads(value)["positions"]
                    self._noted[tuple(words)] = [(first, end) for first, end in positions]
        store.delete_all(kind, json.dumps([host])[:-1])

    def recall(self, storage: QueueStorage, *words: str) -> None:
        """Pass the recorded ranges of a queue to its storage."""
        storage.recall(self._noted.pop(words, []))

    def note(self, storage: Storage | None, *words: str) -> None:
        """Record at the end of the process which messages of a queue were never handed out."""
        if storage is not None and (positions := storage.undelivered_ranges()):
            record = json.dumps({"positions": positions})
            self._store.put(self._kind, json.dumps([self._host, *words]), record.encode())
