"""Packet ids of messages of a durable session whose usual id was in use.

The usual packet id of a message follows from its position in the log, so nothing has to be stored for it. If
an earlier message still uses that id, the message gets the next free one below it. That id is recorded in the
store, and the message is sent when the record is on disk: after a crash it must be resent under the id by
which the client knows it (MQTT 5: 2.2.1, 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

from gateway.broker.mqtt.records import Records
from gateway.broker.mqtt.session import PACKET_IDS
from gateway.model.outcome import ACCEPTED, Outcome


class RenumberedMessages:
    """Packet ids of the messages of one session whose packet id does not follow from their position."""

    __slots__ = ("_by_position", "_client", "_positions", "_recorded", "_records", "_unrecorded", "_used")

    def __init__(
        self, records: Records, client_id: str, used: tuple[Container[int], ...], recorded: Callable[[], None]
    ) -> None:
        """Create an empty map from positions to packet ids.

        `used` has the collections of ids that are in use. `recorded` is called when a chosen packet id is on
        disk, so that its message may be sent.
        """
        self._records = records
        self._client = client_id
        self._used = used
        self._recorded = recorded
        self._by_position: dict[int, int] = {}
        self._positions: dict[int, int] = {}  # by packet id
        self._unrecorded: dict[
            int, bool
        ] = {}  # positions whose record is not on disk; True while it is being written

    def __len__(self) -> int:
        return len(self._by_position)

    def restore(self, position: int, packet_id: int) -> None:
        """Restore the packet id of the message at this position from a record of an earlier process."""
        self._by_position[position] = packet_id
        self._positions[packet_id] = position

    def recorded(self, position: int, usual: int) -> int:
        """Return the recorded packet id of the message at this position, or `usual` if there is none."""
        return self._by_position.get(position, usual)

    def packet_id(self, position: int, usual: int) -> int:
        """Return the packet id for the message at this position; 0 if the message may not be sent yet.

        `usual` is the packet id that follows from the position; it is chosen unless an earlier message still
        uses it. A message with another packet id may be sent when the packet id is on disk.
        """
        packet_id = self._by_position.get(position, usual)
        if self._is_taken(packet_id, position):
            self.forget(position)
            packet_id = self._choose(position, packet_id)
        return 0 if position in self._unrecorded else packet_id

    def _is_taken(self, packet_id: int, position: int) -> bool:
        if self._positions.get(packet_id, position) != position:
            return True
        return any(packet_id in used for used in self._used)

    def _choose(self, position: int, packet_id: int) -> int:
        # The ids above are those of the next messages, the ids below those of messages acknowledged long ago.
        while self._is_taken(packet_id, position):
            packet_id = packet_id - 1 or PACKET_IDS
        self.restore(position, packet_id)
        self._record(position)
        return packet_id

    def _record(self, position: int) -> None:
        self._unrecorded[position] = True
        self._records.put_renumbered(self._client, position, self._by_position[position])
        self._records.store.after_commit(partial(self._has_recorded, position))

    def _has_recorded(self, position: int, outcome: Outcome) -> None:
        if position not in self._unrecorded:
            return
        if outcome is ACCEPTED:
            del self._unrecorded[position]
            self._recorded()
        else:
            self._unrecorded[position] = False

    def retry(self) -> None:
        """Retry to write the records that the disk has refused, unless the disk still fails."""
        if self._unrecorded and self._records.store.healthy:
            for position, is_pending in list(self._unrecorded.items()):
                if not is_pending:
                    self._record(position)

    def forget(self, position: int) -> None:
        """Delete the record of a message that is settled."""
        packet_id = self._by_position.pop(position, 0)
        if packet_id:
            del self._positions[packet_id]
            self._unrecorded.pop(position, None)
            self._records.delete_renumbered(self._client, position)
