"""Interrupted restartable transfers, which their senders can resume (3.5.14).

A message is recognised by its head, byte for byte, and by the user and client-name of its sender: no user can
resume, and thereby read, what another user has begun. The bytes received so far are a file of the spool. A
record in the store names the file, so that a transfer survives a restart. The size of the file says how much
has been received. These bytes are not synced, so some may be missing below that size if the machine was
restarted meanwhile. Then the transfer begins anew, and also if the system has no boot id.

An idle transfer may be dropped. When there are too many, the oldest ones of a user who has more than an equal
part of the limit are dropped, and their senders start from the beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Final

from gateway import clock
from gateway.broker.spool import Spool, SpoolFile
from gateway.errors import StoreError
from gateway.model.shares import UserEntries, UserShares
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

PARTIAL: Final = "fast-partial"


class Partial:
    """Restartable transfer of one message body. `file` has the bytes that were received until now.

    `key` is "" if the transfer cannot be resumed.
    """

    __slots__ = ("body_size", "busy", "file", "key", "utc")

    def __init__(self, key: str, body_size: int, file: SpoolFile, utc: float) -> None:
        self.key = key
        self.body_size = body_size
        self.file = file
        self.busy = True  # True while a connection sends the message
        self.utc = utc  # UTC seconds when a connection last began or stopped sending

    @property
    def user(self) -> str:
        """Name of the user who sends the message."""
        _, user, _, _ = json.loads(self.key)
        return str(user)

    @property
    def sender(self) -> tuple[str, str]:
        """Virtual host and client-name of the sender."""
        host, _, client, _ = json.loads(self.key)
        return host, client


class Partials:
    """Restartable transfers of all virtual hosts that are not complete."""

    def __init__(self, spool: Spool, store: Store | None, *, shares: UserShares, age_secs: float) -> None:
        """Restore the transfers from the store, before the store starts.

        `shares` limits the number and bytes of idle transfers, in total and for each user. A transfer that is
        idle for more than `age_secs` seconds is dropped.
        """
        self._spool = spool
        self._store = store
        self._entries: UserEntries[str] = UserEntries(shares)  # keys of idle transfers, the oldest first
        self._age_secs = age_secs
        self._by_key: dict[str, Partial] = {}
        if store is not None:
            self._restore(store)

    def __iter__(self) -> Iterator[Partial]:
        """Return an iterator over a copy of the list of transfers that can be resumed."""
        return iter(list(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def byte_count(self) -> int:
        """Number of bytes that were received of all transfers."""
        return sum(partial.file.size for partial in self._by_key.values())

    def _restore(self, store: Store) -> None:
        found = []
        for key, value in store.records(PARTIAL):
            assert isinstance(key, str)
            assert isinstance(value, bytes)
            with contain_failure(PARTIAL, key):
                record = json.loads(value)
                utc = store.timeline.restored(record["utc"])
                try:
                    boot = clock.boot_id()
                    if not boot or record.get("boot") != boot:
                        raise StoreError("the machine was restarted")
                    file = self._spool.open_stored(record["file"])
                except StoreError:  # or nothing had been written yet
                    store.delete(PARTIAL, key)
                else:
                    found.append(Partial(key, int(record["body_size"]), file, utc))
        for partial in sorted(found, key=lambda one: one.utc):
            self._by_key[partial.key] = partial
            partial.busy = False
            self._entries.add(partial.key, partial.user, partial.file.size)

    def claim(self, host: str, user: str, client: str, head: bytes, body_size: int) -> Partial:
        """Return the transfer of a message whose content header this client has sent, and mark it busy.

        `head` is the content header, and `body_size` is in bytes. An idle transfer of the same host, user,
        client, content header and body size is resumed. Otherwise a new one begins; it cannot be resumed
        later if an equal one is busy.
        """
        self.forget_old()
        digest = hashlib.sha256(body_size.to_bytes(4, "big") + head).hexdigest()
        key = json.dumps([host, user, client, digest])
        found = self._by_key.get(key)
        # The same message twice at once: the second is a transfer that cannot be resumed.
        if found is not None and found.busy:
            return Partial("", body_size, self._spool.draft(user), clock.utc())
        if found is None:
            file = self._spool.draft(user)
            found = self._by_key[key] = Partial(key, body_size, file, clock.utc())
        found.busy = True
        self._entries.discard(key)
        self._record(found)
        return found

    def _record(self, partial: Partial) -> None:
        partial.utc = clock.utc()
        if self._store is not None:
            record = {
                "file": partial.file.name,
                "body_size": partial.body_size,
                "utc": self._store.timeline.stored(partial.utc),
                "boot": clock.boot_id(),
            }
            self._store.put(PARTIAL, partial.key, json.dumps(record).encode())

    def release(self, partial: Partial) -> None:
        """Mark a transfer idle, so that it can be resumed. Drop the oldest ones if there are too many."""
        if self._by_key.get(partial.key) is partial and partial.busy:
            partial.busy = False
            self._record(partial)
            self._entries.add(partial.key, partial.user, partial.file.size)
            self.forget_old()
            while (key := self._entries.entry_to_evict(partial.user)) is not None:
                self.drop(self._by_key[key])

    def drop(self, partial: Partial) -> None:
        """Delete a transfer, because it is complete or will not be resumed."""
        if self._by_key.get(partial.key) is partial:
            del self._by_key[partial.key]
            self._entries.discard(partial.key)
            if self._store is not None:
                self._store.delete(PARTIAL, partial.key)

    def delete_record(self, partial: Partial) -> None:
        """Delete the record of a transfer, in the same commit that publishes its message."""
        if self._store is not None and partial.key:
            self._store.delete(PARTIAL, partial.key)

    def end(self, partial: Partial, *, accepted: bool) -> None:
        """End a transfer whose message was received completely.

        If the message was not accepted, the transfer is marked idle, so that the sender can retry without
        sending everything again.
        """
        if accepted:
            self.drop(partial)
        else:
            self.release(partial)

    def drop_of(self, host: str, user: str, client: str) -> None:
        """Drop the idle transfers of a closed connection without a client-name, which cannot resume them."""
        begin = json.dumps([host, user, client])[:-1]
        for key in [key for key in self._entries if key.startswith(begin)]:
            self.drop(self._by_key[key])

    def forget_old(self) -> None:
        """Drop idle transfers that are older than the age limit."""
        before = clock.utc() - self._age_secs
        for key in list(self._entries):
            if self._by_key[key].utc > before:
                return
            self.drop(self._by_key[key])
