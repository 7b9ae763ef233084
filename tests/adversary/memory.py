"""What is held for a client, and what nobody has counted."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

from gateway.protocols.amqp091 import methods as m
from tests.adversary.arena import Arena
from tests.adversary.cases import MIB, case
from tests.adversary.wire import mqtt, opened, pair, publish_packet
from tests.ingress.amqp_client import Amqp

WATERMARK_MIB = 192
LIMITED: dict[str, Any] = {"limits": {"memory_bytes_max": WATERMARK_MIB * MIB}}


@case(grown_mib=200)
def large_properties(arena: Arena) -> None:
    """Messages of one byte of body that nobody takes, with as many bytes of properties as are let in."""
    for number in range(60):
        with mqtt(arena.port("mqtt")) as sock, suppress(OSError):
            properties = pair(b"k", bytes([65 + number % 26]) * 60_000) * 250
            sock.sendall(publish_packet(b"nobody/%d" % number, b"x", qos=1, properties=properties))
            sock.recv(64)


@case(grown_mib=200, **LIMITED)
def transactions(arena: Arena) -> None:
    """Empty messages in a transaction that is never committed."""
    with Amqp(arena).open() as client, suppress(ConnectionError, OSError):
        client.call(m.TxSelect(), m.TxSelectOk)
        for _ in range(200):
            client.publish("amq.topic", "k", *[b""] * 2_000)


@case(grown_mib=300, **LIMITED)
def transient_queues(arena: Arena) -> None:
    """Fifteen queues that nobody reads, as much as goes in; the publisher does not wait."""
    with Amqp(arena).open() as client, suppress(ConnectionError, OSError):
        client.sock.settimeout(5.0)
        for number in range(15):
            client.call(m.QueueDeclare(f"heap {number}"), m.QueueDeclareOk)
        body = bytes(128 * 1024)
        for turn in range(6_000):
            client.publish("", f"heap {turn % 15}", body)


@case(grown_mib=300)
def gets_without_acknowledgement(arena: Arena) -> None:
    """`basic.get` of all that there is, and no word of thanks."""
    with Amqp(arena).open() as client, suppress(ConnectionError, OSError):
        client.sock.settimeout(5.0)
        client.call(m.QueueDeclare("taken"), m.QueueDeclareOk)
        body = bytes(64 * 1024)
        for _ in range(400):
            client.publish("", "taken", *[body] * 16)
            client.say(*[m.BasicGet("taken")] * 16)
            with suppress(BlockingIOError):
                client.sock.setblocking(False)
                while client.sock.recv(1 << 20):
                    pass
            client.sock.settimeout(5.0)


@case(grown_mib=96)
def halves(arena: Arena) -> None:
    """Packets and frames that announce much and never come whole."""
    with ExitStack() as stack, suppress(OSError):
        for _ in range(300):
            stack.enter_context(opened(arena.port("mqtt"), b"\x10\xff\xff\xff\x7f" + bytes(1_000)))
            stack.enter_context(opened(arena.port("amqp091"), b"AMQP\0\0\x09\x01\x01\0\0\xff\xff\xff\xff"))
            stack.enter_context(opened(arena.port("amqpfast"), b"AMQP" + bytes(1_000)))
