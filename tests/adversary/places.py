"""Places of which there are only so many: sessions, queues, logins, descriptors; and lines in the log."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any, Final

from gateway.access.users import hash_password
from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from tests.adversary.arena import Arena
from tests.adversary.cases import case
from tests.adversary.wire import connect_packet, mqtt, opened, packet, text
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import connect

WEEK_SECS = 604_800
LINES_MAX = 60


@case(limits={"sessions_max": 200})
def sessions(arena: Arena) -> None:
    """One client opens sessions of a week under ever new names; afterwards another gets in, and again when
    the gateway has been started anew."""
    for number in range(400):
        with opened(
            arena.port("mqtt"), connect_packet(b"s%d" % number, clean=False, expiry_secs=WEEK_SECS)
        ) as sock:
            sock.recv(64)
    with mqtt(arena.port("mqtt"), b"other", clean=False, expiry_secs=WEEK_SECS):
        pass


@case(limits={"queues_max": 200})
def queues(arena: Arena) -> None:
    """One connection declares as many queues as there may be."""
    with Amqp(arena).open() as client, suppress(ConnectionError, AssertionError):
        for number in range(400):
            client.call(m.QueueDeclare(f"q{number}", durable=True), m.QueueDeclareOk)


@case(grown_mib=200, users={"alice": {"password_hash": hash_password("right")}})
def abandoned_logins(arena: Arena) -> None:
    """A thousand wrong logins that nobody waits for; then one that is right."""
    wrong = packet(0x10, text(b"MQTT"), b"\x05\xc2\0\0\0", text(b"w"), text(b"alice"), text(b"wrong"))
    for _ in range(1_000):
        opened(arena.port("mqtt"), wrong).close()
    right = packet(0x10, text(b"MQTT"), b"\x05\xc2\0\0\0", text(b"r"), text(b"alice"), text(b"right"))
    with opened(arena.port("mqtt"), right) as sock:
        sock.settimeout(20.0)
        answer = sock.recv(64)
        assert answer[:1] == b"\x20", answer
        assert answer[3] == 0, answer


@case()
def garbage(arena: Arena) -> None:
    """Six hundred connections that speak nothing known write a few lines, not six hundred; and afterwards
    the same address is served."""
    before = len(arena.log_lines)
    for number in range(600):
        name = ("mqtt", "amqp091", "amqpfast")[number % 3]
        with (
            opened(
                arena.port(name), b"GET / HTTP/1.1\r\n\r\n" if number % 2 else bytes([number % 256]) * 99
            ) as sock,
            suppress(OSError),
        ):
            sock.settimeout(0.1)  # some of it may be the beginning of something
            sock.recv(64)
    assert len(arena.log_lines) - before <= LINES_MAX
    Amqp(arena).open().cut()
    Fast(arena).open().cut()


READER: Final[dict[str, Any]] = {
    "roles": {
        "reader": {
            "mqtt": {"subscribe": "plant/#"},
            "amqp091": {"/": {"configure": "^own", "write": "^own", "read": "^(own|amq\\.topic$)"}},
        },
        "others": {"mqtt": {"publish": "#", "subscribe": "#"}},
    },
    "default_roles": {"anonymous": ["others"], "guest": ["reader"]},
}
PUBLISHERS: Final = 100
PUBLISHED_EACH: Final = 20
SESSION_FULL: Final = 300  # messages


@case(limits={"queue_messages_max": SESSION_FULL, "session_delay_secs": 0.0}, **READER)
def a_reader(arena: Arena) -> None:
    """A user who may only read binds a queue that is full with one message, and opens a session that
    acknowledges nothing. A hundred publishers are answered, and a healthy subscriber gets all once."""
    with ExitStack() as stack:
        reader = stack.enter_context(Amqp(arena).open())
        arguments = (("x-max-length", Value(ValueType.INT32, 1)), ("x-overflow", string("reject-publish")))
        reader.call(m.QueueDeclare("own", arguments=arguments), m.QueueDeclareOk)
        reader.call(m.QueueBind("own", "amq.topic", "plant.#"), m.QueueBindOk)
        silent, _ = connect(arena, "silent", properties={Property.RECEIVE_MAXIMUM: 1})
        stack.enter_context(silent)
        assert silent.subscribe("plant/#", 1) == 1
        healthy, _ = connect(arena, "healthy")
        stack.enter_context(healthy)
        assert healthy.subscribe("plant/#", 1) == 1
        publishers = []
        for number in range(PUBLISHERS):  # half of them have no word for a refusal
            client, _ = connect(arena, f"p{number}", version=Version.V5 if number % 2 else Version.V311)
            publishers.append(stack.enter_context(client))
        wanted = set()
        bodies: list[bytes] = []
        for count in range(1, PUBLISHED_EACH + 1):
            for number, client in enumerate(publishers):
                body = f"{number} {count}".encode()
                wanted.add(body)
                client.publish(f"plant/{number}", body, 1, count)
            for client in publishers:
                assert client.acked(PacketType.PUBACK) == (count, 0)
            while len(bodies) < len(wanted):
                _, _, packet_id, _, body = healthy.row()
                healthy.ack(PacketType.PUBACK, packet_id)
                bodies.append(body)
        assert (len(bodies), set(bodies), healthy.quiet()) == (len(wanted), wanted, True)
        assert arena.counted("gateway_dropped_total", "queue_overflow") >= len(wanted) - 1
        # The silent session holds at most twice its limit, and one message is on its way to it.
        assert arena.counted("gateway_dropped_total", "queue_full") >= len(wanted) - 2 * SESSION_FULL - 1
