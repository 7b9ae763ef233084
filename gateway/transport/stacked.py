"""Two filters as one: WebSocket within TLS."""

from __future__ import annotations

from gateway.transport.stream import Ending, Filter


class Stacked:
    """`outer` stands next to the socket, `inner` next to the owner."""

    def __init__(self, outer: Filter, inner: Filter) -> None:
        self._outer = outer
        self.inner = inner

    @property
    def ended(self) -> Ending | None:
        """What ended either."""
        return self._outer.ended or self.inner.ended

    @property
    def unread(self) -> bool:
        """Either has kept something for another turn."""
        return self._outer.unread or self.inner.unread

    @property
    def certificate(self) -> bytes:
        """That of the layer which knows one."""
        return self._outer.certificate or self.inner.certificate

    def receive(self, data: bytes) -> bytes:
        """From the socket to the peer; what the inner one has kept first."""
        if not data and self.inner.unread:
            return self.inner.receive(b"")
        data = self._outer.receive(data)
        return self.inner.receive(data) if data else b""

    def send(self, data: bytes) -> bytes:
        """From the peer to the socket."""
        return self._outer.send(self.inner.send(data))

    def finish(self) -> bytes:
        """Both farewells, the inner one first."""
        return self._outer.send(self.inner.finish()) + self._outer.finish()


def within(outer: Filter | None, inner: Filter | None) -> Filter | None:
    """`inner` behind `outer`, of which either may be missing."""
    if outer is None or inner is None:
        return outer or inner
    return Stacked(outer, inner)
