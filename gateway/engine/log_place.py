"""How far one replica has read the log of the namespace, remembered over a restart if there is a store."""

from __future__ import annotations

from typing import Final

from gateway.engine.cursor import LogCursor
from gateway.store.store import Store

POSITION: Final = "position"
RECORD_OCTETS: Final = 256  # that a record has, before any has been read


class LogPlace:
    """The place in the log, and how much of it was read."""

    def __init__(self, namespace: str, store: Store | None) -> None:
        """What is in `store`, which has not been started, is there at once."""
        self.octets_read = 0
        self.records_read = 0
        self.cursor = LogCursor()
        self._kind = f"engine log {namespace}"
        self._kept_in = store
        self._noted = -1
        for _, octets in () if store is None else store.things(self._kind):
            assert isinstance(octets, bytes)
            self._noted = self.cursor.position = int.from_bytes(octets, "big")

    @property
    def position(self) -> int:
        """Offset of the last record that has been read; -1 for none."""
        return self.cursor.position

    def note(self) -> None:
        """The wake-up is over: the position goes to disk with what was read."""
        if self._kept_in is not None and self.position != self._noted:
            self._noted = self.position
            self._kept_in.put(self._kind, POSITION, max(self.position, 0).to_bytes(8, "big"))

    def begin_anew(self) -> None:
        """The log does not go back as far as was read, or is another one."""
        self.cursor.begin_anew()
        if self._kept_in is not None:
            self._kept_in.delete_all(self._kind)
            self._noted = -1

    def oldest(self, octets: float) -> float:
        """Return the position behind which there are about so many bytes."""
        each = self.octets_read / self.records_read if self.records_read else RECORD_OCTETS
        return self.position - octets / each
