"""Clients that break the rules, stop in the middle or do not read: they are ended, counted; others go on."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.ingress.mqtt.connection import MqttConnection
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Closed, Confirms
from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.spec import ReasonCode, Version
from gateway.settings import Limits
from gateway.settings.endpoints import ListenerTls
from tests.configured import make_listener
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import Raw, connect, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.test_tls import self_signed

CONNECT = b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
CONNECT_5 = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01c"
CONNACK = b"\x20\x02\x00\x00"
HEADER = b"AMQP\x00\x00\x09\x01"
MEGABYTE = 1_048_576

MQTT_FAULTS = [
    ("PUBLISH before CONNECT", b"\x30\x04\x00\x01ax", b"", "protocol_error"),
    ("PINGREQ before CONNECT", b"\xc0\x00", b"", "protocol_error"),
    ("second CONNECT", CONNECT + CONNECT, CONNACK, "protocol_error"),
    ("HTTP", b"GET / HTTP/1.1\r\n\r\n", b"", "protocol_error"),
    ("AMQP", HEADER, b"", "protocol_error"),
    (
        "unknown version",
        b"\x10\x0d\x00\x04MQTT\x09\x02\x00\x00\x00\x01c",
        None,
        "unsupported_protocol_version",
    ),
    ("a large CONNECT", b"\x10\xff\xff\xff\x7f\0\4MQTT\4", b"", "packet_too_large"),
    ("a large CONNECT of MQTT 5", b"\x10\xff\xff\xff\x7f\0\4MQTT\5", b"\x20\3\0\x95\0", "packet_too_large"),
    ("five bytes of length", CONNECT + b"\x30\xff\xff\xff\xff\xff", CONNACK, "malformed_packet"),
    ("a packet over the limit", CONNECT_5 + b"\x30\xff\xff\xff\x7f", None, "packet_too_large"),
    ("one that is no PUBLISH", CONNECT + b"\x82\xff\xff\xff\x7f", CONNACK, "packet_too_large"),
    (
        "one with a topic that is none",
        CONNECT + b"\x30\xff\xff\xff\x7f\0\x01#",
        CONNACK,
        "topic_name_invalid",
    ),
    ("one with an identifier of 0", CONNECT + b"\x32\xff\xff\xff\x7f\0\x01a\0\0", CONNACK, "protocol_error"),
    ("a wildcard in a topic", CONNECT + b"\x30\x04\x00\x01#x", CONNACK, "topic_name_invalid"),
    ("QoS 3", CONNECT + b"\x36\x06\x00\x01a\x00\x01x", CONNACK, "malformed_packet"),
]


@pytest.mark.parametrize("name, said, heard, reason", MQTT_FAULTS, ids=[row[0] for row in MQTT_FAULTS])
def test_mqtt_faults(gateway: Running, name: str, said: bytes, heard: bytes | None, reason: str) -> None:
    with connect(gateway, "bystander")[0] as bystander, Raw(gateway.mqtt) as client:
        found = client.send(said).rest()
        assert heard is None or found == heard
        assert stats(gateway).protocol_errors.counts == {reason: 1}
        assert bystander.quiet()
        eventually(lambda: stats(gateway).connections == 1)


AMQP_FAULTS = [
    ("HTTP", b"GET / HTTP/1.1\r\n\r\n", HEADER, "protocol_header"),
    ("another version", b"AMQP\x00\x01\x00\x00", HEADER, "protocol_header"),
    ("garbage behind the header", HEADER + b"\xff" * 64, None, "frame_error"),
    ("a bad end of frame", HEADER + b"\x08\x00\x00\x00\x00\x00\x00\x00", None, "frame_error"),
    ("a frame over frame-max", HEADER + b"\x01\x00\x00\x7f\xff\xff\xff", None, "frame_error"),
    (
        "open before start-ok",
        HEADER + b"\x01\x00\x00\x00\x00\x00\x08\x00\x0a\x00\x28\x01/\x00\x00\xce",
        None,
        "channel_error",
    ),
]


@pytest.mark.parametrize("name, said, heard, reason", AMQP_FAULTS, ids=[row[0] for row in AMQP_FAULTS])
def test_amqp_faults(gateway: Running, name: str, said: bytes, heard: bytes | None, reason: str) -> None:
    with Amqp(gateway).open() as bystander, Raw(gateway.amqp) as client:
        found = client.send(said).rest()
        assert heard is None or found == heard
        eventually(lambda: stats(gateway, "amqp091").protocol_errors.counts == {reason: 1})
        bystander.call(m.QueueDeclare("still here"), m.QueueDeclareOk)


@pytest.mark.parametrize(
    "listener, said", [("mqtt", b""), ("mqtt", CONNECT[:9]), ("amqp091", b""), ("amqp091", HEADER)]
)
def test_whoever_does_not_finish_the_greeting_is_cut_off(listener: str, said: bytes) -> None:
    with running(settings_of(limits=Limits(connect_timeout_secs=0.2))) as gateway:
        with Raw(gateway.port(listener)) as client:
            client.send(said).rest()
        assert stats(gateway, listener).protocol_errors.counts == {"connect_timeout": 1}
        eventually(lambda: stats(gateway, listener).connections == 0)


def test_a_client_that_vanishes_in_the_middle_of_a_packet_leaves_nothing(gateway: Running) -> None:
    with Raw(gateway.mqtt) as client:
        client.send(CONNECT + b"\x30\x80\x80\x04\x00\x01a" + bytes(1_000))
        assert client.sock.recv(1)
    with Raw(gateway.amqp) as client:
        client.send(HEADER + b"\x01\x00")
        assert client.sock.recv(1)
    eventually(lambda: stats(gateway).connections + stats(gateway, "amqp091").connections == 0)
    assert gateway.ask(lambda: len(gateway.gateway.mqtt.sessions)) == 0


def test_connections_over_the_limit_are_turned_away_and_counted() -> None:
    with running(settings_of(limits=Limits(connections_max=1))) as gateway:
        with connect(gateway)[0] as first, Raw(gateway.mqtt) as second:
            assert second.rest() == b""
            assert first.quiet()
        assert stats(gateway).refused.counts == {"connections_max": 1}


@pytest.mark.parametrize("qos", [0, 1])
def test_an_mqtt_client_that_never_reads_costs_bounded_memory_and_nobody_else(qos: int) -> None:
    limits = Limits(queue_bytes_max=8 * MEGABYTE, inflight_max=20)
    with running(settings_of(limits=limits)) as gateway:
        deaf, writer, reader, other = (
            connect(gateway, name)[0] for name in ("deaf", "writer", "reader", "other")
        )
        with deaf, writer, reader, other:
            deaf.subscribe("flood/#", qos)
            reader.subscribe("calm/#", 1)
            assert stalls(writer, lambda: writer.publish("flood/x", bytes(MEGABYTE // 4)))
            for number in range(20):
                other.publish("calm/x", str(number).encode())
                assert reader.body() == str(number).encode()
            assert gateway.ask(lambda: held_for(gateway, "deaf")) < 16 * MEGABYTE


def stalls(writer: Raw, publish: Callable[[], None], count: int = 400) -> bool:
    """Publish until the gateway reads no more; False when it took everything."""
    writer.sock.settimeout(0.5)
    try:
        for _ in range(count):
            publish()
    except TimeoutError:
        return True
    return False


def held_for(gateway: Running, client_id: str) -> int:
    """Bytes that wait in a session and behind its connection."""
    session = gateway.gateway.mqtt.sessions[client_id]
    assert isinstance(session.outlet, MqttConnection)
    return session._byte_count + session.outlet.stream.queued


def test_an_amqp_consumer_that_never_reads_costs_bounded_memory_and_nobody_else() -> None:
    limits = Limits(queue_bytes_max=8 * MEGABYTE)
    with running(settings_of(limits=limits)) as gateway, Amqp(gateway).open() as deaf:
        deaf.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        deaf.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        with Amqp(gateway).open() as writer, Amqp(gateway).open() as other:
            assert stalls(writer, lambda: writer.publish("", "q", bytes(MEGABYTE // 4)))
            other.call(m.QueueDeclare("calm"), m.QueueDeclareOk)
            other.call(m.ConfirmSelect(), m.ConfirmSelectOk)
            other.publish("", "calm", b"x")
            assert other.next(Confirms).confirms[0][3]
            assert gateway.ask(lambda: waiting_in(gateway, "q")) < 16 * MEGABYTE
        gateway.ask(gateway.gateway.host.queues["q"].purge)  # it is full, and holds its publisher


def waiting_in(gateway: Running, queue: str) -> int:
    """Bytes that wait in a queue and behind all connections of the listener."""
    behind = sum(connection.stream.queued for connection in gateway.gateway.listeners["amqp091"].connections)
    return gateway.gateway.host.queues[queue].byte_count + behind


def test_garbage_on_a_tls_listener_is_ended_and_tls_clients_go_on(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ListenerTls(cert_file=certificate, key_file=key)
    listeners = {"mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0, tls=tls)}
    with running(settings_of(listeners=listeners)) as gateway:
        with Raw(gateway.mqtt) as client:
            assert CONNACK not in client.send(CONNECT).rest()
        context = ssl.create_default_context(cafile=certificate)
        with Raw(gateway.mqtt) as client:
            client.sock = context.wrap_socket(client.sock, server_hostname="localhost")
            assert client.send(CONNECT).sock.recv(4) == CONNACK
        eventually(lambda: stats(gateway).connections == 0)


@pytest.mark.parametrize("version", [Version.V5, Version.V311])
def test_last_words_arrive_although_the_client_was_still_sending(version: Version) -> None:
    with running(settings_of(limits=Limits(message_bytes_max=1_000))) as gateway:
        client, _ = connect(gateway, version=version)
        with client:
            client.send(b"\x30\x80\x80\x80\x01" + bytes(2 * MEGABYTE))
            if version is Version.V5:
                assert client.next(Disconnect).reason == ReasonCode.PACKET_TOO_LARGE
            assert client.closed()


def test_a_login_that_is_refused_is_told_so(gateway: Running) -> None:
    with Amqp(gateway, password="wrong") as client:
        closed = client.next(Closed)
    assert closed.reply_code == 403
    assert "ACCESS_REFUSED" in closed.text
    assert stats(gateway, "amqp091").refused.counts == {"access_refused": 1}


def test_an_unknown_virtual_host_is_refused(gateway: Running) -> None:
    with Amqp(gateway, virtual_host="none") as client:
        closed = client.next(Closed)
    assert (closed.reply_code, closed.text) == (530, "NOT_ALLOWED - vhost none not found")
