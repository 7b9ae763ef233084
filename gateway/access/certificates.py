"""Certificates as identities: names in certificates, and the back end that authenticates by them.

This module does not verify signatures. Either TLS or the load balancer that sends the client's certificate
has verified that a trusted authority signed it. A load balancer sends the common name, and may send the
certificate itself.
"""

from __future__ import annotations

from typing import Any, Final

from cryptography import x509
from cryptography.x509.oid import NameOID

from gateway.access.backends import Denial
from gateway.access.credentials import Certificate, Credentials
from gateway.access.principal import Principal
from gateway.access.users import Users

PARTS: Final = {
    "common_name": NameOID.COMMON_NAME,
    "ou": NameOID.ORGANIZATIONAL_UNIT_NAME,
    "o": NameOID.ORGANIZATION_NAME,
}
ALTERNATIVES: Final[dict[str, Any]] = {
    "dns": x509.DNSName,
    "email": x509.RFC822Name,
    "uri": x509.UniformResourceIdentifier,
    "ip": x509.IPAddress,
}
FIELDS: Final = {"common_name": "cn", "ou": "ou", "o": "o", **{name: name for name in ALTERNATIVES}}


def from_bytes(der: bytes) -> Certificate | None:
    """Return the names in a DER certificate, or None if the certificate cannot be parsed."""
    try:
        return _read(der)
    except Exception:  # untrusted bytes, which OpenSSL parses less strictly
        return None


def _read(der: bytes) -> Certificate:
    """Return the names in the subject and in the alternative names of a DER certificate."""
    certificate = x509.load_der_x509_certificate(der)
    subject = certificate.subject
    names = {"distinguished_name": subject.rfc4514_string()}
    for name, oid in PARTS.items():
        if found := subject.get_attributes_for_oid(oid):
            names[name] = str(found[0].value)
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return Certificate(names)
    for name, kind in ALTERNATIVES.items():
        if values := others.get_values_for_type(kind):
            names[name] = str(values[0])
    return Certificate(names)


def from_balancer(common_name: str, der: bytes) -> Certificate | None:
    """Return the client certificate that a load balancer has described in the PROXY header.

    `der` is the whole certificate; if it is not empty, `common_name` is ignored. Return None if both are
    empty, or if the certificate cannot be parsed.
    """
    if der:
        return from_bytes(der)
    return Certificate({"common_name": common_name}) if common_name else None


class Certificates:
    """Back end that authenticates clients by their certificates.

    `name` selects the name in the certificate that is the user name, such as `common_name`. If `users` is not
    None, the user must exist in it.
    """

    kind: Final = "certificates"

    def __init__(self, name: str, users: Users | None = None) -> None:
        self._name = name
        self._users = users

    def supports_method(self, method: str) -> bool:
        """Return True if `method` is empty: TLS has authenticated the client, so no method is needed."""
        return not method

    def recognizes_login(self, credentials: Credentials) -> bool:
        """Return True if the client has a certificate and sends no password."""
        return credentials.certificate is not None and not credentials.password

    def authenticate_nowait(self, credentials: Credentials) -> Principal | Denial | None:
        """Return the principal that the client's certificate names, or Denial.WRONG.

        Logins with a password, or with a user name that differs from the name in the certificate, are denied.
        """
        if credentials.certificate is None or credentials.password:
            return Denial.WRONG
        name = credentials.certificate.names.get(self._name, "")
        if not name or credentials.user not in ("", name):
            return Denial.WRONG
        if not self.accepts_name(name):
            return Denial.WRONG
        return principal_of(name, credentials.certificate)

    def accepts_name(self, name: str) -> bool:
        """Return True if `name` may log in: if it is a user, or users need not be configured."""
        return self._users is None or self._users.find_principal(name) is not None

    async def authenticate(self, credentials: Credentials) -> Principal | Denial:
        """Return the result of `authenticate_nowait`, which never has to wait."""
        return self.authenticate_nowait(credentials) or Denial.WRONG


def principal_of(name: str, certificate: Certificate) -> Principal:
    """Return a principal with this name, and with the names in its certificate as fields.

    Placeholders in rules can refer to these fields, for example `{cn}`.
    """
    fields = {FIELDS[key]: value for key, value in certificate.names.items() if key in FIELDS}
    return Principal(name, fields=fields, backend=Certificates.kind)
