"""One packet, or one client, that makes work for minutes."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress
from itertools import pairwise

from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.events import MethodReceived
from gateway.protocols.amqp091.translate import encode_properties
from gateway.protocols.amqpfast import commands as c
from gateway.protocols.amqpfast.sender import Producer
from tests.adversary.arena import Arena
from tests.adversary.cases import MIB, case
from tests.adversary.wire import answered, length, mqtt, packet, pair, publish_packet, text
from tests.ingress.amqp_client import NOTHING, Amqp
from tests.ingress.amqpfast.client import EMPTY, TOPIC, Fast, head
from tests.ingress.clients import connect


def spoken(sock: socket.socket, data: bytes) -> None:
    """Say all of it, as far as the gateway listens, and wait for an answer or the end."""
    answered(sock, data)


@case(grown_mib=96)
def user_properties(arena: Arena) -> None:
    """A PUBLISH, a SUBSCRIBE and a CONNECT of 15 MiB of user properties of no bytes each."""
    many = pair(b"", b"") * (15 * MIB // 5)
    for sound in (
        publish_packet(b"a", qos=1, properties=many),
        packet(0x82, b"\0\1", length(len(many)), many, text(b"a"), b"\0"),
        packet(0xA2, b"\0\1", length(len(many)), many, text(b"a")),
        packet(0xE0, b"\0", length(len(many)), many),
    ):
        with mqtt(arena.port("mqtt")) as sock:
            spoken(sock, sound)


@case(grown_mib=96)
def distinct_properties(arena: Arena) -> None:
    """As many as are let in, and every one different, to subscribers of all protocols."""
    reader, _ = connect(arena, "reader")
    reader.subscribe("a/#")
    fast = Fast(arena).open()
    fast.consume(fast.handle("a.b", TOPIC))
    with mqtt(arena.port("mqtt")) as sock:
        for turn in range(40):
            properties = b"".join(pair(b"k%d" % at, b"%d" % (at * turn)) for at in range(200))
            spoken(sock, publish_packet(b"a/b", qos=1, properties=properties))
    reader.cut()
    fast.cut()


@case(grown_mib=96)
def filters(arena: Arena) -> None:
    """One SUBSCRIBE with four million filters; one UNSUBSCRIBE; the same, each filter different."""
    one = text(b"a") + b"\0"
    for sound in (
        packet(0x82, b"\0\1", b"\0", one * 3_900_000),
        packet(0xA2, b"\0\1", b"\0", text(b"a") * 5_000_000),
        packet(0x82, b"\0\1", b"\0", *(text(b"%x" % at) + b"\0" for at in range(1_000_000))),
    ):
        with mqtt(arena.port("mqtt")) as sock:
            spoken(sock, sound)


@case(grown_mib=160)
def retained(arena: Arena) -> None:
    """Twenty thousand retained topics, each of them new, and two hundred times `#`."""
    with mqtt(arena.port("mqtt"), b"keeper") as sock:
        for begin in range(0, 20_000, 500):
            sock.sendall(
                b"".join(packet(0x31, text(b"r/%d" % at), b"\0", b"x") for at in range(begin, begin + 500))
            )
        sock.sendall(b"\xc0\0")
        sock.recv(2)
    with mqtt(arena.port("mqtt"), b"reader") as sock:
        sock.sendall(packet(0x82, b"\0\1", b"\0", *(text(b"#") + b"\0" for _ in range(200))))
        found = 0
        while found < 20_000 * len(b"0_r/1x"):  # each topic at least once
            found += len(sock.recv(65_536))


@case(grown_mib=160)
def new_addresses(arena: Arena) -> None:
    """Ten thousand messages of each protocol, each to where nobody has published before."""
    numbers = [range(begin, begin + 1_000) for begin in range(0, 10_000, 1_000)]
    with mqtt(arena.port("mqtt"), b"new") as sock:
        for chunk in numbers:
            sock.sendall(b"".join(publish_packet(b"new/%d" % at) for at in chunk))
        sock.sendall(b"\xc0\0")
        assert sock.recv(2) == b"\xd0\0"
    with Amqp(arena).open() as client:
        for chunk in numbers:
            for at in chunk:
                client.machine.send_content(1, m.BasicPublish("amq.topic", f"new.{at}"), NOTHING, b"x")
            client.flush()
        client.call(m.QueueDeclare("other"), m.QueueDeclareOk)
    with Fast(arena).open() as fast:
        handle = fast.handle("", TOPIC)
        for chunk in numbers:
            Producer(fast.machine, handle).send_many([(b"new.%d" % at, EMPTY, b"x") for at in chunk])
            fast.flush()
        fast.quiet()


@case()
def wildcards(arena: Arena) -> None:
    """A thousand bindings of a hundred `#` and `*`, and one publish that almost fits."""
    with Amqp(arena).open() as client:
        client.call(m.QueueDeclare("wild"), m.QueueDeclareOk)
        chance = random.Random(100)
        with suppress(ConnectionError, AssertionError):
            for _ in range(1_000):
                key = ".".join(chance.choice("#*") for _ in range(100)) + ".end"
                client.machine.send_method(1, m.QueueBind("wild", "amq.topic", key))
            client.flush()
            for _ in range(1_000):
                client.next(MethodReceived)
            client.publish("amq.topic", ".".join(["a"] * 120), b"x")
            client.call(m.QueueDeclare("other"), m.QueueDeclareOk)


@case()
def unbinding(arena: Arena) -> None:
    """A queue with 16 000 bindings is deleted."""
    with Amqp(arena).open() as client:
        client.call(m.QueueDeclare("bound"), m.QueueDeclareOk)
        for begin in range(0, 16_000, 1_000):
            client.say(*(m.QueueBind("bound", "amq.topic", f"k.{at}") for at in range(begin, begin + 1_000)))
            for _ in range(1_000):
                client.next(MethodReceived)
        client.call(m.QueueDeclare("other"), m.QueueDeclareOk)
        client.call(m.QueueDelete("bound"), m.QueueDeleteOk)


@case(limits={"exchanges_per_user_max": 1_000})
def chain_of_exchanges(arena: Arena) -> None:
    """980 exchanges bound one behind the other, into a queue whose messages expire into the first of them."""
    with Amqp(arena).open() as client:
        names = [f"link {number}" for number in range(980)]
        for begin in range(0, len(names), 70):
            client.say(*(m.ExchangeDeclare(name, "fanout") for name in names[begin : begin + 70]))
            for _ in range(70):
                client.next(MethodReceived)
        client.say(*(m.ExchangeBind(to, source) for source, to in pairwise(names)))
        for _ in names[1:]:
            client.next(MethodReceived)
        arguments = (
            ("x-message-ttl", Value(ValueType.INT32, 50)),
            ("x-dead-letter-exchange", string(names[0])),
        )
        client.call(m.QueueDeclare("end", arguments=arguments), m.QueueDeclareOk)
        client.call(m.QueueBind("end", names[-1]), m.QueueBindOk)
        for _ in range(20):
            client.publish(names[0], "k", b"x")
        client.call(m.QueueDeclare("other"), m.QueueDeclareOk)


SLOW = (
    "[1,2,3,4,5,6,7,8,9,10].all(a,[1,2,3,4,5,6,7,8,9,10].all(b,[1,2,3,4,5,6,7,8,9,10].all(c,"
    "[1,2,3,4,5,6,7,8,9,10].all(d,[1,2,3,4,5,6,7,8,9,10].all(e,[1,2,3,4,5,6,7,8,9,10].all(f,"
    "[1,2,3,4,5,6,7,8,9,10].all(g,true)))))))"
)
DOUBLED = '["a"]' + "".join(f".map(x{at}, x{at}+x{at}+x{at}+x{at})" for at in range(14)) + "[0]=='a'"
STARS = "name LIKE '" + "%a" * 60 + "%b'"


@case()
def selectors(arena: Arena) -> None:
    """Conditions that take minutes for one message, thirty consumers each."""
    for selector, language in ((SLOW, "application/cel"), (DOUBLED, "application/cel"), (STARS, "")):
        with ExitStack() as stack:
            for _ in range(30):
                client = stack.enter_context(Fast(arena).open())
                handle = client.handle("chosen", TOPIC)
                client.say(
                    c.HandleConsume(handle, prefetch=10, selector=selector.encode(), mime_type=language)
                )
                with suppress(ConnectionError):
                    client.quiet()
            with mqtt(arena.port("mqtt")) as sock:
                properties = pair(b"name", b"a" * 4_000)
                spoken(sock, publish_packet(b"chosen", b"x", qos=1, properties=properties))


HARD = "name LIKE '%a%ab' " + " ".join(f"OR name LIKE '%ab{at}%'" for at in range(39))


@case()
def many_selectors(arena: Arena) -> None:
    """300 consumers with 40 LIKE each, all different, and a message that each of them has to look through."""
    with ExitStack() as stack:
        for number in range(300):
            client = stack.enter_context(Fast(arena).open())
            selector = f"{HARD} OR name = '{number}'".encode()
            client.say(c.HandleConsume(client.handle("hard", TOPIC), prefetch=10, selector=selector))
        client.quiet()
        with mqtt(arena.port("mqtt")) as sock:
            properties = pair(b"name", b"ab" * 4_000)
            for _ in range(5):
                spoken(sock, publish_packet(b"hard", b"x", qos=1, properties=properties))


@case()
def selecting_from_a_long_queue(arena: Arena) -> None:
    """A consumer with 40 LIKE joins a queue of 2 000 messages, and another client asks for a list of them."""
    with Fast(arena).open() as client:
        handle = client.handle("long")
        headed = head(headers={"name": "ab" * 4_000})
        for _ in range(20):
            client.put(handle, *[b"x"] * 100, head=headed)
        client.say(c.HandleConsume(handle, prefetch=10, selector=HARD.encode()))
        client.quiet()
        with Fast(arena).open() as other:
            other.index(other.handle("long"), selector=HARD.encode())


@case(grown_mib=128)
def headers_bindings(arena: Arena) -> None:
    """3 000 bindings of 63 arguments that differ in the last one, and a message that has all the others."""
    shared = tuple((f"h{at}", string("same")) for at in range(62))
    with Amqp(arena).open() as client:
        client.call(m.QueueDeclare("bound"), m.QueueDeclareOk)
        for begin in range(0, 3_000, 100):
            client.say(
                *(
                    m.QueueBind("bound", "amq.headers", "", arguments=(*shared, (f"id{at}", string("x"))))
                    for at in range(begin, begin + 100)
                )
            )
            for _ in range(100):
                client.next(MethodReceived)
        message = Message(amqp_address("amq.headers", "k"), b"x", property_set(Properties(headers=shared)))
        for _ in range(5):
            client.machine.send_content(
                1, m.BasicPublish("amq.headers", "k"), encode_properties(message, 0.0), b"x"
            )
            client.flush()
        client.call(m.QueueDeclare("other"), m.QueueDeclareOk)


@case()
def deep_filters(arena: Arena) -> None:
    """A SUBSCRIBE and an UNSUBSCRIBE of 1 000 filters of 190 levels, and of filters of wildcards."""
    chance = random.Random(31)
    numbers = [f"{at}" for at in range(1_000)]
    deep = ["/".join(chance.choices(numbers, k=190)) for _ in range(1_000)]
    wild = ["/".join([*chance.choices("+a", k=190), "x"]) for _ in range(1_000)]
    with mqtt(arena.port("mqtt")) as sock:
        for filters in (deep, wild):
            texts = [text(one.encode()) for one in filters]
            spoken(sock, packet(0x82, b"\0\1", b"\0", *(one + b"\1" for one in texts)))
            spoken(sock, publish_packet(b"/".join([b"a"] * 191), qos=1))
            spoken(sock, packet(0xA2, b"\0\1", b"\0", *texts))


@case()
def floods_of_small_packets(arena: Arena) -> None:
    """Thirty connections say nothing but the smallest packet, and half of them do not read the answers."""
    small = (b"\xc0\0" * 32_768, b"\x40\2\0\1" * 16_384, publish_packet(b"nobody") * 6_000)
    with ExitStack() as stack:
        socks = [stack.enter_context(mqtt(arena.port("mqtt"), b"flood %d" % number)) for number in range(30)]
        for sock in socks:
            sock.setblocking(False)
        gone: set[socket.socket] = set()
        for turn in range(200):
            for number, sock in enumerate(socks):
                if sock in gone:
                    continue
                try:
                    with suppress(BlockingIOError):
                        sock.send(small[(number + turn // 40) % len(small)])
                    if number % 2:
                        with suppress(BlockingIOError):
                            sock.recv(1 << 20)
                except OSError:
                    gone.add(sock)


@case()
def floods_of_empty_frames(arena: Arena) -> None:
    """AMQP heartbeats, and channels opened and closed, without a pause."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Amqp(arena).open()) for _ in range(10)]
        beats = b"\x08\0\0\0\0\0\0\xce" * 8_192
        for client in clients:
            client.sock.setblocking(False)
        for _ in range(200):
            for client in clients:
                with suppress(OSError):
                    client.sock.send(beats)
