"""First bytes of a client: the protocol that they belong to, and whether they fit a port with or without TLS.

Clients send first in every supported protocol, so their first bytes show whether a client without TLS uses a
TLS port, or a client with TLS another port. All listeners and the HTTP server use `check_first_bytes`; those
with streams use it through `FirstBytesFilter`, which removes itself once the first bytes have passed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.protocols import DIALECTS
from gateway.transport.filter import Ending, Filter
from gateway.transport.http import response
from gateway.transport.stream import Stream

TLS_HANDSHAKE: Final = b"\x16"


class FirstBytesRefusal(NamedTuple):
    """Refusal of a client whose first bytes do not fit its port.

    `reason` is a label for counters, `text` explains the refusal for the log. `answer` has the unencrypted
    bytes to send: a refusal in the client's protocol if that has one before TLS, or a line of text for a TLS
    client.
    """

    reason: str
    text: str
    answer: bytes


def recognise(data: bytes) -> str:
    """Return the name of the protocol whose first bytes are `data`.

    The result is a protocol of DIALECTS, `tls`, `http` or `unknown`; or "" if more bytes are needed.
    """
    beginnings = [(begin, one.name) for one in DIALECTS.values() for begin in one.first_bytes]
    for begin, name in (*beginnings, (TLS_HANDSHAKE, "tls")):
        if data.startswith(begin):
            return name
    if any(begin.startswith(data) for begin, _ in beginnings):
        return ""
    return "http" if ord("A") <= data[0] <= ord("Z") else "unknown"


def check_first_bytes(data: bytes, *, secure: bool) -> FirstBytesRefusal | None:
    """Return the refusal of a client whose first bytes are `data`, or None if they fit the port.

    `secure` is True for a port with TLS. If the protocol is unknown, the bytes fit both kinds of port: a
    later layer refuses them.
    """
    protocol = recognise(data)
    if not secure:
        text = "the client uses TLS, but this port does not"
        return FirstBytesRefusal("no_tls", text, f"{text}\n".encode()) if protocol == "tls" else None
    if protocol in ("tls", "unknown"):
        return None
    dialect = DIALECTS.get(protocol)
    title = dialect.title if dialect is not None else protocol.upper() or "a protocol"
    text = f"TLS is required, but the client uses {title} without TLS"
    if dialect is not None:
        return FirstBytesRefusal("tls_required", text, dialect.refusal(data, text))
    return FirstBytesRefusal("tls_required", text, response(400, f"{text}\n") if protocol == "http" else b"")


class FirstBytesFilter:
    """Outermost layer of a new stream, which checks the client's first bytes and then removes itself."""

    def __init__(self, stream: Stream, inner: Filter | None, *, secure: bool) -> None:
        """Create the layer between the socket and `inner`; `secure` is True if the port has TLS."""
        self._stream = stream
        self._inner = inner
        self._secure = secure
        self._refused: Ending | None = None
        self._answer = b""

    @property
    def ended(self) -> Ending | None:
        """Reason why the client was refused, or why the inner layer ended; None while bytes may pass."""
        return self._refused or (None if self._inner is None else self._inner.ended)

    @property
    def unread(self) -> bool:
        """True if the inner layer has decoded data that it has not returned yet."""
        return self._inner is not None and self._inner.unread

    @property
    def certificate(self) -> bytes:
        """Peer's verified certificate (DER) from the inner layer; b"" if there is none."""
        return b"" if self._inner is None else self._inner.certificate

    def receive(self, data: bytes) -> bytes:
        """Check the client's first bytes, and return the data for the owner.

        If the bytes fit the port, the inner layer replaces this layer of the stream and decodes them.
        Otherwise `ended` is set and b"" is returned.
        """
        if not data or self._refused is not None:
            return b""
        found = check_first_bytes(data, secure=self._secure)
        if found is not None:
            self._refused = Ending(found.text, refused=found.reason)
            self._answer = found.answer
            return b""
        self._stream.layer = self._inner
        return data if self._inner is None else self._inner.receive(data)

    def send(self, data: bytes) -> bytes:
        """Pass bytes through the inner layer and return the bytes for the socket.

        After a refusal, return the response for the client once, and then b"".
        """
        if self._refused is not None:
            answer, self._answer = self._answer, b""
            return answer
        return data if self._inner is None else self._inner.send(data)

    def finish(self) -> bytes:
        """Return the closing bytes of the inner layer, or b"" after a refusal."""
        return b"" if self._inner is None or self._refused is not None else self._inner.finish()
