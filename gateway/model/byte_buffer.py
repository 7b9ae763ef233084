"""Buffer for bytes that arrive in parts of any size, until all of them are there.

Large bodies pass through here. A copy of one costs more than the copying itself, since the system has to
provide the memory first. So large parts are stored as they arrive and joined once. Small parts are appended
to one buffer: an object for each byte would take forty times the memory of the data.
"""

from __future__ import annotations

from typing import Final

PART_BYTES_MIN: Final = 4_096


class ByteBuffer:
    """Buffer of bytes that arrive in parts; `byte_count` is the number of bytes in it."""

    __slots__ = ("_parts", "byte_count")

    def __init__(self, first: bytes = b"") -> None:
        self._parts: list[bytes | bytearray | memoryview] = [first] if first else []
        self.byte_count = len(first)

    def add(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        parts = self._parts
        self.byte_count += len(data)
        if len(data) >= PART_BYTES_MIN:
            parts.append(data)
            return
        last = parts[-1] if parts else None
        if isinstance(last, bytearray):
            last += data
        else:
            parts.append(bytearray(data))

    def take_all(self) -> bytes:
        """Return all bytes and empty the buffer."""
        data = b"".join(self._parts)
        self._parts.clear()
        self.byte_count = 0
        return data
