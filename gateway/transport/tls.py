"""TLS as a filter: an SSLObject between two memory BIOs, so that the poller stays one synchronous loop."""

from __future__ import annotations

import contextlib
import ssl
from typing import Final

from gateway.transport.filter import Ending

RECORDS_MAX: Final = 512  # TLS records per turn: each may hold as little as one byte


class TlsFilter:
    """TLS layer of one connection.

    The handshake takes place while bytes pass through the layer. Data that the owner sends before the end of
    the handshake is buffered.
    """

    def __init__(
        self, context: ssl.SSLContext, *, server_side: bool, server_hostname: str | None = None
    ) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_side, server_hostname=server_hostname
        )
        self._pending = b""
        self.established = False
        self.unread = False
        self.ended: Ending | None = None

    def receive(self, data: bytes) -> bytes:
        """Decrypt bytes from the socket and return the plain data.

        A failed handshake or bad record sets `ended`; `send` then returns the alert for the peer.
        """
        self._incoming.write(data)
        self.unread = False
        pieces = []
        try:
            if self.established or self._shake():
                while piece := self._tls.read(65_536):
                    pieces.append(piece)
                    if len(pieces) >= RECORDS_MAX:
                        self.unread = True
                        break
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            pass  # the peer sent close-notify; the end of the socket follows
        except ssl.SSLError as error:
            self.ended = Ending(error.strerror or str(error), violation="tls")
        return b"".join(pieces)

    def send(self, data: bytes) -> bytes:
        """Encrypt `data` and return the bytes for the socket, including those of the handshake.

        Until the handshake is done, `data` is buffered.
        """
        if self.ended is not None:
            return self._outgoing.read()
        if data:
            self._pending += data
        if not self.established and not self._shake():
            return self._outgoing.read()
        if self._pending:
            self._tls.write(self._pending)
            self._pending = b""
        return self._outgoing.read()

    @property
    def certificate(self) -> bytes:
        """Peer's verified certificate (DER); b"" if it has presented none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def finish(self) -> bytes:
        """Return the bytes that are still to be sent, and the close-notify alert after them."""
        if self.established and self.ended is None:
            with contextlib.suppress(ssl.SSLError):  # the peer's own close-notify is not awaited
                self._tls.unwrap()
        return self._outgoing.read()

    def _shake(self) -> bool:
        """Continue the handshake. Return True if it is done, False if it needs more bytes from the peer."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self.established = True
        return True
