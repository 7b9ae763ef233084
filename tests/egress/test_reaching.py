"""Why nobody was reached, in words that need no knowledge of errno, Trio or OpenSSL."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.egress.connect_errors import reason
from tests.interop.test_tls import make_certificate

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


def test_a_renewed_key_with_a_password_is_told_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    """OpenSSL asks at the terminal of the gateway, and the event loop would wait for the answer."""
    make_certificate(tmp_path, "us")
    hidden = tmp_path / "hidden.pem"
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:x", "-in", str(tmp_path / "key.pem")]
    subprocess.run([*command, "-out", str(hidden)], check=True, capture_output=True)
    code = (
        "from pathlib import Path\n"
        "from gateway.egress.link import tls_to\n"
        "from gateway.errors import LinkError\n"
        "from gateway.settings import parse_url\n"
        "from gateway.settings.endpoints import LinkTls\n"
        f"tls = LinkTls.model_construct(cert_file=Path({str(tmp_path / 'cert.pem')!r}), "
        f"key_file=Path({str(hidden)!r}), ca_file=None, verify=True)\n"
        "try:\n    tls_to(parse_url('amqps://h'), tls, 'erp')\n"
        "except LinkError as error:\n    print(error)\n"
    )
    ours, theirs = os.openpty()
    asked = [sys.executable, "-c", code]
    out = subprocess.run(asked, stdin=theirs, capture_output=True, timeout=60, start_new_session=True).stdout
    os.close(ours)
    os.close(theirs)
    assert f"the key in {hidden} is encrypted" in out.decode()


@pytest.mark.parametrize("error, told", REASONS, ids=lambda row: repr(row)[:40])
def test_the_reason(error: Exception, told: str) -> None:
    assert reason(error) == told
