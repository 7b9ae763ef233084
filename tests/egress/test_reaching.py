"""Why nobody was reached, in words that need no knowledge of errno, Trio or OpenSSL."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Final

import pytest

from gateway.egress.connect_errors import reason

REFUSED: Final = ConnectionRefusedError(errno.ECONNREFUSED, "Error connecting to ('::1', 5): refused")


def caused(by: BaseException) -> OSError:
    """As Trio tells of all addresses of a name."""
    error = OSError("all attempts to connect to name:5 failed")
    error.__cause__ = by
    return error


REASONS: Final[list[tuple[Exception, str]]] = [
    (REFUSED, "Connection refused"),
    (caused(REFUSED), "Connection refused"),
    (caused(ExceptionGroup("both", [REFUSED, OSError(errno.ENETUNREACH, "?")])), "Connection refused"),
    (TimeoutError("timed out"), "timed out"),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
    (
        ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol"),
        "the connection ended during the TLS handshake; check that this port uses TLS",
    ),
    (ValueError("anything else"), "anything else"),
]


@pytest.mark.parametrize("error, told", REASONS, ids=lambda row: repr(row)[:40])
def test_the_reason(error: Exception, told: str) -> None:
    assert reason(error) == told
