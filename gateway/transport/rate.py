"""Receive limit of one connection: a token bucket, charged once per read and never per message.

All bytes that were read are processed, even if they exceed the limit; the connection is then not read until
the excess is paid off. So TCP slows the sender down, and nothing is dropped or refused. Unused allowance
lasts for one second (KEPT_SECS).
"""

from __future__ import annotations

from typing import Final

KEPT_SECS: Final = 1.0


class Rate:
    """Token bucket of one connection, in bytes and messages per second; 0 means no limit.

    The owner of the stream adds the messages that it counts to `messages`.
    """

    __slots__ = ("_at", "_messages_left", "_octets_left", "messages", "messages_per_sec", "octets_per_sec")

    def __init__(self, octets_per_sec: int, messages_per_sec: int, now: float) -> None:
        self.octets_per_sec = octets_per_sec
        self.messages_per_sec = messages_per_sec
        self.messages = 0
        self._octets_left = octets_per_sec * KEPT_SECS
        self._messages_left = messages_per_sec * KEPT_SECS
        self._at = now

    def charge(self, octets: int, now: float) -> float:
        """Charge `octets` bytes and the counted `messages`, and set `messages` to 0.

        Return for how many seconds nothing more may be read. `now` is in loop-clock seconds.
        """
        passed = now - self._at
        self._at = now
        wait = 0.0
        if self.octets_per_sec:
            most = self.octets_per_sec * KEPT_SECS
            self._octets_left = min(self._octets_left + passed * self.octets_per_sec, most) - octets
            wait = -self._octets_left / self.octets_per_sec
        if self.messages_per_sec:
            most = self.messages_per_sec * KEPT_SECS
            self._messages_left = (
                min(self._messages_left + passed * self.messages_per_sec, most) - self.messages
            )
            wait = max(wait, -self._messages_left / self.messages_per_sec)
        self.messages = 0
        return max(wait, 0.0)
