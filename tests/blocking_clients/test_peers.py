"""The blocking clients against a gateway: runs of messages out and in, refusals, and broken connections."""

from __future__ import annotations

import socketserver
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from threading import Thread
from typing import Any, Final

import pika
import pytest
import trio

from gateway.clients.amqp import AmqpClient
from gateway.clients.amqpfast import FastClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import Client, ConnectionOptions, ReceivedMessage
from gateway.egress.amqpfast.client import ServerUnreachable, connect
from gateway.errors import LinkError
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, property_set
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import Limits, LinkUrl, ListenerTls, parse_url
from tests.configured import make_listener
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.transport.test_tls import self_signed

COUNT: Final = 500
PATIENCE_SECS: Final = 30.0
MEANING: Final = Properties(
    content_type="text/plain", message_id="m-1", headers=(("n", Value(ValueType.INT32, 7)),)
)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running(settings_of(limits=Limits(message_bytes_max=100_000))) as one:
        yield one


def access(gateway: Running, protocol: str) -> ConnectionOptions:
    scheme = {"mqtt": "mqtt", "amqp091": "amqp", "amqpfast": "amqpfast"}[protocol]
    return ConnectionOptions(
        parse_url(f"{scheme}://guest:guest@{LOOPBACK}:{gateway.port(protocol)}"), PATIENCE_SECS
    )


def peers(gateway: Running, protocol: str, name: str) -> tuple[Client, Client, Address]:
    """A publisher, a consumer, and the address between them."""
    at = access(gateway, protocol)
    if protocol == "mqtt":
        consumer = MqttClient(at)
        consumer.subscribe(name, 2)
        return MqttClient(at), consumer, topic_address(name)
    if protocol == "amqp091":
        amqp = AmqpClient(at)
        amqp.declare(name, "amq.topic", ["#"])
        amqp.consume(name, None, "", prefetch=50)
        return AmqpClient(at), amqp, amqp_address("", name)
    fast = FastClient(at)
    fast.consume("queue", name, prefetch=50)
    return FastClient(at), fast, fast_address("queue", name)


def taken(consumer: Client, count: int) -> list[ReceivedMessage]:
    """The next `count` messages, acknowledged."""
    found: list[ReceivedMessage] = []
    end = time.monotonic() + PATIENCE_SECS
    while len(found) < count:
        arrivals = consumer.arrivals(PATIENCE_SECS)
        assert arrivals or time.monotonic() < end, "nothing comes"
        consumer.acknowledge(arrivals)
        found += arrivals
    return found


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
@pytest.mark.parametrize("qos", [1, 2])
def test_a_run_of_messages_arrives_in_order_with_what_it_says(
    gateway: Running, protocol: str, qos: int
) -> None:
    publisher, consumer, address = peers(gateway, protocol, f"run-{qos}")
    given = property_set(MEANING)
    bodies = [b"%d" % number + b"x" * (number % 3 * 40_000 // 500 * 100) for number in range(COUNT)]
    messages = [Message(address, body, given, qos, True) for body in bodies]
    assert publisher.publish_many(messages, in_flight=40) == {}
    found = taken(consumer, COUNT)
    assert [arrival.message.body for arrival in found] == bodies
    assert found[0].message.properties == MEANING
    assert not any(arrival.redelivered for arrival in found)
    for peer in (publisher, consumer):
        peer.close()


def test_a_life_beyond_ten_years_is_shortened_and_said(gateway: Running) -> None:
    publisher, consumer, address = peers(gateway, "amqp091", "long-lives")
    assert isinstance(publisher, AmqpClient)
    years = 86_400 * 365.0
    lives = [Message(address, b"%d" % at, expires=time.time() + at * years) for at in (9, 11, 12)]
    with pytest.warns(RuntimeWarning, match="more than ten years"):
        assert publisher.publish_many(lives) == {}
    assert publisher.shortened == 2
    left = [arrival.message.expires - time.time() for arrival in taken(consumer, 3)]
    assert left == pytest.approx([9 * years, 10 * years, 10 * years], abs=60)
    for peer in (publisher, consumer):
        peer.close()


def test_what_is_not_acknowledged_comes_again(gateway: Running) -> None:
    for protocol in ("amqp091", "amqpfast"):
        publisher, consumer, address = peers(gateway, protocol, "again")
        publisher.publish_many([Message(address, b"%d" % n, assurance=1, durable=True) for n in range(4)])
        found: list[ReceivedMessage] = []
        while len(found) < 4:
            found += consumer.arrivals(PATIENCE_SECS)
        consumer.acknowledge(found[:2])
        consumer.close()
        publisher.close()
        publisher, consumer, _ = peers(gateway, protocol, "again")
        again = taken(consumer, 2)
        assert [(one.message.body, one.redelivered) for one in again] == [(b"2", True), (b"3", True)]
        consumer.close()
        publisher.close()


def test_a_message_that_is_too_large_stays_in_its_queue() -> None:
    with running() as gateway:
        publisher, consumer, address = peers(gateway, "amqpfast", "large")
        assert isinstance(consumer, FastClient)
        consumer._assembly.bytes_max = 600_000
        bodies = [b"before", b"x" * 900_000, b"behind"]
        messages = [Message(address, body, assurance=1, durable=True) for body in bodies]
        assert publisher.publish_many(messages) == {}
        assert [one.message.body for one in taken(consumer, 1)] == [b"before"]
        for _ in range(2):
            with pytest.raises(LinkError, match="'large' has 900000 bytes.*at most 600000"):
                taken(consumer, 1)
        consumer.close()
        consumer = FastClient(access(gateway, "amqpfast"))
        consumer.consume("queue", "large")
        assert [one.message.body for one in taken(consumer, 2)] == bodies[1:]
        consumer.close()
        publisher.close()


def test_a_session_keeps_what_its_client_has_not_acknowledged(gateway: Running) -> None:
    at = access(gateway, "mqtt")
    publisher = MqttClient(at)
    consumer = MqttClient(at, client_id="keeper", session_secs=600, receive_max=2)
    consumer.subscribe(["kept/#"], 1)
    publisher.publish_many([Message(topic_address("kept/a"), b"%d" % n, assurance=1) for n in range(5)])
    first: list[ReceivedMessage] = []
    while len(first) < 2:
        first += consumer.arrivals(PATIENCE_SECS)
    consumer.acknowledge(first[:1])
    consumer.close()
    consumer = MqttClient(at, client_id="keeper", session_secs=600)
    assert [one.message.body for one in taken(consumer, 4)] == [b"1", b"2", b"3", b"4"]
    consumer.close()
    publisher.close()


REFUSED: Final[list[tuple[str, Any, bool]]] = [
    ("mqtt", Message(topic_address("refused/+/x"), b"", assurance=1), True),
    ("mqtt", Message(topic_address("$SYS/x"), b"", assurance=1), True),
    ("amqp091", Message(amqp_address("", "nowhere"), b"", assurance=1), True),
]


@pytest.mark.parametrize("protocol, bad, final", REFUSED, ids=lambda row: str(row))
def test_one_bad_message_is_named_and_the_others_arrive(
    gateway: Running, protocol: str, bad: Message, final: bool
) -> None:
    publisher, consumer, address = peers(gateway, protocol, "others")
    good = [Message(address, b"%d" % number, assurance=1) for number in range(6)]
    refused = publisher.publish_many([*good[:3], bad, *good[3:]])
    assert {at: why.final for at, why in refused.items()} == {3: final}
    assert [one.message.body for one in taken(consumer, 6)] == [message.body for message in good]
    publisher.close()
    consumer.close()


def test_a_closed_channel_is_an_error(gateway: Running) -> None:
    publisher = AmqpClient(access(gateway, "amqp091"))
    with pytest.raises(LinkError, match="exchange"):
        publisher.publish_many([Message(amqp_address("no-such", "x"), b"", assurance=1)])
    publisher.close()
    consumer = AmqpClient(access(gateway, "amqp091"))
    consumer.consume("no-such-queue", None, "")
    with pytest.raises(LinkError, match="no-such-queue"):
        list(chain.from_iterable(consumer.arrivals(1.0) for _ in range(30)))
    consumer.close()


def test_a_queue_that_is_deleted_ends_its_consumer(gateway: Running) -> None:
    consumer = AmqpClient(access(gateway, "amqp091"))
    consumer.declare("short-lived", "amq.topic", [])
    consumer.consume("short-lived", None, "")
    assert consumer.arrivals(0.2) == []
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        connection.channel().queue_delete("short-lived")
    with pytest.raises(LinkError, match="queue was deleted"):
        list(chain.from_iterable(consumer.arrivals(1.0) for _ in range(30)))
    consumer.close()


def test_what_a_log_sees_of_an_access_has_no_password() -> None:
    said = ConnectionOptions(parse_url("mqtt://ann:secret@broker.internal"))
    assert "secret" not in repr(said)


@pytest.mark.parametrize("protocol", ["mqtt", "amqp091", "amqpfast"])
def test_tls(tmp_path_factory: pytest.TempPathFactory, protocol: str) -> None:
    """With the authority that signed it, and a certificate of our own; without, nobody is trusted."""
    certificate, key = self_signed(tmp_path_factory.mktemp("tls"))
    tls = ListenerTls(cert_file=certificate, key_file=key, client_ca_file=certificate)
    listener = make_listener(protocol=protocol, host=LOOPBACK, port=0, tls=tls)
    scheme = {"mqtt": "mqtts", "amqp091": "amqps", "amqpfast": "amqpfasts"}[protocol]
    with running(settings_of(listeners={protocol: listener})) as secured:
        target = parse_url(f"{scheme}://guest:guest@{LOOPBACK}:{secured.port(protocol)}")
        at = ConnectionOptions(target, PATIENCE_SECS, str(certificate), str(certificate), str(key))
        maker = {"mqtt": MqttClient, "amqp091": AmqpClient, "amqpfast": FastClient}[protocol]
        maker(at).close()
        with pytest.raises(LinkError, match="certificate verify failed"):
            maker(at._replace(ca_file=None))


def test_nobody_there() -> None:
    for peer in (MqttClient, AmqpClient, FastClient):
        with pytest.raises(LinkError, match="127.0.0.1:1"):
            peer(ConnectionOptions(parse_url("mqtt://127.0.0.1:1"), 5.0))
    with pytest.raises(LinkError, match=r"^gateway.invalid:1: [^\[]+$"):  # the words of the resolver
        MqttClient(ConnectionOptions(parse_url("mqtt://gateway.invalid:1"), 5.0))


SCHEMES: Final = {"mqtt": MqttClient, "amqp": AmqpClient, "amqpfast": FastClient}
AMQP_HEADER: Final = b"AMQP\x00\x00\x09\x01"
STRANGERS: Final[list[tuple[str, bytes | None, float, str]]] = [
    # scheme, what the server says (None: it closes), timeout in seconds, what the user is told
    ("mqtt", AMQP_HEADER, PATIENCE_SECS, "this server uses AMQP 0-9-1, not MQTT"),
    ("amqpfast", AMQP_HEADER, PATIENCE_SECS, "this server uses AMQP 0-9-1, not AMQP/Fast"),
    ("amqp", b"AMQP\x03\x01\x00\x00", PATIENCE_SECS, "this server uses AMQP 1.0, not AMQP 0-9-1"),
    ("amqp", b"AMQP\x00\x00\x08\x00", PATIENCE_SECS, "another protocol, or incorrectly"),
    ("mqtt", b"HTTP/1.1 400 Bad Request\r\n\r\n", PATIENCE_SECS, "this server uses HTTP, not MQTT"),
    ("amqp", b"SSH-2.0-OpenSSH_9.2\r\n", PATIENCE_SECS, "this server uses SSH, not AMQP 0-9-1"),
    ("mqtt", b"\x15\x03\x03\x00\x02\x02\x0a", PATIENCE_SECS, "this server uses TLS, not MQTT"),
    ("mqtt", b"what?", PATIENCE_SECS, "the server responded in another protocol, or incorrectly: "),
    ("amqp", b"what?aaaaaaaa", PATIENCE_SECS, "the server responded in another protocol, or incorrectly: "),
    (
        "amqpfast",
        b"what?aaaaaaaa",
        PATIENCE_SECS,
        "the server responded in another protocol, or incorrectly: ",
    ),
    ("mqtt", None, PATIENCE_SECS, "check that the server supports MQTT"),
    ("amqp", None, PATIENCE_SECS, "check that the server supports AMQP 0-9-1"),
    ("amqpfast", None, PATIENCE_SECS, "check that the server supports AMQP/Fast"),
    ("mqtt", b"", 0.2, "no response within 0.2 s; check that the server supports MQTT"),
    ("amqp", b"", 0.2, "no response within 0.2 s; check that the server supports AMQP 0-9-1"),
    ("amqpfast", b"", 0.2, "no response within 0.2 s; check that the server supports AMQP/Fast"),
    ("mqtts", b"HTTP/1.1 400 Bad Request\r\n\r\n", PATIENCE_SECS, "this port does not use TLS"),
]


class Stranger(socketserver.ThreadingTCPServer):
    """Says `words` to whoever connects and listens until they go; None: closes."""

    daemon_threads = True

    def __init__(self, words: bytes | None) -> None:
        self.words = words
        super().__init__((LOOPBACK, 0), Turn)


class Turn(socketserver.BaseRequestHandler):
    server: Stranger

    def handle(self) -> None:
        if self.server.words is not None:
            self.request.sendall(self.server.words)
            with suppress(ConnectionError):
                while self.request.recv(4096):
                    pass


@pytest.mark.needs("time")
@pytest.mark.parametrize("scheme, words, timeout_secs, told", STRANGERS, ids=lambda row: str(row)[:30])
def test_who_has_answered_instead_is_told(
    scheme: str, words: bytes | None, timeout_secs: float, told: str
) -> None:
    with Stranger(words) as stranger:
        thread = Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        target = parse_url(f"{scheme}://{LOOPBACK}:{stranger.server_address[1]}")
        try:
            with pytest.raises(LinkError) as failed:
                SCHEMES[scheme.removesuffix("s")](ConnectionOptions(target, timeout_secs))
            with pytest.raises(LinkError) as failed_too:
                trio.run(visit, target._replace(protocol="amqpfast"), timeout_secs)
        finally:
            stranger.shutdown()
            thread.join()
    said = str(failed.value)
    assert said.startswith(f"{LOOPBACK}:{stranger.server_address[1]}: ")
    assert told in said
    assert "\n" not in said
    assert isinstance(failed_too.value, ServerUnreachable)
    if scheme == "amqpfast":
        assert told in str(failed_too.value)


async def visit(target: LinkUrl, timeout_secs: float) -> None:
    """The client on Trio, which the command line uses."""
    async with connect(target, timeout_secs=timeout_secs):
        pass


def test_whoever_is_refused_is_told_by_whom(gateway: Running) -> None:
    for scheme, maker in SCHEMES.items():
        protocol = "amqp091" if scheme == "amqp" else scheme
        target = parse_url(f"{scheme}://guest:wrong@{LOOPBACK}:{gateway.port(protocol)}")
        with pytest.raises(LinkError, match=r"(?i)refused|not authorized|password") as failed:
            maker(ConnectionOptions(target, PATIENCE_SECS))
        assert "speak" not in str(failed.value)


def test_amqpfast_selectors_and_unreliable_deliveries() -> None:
    """What is unreliable is gone when it was sent, though nothing acknowledges it."""
    with running() as gateway:
        access = ConnectionOptions(
            parse_url(f"amqpfast://guest:guest@{LOOPBACK}:{gateway.port('amqpfast')}/")
        )
        client = FastClient(access)
        message = Message(fast_address("queue", "q"), b"1", durable=True)
        assert client.publish_many([message, message]) == {}
        client.consume("queue", "q", selector="PRIORITY = 0", unreliable=True)
        found: list[ReceivedMessage] = []
        while len(found) < 2:
            found += client.arrivals(10.0)
        client.close()
        assert gateway.ask(lambda: len(gateway.gateway.fast_hosts["/"].queues["q"])) == 0
