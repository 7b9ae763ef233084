"""What to say when a broker is not reached: nobody answers, or somebody else does.

A protocol machine can only say that it does not understand. Whoever has mistaken the port wants to know whom
they have reached, which the first octets that come mostly show; and a server that says nothing at all mostly
waits for words of another protocol.
"""

from __future__ import annotations

import os
import ssl
from typing import Final

from gateway.protocols import DIALECTS
from gateway.protocols.amqp091.dialect import AMQP091

LOOK_OCTETS: Final = 8
SPEAKERS: Final = (
    (b"AMQP\x00\x00\x09\x01", AMQP091.title),  # what is no AMQP is answered with the header of what is
    (b"AMQP\x00\x01\x00\x00", "AMQP 1.0"),
    (b"AMQP\x03\x01\x00\x00", "AMQP 1.0"),
    (b"HTTP/", "HTTP"),
    (b"SSH-", "SSH"),
    (b"\x15\x03", "TLS"),  # an alert
)
GARBLED: Final = "the server answers in another protocol, or wrongly"


def explained(wanted: str, first: bytes, why: str) -> str:
    """`why` a connection to a server of the protocol `wanted` ended before it was open, or who has answered
    instead. `first`: what has come, at least LOOK_OCTETS of it if it was that much.
    """
    title = DIALECTS[wanted].title
    for begin, speaker in SPEAKERS:
        if first.startswith(begin) and speaker != title:
            return f"this server speaks {speaker}, not {title}"
    return why if first else f"{why}; does it speak {title}?"


def reason(error: Exception) -> str:
    """Why a connection could not be made, in words. Trio wraps what the system said to each address that a
    host name has; the first of those speaks for all."""
    found: BaseException = error.__cause__ or error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    if isinstance(found, ssl.SSLEOFError):
        return "the connection ended before TLS stood; does this port speak TLS?"
    if isinstance(found, ssl.SSLError):
        no_tls = found.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
        return "this port does not speak TLS" if no_tls else str(found)
    number = found.errno if isinstance(found, OSError) else None
    if number is not None and number > 0:  # below are those of name look-ups
        return os.strerror(number)
    return getattr(found, "strerror", None) or str(found)
