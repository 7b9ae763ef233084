"""Error texts for connections to a broker that fail before they are open.

Either no server answers or the server speaks another protocol. A protocol machine can only report bytes that
it cannot parse. A user who has configured the wrong port wants to know which protocol the server speaks,
which the first received bytes usually show. A server that sends nothing usually waits for another protocol.
"""

from __future__ import annotations

import os
import ssl
from typing import Final

from gateway.protocols import DIALECTS
from gateway.protocols.amqp091.dialect import AMQP091

LOOK_BYTES: Final = 8
SPEAKERS: Final = (
    (b"AMQP\x00\x00\x09\x01", AMQP091.title),  # the server's reply to a client of another protocol
    (b"AMQP\x00\x01\x00\x00", "AMQP 1.0"),
    (b"AMQP\x03\x01\x00\x00", "AMQP 1.0"),
    (b"HTTP/", "HTTP"),
    (b"SSH-", "SSH"),
    (b"\x15\x03", "TLS"),  # an alert
)
GARBLED: Final = "the server responded in another protocol, or incorrectly"


def explain_end(protocol: str, first: bytes, why: str) -> str:
    """Return the error text for a connection that ended before it was open.

    `protocol` names the protocol of the link, `why` is the reason known so far. `first` are the first bytes
    received, at least LOOK_BYTES if that many arrived; if they show another protocol, the text names it.
    """
    title = DIALECTS[protocol].title
    for begin, speaker in SPEAKERS:
        if first.startswith(begin) and speaker != title:
            return f"this server uses {speaker}, not {title}"
    return why if first else f"{why}; check that the server supports {title}"


def reason(error: Exception) -> str:
    """Return the text for an error while connecting.

    Trio wraps the errors of all addresses of a host name in a group; the text is that of the first.
    """
    found: BaseException = error.__cause__ or error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if isinstance(found, ssl.SSLEOFError):
        return "the connection ended during the TLS handshake; check that this port uses TLS"
    if isinstance(found, ssl.SSLError):
        no_tls = found.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
        return "this port does not use TLS" if no_tls else str(found)
    number = found.errno if isinstance(found, OSError) else None
    if number is not None and number > 0:  # negative numbers are errors of name resolution
        return os.strerror(number)
    return getattr(found, "strerror", None) or str(found)
