"""When to tell a silent peer's timer that we are alive: AMQP 0-9-1's heartbeats and AMQP/Fast's PINGs.

A peer gives up after one or two intervals without a word, depending on who wrote it; so a beat goes out after
half an interval in which nothing else was said, and after each further half. Beats themselves are no words:
counted as such, each would put off the next. The clock is the caller's, and looks only now and then: what was
said since it looked last counts as said then, so that a beat is early rather than late.
"""

from __future__ import annotations


class Beats:
    """The beats of one connection."""

    __slots__ = ("_interval", "_looked", "at", "spoke")

    def __init__(self) -> None:
        self.at = 0.0  # when to look again: a beat is due unless something was said
        self.spoke = False  # since the last look; set by whoever writes anything but a beat
        self._interval = 0.0
        self._looked = 0.0

    def agree(self, interval: float, now: float) -> None:
        """The peer expects to hear from us within `interval` seconds; 0: it does not."""
        self._interval = interval
        self._looked = now
        self.at = now + interval / 2

    def due(self, now: float) -> bool:
        """Whether to say something, for nothing else was said; if so it counts as said now."""
        since, self._looked = self._looked, now
        if self.spoke:
            self.spoke = False
            self.at = since + self._interval / 2
        if not self._interval or now < self.at:
            return False
        self.at = now + self._interval / 2
        return True
