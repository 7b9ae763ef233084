"""Clients whose certificate was revoked: refused over a socket, from the moment that the list says so."""

from __future__ import annotations

import datetime
import os
import socket
import ssl
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gateway.errors import ConfigurationError
from gateway.protocols.mqtt.packets import Connect
from gateway.protocols.mqtt.spec import Version
from gateway.settings import ListenerTls
from gateway.transport.certificates import server_context
from tests.configured import make_listener
from tests.ingress.clients import PATIENCE_SECS, Mqtt
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

NOW: Final = datetime.datetime.now(datetime.UTC)
DAY: Final = datetime.timedelta(days=1)
KEPT: Final = "certificate reload failed, previous one in use"


class Authority:
    """Signs certificates, and lists those that it has revoked."""

    def __init__(self, folder: Path, name: str = "devices") -> None:
        self.folder = folder
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(self.name, self.key).add_extension(x509.BasicConstraints(True, None), True)
        self.certificate = builder.sign(self.key, hashes.SHA256())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        self.crl = folder / f"{name}.crl"

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(self.name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(NOW - DAY).not_valid_after(NOW + DAY)

    def sign(self, name: str) -> tuple[x509.Certificate, Path]:
        """A certificate, and a file with it and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        found = self._builder(subject, key).sign(self.key, hashes.SHA256())
        file = self.folder / f"{name}-of.pem"
        pem = serialization.Encoding.PEM
        plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        file.write_bytes(found.public_bytes(pem) + key.private_bytes(pem, *plain))
        return found, file

    def revoke(self, *certificates: x509.Certificate, until: datetime.datetime = NOW + DAY) -> None:
        """Write the list anew."""
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.name)
        builder = builder.last_update(NOW - 2 * DAY).next_update(until)
        for one in certificates:
            row = x509.RevokedCertificateBuilder().serial_number(one.serial_number).revocation_date(NOW - DAY)
            builder = builder.add_revoked_certificate(row.build())
        signed = builder.sign(self.key, hashes.SHA256())
        before = self.crl.stat().st_mtime_ns if self.crl.exists() else 0
        whole = self.crl.with_suffix(".new")  # a gateway must not read half of it
        whole.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        os.utime(whole, ns=(before + 1_000_000, before + 1_000_000))
        whole.rename(self.crl)


class Tls(Mqtt):
    """A client that shows a certificate."""

    def __init__(self, port: int, certificate: Path | None) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if certificate is not None:
            context.load_cert_chain(certificate)
        super().__init__(port)
        self.sock: socket.socket = context.wrap_socket(self.sock)
        self.sock.settimeout(PATIENCE_SECS)


def is_let_in(gateway: Running, certificate: Path | None) -> bool:
    """Connect; in TLS 1.3 a client hears only behind its handshake that its certificate is refused."""
    try:
        client = Tls(gateway.port("mqtt"), certificate)
    except OSError:
        return False
    with client:
        try:
            client.say(Connect("c", Version.V5))
            return bool(client.sock.recv(65_536))
        except OSError:
            return False


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    found = Authority(tmp_path)
    found.revoke()
    return found


def serving(authority: Authority, **more: Any) -> ListenerTls:
    _, own = authority.sign("gateway")
    return ListenerTls(
        cert_file=own, key_file=own, client_ca_file=authority.file, crl_file=authority.crl, **more
    )


def settings_with(tls: ListenerTls):  # type: ignore[no-untyped-def]
    return settings_of(listeners={"mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0, tls=tls)})


def test_a_revoked_client_is_refused_from_the_next_connection_on(authority: Authority) -> None:
    good, good_file = authority.sign("good")
    stolen, stolen_file = authority.sign("stolen")
    with running(settings_with(serving(authority))) as gateway:
        assert is_let_in(gateway, good_file)
        assert is_let_in(gateway, stolen_file)
        authority.revoke(stolen)
        assert not is_let_in(gateway, stolen_file)
        assert is_let_in(gateway, good_file)
        authority.revoke(stolen, good)
        assert not is_let_in(gateway, good_file)
        authority.revoke()
        assert is_let_in(gateway, stolen_file)


def test_a_list_that_is_cut_short_leaves_the_old_one(authority: Authority) -> None:
    stolen, file = authority.sign("stolen")
    authority.revoke(stolen)
    with running(settings_with(serving(authority)), but=KEPT) as gateway:
        assert not is_let_in(gateway, file)
        for left in (b"", authority.crl.read_bytes()[:200], authority.file.read_bytes()):
            authority.crl.write_bytes(left)
            assert not is_let_in(gateway, file)


def test_an_expired_list_refuses_everybody(authority: Authority) -> None:
    _, file = authority.sign("good")
    authority.revoke(until=NOW - DAY)
    with running(settings_with(serving(authority))) as gateway:
        assert not is_let_in(gateway, file)


def test_who_needs_no_certificate_is_let_in_without_one(authority: Authority) -> None:
    stolen, file = authority.sign("stolen")
    authority.revoke(stolen)
    with running(settings_with(serving(authority, client_certificate="optional"))) as gateway:
        assert is_let_in(gateway, None)
        assert not is_let_in(gateway, file)


@pytest.mark.parametrize("content", ["", "nonsense", "certificate", "certificate and list"])
def test_a_file_that_is_no_list_is_refused_at_the_start(authority: Authority, content: str) -> None:
    """Above all a certificate, which would be trusted as an authority."""
    _, own = authority.sign("gateway")
    data = {
        "certificate": authority.file.read_bytes(),
        "certificate and list": authority.file.read_bytes() + authority.crl.read_bytes(),
    }.get(content, content.encode())
    authority.crl.write_bytes(data)
    with pytest.raises(ConfigurationError, match="certificate"):
        server_context("mqtts", own, own, authority.file, crl_file=authority.crl)


def test_a_list_needs_authorities(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="crl_file needs client_ca_file"):
        ListenerTls(cert_file=tmp_path, key_file=tmp_path, crl_file=tmp_path)
