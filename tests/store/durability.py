"""What each store of a test tells, against what is on its disk after each commit.

`watched` has every store that is opened looked after, without the test's doing:

- What a store has accepted is on disk, or was settled or dropped: checked whenever a store says so.
- An id on disk (a QoS 2 packet id that was received, a message id of a route that deduplicates) implies that
  its message is on disk or settled. An id is written in the wake-up that writes its message; on disk are then
  both or neither. An id of a message that no target has accepted yet, in a wake-up that writes none, stands
  for nothing.

After each commit only new rows are read, without their messages. `crashes.py` looks at whole copies of the
database, for tests that know which messages are settled.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from gateway.broker.deduplication import ID_BYTES_MAX, KIND
from gateway.broker.mqtt.received_ids import DurableReceivedIds
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store.group import Key
from gateway.store.index import Log
from gateway.store.store import Store

INCOMING: Final = "incoming"  # kind of the logs of received packet ids
Place = tuple[Log, int]


class Appended(NamedTuple):
    """Messages that one call has handed to the store."""

    log: Log
    first: int
    messages: list[Message]

    def places(self) -> Iterator[Place]:
        return ((self.log, at) for at in range(self.first, self.first + len(self.messages)))


class Claim(NamedTuple):
    """An id that is to be written, and where its message is to be."""

    id: Place | Key
    places: list[Place]


class Ledger:
    """What one store was called with, and what its disk has had."""

    def __init__(self, faults: list[str], *, ids_alone: bool) -> None:
        """`ids_alone`: the messages of ids need not be in the store."""
        self.faults = faults
        self._ids_alone = ids_alone
        # Of ids that are not on disk yet: of the last attempt, if an earlier one was refused.
        self._claims: dict[Place | Key, Claim] = {}
        self._last_row = 0
        self._written: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by log: first and end
        self._settled: dict[int, set[int]] = defaultdict(set)
        self._settled_runs: dict[int, list[range]] = defaultdict(list)
        self._appended: list[Appended] = []  # in this wake-up
        self._ids: list[tuple[Log, int]] = []  # in this wake-up: packet ids that no target has accepted
        self._seen: list[Key] = []  # in this wake-up: message ids beside their messages
        self._retained: set[str] = set()  # in this wake-up: senders of messages that were retained or cleared

    # In the loop.

    def append(self, call: Appended) -> None:
        self._appended.append(call)

    def received(self, log: Log, position: int) -> None:
        self._ids.append((log, position))

    def seen(self, key: Key) -> None:
        self._seen.append(key)

    def retain(self, message: Message) -> None:
        self._retained.add(message.sender.client)

    def settle(self, log: Log, positions: Sequence[int] | range) -> None:
        if isinstance(positions, range):
            self._settled_runs[log.id].append(positions)
        else:
            self._settled[log.id].update(positions)

    def flush(self) -> None:
        """End a wake-up: its ids claim that its messages are written with them."""
        given = [one for one in self._appended if one.log.kind != INCOMING]
        for log, position in self._ids:
            own = [one for one in given if any(row.sender.client == log.name for row in one.messages)]
            if own or log.name not in self._retained:  # only retained: by key, with the id
                self._claim((log, position), own, f"packet id at {position} of {log.name!r}")
        for key in self._seen:
            own = [one for one in given if any(_is_of(row, key) for row in one.messages)] or given
            self._claim(key, own, f"message id {key!r}")
        self._appended, self._ids, self._seen, self._retained = [], [], [], set()

    def _claim(self, id: Place | Key, own: list[Appended], what: str) -> None:
        if not own:
            if self._ids_alone:
                return
            self.faults.append(f"{what}: no message is written with it")
        else:
            places = [place for one in own for place in one.places()]
            self._claims[id] = Claim(id, places)

    def told(self, call: Appended, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        if outcome is ACCEPTED:
            lacking = [at for log, at in call.places() if not self.has(log, at)]
            if lacking:
                self.faults.append(f"accepted and not on disk: {call.log} at {lacking[:5]}")
        done(outcome)

    def has(self, log: Log, position: int) -> bool:
        """Return True if a message is or was on disk, or need not be."""
        if log.dropped or any(first <= position < end for first, end in reversed(self._written[log.id])):
            return True
        return position in self._settled[log.id] or any(position in run for run in self._settled_runs[log.id])

    # In the store's thread.

    def committed(self, connection: sqlite3.Connection) -> None:
        """Read the new rows of the disk, and check the ids that are there now."""
        execute = partial(sqlite3.Connection.execute, connection)
        for row, log, first, length in execute(
            "SELECT id, log, first, count FROM rows WHERE id > ? ORDER BY id", (self._last_row,)
        ):
            self._last_row = row
            self._written[log].append((first, first + length))
        for claim in list(self._claims.values()):
            if isinstance(claim.id, tuple):
                log, at = claim.id
                is_there = any(first <= at < end for first, end in self._written[log.id])
            else:
                query = "SELECT count(*) FROM things WHERE kind = ? AND key = ?"
                is_there = execute(query, (KIND, claim.id)).fetchone()[0] > 0
            if is_there:
                del self._claims[claim.id]
                if lacking := [place for place in claim.places if not self.has(*place)]:
                    self.faults.append(f"id {claim.id!r} is on disk without its message at {lacking[:5]}")


def _is_of(message: Message, key: Key) -> bool:
    found = message.properties.message_id
    if found is None or isinstance(key, str):
        return False
    return len(found) > ID_BYTES_MAX or key.endswith(found.encode(errors="replace"))


@contextmanager
def watched(*, ids_alone: bool) -> Iterator[list[str]]:
    """Look after all stores that are opened within the block. Yields what is wrong with them, a line each.

    `ids_alone`: a test of ids has no queue or session that has stored their messages.
    """
    faults: list[str] = []
    ledgers: dict[int, tuple[Store, Ledger]] = {}
    made, appended, put, flush = Store.__init__, Store.append, Store.put_with_messages, Store.flush
    retain = RetainedTopics.set_retained
    settlements = {name: getattr(Store, name) for name in ("settle", "settle_beside")}
    write = DurableReceivedIds._write

    @wraps(made)
    def open_store(store: Store, *folder: Any, factory: Any = sqlite3.Connection, **options: Any) -> None:
        ledger = Ledger(faults, ids_alone=ids_alone)
        ledgers[id(store)] = store, ledger
        made(store, *folder, factory=_watching(factory, ledger), **options)

    def of(store: Store) -> Ledger:
        """Return a store's ledger; a new one that nobody reads if it was opened before."""
        found = ledgers.get(id(store))
        return Ledger([], ids_alone=True) if found is None else found[1]

    def append(store: Store, log: Log, first: int, messages: list[Message], done: Any, **tag: Any) -> None:
        ledger = of(store)
        call = Appended(log, first, list(messages))
        ledger.append(call)
        appended(store, log, first, messages, partial(ledger.told, call, done), **tag)

    def watched_settlement(name: str) -> Callable[[Store, Log, Sequence[int] | range], None]:
        def settle(store: Store, log: Log, positions: Sequence[int] | range) -> None:
            of(store).settle(log, positions)
            settlements[name](store, log, positions)

        return settle

    def set_retained(retained: RetainedTopics, message: Message) -> bool:
        if retained._store is not None:
            of(retained._store).retain(message)
        return retain(retained, message)

    def put_beside(store: Store, kind: str, key: Any, value: bytes) -> None:
        if kind == KIND and store.healthy:
            of(store).seen(key)
        put(store, kind, key, value)

    def flush_store(store: Store) -> None:
        of(store).flush()
        flush(store)

    def write_id(ids: DurableReceivedIds, packet_id: int, taken: Any) -> None:
        write(ids, packet_id, taken)
        if not taken.accepted and ids._log is not None and ids._store.healthy:
            of(ids._store).received(ids._log, taken.position)

    with ExitStack() as stack:
        replacements: list[tuple[type, str, Callable[..., object]]] = [
            (Store, "__init__", open_store),
            (Store, "append", append),
            (RetainedTopics, "set_retained", set_retained),
            (Store, "put_with_messages", put_beside),
            (Store, "flush", flush_store),
            (DurableReceivedIds, "_write", write_id),
        ]
        replacements += [(Store, name, watched_settlement(name)) for name in settlements]
        for kind, name, replaced in replacements:
            stack.enter_context(patch.object(kind, name, replaced))
        yield faults


def _watching(base: type[sqlite3.Connection], ledger: Ledger) -> type[sqlite3.Connection]:
    class Connection(base):  # type: ignore[misc,valid-type]
        """One whose ledger is told of each commit."""

        def commit(self) -> None:
            super().commit()
            ledger.committed(self)

    return Connection
