"""What one AMQP client has been sent and has not acknowledged, by weight.

Its prefetch counts messages, whatever they weigh, and `basic.get` counts nothing: this is the bound on octets
that goes with them. Messages count from their delivery until they are settled or return to their queue, also
while a transaction keeps their acknowledgement.
"""

from __future__ import annotations

from gateway.transport.stream import Stream


class Outstanding:
    """The `octets` that a connection's client holds. `stream` is asked to go on when it is half of `most`."""

    __slots__ = ("_most", "_starved", "_stream", "octets")

    def __init__(self, stream: Stream, most: int) -> None:
        self.octets = 0
        self._most = most
        self._stream = stream
        self._starved = False

    @property
    def full(self) -> bool:
        """True: the client gets nothing more before it acknowledges. Its consumers are told when they may."""
        if self.octets < self._most:
            return False
        self._starved = True
        return True

    def settled(self, octets: int) -> None:
        """So much of it has been acknowledged, or given back."""
        self.octets -= octets
        if self._starved and self.octets <= self._most // 2:
            self._starved = False
            self._stream.starve()
