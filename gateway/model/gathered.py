"""Octets that come in parts of any size, until all are there.

A large body passes here. Each copy of one costs more than the copying: what it is copied to is memory that
the system has to hand out first. So parts are kept as they come, and joined once. Small ones are written one
behind the other, for an object of its own for each octet would be forty times what was sent.
"""

from __future__ import annotations

from typing import Final

PART_OCTETS_MIN: Final = 4_096


class Gathered:
    """`octets` of them are there."""

    __slots__ = ("_parts", "octets")

    def __init__(self, first: bytes = b"") -> None:
        self._parts: list[bytes | bytearray | memoryview] = [first] if first else []
        self.octets = len(first)

    def add(self, data: bytes | memoryview) -> None:
        """The next of them."""
        parts = self._parts
        self.octets += len(data)
        if len(data) >= PART_OCTETS_MIN:
            parts.append(data)
            return
        last = parts[-1] if parts else None
        if isinstance(last, bytearray):
            last += data
        else:
            parts.append(bytearray(data))

    def joined(self) -> bytes:
        """All of them; nothing is left here."""
        data = b"".join(self._parts)
        self._parts.clear()
        self.octets = 0
        return data
