"""Limit on the bytes of an AMQP client's unacknowledged deliveries.

Prefetch counts messages without regard to their size, and basic.get is not limited by it, so this limit
complements them. A message counts from its delivery until it is settled or requeued, also while its
acknowledgement waits in a transaction.
"""

from __future__ import annotations

from gateway.transport.stream import Stream


class Outstanding:
    """Number of bytes of one connection's unacknowledged deliveries (`byte_count`); `most` is its maximum."""

    __slots__ = ("_most", "_starved", "_stream", "byte_count")

    def __init__(self, stream: Stream, most: int) -> None:
        self.byte_count = 0
        self._most = most
        self._stream = stream
        self._starved = False

    @property
    def full(self) -> bool:
        """True if nothing more may be delivered before an acknowledgement.

        Reading True has a side effect: the stream's owner is notified when half of the limit is acknowledged.
        """
        if self.byte_count < self._most:
            return False
        self._starved = True
        return True

    def subtract(self, byte_count: int) -> None:
        """Subtract bytes that were acknowledged or requeued. Resume deliveries at half of the limit."""
        self.byte_count -= byte_count
        if self._starved and self.byte_count <= self._most // 2:
            self._starved = False
            self._stream.request_resume()
