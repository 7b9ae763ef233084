"""Receive limit of one connection: a token bucket, charged once per read and never per message.

All bytes that were read are processed, even if they exceed the limit; the connection is then not read until
the average is at the limit again. So TCP slows the sender down, and nothing is dropped or refused. Unused
allowance lasts for one second (KEPT_SECS).
"""

from __future__ import annotations

from typing import Final

KEPT_SECS: Final = 1.0


class ConnectionRate:
    """Token bucket of one connection, in bytes and messages per second; 0 means no limit.

    The owner of the stream adds the messages that it counts to `messages`.
    """

    __slots__ = ("_at", "_bytes_left", "_messages_left", "bytes_per_sec", "messages", "messages_per_sec")

    def __init__(self, bytes_per_sec: int, messages_per_sec: int, now: float) -> None:
        self.bytes_per_sec = bytes_per_sec
        self.messages_per_sec = messages_per_sec
        self.messages = 0
        self._bytes_left = bytes_per_sec * KEPT_SECS
        self._messages_left = messages_per_sec * KEPT_SECS
        self._at = now

    def charge(self, byte_count: int, now: float) -> float:
        """Subtract `byte_count` bytes and the counted `messages` from the allowance, and set `messages` to 0.

        Return for how many seconds nothing more may be read. `now` is in loop-clock seconds.
        """
        passed = now - self._at
        self._at = now
        wait = 0.0
        if self.bytes_per_sec:
            most = self.bytes_per_sec * KEPT_SECS
            self._bytes_left = min(self._bytes_left + passed * self.bytes_per_sec, most) - byte_count
            wait = -self._bytes_left / self.bytes_per_sec
        if self.messages_per_sec:
            most = self.messages_per_sec * KEPT_SECS
            self._messages_left = (
                min(self._messages_left + passed * self.messages_per_sec, most) - self.messages
            )
            wait = max(wait, -self._messages_left / self.messages_per_sec)
        self.messages = 0
        return max(wait, 0.0)
