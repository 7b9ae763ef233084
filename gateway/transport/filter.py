"""Layer between a socket and its protocol, as streams see TLS and WebSocket. Blocking clients use it, too."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Ending(NamedTuple):
    """Reason why a layer such as TLS passes no more bytes.

    `violation` and `refused` are short labels for counters: the peer broke a rule of the layer, or the client
    was refused. Both are empty if the peer closed normally.
    """

    text: str
    violation: str = ""
    refused: str = ""


class Filter(Protocol):
    """Layer (TLS, WebSocket) that converts between a socket's bytes and the bytes of the protocol above."""

    @property
    def ended(self) -> Ending | None:
        """Reason why `receive` will return no more bytes, or None while the layer is open.

        After the end, the caller must still write the bytes that `send` returns, such as an alert of TLS.
        """

    @property
    def unread(self) -> bool:
        """True if the layer has decoded data that it has not returned yet; `receive(b"")` returns it."""

    @property
    def certificate(self) -> bytes:
        """Peer's verified certificate (DER); b"" if it has presented none."""

    def receive(self, data: bytes) -> bytes:
        """Convert bytes from the socket and return the bytes for the stream's owner.

        If `data` ends the layer, set `ended` and return only the bytes before the end.
        """

    def send(self, data: bytes) -> bytes:
        """Return the bytes for the socket: `data` converted, and the layer's own output.

        With b"" as `data`, the result is only the layer's own output.
        """

    def finish(self) -> bytes:
        """Return the bytes that close the layer."""
