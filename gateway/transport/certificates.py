"""TLS contexts for listeners, reloaded when their files change.

Certificates can thus be renewed while the gateway runs.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from gateway.errors import ConfigurationError
from gateway.reloads import ReloadedValue

CERTIFICATE: Final = b"-----BEGIN CERTIFICATE-----"
KEY: Final = b"PRIVATE KEY-----"
REVOCATIONS: Final = b"-----BEGIN X509 CRL-----"

log = structlog.get_logger(limited=True)


def load_pair(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    """Load a certificate and its private key into `context`.

    Raises OSError if they cannot be loaded; the error's text explains the reason, for example that the key
    belongs to another certificate.
    """
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except _EncryptedError:
        raise OSError(f"the key in {key_file} is encrypted; store it without a password") from None
    except ssl.SSLError as error:
        reason = _load_error_reason(cert_file, key_file, error)
        if reason is None:
            raise
        raise OSError(reason) from error


class _EncryptedError(Exception):
    """Error for an encrypted private key, for which the gateway has no password."""


def _no_password() -> str:
    raise _EncryptedError


def _load_error_reason(cert_file: Path, key_file: Path, error: ssl.SSLError) -> str | None:
    """Return why a certificate and key cannot be loaded, or None if the text of `error` explains it best."""
    certificate, key = cert_file.read_bytes(), key_file.read_bytes()
    if KEY in certificate and CERTIFICATE not in certificate and CERTIFICATE in key and KEY not in key:
        return f"cert_file and key_file are swapped: {cert_file} holds a key, {key_file} a certificate"
    if CERTIFICATE not in certificate:
        return f"{cert_file} holds no certificate in PEM"
    if KEY not in key:
        return f"{key_file} holds no private key in PEM"
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key in {key_file} is not that of the certificate in {cert_file}"
    return None


def load_revocations(context: ssl.SSLContext, crl_file: Path) -> None:
    """Make `context` check the peers' certificates against the revocation lists in `crl_file`.

    Raises OSError if the file has no revocation list, or if it has a certificate, which OpenSSL would trust
    as an authority.
    """
    data = crl_file.read_bytes()
    if REVOCATIONS not in data:
        raise OSError(f"{crl_file} holds no certificate revocation list in PEM")
    if CERTIFICATE in data:
        raise OSError(f"{crl_file} holds a certificate; authorities belong in client_ca_file")
    context.load_verify_locations(crl_file)
    context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF


def server_context(
    name: str,
    cert_file: Path,
    key_file: Path,
    client_ca_file: Path | None = None,
    *,
    crl_file: Path | None = None,
    optional: bool = False,
) -> Callable[[], ssl.SSLContext]:
    """Return a function that returns the TLS context for the next connection of the listener `name`.

    The function reads changed files again; if these cannot be used, it returns the previous context.
    `optional` True means that clients need not present a certificate. `crl_file` has lists of revoked client
    certificates. Raises ConfigurationError if the files cannot be used at the start.
    """

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.options |= ssl.OP_NO_RENEGOTIATION  # renegotiation costs a server far more than a client
        load_pair(context, cert_file, key_file)
        if client_ca_file is not None:
            context.load_verify_locations(client_ca_file)
            context.verify_mode = ssl.CERT_OPTIONAL if optional else ssl.CERT_REQUIRED
        if crl_file is not None:
            load_revocations(context, crl_file)
        return context

    def log_reload(_: ssl.SSLContext) -> None:
        log.info("certificate reloaded", listener=name)

    def report_refused(error: Exception) -> None:  # perhaps only some of the files are replaced yet
        log.error("certificate reload failed, previous one in use", listener=name, error=str(error))

    files = [file for file in (cert_file, key_file, client_ca_file, crl_file) if file is not None]
    try:
        contexts = ReloadedValue(files, build, report_loaded=log_reload, refused=report_refused)
    except OSError as error:
        raise ConfigurationError(f"listeners.{name}.tls: the files cannot be used: {error}") from error

    def latest() -> ssl.SSLContext:
        contexts.reload_if_changed()
        return contexts.value

    return latest
