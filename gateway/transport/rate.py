"""How much one connection may send in a second: a token bucket, asked once per read and never per message.

What has been read is taken, even if it is more than was allowed: the debt is paid by not being read for as
long as it takes. So the sender is slowed down by TCP, and nothing is dropped or refused. What was not used is
kept for one second, no longer.
"""

from __future__ import annotations

from typing import Final

KEPT_SECS: Final = 1.0


class Rate:
    """Of one connection. 0 means: no limit. `messages` is added to by the owner as it counts them."""

    __slots__ = ("_at", "_messages_left", "_octets_left", "messages", "messages_per_sec", "octets_per_sec")

    def __init__(self, octets_per_sec: int, messages_per_sec: int, now: float) -> None:
        self.octets_per_sec = octets_per_sec
        self.messages_per_sec = messages_per_sec
        self.messages = 0
        self._octets_left = octets_per_sec * KEPT_SECS
        self._messages_left = messages_per_sec * KEPT_SECS
        self._at = now

    def charge(self, octets: int, now: float) -> float:
        """So many octets, and `messages`, have come; returns for how many seconds nothing more may."""
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
