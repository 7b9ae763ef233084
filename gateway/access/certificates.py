"""Certificates as identities: what one says of its owner, and the back end that believes it.

Whether an authority of ours has signed it has been checked before: by TLS, or by the balancer that announces
the client. A balancer tells the common name, and may send the certificate itself.
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


def from_octets(der: bytes) -> Certificate | None:
    """What a certificate says; None: it cannot be read."""
    try:
        return _read(der)
    except Exception:  # somebody else's octets, which OpenSSL reads less strictly
        return None


def _read(der: bytes) -> Certificate:
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
    """Out of what a PROXY header says; the certificate, if it is sent, says all. None: nothing of use."""
    if der:
        return from_octets(der)
    return Certificate({"common_name": common_name}) if common_name else None


class Certificates:
    """The back end. `name` is one of a certificate's; `users` are those that it must be one of, if any."""

    kind: Final = "certificates"

    def __init__(self, name: str, users: Users | None = None) -> None:
        self._name = name
        self._users = users

    def speaks(self, method: str) -> bool:
        """By none: TLS has done it."""
        return not method

    def claims(self, credentials: Credentials) -> bool:
        """Whoever shows a certificate, and says no password."""
        return credentials.certificate is not None and not credentials.password

    def known(self, credentials: Credentials) -> Principal | Denial | None:
        """Who the certificate says it is; a name that is said besides must be that."""
        if credentials.certificate is None or credentials.password:
            return Denial.WRONG
        name = credentials.certificate.names.get(self._name, "")
        if not name or credentials.user not in ("", name):
            return Denial.WRONG
        if self._users is not None and self._users.named(name) is None:
            return Denial.WRONG
        return principal_of(name, credentials.certificate)

    async def look(self, credentials: Credentials) -> Principal | Denial:
        """There is nothing to look for."""
        return self.known(credentials) or Denial.WRONG


def principal_of(name: str, certificate: Certificate) -> Principal:
    """Whom a certificate stands for, with what else it says."""
    fields = {FIELDS[key]: value for key, value in certificate.names.items() if key in FIELDS}
    return Principal(name, fields=fields, backend=Certificates.kind)
