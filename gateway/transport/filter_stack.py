"""Combination of two filters into one: WebSocket within TLS."""

from __future__ import annotations

from gateway.transport.filter import Ending, Filter


class Stacked:
    """Filter of two layers: `outer` is next to the socket, `inner` is next to the stream's owner."""

    def __init__(self, outer: Filter, inner: Filter) -> None:
        self._outer = outer
        self.inner = inner

    @property
    def ended(self) -> Ending | None:
        """Reason why one of the layers ended, the outer one's first; None while both are open."""
        return self._outer.ended or self.inner.ended

    @property
    def unread(self) -> bool:
        """True if a layer has decoded data that it has not returned yet; `receive(b"")` returns it."""
        return self._outer.unread or self.inner.unread

    @property
    def certificate(self) -> bytes:
        """Peer's verified certificate (DER) from the layer that has one; b"" if neither has."""
        return self._outer.certificate or self.inner.certificate

    def receive(self, data: bytes) -> bytes:
        """Pass bytes from the socket through both layers, and return the bytes for the owner.

        If `data` is b"", first return the decoded data that the inner layer has not returned yet.
        """
        if not data and self.inner.unread:
            return self.inner.receive(b"")
        data = self._outer.receive(data)
        return self.inner.receive(data) if data else b""

    def send(self, data: bytes) -> bytes:
        """Pass bytes from the owner through both layers. Return the bytes for the socket."""
        return self._outer.send(self.inner.send(data))

    def finish(self) -> bytes:
        """Return the closing bytes of both layers, those of the inner one first."""
        return self._outer.send(self.inner.finish()) + self._outer.finish()


def stack_filters(outer: Filter | None, inner: Filter | None) -> Filter | None:
    """Return a filter with `inner` inside `outer`. If one of them is None, return the other one (or None)."""
    if outer is None or inner is None:
        return outer or inner
    return Stacked(outer, inner)
