"""Bodies in spool files, and the storage of queues whose messages may have such bodies.

The store has such a message with the name of its file. `SpooledBodies` has the references to the files, by
log and position, for as long as the store may return the message. A file is deleted only after the disk has
recorded that its message is settled: a stored message without its body must never be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.broker.queue import Queue
from gateway.broker.spool import Spool
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.shares import UserShares
from gateway.model.spooled_bodies import BodyFile, Spooled
from gateway.settings.limits import Limits
from gateway.store.index import Log
from gateway.store.store import Store


class SpooledBodies:
    """Spool of a gateway, with the spooled bodies of the messages that the store has."""

    def __init__(self, limits: Limits, store: Store | None, shares: UserShares | None = None) -> None:
        """Open the spool, before the store starts. Raises StoreError.

        `shares` has the limits of the spool in bytes, in total and for each user.
        """
        self.spool = Spool(
            None if store is None else store.folder / "spool",
            bytes_max=limits.spool_bytes_max,
            memory_bytes_max=limits.fast_memory_bytes_max,
            memory_total_max=limits.fast_memory_total_bytes_max,
            shares=shares,
        )
        # The bodies of virtual hosts that are not configured stay on disk.
        self._by_log: dict[int, dict[int, Spooled]] = {}
        if store is not None:
            for log, position, body in store.use_bodies(self.spool.stored_body):
                self._by_log.setdefault(log, {})[position] = body

    def of(self, log: Log) -> dict[int, Spooled]:
        """Return the spooled bodies of messages that an earlier process has stored in a log, by position."""
        return self._by_log.get(log.id, {})

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return functions that read the spool's gauges, by metric name."""
        return {
            "gateway_spool_bytes": lambda: self.spool.used_bytes,
            "gateway_spool_files": lambda: len(self.spool.files),
            "gateway_spool_held_bytes": lambda: self.spool.reserved_bytes,
        }


class SpooledStorage(QueueStorage):
    """Storage of a durable queue or subscription that also keeps bodies in spool files."""

    def __init__(
        self, queue: Queue, store: Store, log: Log, memory: MemoryLimits, bodies: SpooledBodies
    ) -> None:
        super().__init__(queue, store, log, memory)
        self._spool = bodies.spool
        self._bodies = bodies.of(log)

    def take(self, sub_batch: SubBatch, messages: list[Message]) -> list[Message]:
        """Queue `messages` of the sub-batch `sub_batch`, and store those that must survive a restart.

        They are queued in memory or on disk only. `sub_batch` is settled: stored messages after their commit,
        others at once. Return the queued messages: all of `messages`, unless the store is read-only now.
        """
        first = self._queue.next
        queued = super().take(sub_batch, messages)
        if self._spool.files:
            for position, message in enumerate(queued, first):
                if isinstance(message.body, Spooled):
                    self._bodies[position] = message.body
        return queued

    def _written(
        self, sub_batch: SubBatch, start: int, stop: int, first: int, alone: bool, outcome: Outcome
    ) -> None:
        if outcome is not ACCEPTED:
            for position in range(first, first + stop - start):
                self._bodies.pop(position, None)
        super()._written(sub_batch, start, stop, first, alone, outcome)

    def forget(self, positions: Sequence[int]) -> None:
        """Delete settled messages at these positions from the disk, and release their files."""
        super().forget(positions)
        if self._bodies:
            dropped = positions if isinstance(positions, range) else set(positions)
            self._release_bodies([position for position in self._bodies if position in dropped])

    def clear(self, first: int | None) -> None:
        """Delete all messages from position `first` on, and release their files.

        None deletes only the messages that are on disk and not in memory.
        """
        log = self.log
        super().clear(first)
        if self.log is not log:
            self._release_bodies(list(self._bodies))

    def drop(self) -> None:
        """Delete the storage of a deleted queue, and release its files."""
        super().drop()
        self._release_bodies(list(self._bodies))

    def _release_bodies(self, positions: Iterable[int]) -> None:
        files: list[BodyFile] = [self._bodies.pop(position).file for position in positions]
        if files:
            self._store.after_settled(files.clear)  # what nothing refers to is deleted
