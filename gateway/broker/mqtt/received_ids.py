"""QoS 2 from a client: the packet ids of messages that were taken and not released (5: 4.3.3).

A message whose id is known is not taken again. PUBREC is said when every target has the message; of a
session that survives a restart only when the id is on disk, too. There the id is a message of its own in a
log, for the store writes the messages of a wake-up all together or not at all: when everything that the
message leads to is within this gateway, the id is written in the wake-up in which it came, so that after a
crash both are there or neither. What leads to a remote broker is not ours to write together: its id is
written when the broker has confirmed, and the crash in between costs a repeat, never a message.
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

    def take(self, packet_id: int, *, here: bool) -> bool:
        """A message came under this id. `here`: no remote broker is to have it. False: it came before."""
        if packet_id in self._accepted:
            return False
        self._accepted[packet_id] = False
        return True

    def accept(self, packet_id: int) -> bool:
        """Every target has the message. True: say PUBREC now; otherwise it is said later, or never."""
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

    def take(self, packet_id: int, *, here: bool) -> bool:
        """As above; the id is written now if the message stays here."""
        if packet_id in self._taken:
            return False
        taken = self._taken[packet_id] = _Taken()
        if here:
            self._write(packet_id, taken)
        return True

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

    def accept(self, packet_id: int) -> bool:
        """As above."""
        taken = self._taken.get(packet_id)
        if taken is None:
            return False
        taken.accepted = True
        if not taken.settled and taken.position == NONE:
            self._write(packet_id, taken)
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
