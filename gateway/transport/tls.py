"""TLS as a filter: an SSLObject between two memory BIOs, so that the poller stays one synchronous loop."""

from __future__ import annotations

import contextlib
import ssl
from typing import Final

from gateway.transport.stream import Ending

RECORDS_MAX: Final = 512  # of one turn: they may be as small as one octet


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
        self.unread = False
        self.ended: Ending | None = None

    def receive(self, data: bytes) -> bytes:
        """Decrypt. A bad handshake or record ends it; what is left to send then is the alert that says so."""
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
            pass  # the peer said that it will send no more; the socket's end follows
        except ssl.SSLError as error:
            self.ended = Ending(error.strerror or str(error), broke="tls")
        return b"".join(pieces)

    def send(self, data: bytes) -> bytes:
        """Encrypt what can be, and collect what the handshake has to say."""
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
        """The peer's certificate (DER), which has been verified; b"": none has been shown."""
        return self._tls.getpeercert(binary_form=True) or b""

    def finish(self) -> bytes:
        """The close-notify alert."""
        if self.established and self.ended is None:
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
