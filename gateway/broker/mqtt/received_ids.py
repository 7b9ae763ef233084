"""Packet ids of QoS 2 messages received from a client, until their PUBREL (5: 4.3.3).

A message whose id is known is not accepted again. PUBREC is sent when every target has the message.

An id on disk implies that its message is on disk or settled. Ids of a session that survives a restart are
messages in a log of their own, because the store writes the messages of a pass of the event loop all together
or not at all:

- All targets are within this gateway, and one writes the message: the id is written in the same pass, so
  that after a crash both exist or neither. PUBREC waits for that commit. If one target refuses its copy at
  once, no id is written beside the copies of the others.
- All targets have the message in memory only: so is the id, and a message that is repeated after a crash is
  published again.
- A target is a remote broker, behind a paused route, or a subscription that has postponed its selector: the
  id is written when it has accepted, and a crash in between causes a repeat, but never loses a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.index import Log
from gateway.store.store import Store

NOWHERE: Final = topic_address("")
NONE: Final = -1  # position of an id that is not in the log
IDS_MAX: Final = 65_535


class ReceivedIds:
    """Packet ids of QoS 2 messages received from a client, for a session that ends with the process."""

    __slots__ = ("_accepted",)

    def __init__(self) -> None:
        self._accepted: dict[int, bool] = {}

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._accepted

    def add(self, packet_id: int) -> bool:
        """Add the packet id of a message that has arrived.

        Return False if it is known, so that the message is a repeat.
        """
        if packet_id in self._accepted:
            return False
        self._accepted[packet_id] = False
        return True

    def record_local_delivery(self, packet_id: int) -> None:
        """Record that all targets of a message are local and have received it in this event-loop pass.

        They have accepted the message in memory, or are writing it. This class does nothing; overridden for
        sessions that survive a restart.
        """

    def accept(self, packet_id: int, *, stored: bool = True) -> bool:
        """Record that every target has accepted the message. Return True if PUBREC must be sent now.

        Otherwise PUBREC is sent later, or never. `stored` is False if the targets have the message in memory
        only.
        """
        if packet_id not in self._accepted:
            return False
        self._accepted[packet_id] = True
        return True

    def is_accepted(self, packet_id: int) -> bool:
        """Return True if PUBREC may be sent, or resent."""
        return self._accepted.get(packet_id, False)

    def mark_refused(self, packet_id: int) -> None:
        """Record that a target has refused the message and that delivery to it is retried.

        This class does nothing.
        """

    def forget(self, packet_id: int, *, refusal_sent: bool) -> None:
        """Forget the packet id of a message that was not accepted, so that the client can send it again.

        `refusal_sent` is False if the client was not informed, and so must repeat the message with this
        packet id.
        """
        self._accepted.pop(packet_id, None)

    def release(self, packet_id: int) -> bool:
        """Free the packet id after PUBREL. Return False if it is unknown."""
        return self._accepted.pop(packet_id, None) is not None

    def drop(self) -> None:
        """Forget all packet ids, because the session has ended."""
        self._accepted.clear()


@dataclass
class _ReceivedId:
    """State of a received packet id, at `position` in the log of ids.

    `settled` is True once the write of the id is over, whatever its result. `refused` is True once a target
    has refused the message, so that delivery is retried.
    """

    position: int = NONE
    settled: bool = False
    accepted: bool = False
    refused: bool = False


class DurableReceivedIds(ReceivedIds):
    """Packet ids of QoS 2 messages received from a client, for a session that survives a restart."""

    __slots__ = ("_client", "_entries", "_log", "_next", "_say", "_store")

    def __init__(self, store: Store, client: str, say: Callable[[int], None]) -> None:
        """Create an empty set of packet ids for the client id `client`.

        `say` sends PUBREC for a message that was accepted before its packet id was on disk.
        """
        super().__init__()
        self._store = store
        self._client = client
        self._say = say
        self._log: Log | None = None
        self._next = 0
        self._entries: dict[int, _ReceivedId] = {}

    def restore(self, log: Log) -> None:
        """Read the packet ids that an earlier process has written to `log`.

        Only valid before the store starts.
        """
        self._log = log
        self._next = self._store.extent(log).end
        self._store.read_from(log, 0, self._restore, messages_max=IDS_MAX, bytes_max=1 << 30)

    def _restore(self, stored: list[tuple[int, Message, bytes]]) -> None:
        for position, message, _ in stored:
            self._entries[int.from_bytes(message.body, "big")] = _ReceivedId(position, True, True)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._entries

    def add(self, packet_id: int) -> bool:
        """Add the packet id of a message that has arrived.

        Return False if it is known, so that the message is a repeat.
        """
        if packet_id in self._entries:
            return False
        self._entries[packet_id] = _ReceivedId()
        return True

    def record_local_delivery(self, packet_id: int) -> None:
        """Write the packet id in the transaction in which the local targets store the message."""
        entry = self._entries.get(packet_id)
        if entry is None or entry.settled or entry.accepted or entry.refused:
            return
        if entry.position == NONE:
            self._write(packet_id, entry)

    def _write(self, packet_id: int, entry: _ReceivedId) -> None:
        if self._log is None:
            self._log = self._store.log("incoming", self._client)
        position = entry.position = self._next
        self._next += 1
        mark = Message(NOWHERE, packet_id.to_bytes(2, "big"))
        self._store.append(self._log, position, [mark], partial(self._written, packet_id, position))

    def _written(self, packet_id: int, position: int, outcome: Outcome) -> None:
        """Mark the write of the packet id as finished, and send PUBREC if the message was accepted before.

        If the disk has refused the packet id, it is in memory only. Nothing is done for an outdated
        `position`.
        """
        entry = self._entries.get(packet_id)
        if entry is None or entry.position != position:
            return
        entry.settled = True
        if outcome is not ACCEPTED:
            entry.position = NONE
        if entry.accepted:
            self._say(packet_id)

    def accept(self, packet_id: int, *, stored: bool = True) -> bool:
        """Record that every target has accepted the message, and write the packet id if `stored`.

        Return True if PUBREC must be sent now.
        """
        entry = self._entries.get(packet_id)
        if entry is None:
            return False
        entry.accepted = True
        if not entry.settled and entry.position == NONE:
            if stored:
                self._write(packet_id, entry)
            else:
                entry.settled = True
        return entry.settled

    def is_accepted(self, packet_id: int) -> bool:
        """Return True if PUBREC may be sent, or resent."""
        entry = self._entries.get(packet_id)
        return entry is not None and entry.accepted and entry.settled

    def mark_refused(self, packet_id: int) -> None:
        """Delete the packet id from disk, because a target has refused the message and delivery is retried.

        If the gateway crashed now, an id on disk without its message would make the client's repeat count as
        a duplicate, and the message would be lost. The id is written again when the message is accepted.
        """
        entry = self._entries.get(packet_id)
        if entry is not None:
            self._erase(entry)
            entry.settled = False
            entry.refused = True

    def forget(self, packet_id: int, *, refusal_sent: bool) -> None:
        """Forget the packet id of a message that was not accepted, and delete it from disk."""
        self.release(packet_id)

    def release(self, packet_id: int) -> bool:
        """Free the packet id after PUBREL, and delete it from disk. Return False if it is unknown."""
        entry = self._entries.pop(packet_id, None)
        if entry is not None:
            self._erase(entry)
        return entry is not None

    def _erase(self, entry: _ReceivedId) -> None:
        if entry.position != NONE:
            assert self._log is not None
            self._store.settle(self._log, (entry.position,))
            entry.position = NONE

    def drop(self) -> None:
        """Forget all packet ids and delete their log, because the session has ended."""
        self._entries.clear()
        if self._log is not None:
            self._store.drop(self._log)
