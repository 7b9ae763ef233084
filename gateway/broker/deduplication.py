"""Deduplication: a message whose id a route has accepted within a time window is not passed on a second time.

A route that deduplicates has a Guard in front of its end. A message with a new id is passed on. Its repeats
are released (returned to the source, to be retried) until the first one is settled, so that nothing is
accepted too early; from then on they are accepted and dropped. Accepted ids are in memory, and in the store
with the time when they may be forgotten.

An id on disk implies that its message is on disk or settled. If the target is local (a queue, a session, an
outbox) and writes the message, the id is written in the same pass of the event loop, so that one transaction
has both or neither, unless another target of the message has refused it. What a local target accepts at once
is in memory only, and so is its id. A remote broker accepts later, as does the end of a paused route, or a
subscription that evaluates its selector in a later pass: then the id is written first, and the source
informed when it is on disk.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Final, NamedTuple

from gateway import clock
from gateway.broker.poison import outcome_of_error
from gateway.broker.routing import OneSink
from gateway.errors import RemoteProtocolError
from gateway.mapping.routes import Route
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.shares import NO_LIMIT, UserEntries, UserShares
from gateway.model.times import Monotonic
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

KIND: Final = "seen"  # kind of record in the store
ID_BYTES_MAX: Final = 255  # bytes; a longer id is stored as its hash
ADDRESSES_MAX: Final = 1_024  # addresses whose recipients one guard caches

UNSETTLED: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "a message with the same id is in flight and not accepted yet"
)


RecipientsOf = Callable[[Message], tuple[tuple[Recipient, ...], bool]]
"""Function that returns a message's recipients behind a guard, and True if its address determines them.
"""


class Ids:
    """Message ids that one route has seen.

    `accepted` has the accepted ids, oldest first, with the time in POSIX seconds until which they are known.
    `open` has the ids of unsettled messages. If there are too many accepted ids, those of a user who has more
    than an equal part of them are forgotten first. After a restart the users of older ids are unknown.
    """

    __slots__ = ("_entries", "accepted", "forgotten", "is_loaded", "open", "route")

    def __init__(self, route: str) -> None:
        self.route = route
        self.accepted: dict[str, float] = {}
        self._entries: UserEntries[str] = UserEntries(UserShares("message ids"))
        self.open: set[str] = set()
        self.forgotten = 0  # before their time, because there were too many
        self.is_loaded = False  # from the store, with times of a clock that may have been wrong

    def load(self, rows: Iterable[tuple[float, str]]) -> None:
        """Add accepted ids from the store, oldest first.

        Each of `rows` is (time in POSIX seconds until which the id is known, id).
        """
        for expires_at, id in rows:
            self.accept(id, "", expires_at)
        self.is_loaded = True

    def accept(self, id: str, user: str, expires_at: float) -> None:
        """Add the id of a message that this user has sent. It is known until `expires_at` (POSIX seconds)."""
        self.discard(id)
        self.accepted[id] = expires_at
        self._entries.add(id, user, 0)

    def discard(self, id: str) -> None:
        """Remove an id, if it is known."""
        if self.accepted.pop(id, None) is not None:
            self._entries.discard(id)

    def evict(self, user: str) -> str | None:
        """Remove and return an id, because `user` has added one and there are too many; None if all fit."""
        id = self._entries.entry_to_evict(user)
        if id is not None:
            self.discard(id)
            self.forgotten += 1
        return id

    def bound(self, latest: float, ids_max: int) -> None:
        """Limit the number of accepted ids to `ids_max`.

        `latest` (POSIX seconds) is the time until which an id accepted now is known. Later times of ids that
        were loaded from the store are reduced to it, because a wrong clock has written them.
        """
        self._entries.shares.set_limits(ids_max, NO_LIMIT)
        if self.is_loaded:
            self.is_loaded = False
            self.accepted = {id: min(end, latest) for id, end in self.accepted.items()}


class RouteEnd(NamedTuple):
    """End of a route, as the duplicate check (Guard) in front of it uses it.

    `recipients_of` returns the recipients of a message, and `unrouted` is the outcome of a message that has
    none. `local` is True if the target accepts each message in the pass of the event loop in which it
    arrives: in memory, or in the transaction of that pass. A selector may postpone messages to a later pass;
    then the result of `postponed_count` has increased. `accepts_in_memory` returns True while targets receive
    messages that were held or postponed in an earlier pass.
    """

    route: Route
    recipients_of: RecipientsOf
    local: bool
    unrouted: Outcome
    accepts_in_memory: Callable[[], bool]
    postponed_count: Callable[[], int]


class Deduplication:
    """Message ids of all routes that deduplicate. Must be created before the store, if any, starts."""

    def __init__(self, store: Store | None = None, utc: Callable[[], float] = clock.utc) -> None:
        self.store = store
        self.utc = utc
        self.is_shared = False  # True if a database has to confirm each id
        self._ids: dict[str, Ids] = {}
        if store is not None:
            self._load(store)

    def __iter__(self) -> Iterator[Ids]:
        return iter(self._ids.values())

    def of(self, route: str) -> Ids:
        """Return the message ids of a route. They stay in memory if the route is removed."""
        found = self._ids.get(route)
        if found is None:
            found = self._ids[route] = Ids(route)
        return found

    def guard(self, end: RouteEnd) -> Guard:
        """Return a new duplicate check (Guard) for a route whose end is `end`."""
        return Guard(self, end)

    def use(self, routes: Iterable[Route]) -> None:
        """Do nothing: the ids of a removed route stay, because the route may be added again."""

    def _load(self, store: Store) -> None:
        utc = self.utc()
        found: dict[str, list[tuple[float, str]]] = {}
        for key, value in store.records(KIND):
            assert isinstance(key, bytes)
            assert isinstance(value, bytes)
            with contain_failure(KIND, key):
                route, _, id = key.decode("utf-8", "surrogatepass").partition("/")
                expires_at = store.timeline.restored(struct.unpack(">d", value)[0])
                if expires_at > utc:
                    found.setdefault(route, []).append((expires_at, id))
                else:
                    store.delete(KIND, key)
        for route, rows in found.items():
            rows.sort()
            self.of(route).load(rows)

    def record(self, ids: Ids, id: str, expires_at: float, *, beside: bool = False) -> None:
        """Store an accepted id until `expires_at` (POSIX seconds).

        With `beside` the id is stored only if the transaction with the messages of this pass of the event
        loop succeeds.
        """
        if self.store is not None:
            put = self.store.put_with_messages if beside else self.store.put
            put(KIND, _key(ids, id), struct.pack(">d", self.store.timeline.stored(expires_at)))

    def forget(self, ids: Ids, id: str) -> None:
        """Delete an id from the store."""
        if self.store is not None:
            self.store.delete(KIND, _key(ids, id))

    def tick(self) -> None:
        """Forget ids that are older than their window."""
        utc = self.utc()
        for ids in self._ids.values():
            accepted = ids.accepted
            expired_ids: list[str] = []
            for id, expires_at in accepted.items():
                if expires_at > utc:
                    break
                expired_ids.append(id)
            for id in expired_ids:
                ids.discard(id)
                self.forget(ids, id)


class Guard(OneSink):
    """Duplicate check in front of the end of a route that deduplicates; a sink and namespace.

    It is replaced when the route's end changes.
    """

    def __init__(self, deduplication: Deduplication, end: RouteEnd) -> None:
        route = end.route
        rule = route.rule.deduplicate
        assert rule is not None
        super().__init__(self)
        self.route = route
        self.local = end.local
        self.ids = deduplication.of(route.name)
        self._deduplication = deduplication
        self._recipients_of = end.recipients_of
        self._unrouted = end.unrouted
        self._accepts_in_memory = end.accepts_in_memory
        self._postponed_count = end.postponed_count
        self._recipients: dict[Address, tuple[Recipient, ...]] = {}
        self._window = rule.window_secs
        self.ids.bound(deduplication.utc() + self._window, rule.ids_max)

    def publish(self, sub_batch: SubBatch) -> None:
        """Forward messages with new ids to the route's end, and settle repeats.

        Repeats of accepted messages are accepted and dropped; repeats of unsettled messages are returned to
        the source, to be retried.
        """
        ids = self.ids
        accepted, open_ = ids.accepted, ids.open
        utc = self._deduplication.utc()
        store = self._deduplication.store
        source = ForwardedSource(self, sub_batch)
        batch = sub_batch.batch.forwarded_batch(source)
        repeats: list[int] = []
        passed: list[str] = []
        for at, message in enumerate(sub_batch.messages):
            try:
                id = message.properties.message_id
            except RemoteProtocolError as malformed:
                sub_batch.settle_at((at,), Outcome(Verdict.REJECTED, Reason.MALFORMED, str(malformed)))
                continue
            if id:
                if len(id) > ID_BYTES_MAX:
                    id = blake2b(id.encode("utf-8", "surrogatepass")).hexdigest()
                if id in open_:
                    sub_batch.settle_at((at,), UNSETTLED)
                    continue
                if accepted.get(id, 0.0) > utc:
                    repeats.append(at)
                    continue
                if store is not None and not store.healthy:
                    store.refuse(partial(sub_batch.settle_at, (at,)))
                    continue
            try:
                self._forward(batch, sub_batch, at, id or "", message)
            except Exception as error:
                sub_batch.settle_at((at,), outcome_of_error(error, route=self.route.name))
                continue
            if id:
                passed.append(id)
        self._repeated(sub_batch, repeats)
        postponed = self._postponed_count()
        batch.send()
        if self._postponed_count() != postponed:
            source.local = False
        elif self.local:
            self._record_what_is_written(sub_batch, batch, passed)

    def _record_what_is_written(self, sub_batch: SubBatch, batch: Batch, passed: list[str]) -> None:
        """Store the ids of messages that local targets are writing to disk, in the same transaction.

        `batch` has the messages of `sub_batch` that were forwarded, and `passed` their ids. Ids of messages
        that are settled or that a target has refused are not stored.
        """
        open_, expires_at = self.ids.open, self._deduplication.utc() + self._window
        refused = [batch.receipts[slot] for slot in batch.unaccepted_slots]
        sub_batch.batch.mark_refused([sub_batch.slots[at] for at, _ in refused])
        refused_ids = {id for _, id in refused}
        for id in passed:
            if id in open_ and id not in refused_ids:
                self._deduplication.record(self.ids, id, expires_at, beside=True)

    def _repeated(self, sub_batch: SubBatch, positions: list[int]) -> None:
        """Accept and count messages of `sub_batch` that repeat accepted ones, at the indexes `positions`."""
        if positions:
            self.route.duplicates += len(positions)
            sub_batch.settle_at(positions)

    def _recipients_for(self, sub_batch: SubBatch, at: int, message: Message) -> tuple[Recipient, ...]:
        """Return the recipients of the message at position `at` of `sub_batch`.

        If there are none, the message is settled.
        """
        recipients = self._recipients.get(message.address)
        if recipients is None or message.retain:
            recipients, always = self._recipients_of(message)
            if always:
                if len(self._recipients) >= ADDRESSES_MAX:
                    self._recipients.clear()
                self._recipients[message.address] = recipients
        if not recipients:
            self.route.failed += self._unrouted is not ACCEPTED
            sub_batch.settle_at((at,), self._unrouted)
        return recipients

    def _forward(self, batch: Batch, sub_batch: SubBatch, at: int, id: str, message: Message) -> None:
        recipients = self._recipients_for(sub_batch, at, message)
        if not recipients:
            return
        if id:
            self.ids.open.add(id)
            # Expired long ago; its deletion must not delete what is recorded now.
            self.ids.discard(id)
        batch.add_from(sub_batch.slots[at], (at, id), [(recipient, message) for recipient in recipients])

    # Outcomes of passed messages.

    def settle_messages(
        self, sub_batch: SubBatch, rows: list[tuple[int, str]], outcome: Outcome, local: bool
    ) -> None:
        """Settle messages of `sub_batch` with the target's outcome; remember the ids of accepted messages.

        Each of `rows` is (index in `sub_batch`, id or ""). With `local`, every target got its messages in the
        pass of the event loop in which they arrived, and the ids are already written or need not be.
        Otherwise accepted messages are settled once their ids are on disk.
        """
        positions = [at for at, _ in rows]
        message_ids = [id for _, id in rows if id]
        if outcome is not ACCEPTED:
            self.ids.open.difference_update(message_ids)
            if self.local:
                for id in message_ids:
                    self._deduplication.forget(self.ids, id)
            sub_batch.settle_at(positions, outcome)
            return
        store = self._deduplication.store
        expires_at = self._deduplication.utc() + self._window
        owners = owners_of(sub_batch, rows)
        if local or store is None or not message_ids or self._accepts_in_memory():
            self._accept(sub_batch, positions, owners, expires_at, ACCEPTED)
            return
        for id in message_ids:
            self._deduplication.record(self.ids, id, expires_at)
        store.after_commit(partial(self._accept, sub_batch, positions, owners, expires_at))

    def _accept(
        self,
        sub_batch: SubBatch,
        positions: list[int],
        owners: list[tuple[str, str]],
        expires_at: float,
        written: Outcome,
    ) -> None:
        """Settle messages that the target has accepted, and remember their ids until `expires_at`.

        The messages are at the indexes `positions` in `sub_batch`; `owners` has (id, user who sent the
        message) of each. `written` (outcome of writing the ids) is not used: if the disk has failed, the
        store retries to write the ids.
        """
        ids = self.ids
        for id, user in owners:
            ids.open.discard(id)
            ids.accept(id, user, expires_at)
            while (forgotten := ids.evict(user)) is not None:
                self._deduplication.forget(ids, forgotten)
        sub_batch.settle_at(positions)


class ForwardedSource:
    """Source of the messages of one sub-batch that a duplicate check forwards.

    A receipt is (index in the sub-batch, id or "").
    """

    __slots__ = ("_guard", "_sub_batch", "local")

    def __init__(self, guard: Guard, sub_batch: SubBatch) -> None:
        self._guard = guard
        self._sub_batch = sub_batch
        self.local = guard.local  # False from the moment that a target has postponed messages

    def settle(
        self, receipts: list[tuple[int, str]], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Report the target's outcomes to the duplicate check (Guard)."""
        if refused is None:
            self._guard.settle_messages(self._sub_batch, receipts, ACCEPTED, self.local)
            return
        done = [receipt for at, receipt in enumerate(receipts) if at not in refused]
        if done:
            self._guard.settle_messages(self._sub_batch, done, ACCEPTED, self.local)
        for at, outcome in refused.items():
            self._guard.settle_messages(self._sub_batch, [receipts[at]], outcome, self.local)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Stop reading from the connections of `senders`. Return the functions that resume reading."""
        return self._sub_batch.batch.source.hold(senders)


def owners_of(sub_batch: SubBatch, rows: list[tuple[int, str]]) -> list[tuple[str, str]]:
    """Return (id, user who sent the message) for each of `rows`, which are (index in `sub_batch`, id or "").

    Rows without an id are left out.
    """
    return [(id, sub_batch.messages[at].sender.user) for at, id in rows if id]


def _key(ids: Ids, id: str) -> bytes:
    return f"{ids.route}/{id}".encode("utf-8", "surrogatepass")
