"""AMQP listeners: virtual hosts, logins by certificate, many channels, what is counted."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import (
    ChannelOpened,
    Closed,
    Confirms,
    Deliveries,
    GetResponse,
    MethodReceived,
    Opened,
)
from gateway.settings import ListenerTls, User
from tests.configured import make_listener
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.servers import program
from tests.passwords import hashed


def queue(client: Amqp, name: str) -> None:
    client.call(m.QueueDeclare(name), m.QueueDeclareOk)


@pytest.fixture
def hosts() -> Iterator[Running]:
    """A listener with two virtual hosts, and one with the second alone."""
    given = {
        "mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
        "amqp091": make_listener(protocol="amqp091", host=LOOPBACK, port=0, virtual_hosts=["/", "tenant"]),
        "other": make_listener(protocol="amqp091", host=LOOPBACK, port=0, virtual_hosts=["tenant"]),
    }
    with running(settings_of(listeners=given)) as gateway:
        yield gateway


def test_virtual_hosts_are_apart_and_shared_by_listeners(hosts: Running) -> None:
    with (
        Amqp(hosts).open() as root,
        Amqp(hosts, virtual_host="tenant").open() as tenant,
        Amqp(hosts, virtual_host="tenant", listener="other").open() as other,
    ):
        queue(root, "q")
        queue(tenant, "q")
        tenant.publish("", "q", b"mine")
        tenant.call(m.QueueDeclare("q", passive=True), m.QueueDeclareOk)
        root.say(m.BasicGet("q"))
        assert isinstance(root.next(MethodReceived).method, m.BasicGetEmpty)
        other.say(m.BasicGet("q"))
        assert other.next(GetResponse).body == b"mine"
    assert hosts.ask(lambda: [*hosts.gateway.hosts]) == ["/", "tenant"]


def test_only_the_first_virtual_host_is_on_the_routes(hosts: Running) -> None:
    with connect(hosts, "device")[0] as device:
        device.subscribe("#", 1)
        with Amqp(hosts, virtual_host="tenant").open() as tenant, Amqp(hosts).open() as root:
            for client, body in ((tenant, b"hidden"), (root, b"seen")):
                client.publish("amq.topic", "a.b", body)
                client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
            assert device.body() == b"seen"


def test_a_virtual_host_of_another_listener_is_unknown(hosts: Running) -> None:
    with Amqp(hosts, listener="other") as client:
        assert client.next(Closed).reply_code == 530


def authority(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", f"/O=plant/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("name, admitted", [("ann", True), ("bob", False)])
def test_the_name_in_a_certificate_is_a_login(tmp_path: Path, name: str, admitted: bool) -> None:
    own, theirs = authority(tmp_path, "gateway"), authority(tmp_path, name)
    tls = ListenerTls(cert_file=own[0], key_file=own[1], client_ca_file=theirs[0])
    given = {"amqp091": make_listener(protocol="amqp091", host=LOOPBACK, port=0, tls=tls)}
    users = {"ann": User(password_hash=SecretStr(hashed("unused")))}
    context = ssl.create_default_context(cafile=own[0])
    context.load_cert_chain(*theirs)
    with (
        running(settings_of(listeners=given, users=users)) as gateway,
        Amqp(gateway, mechanism="EXTERNAL", tls=context) as client,
    ):
        if admitted:
            client.next(Opened)
            client.open_channel()
            client.publish("amq.direct", "k", b"x", properties=b"\x00\x10\x03ann")
            client.call(m.QueueDeclare("", exclusive=True), m.QueueDeclareOk)
        else:
            closed = client.next(Closed)
            assert (closed.reply_code, "mechanism EXTERNAL" in closed.text) == (403, True)


def test_a_certificate_is_asked_for_before_it_can_be_a_login(gateway: Running) -> None:
    with Amqp(gateway, mechanism="EXTERNAL") as client:
        assert client.next(Closed).reply_code == 530, "the client knows that it is not offered"


def test_five_hundred_channels_on_one_connection(gateway: Running) -> None:
    with Amqp(gateway) as client:
        client.next(Opened)
        for _ in range(500):
            client.machine.open_channel()
        client.flush()
        for _ in range(500):
            client.next(ChannelOpened)
        queue(client, "q")
        for number in range(1, 501):
            client.machine.send_method(number, m.ConfirmSelect())
            client.machine.send_method(number, m.BasicConsume("q", f"c{number}"))
            client.machine.send_content(number, m.BasicPublish("", "q"), b"\0\0", b"%d" % number)
        client.flush()
        confirmed: set[int] = set()
        bodies: set[bytes] = set()
        while len(confirmed) < 500 or len(bodies) < 500:
            for event in client.events():
                if isinstance(event, Confirms):
                    confirmed |= {number for number, tag, _, ack in event.confirms if (tag, ack) == (1, True)}
                elif isinstance(event, Deliveries):
                    bodies |= {row[-1] for row in event.contents}
        assert bodies == {b"%d" % number for number in range(1, 501)}


def test_what_dies_in_a_queue_is_counted(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        arguments = (("x-max-length", Value(ValueType.INT32, 1)),)
        client.call(m.QueueDeclare("short", arguments=arguments), m.QueueDeclareOk)
        client.publish("", "short", b"1", b"2", b"3")
        client.say(m.BasicGet("short"))
        client.next(GetResponse)
        client.say(m.BasicReject(1, requeue=False))
        queue(client, "q")
        exposed = gateway.ask(lambda: gateway.gateway.metrics.exposition(""))[0].decode()
    assert 'gateway_dropped_total{reason="queue_maxlen"} 2.0' in exposed
    assert 'gateway_dropped_total{reason="queue_rejected"} 1.0' in exposed
