"""Base class for the records in the store of what survives a restart in one virtual host.

A key is a JSON list: the name of the virtual host and the words that name the record. A value is JSON. The
messages of a durable queue are in a log under the same key. The records of each protocol are in its own
folder (amqp091/definitions.py, amqpfast/definitions.py).
"""

from __future__ import annotations

import json
from typing import Any, ClassVar

from mypy_extensions import mypyc_attr

from gateway.broker.bodies import SpooledBodies, SpooledStorage
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits
from gateway.broker.undelivered import UndeliveredRecords
from gateway.settings.limits import Limits
from gateway.store.recovery import contain_failure
from gateway.store.store import Store


@mypyc_attr(allow_interpreted_subclasses=True)
class HostRecords:
    """Access to the records of one virtual host in the store.

    `untouched` is the kind of record for messages that were never delivered (undelivered.py).
    """

    untouched: ClassVar[str]

    def __init__(self, store: Store, host: str, bodies: SpooledBodies, limits: Limits) -> None:
        """Create the access to the records of the virtual host `host`.

        `bodies` has spooled bodies of messages. Beyond `queue_memory_messages_max` and
        `queue_memory_bytes_max` of the limits the messages of a durable queue are only on disk.
        """
        self._store = store
        self._host = host
        self._bodies = bodies
        self._memory = MemoryLimits(limits.queue_memory_messages_max, limits.queue_memory_bytes_max)
        self._untouched = UndeliveredRecords(store, self.untouched, host)

    def _key(self, *words: str) -> str:
        return json.dumps([self._host, *words])

    def _put(self, kind: str, record: object, *words: str) -> None:
        self._store.put(kind, self._key(*words), json.dumps(record).encode())

    def _delete(self, kind: str, *words: str) -> None:
        self._store.delete(kind, self._key(*words))

    def _records(self, kind: str) -> list[tuple[list[str], Any]]:
        """Return (words, value) of each record of a kind in this virtual host.

        `words` are the parts of the record's key without the virtual host. Only valid before the store
        starts.
        """
        found = []
        for key, value in self._store.records(kind):
            assert isinstance(key, str)
            assert isinstance(value, bytes)
            with contain_failure(kind, key):
                host, *words = json.loads(key)
                if host == self._host:
                    found.append((words, json.loads(value)))
        return found

    def _storage(self, queue: Queue, kind: str, *words: str) -> SpooledStorage:
        """Create the storage of a queue, which restores its messages and stores new ones from now on.

        `kind` and `words` (the queue's key without the virtual host) name the log of its messages.
        """
        log = self._store.log(kind, self._key(*words))
        return SpooledStorage(queue, self._store, log, self._memory, self._bodies)
