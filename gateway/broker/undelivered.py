"""Records of the messages in durable queues that were never delivered, made when a process ends.

The next process does not mark these messages as redelivered. It deletes the records when it reads them,
because they are only true until something is delivered. After a crash there are no records, and any message
may have been delivered.
"""

from __future__ import annotations

import json

from gateway.broker.queue import Storage
from gateway.broker.storage import QueueStorage, Range
from gateway.store.recovery import contain_failure
from gateway.store.store import Store


class UndeliveredRecords:
    """Records of the messages of one virtual host that were never delivered, by queue.

    `kind` is the kind of record in the store. A queue is identified by one or more words.
    """

    def __init__(self, store: Store, kind: str, host: str) -> None:
        """Read the records and delete them from the store. Must be called before the store starts."""
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

    def restore_ranges(self, storage: QueueStorage, *words: str) -> None:
        """Set in `storage` which messages of a queue the earlier process has never delivered.

        `words` identify the queue, as in `record_ranges`. Without a record, any message may have been
        delivered.
        """
        storage.set_undelivered(self._noted.pop(words, []))

    def record_ranges(self, storage: Storage | None, *words: str) -> None:
        """Record which messages of a queue were never delivered, because the process is ending.

        `storage` is that of the queue. `words` identify the queue in its virtual host, for example by its
        name. Does nothing without a storage.
        """
        if storage is not None and (positions := storage.undelivered_ranges()):
            record = json.dumps({"positions": positions})
            self._store.put(self._kind, json.dumps([self._host, *words]), record.encode())
