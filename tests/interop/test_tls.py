"""TLS on listeners, with real clients; a renewed certificate is taken without a restart."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest

from gateway.settings import ListenerTls
from tests.configured import make_listener
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


def make_certificate(folder: Path, name: str) -> None:
    """A self-signed certificate for the loopback address."""
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
            "-addext",
            "subjectAltName=IP:127.0.0.1,DNS:localhost",
            "-keyout",
            str(folder / "key.pem"),
            "-out",
            str(folder / "cert.pem"),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Running]:
    make_certificate(tmp_path, "first")
    tls = ListenerTls(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    listeners = {
        "mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0, tls=tls),
        "amqp091": make_listener(protocol="amqp091", host=LOOPBACK, port=0, tls=tls),
    }
    with running(settings_of(listeners=listeners)) as started:
        yield started


def subject(port: int, folder: Path) -> str:
    """The common name that the listener shows."""
    context = ssl.create_default_context(cafile=folder / "cert.pem")
    plain = socket.create_connection((LOOPBACK, port), 5)
    with context.wrap_socket(plain, server_hostname=LOOPBACK) as sock:
        found = sock.getpeercert()
    assert found is not None
    return str(dict(pair[0] for pair in found["subject"])["commonName"])


def test_a_message_crosses_over_tls(secure: Running, tmp_path: Path) -> None:
    context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
    parameters = pika.ConnectionParameters(
        LOOPBACK, secure.amqp, ssl_options=pika.SSLOptions(context, LOOPBACK)
    )
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    queue = channel.queue_declare("", exclusive=True).method.queue
    channel.queue_bind(queue, "amq.topic", "a.#")
    body = "x" * 200_000  # many TLS records, and more than one read
    (tmp_path / "body").write_text(body)
    subprocess.run(
        [
            "mosquitto_pub",
            "-h",
            LOOPBACK,
            "-p",
            str(secure.mqtt),
            "--cafile",
            str(tmp_path / "cert.pem"),
            "-t",
            "a/b",
            "-q",
            "1",
            "-f",
            str(tmp_path / "body"),
        ],
        check=True,
        timeout=20,
    )
    _, _, received = next(channel.consume(queue, inactivity_timeout=10))
    assert received == body.encode()
    connection.close()


def test_a_renewed_certificate_is_taken(secure: Running, tmp_path: Path) -> None:
    assert subject(secure.mqtt, tmp_path) == "first"
    make_certificate(tmp_path, "second")
    assert subject(secure.mqtt, tmp_path) == "second"


def test_plain_text_to_a_tls_port_costs_only_its_connection(secure: Running, tmp_path: Path) -> None:
    with socket.create_connection((LOOPBACK, secure.mqtt), 5) as sock:
        sock.sendall(b"\x10\x0c\x00\x04MQTT\x04\x02\x00\x00\x00\x00")
        sock.settimeout(5)
        while sock.recv(1024):
            pass  # the alert, and then the end
    assert subject(secure.mqtt, tmp_path) == "first"
