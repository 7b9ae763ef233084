"""Retained messages, as the log of the namespace says them: the same at every replica.

Whoever publishes one publishes it to the log, and every replica, his own too, keeps what comes out of it, in
the order of the log. So the limits strike everywhere alike, if the replicas have the same. With a store a
replica remembers them and the position it has come to, in one transaction, and goes on from there.

The log forgets what is older than `state_secs`, or has `state_bytes_max` behind it. So whoever finds that a
record has lived for half of that writes it again, under the offset of the first one, its origin. Of two
records of a topic that counts whose origin is later: a record that was written again does not undo what
others have published meanwhile. Each replica looks at a moment of its own, and what one has written again is
young for the others.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from gateway import clock
from gateway.broker.mqtt.retained import Retained
from gateway.broker.mqtt.system import SYS
from gateway.engine.cursor import LogCursor
from gateway.model.batch import SubBatch
from gateway.model.message import Message
from gateway.protocols.mqtt.dialect import MQTT
from gateway.store.restoring import set_aside
from gateway.store.store import Store

POSITION: Final = "position"
PLACED: Final = Struct(">QQQ")  # the fields of Placed
RECORD_OCTETS: Final = 256  # that a record has, before any has been read
HALF: Final = 0.5
SPREAD: Final = 0.25  # of its life, by which replicas differ in what they find due
AGAIN_MAX: Final = 500  # records that are written again at once
DUE: Final = 0  # as the time of a clear: an older record of its topic is behind it


class Placed(NamedTuple):
    """Where the log has what a topic retains, now and at first, and since when (milliseconds UTC)."""

    offset: int
    origin: int
    written: int


class EngineRetained(Retained):
    """What the log retains. It is a sink, but what is published is kept when it comes back."""

    def __init__(
        self,
        namespace: str,
        publish: Callable[[Message], None],
        *,
        messages_max: int,
        octets_max: int,
        store: Store | None,
        utc: Callable[[], float],
    ) -> None:
        """`utc`: by which records say when they were written. `publish` writes a message to
        the log. What is in `store`, which has not been started, is there at once."""
        super().__init__(messages_max=messages_max, octets_max=octets_max)
        self.octets_read = 0  # of the log, and
        self.records_read = 0
        self.cursor = LogCursor()
        self._publish = publish
        self._utc = utc
        self._kind = f"engine retained {namespace}"
        self._placed_kind = f"engine placed {namespace}"
        self._cleared_kind = f"engine cleared {namespace}"
        self._log_kind = f"engine log {namespace}"
        self._kept_in = store
        self._placed: dict[str, Placed] = {}
        self._cleared: dict[str, Placed] = {}  # topics that retain nothing, the oldest clear first
        self._noted = -1
        if store is not None:
            self._take_from(store)

    def _take_from(self, store: Store) -> None:
        utc = clock.utc()
        for key, octets in store.things(self._placed_kind):
            assert isinstance(octets, bytes)
            assert isinstance(key, bytes)
            self._placed[key.decode()] = Placed(*PLACED.unpack(octets))
        for key, octets in store.things(self._cleared_kind):
            assert isinstance(octets, bytes)
            assert isinstance(key, bytes)
            self._cleared[key.decode()] = Placed(*PLACED.unpack(octets))
        for key, message in store.things(self._kind):
            assert isinstance(message, Message)
            with set_aside(self._kind, key):
                self._set(message, utc)
        for _, octets in store.things(self._log_kind):
            assert isinstance(octets, bytes)
            self._noted = int.from_bytes(octets, "big")
            self.cursor.position = self._noted

    @property
    def position(self) -> int:
        """Offset of the last record that has been read; -1 for none."""
        return self.cursor.position

    def publish(self, part: SubBatch) -> None:
        """What is published goes to the log by the way that all messages go; only `$SYS` stays here."""
        for message in part.messages:
            if message.address.name.startswith(SYS):
                self.show(message)
        part.accept()

    def forget(self, message: Message) -> bool:
        """Have every replica forget this message; False: its topic has another one, or none."""
        if self._messages.get(message.address.name) is not message:
            return False
        self._publish(Message(message.address, b"", assurance=1, durable=True, retain=True))
        return True

    # What the log says.

    def apply(self, message: Message, offset: int, *, origin: int, written: int) -> bool:
        """A record at `offset`, which is the origin unless it says another. False: a later one counts."""
        topic, store = message.address.name, self._kept_in
        first = offset if origin < 0 else origin
        cleared = self._cleared.get(topic)
        before = cleared or self._placed.get(topic)
        if before is not None and before.origin > first:
            if cleared is not None:
                self._clear(topic, cleared._replace(written=DUE))
            return False
        kept = self._set(message, written / 1000)
        if kept is None:
            self._drop(topic)
        key = message.address.wire
        placed = Placed(offset, first, written)
        if kept:
            self._forget_clear(topic)
            self._placed[topic] = placed
            if store is not None:
                store.put(self._kind, key, message)
                store.put(self._placed_kind, key, PLACED.pack(*placed))
            return True
        if self._placed.pop(topic, None) is not None and store is not None:
            store.delete(self._kind, key)
            store.delete(self._placed_kind, key)
        self._clear(topic, placed)
        return True

    def _clear(self, topic: str, placed: Placed) -> None:
        """Remember that a topic retains nothing since then; of too many clears the oldest is forgotten."""
        self._cleared.pop(topic, None)
        self._cleared[topic] = placed
        if self._kept_in is not None:
            self._kept_in.put(self._cleared_kind, topic.encode(), PLACED.pack(*placed))
        if len(self._cleared) > self.messages_max:
            self._forget_clear(next(iter(self._cleared)))

    def _forget_clear(self, topic: str) -> None:
        if self._cleared.pop(topic, None) is not None and self._kept_in is not None:
            self._kept_in.delete(self._cleared_kind, topic.encode())

    def tick(self) -> None:
        """Keep expired messages: a record that needs their place drops them, at all replicas alike."""

    def _forgotten(self, message: Message) -> None:
        self._placed.pop(message.address.name, None)
        if self._kept_in is not None:
            self._kept_in.delete(self._kind, message.address.wire)
            self._kept_in.delete(self._placed_kind, message.address.wire)

    def note(self) -> None:
        """The wake-up is over: the position goes to disk with what was read."""
        if self._kept_in is not None and self.position != self._noted:
            self._noted = self.position
            self._kept_in.put(self._log_kind, POSITION, max(self.position, 0).to_bytes(8, "big"))

    def begin_anew(self) -> None:
        """The log does not go back as far as we have read, or is another one: what it says now counts."""
        for message in self.messages():
            if not message.address.name.startswith(SYS):
                self._drop(message.address.name)
        self._placed.clear()
        self._cleared.clear()
        self.cursor.begin_anew()
        if self._kept_in is not None:
            for kind in (self._kind, self._placed_kind, self._cleared_kind, self._log_kind):
                self._kept_in.delete_all(kind)
            self._noted = -1

    def oldest(self, octets: float) -> float:
        """The position behind which there are so many octets, about."""
        each = self.octets_read / self.records_read if self.records_read else RECORD_OCTETS
        return self.position - octets / each

    def due(self, state_secs: float, state_octets: int) -> list[tuple[Message, int]]:
        """Messages that have to be written again, with their origins; those that have expired are dropped,
        and clears that are older than the log. An empty message is a clear.

        `state_octets` are what the log keeps; how many records that are, the records tell that were read.
        """
        utc, wall = self._utc(), clock.utc()
        share = HALF - SPREAD * random.random()
        limit = (utc - state_secs * share) * 1000
        oldest = self.oldest(state_octets * share)
        found: list[tuple[Message, int]] = []
        for topic, placed in list(self._placed.items()):
            if placed.written > limit and placed.offset > oldest:
                continue
            message = self._messages[topic]
            if message.expires and message.expires <= wall:
                self.apply(
                    Message(message.address, b""), placed.offset, origin=placed.origin, written=placed.written
                )
            elif len(found) < AGAIN_MAX:
                found.append((message, placed.origin))
        for topic, placed in list(self._cleared.items()):
            if placed.written != DUE and placed.written < (utc - state_secs) * 1000:
                self._forget_clear(topic)
            elif placed.written == DUE and len(found) < AGAIN_MAX:
                clear = Message(MQTT.address("", topic), b"", assurance=1, durable=True, retain=True)
                found.append((clear, placed.origin))
        return found
