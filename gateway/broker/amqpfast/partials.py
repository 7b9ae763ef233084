"""Restartable transfers that have been broken off, so that their senders can go on from there (3.5.14).

A message is known again by its head, octet for octet, and the user and client-name of its sender: nobody
resumes, and so reads, what another user has begun. What has come of it
is a file of the spool; the store has a record of which, so that this outlasts the gateway. How much has come
is the size of the file: a file system writes what is appended before it says so.

Nothing is promised of a transfer that is idle: of too many, the oldest ones of a user who has more than an
equal part are forgotten, and then their senders begin anew.
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
from gateway.store.restoring import set_aside
from gateway.store.store import Store

PARTIAL: Final = "fast-partial"


class Partial:
    """A transfer: what of a body is in `file`. `key` is "" when it will not be known again."""

    __slots__ = ("body_size", "busy", "file", "head", "key", "utc")

    def __init__(self, key: str, head: bytes, body_size: int, file: SpoolFile, utc: float) -> None:
        self.key = key
        self.head = head  # empty when it was begun in an earlier life: the key says enough
        self.body_size = body_size
        self.file = file
        self.busy = True  # somebody sends it
        self.utc = utc  # when something was last heard of it

    @property
    def user(self) -> str:
        """User who sends it."""
        _, user, _, _ = json.loads(self.key)
        return str(user)

    @property
    def sender(self) -> tuple[str, str]:
        """Virtual host and client-name of who sends it."""
        host, _, client, _ = json.loads(self.key)
        return host, client


class Partials:
    """The transfers of all virtual hosts."""

    def __init__(self, spool: Spool, store: Store | None, *, shares: UserShares, age_secs: float) -> None:
        """Before the store starts. The limits in `shares` are for transfers that are idle."""
        self._spool = spool
        self._store = store
        self._entries: UserEntries[str] = UserEntries(shares)  # those that are idle, the oldest first
        self._age_secs = age_secs
        self._known: dict[str, Partial] = {}
        if store is not None:
            self._restore(store)

    def __iter__(self) -> Iterator[Partial]:
        """All that will be known again; they may come and go while this is gone through."""
        return iter(list(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    @property
    def octets(self) -> int:
        """What has come of all of them."""
        return sum(partial.file.size for partial in self._known.values())

    def _restore(self, store: Store) -> None:
        found = []
        for key, value in store.things(PARTIAL):
            assert isinstance(key, str)
            assert isinstance(value, bytes)
            with set_aside(PARTIAL, key):
                given = json.loads(value)
                try:
                    file = self._spool.recall(given["file"])
                except StoreError:  # nothing had been written yet
                    store.delete(PARTIAL, key)
                else:
                    found.append(Partial(key, b"", int(given["body_size"]), file, float(given["utc"])))
        for partial in sorted(found, key=lambda one: one.utc):
            self._known[partial.key] = partial
            partial.busy = False
            self._entries.add(partial.key, partial.user, partial.file.size)

    def claim(self, host: str, user: str, client: str, head: bytes, body_size: int) -> Partial:
        """The transfer of a message that a client of this user announces; a new one, unless that user broke
        it off."""
        self.forget_old()
        digest = hashlib.sha256(body_size.to_bytes(4, "big") + head).hexdigest()
        key = json.dumps([host, user, client, digest])
        found = self._known.get(key)
        if found is not None and found.busy:  # the same message twice at once: the second is another one
            return Partial("", head, body_size, self._spool.draft(user), clock.utc())
        if found is None:
            file = self._spool.draft(user)
            found = self._known[key] = Partial(key, head, body_size, file, clock.utc())
        found.busy = True
        found.head = head
        self._entries.discard(key)
        self._record(found)
        return found

    def _record(self, partial: Partial) -> None:
        partial.utc = clock.utc()
        if self._store is not None:
            given = {"file": partial.file.name, "body_size": partial.body_size, "utc": partial.utc}
            self._store.put(PARTIAL, partial.key, json.dumps(given).encode())

    def release(self, partial: Partial) -> None:
        """Nobody sends it any more: it waits to be resumed."""
        if self._known.get(partial.key) is partial and partial.busy:
            partial.busy = False
            self._record(partial)
            self._entries.add(partial.key, partial.user, partial.file.size)
            self.forget_old()
            while (key := self._entries.crowded_out(partial.user)) is not None:
                self.drop(self._known[key])

    def drop(self, partial: Partial) -> None:
        """It is complete, or of no use."""
        if self._known.get(partial.key) is partial:
            del self._known[partial.key]
            self._entries.discard(partial.key)
            if self._store is not None:
                self._store.delete(PARTIAL, partial.key)

    def hand_over(self, partial: Partial) -> None:
        """Its message is published in this wake-up: from the commit that has it on, it is no transfer."""
        if self._store is not None and partial.key:
            self._store.delete(PARTIAL, partial.key)

    def end(self, partial: Partial, *, taken: bool) -> None:
        """It was complete; if its message was not taken, it may be sent again from what is here."""
        if taken:
            self.drop(partial)
        else:
            self.release(partial)

    def drop_of(self, host: str, user: str, client: str) -> None:
        """The client had no name, and nobody will be known by it again."""
        begin = json.dumps([host, user, client])[:-1]
        for key in [key for key in self._entries if key.startswith(begin)]:
            self.drop(self._known[key])

    def forget_old(self) -> None:
        """Drop those that are idle and too old."""
        before = clock.utc() - self._age_secs
        for key in list(self._entries):
            if self._known[key].utc > before:
                return
            self.drop(self._known[key])
