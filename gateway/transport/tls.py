"""TLS as a filter: an SSLObject between two memory BIOs, so that the poller stays one synchronous loop."""

from __future__ import annotations

import contextlib
import ssl


class TlsFilter:
    """One TLS connection. The handshake happens as octets pass; what is sent before it ends is kept."""

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
        self._broken = False

    def receive(self, data: bytes) -> bytes:
        """Decrypt; ssl.SSLError (an OSError) when the handshake or a record is bad."""
        self._incoming.write(data)
        try:
            return self._decrypted()
        except ssl.SSLError:
            self._broken = True  # what is left to send is the alert that says so
            raise

    def _decrypted(self) -> bytes:
        if not self.established and not self._shake():
            return b""
        pieces = []
        while True:
            try:
                piece = self._tls.read(65_536)
            except ssl.SSLWantReadError:
                break
            except ssl.SSLZeroReturnError:
                break  # the peer said that it will send no more; the socket's end follows
            if not piece:
                break
            pieces.append(piece)
        return b"".join(pieces)

    def send(self, data: bytes) -> bytes:
        """Encrypt what can be, and collect what the handshake has to say."""
        if self._broken:
            return self._outgoing.read()
        if data:
            self._pending += data
        if not self.established and not self._shake():
            return self._outgoing.read()
        if self._pending:
            self._tls.write(self._pending)
            self._pending = b""
        return self._outgoing.read()

    def finish(self) -> bytes:
        """The close-notify alert."""
        if self.established and not self._broken:
            with contextlib.suppress(ssl.SSLError):  # the peer's own close-notify is not awaited
                self._tls.unwrap()
        return self._outgoing.read()

    def _shake(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        self.established = True
        return True
