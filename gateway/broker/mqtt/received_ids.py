"""QoS 2 from a client: the packet ids of messages that were taken and not released (5: 4.3.3).

A message whose id is known is not taken again. PUBREC is said when every target has the message.

An id on disk implies that its message is on disk or settled. Ids of a session that survives a restart are
messages of their own in a log, for the store writes the messages of a wake-up all together or not at all:
- Every target is within this gateway, and one writes the message: the id is written in the same wake-up, so
  that after a crash both are there or neither. PUBREC waits for that commit.
- Every target has the message in memory only: so is the id, and a message that is repeated after a crash is
  published again.
- A target is a remote broker, or behind a paused route: the id is written when it has accepted, and a crash
  in between costs a repeat, never a message.
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
    """The ids of a session that ends with the process."""

    __slots__ = ("_accepted",)

    def __init__(self) -> None:
        self._accepted: dict[int, bool] = {}

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._accepted

    def take(self, packet_id: int) -> bool:
        """Note that a message came under this id. Return False if it came before."""
        if packet_id in self._accepted:
            return False
        self._accepted[packet_id] = False
        return True

    def handed_on(self, packet_id: int) -> None:
        """Note that the targets, all within this gateway, were given the message in this wake-up: they have
        it in memory, and have accepted it, or are writing it.
        """

    def accept(self, packet_id: int, *, stored: bool = True) -> bool:
        """Note that every target has the message. Return True if PUBREC is to be sent now; otherwise it is
        sent later, or never. Not `stored`: the targets have it in memory only.
        """
        if packet_id not in self._accepted:
            return False
        self._accepted[packet_id] = True
        return True

    def accepted(self, packet_id: int) -> bool:
        """PUBREC may be said, and said again."""
        return self._accepted.get(packet_id, False)

    def doubt(self, packet_id: int) -> None:
        """A target refused the message and is asked again: nobody knows how that will end."""

    def forget(self, packet_id: int) -> None:
        """The message was not taken: when the client sends it again, that is the first time."""
        self._accepted.pop(packet_id, None)

    def release(self, packet_id: int) -> bool:
        """PUBREL came: the id is free. False: it was not taken."""
        return self._accepted.pop(packet_id, None) is not None

    def drop(self) -> None:
        """The session has ended."""
        self._accepted.clear()


@dataclass
class _Taken:
    """What is known of an id. `settled`: writing it is over, whatever came of that."""

    position: int = NONE
    settled: bool = False
    accepted: bool = False


class DurableReceivedIds(ReceivedIds):
    """The ids of a session that survives a restart."""

    __slots__ = ("_client", "_log", "_next", "_say", "_store", "_taken")

    def __init__(self, store: Store, client: str, say: Callable[[int], None]) -> None:
        """`say` has PUBREC said for an id that was accepted before it was on disk."""
        super().__init__()
        self._store = store
        self._client = client
        self._say = say
        self._log: Log | None = None
        self._next = 0
        self._taken: dict[int, _Taken] = {}

    def restore(self, log: Log) -> None:
        """The ids that an earlier process has written. Before the store is started."""
        self._log = log
        self._next = self._store.extent(log).end
        self._store.read_from(log, 0, self._found, messages_max=IDS_MAX, octets_max=1 << 30)

    def _found(self, stored: list[tuple[int, Message, bytes]]) -> None:
        for position, message, _ in stored:
            self._taken[int.from_bytes(message.body, "big")] = _Taken(position, True, True)

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._taken

    def take(self, packet_id: int) -> bool:
        """As above."""
        if packet_id in self._taken:
            return False
        self._taken[packet_id] = _Taken()
        return True

    def handed_on(self, packet_id: int) -> None:
        """As above; the id of a message that is being written is written with it."""
        taken = self._taken.get(packet_id)
        if taken is not None and not taken.settled and not taken.accepted and taken.position == NONE:
            self._write(packet_id, taken)

    def _write(self, packet_id: int, taken: _Taken) -> None:
        if self._log is None:
            self._log = self._store.log("incoming", self._client)
        position = taken.position = self._next
        self._next += 1
        mark = Message(NOWHERE, packet_id.to_bytes(2, "big"))
        self._store.append(self._log, position, [mark], partial(self._written, packet_id, position))

    def _written(self, packet_id: int, position: int, outcome: Outcome) -> None:
        """The id is on disk, or the disk does not take it: then it is known as long as we live."""
        taken = self._taken.get(packet_id)
        if taken is None or taken.position != position:
            return
        taken.settled = True
        if outcome is not ACCEPTED:
            taken.position = NONE
        if taken.accepted:
            self._say(packet_id)

    def accept(self, packet_id: int, *, stored: bool = True) -> bool:
        """As above."""
        taken = self._taken.get(packet_id)
        if taken is None:
            return False
        taken.accepted = True
        if not taken.settled and taken.position == NONE:
            if stored:
                self._write(packet_id, taken)
            else:
                taken.settled = True
        return taken.settled

    def accepted(self, packet_id: int) -> bool:
        """As above."""
        taken = self._taken.get(packet_id)
        return taken is not None and taken.accepted and taken.settled

    def doubt(self, packet_id: int) -> None:
        """As above; the id must not be on disk without its message."""
        taken = self._taken.get(packet_id)
        if taken is not None:
            self._erase(taken)
            taken.settled = False

    def forget(self, packet_id: int) -> None:
        """As above."""
        self.release(packet_id)

    def release(self, packet_id: int) -> bool:
        """As above."""
        taken = self._taken.pop(packet_id, None)
        if taken is not None:
            self._erase(taken)
        return taken is not None

    def _erase(self, taken: _Taken) -> None:
        if taken.position != NONE:
            assert self._log is not None
            self._store.settle(self._log, (taken.position,))
            taken.position = NONE

    def drop(self) -> None:
        """As above."""
        self._taken.clear()
        if self._log is not None:
            self._store.drop(self._log)
