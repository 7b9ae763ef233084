"""Layer between a socket and its protocol, as streams see TLS and WebSocket. Blocking clients use it, too."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Ending(NamedTuple):
    """Reason why no more bytes pass a layer.

    `broke` and `refused` are short labels for counters: the peer broke a rule of the layer, or the client was
    refused. Both are empty if the peer closed normally.
    """

    text: str
    broke: str = ""
    refused: str = ""


class Filter(Protocol):
    """Layer that converts between the socket's bytes and the peer's (TLS, WebSocket)."""

    @property
    def ended(self) -> Ending | None:
        """Reason why nothing more will be received, or None.

        Output that `send` still returns must be written.
        """

    @property
    def unread(self) -> bool:
        """True if `receive` with b"" would return more data, which is left for another turn."""

    @property
    def certificate(self) -> bytes:
        """Peer's verified certificate (DER); b"" if it has presented none."""

    def receive(self, data: bytes) -> bytes:
        """Convert bytes from the socket and return those for the owner, up to whatever sets `ended`."""

    def send(self, data: bytes) -> bytes:
        """Return the bytes for the socket: `data` converted, and the layer's own output.

        With b"" as `data`, the result is only the layer's own output.
        """

    def finish(self) -> bytes:
        """Return the bytes that close the layer."""
