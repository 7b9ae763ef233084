"""TLS contexts for listeners, read again when their files change: certificates are renewed while we run."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway.errors import ConfigurationError
from gateway.reloads import Reloaded

log = structlog.get_logger(limited=True)


def server_context(
    name: str,
    cert_file: Path,
    key_file: Path,
    client_ca_file: Path | None = None,
    *,
    optional: bool = False,
) -> Callable[[], ssl.SSLContext]:
    """A function that returns the context for the next connection of listener `name`. `optional`: clients
    need not show a certificate.

    Raises ConfigurationError when the files cannot be used at the start; later, the last good context stays.
    """

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.options |= ssl.OP_NO_RENEGOTIATION  # it would cost us far more than the client
        context.load_cert_chain(cert_file, key_file)
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            context.verify_mode = ssl.CERT_OPTIONAL if optional else ssl.CERT_REQUIRED
        return context

    def report_taken(_: ssl.SSLContext) -> None:
        log.info("certificate was read again", listener=name)

    def report_refused(error: Exception) -> None:  # half of the files may have been replaced
        log.error("certificate cannot be read again, the old one stays", listener=name, error=str(error))

    files = [file for file in (cert_file, key_file, client_ca_file) if file is not None]
    try:
        contexts = Reloaded(files, build, taken=report_taken, refused=report_refused)
    except OSError as error:
        raise ConfigurationError(f"listeners.{name}.tls: the files cannot be used: {error}") from error

    def latest() -> ssl.SSLContext:
        contexts.look()
        return contexts.value

    return latest
