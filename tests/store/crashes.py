"""What a crash after any commit would leave on disk, and whether that keeps the promises of durability.

`Crashes.factory` makes connections that copy the database after each commit, and read the copy. `check` then
looks at every copy:

- An id on disk (a QoS 2 packet id that was received, a message id of a route that deduplicates) implies that
  its message is on disk or settled.
- A message that was on disk is on disk in the next copy, too, in whatever log or letter, or it is settled.

A message is known by its body, so each has its own. It is settled when the test says so (`settled`): it was
consumed and acknowledged, or a remote broker confirmed it, or it may expire.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from gateway.store.index import TRANSIENT
from gateway.store.messages import MessageReader

INCOMING: Final = "incoming"  # the kind of log with received packet ids
SEEN: Final = "seen"  # the kind of thing with message ids
WILL: Final = "will"  # the kind of thing with wills that are not settled


class State(NamedTuple):
    """What one commit has left: ids as `kind/owner/id`, the bodies of messages, and those settled by then."""

    ids: frozenset[str]
    bodies: frozenset[bytes]
    settled: frozenset[bytes]
    twice: frozenset[bytes]
    """Bodies that are there more than once."""
    wills: int
    """Number of recorded wills."""


class Crashes:
    """Copies of a database, one for each commit."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.settled: set[bytes] = set()

    def factory(self, base: type[sqlite3.Connection] = sqlite3.Connection) -> type[sqlite3.Connection]:
        """Return the class of connections for a store (`factory=`)."""
        crashes = self

        class Connection(base):  # type: ignore[misc,valid-type]
            """One that is looked into after each commit."""

            def commit(self) -> None:
                settled = frozenset(crashes.settled)
                super().commit()
                copy = sqlite3.connect(":memory:")
                self.backup(copy)
                bodies = Counter(_bodies(copy))
                twice = frozenset(body for body, count in bodies.items() if count > 1)
                ((wills,),) = copy.execute("SELECT count(*) FROM things WHERE kind = ?", (WILL,))
                crashes.states.append(State(_ids(copy), frozenset(bodies), settled, twice, wills))
                copy.close()

        return Connection

    def check(self, body_of: Callable[[str], bytes] = str.encode) -> None:
        """Assert the order of durability in every state. `body_of` returns the body of an id's message."""
        before: State | None = None
        for number, state in enumerate(self.states):
            for one in state.ids:
                body = body_of(one)
                assert body in state.bodies or body in state.settled, f"commit {number}: {one} has no message"
            if before is not None:
                lost = before.bodies - state.bodies - state.settled
                assert not lost, f"commit {number} has lost {sorted(lost)[:5]}"
            before = state

    @property
    def last(self) -> State:
        return self.states[-1]


def _ids(copy: sqlite3.Connection) -> frozenset[str]:
    found = {f"{INCOMING}/{name}/{int.from_bytes(body, 'big')}" for name, body in _stored(copy, INCOMING)}
    for (key,) in copy.execute("SELECT key FROM things WHERE kind = ?", (SEEN,)):
        found.add(f"{SEEN}/{key.decode()}")
    return frozenset(found)


def _bodies(copy: sqlite3.Connection) -> Iterator[bytes]:
    reader = MessageReader()
    for _, body in _stored(copy, None):
        yield body
    for query in ("SELECT value FROM things WHERE message = 1", "SELECT message FROM dead_letters"):
        for (data,) in copy.execute(query):
            yield reader.decode_one(data).body


def _stored(copy: sqlite3.Connection, kind: str | None) -> Iterator[tuple[str, bytes]]:
    """Names of logs and bodies of what is not settled: of logs of this kind, or of all but INCOMING."""
    reader = MessageReader()
    settled: dict[int, bytes] = dict(copy.execute("SELECT row, bits FROM settled"))
    rows: list[tuple[Any, ...]] = copy.execute(
        "SELECT rows.id, logs.kind, logs.name, rows.tag, rows.messages"
        " FROM rows JOIN logs ON logs.id = rows.log"
    ).fetchall()
    for id, of, name, tag, data in rows:
        if tag == TRANSIENT or (of != kind if kind else of == INCOMING):
            continue
        assert data, "rows in the heap are not looked into: use small bodies"
        bits = int.from_bytes(settled.get(id, b""), "little")
        for offset, message in zip(*reader.decode(data), strict=True):
            if not bits >> offset & 1:
                yield name, message.body
