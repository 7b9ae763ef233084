"""Who takes part in a load: one object per connection, which counts bytes and decodes as little as it can.

PUBACKs have four bytes, confirms twenty-one, and all deliveries of a run have the size of the first one, so
whole reads are counted by division. So that such a count cannot deceive, the first delivery is decoded fully
and compared with what was published, and in every read the place where a message must begin is looked at.
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal, Protocol

from tests.benchmarks import wires

READ: Final = 1 << 18
QOS0_BURST: Final = 64  # messages per write
CONFIRM: Final = struct.Struct(">BH8sQBx")  # frame type, channel, size and method, number, multiple
CONFIRM_METHOD: Final = b"\x00\x00\x00\x0d\x00\x3c\x00\x50"
ACK_HEAD: Final = b"\x01\x00\x01\x00\x00\x00\x0d\x00\x3c\x00\x50"
REPLY_HEAD: Final = b"\x00\x09\x30"
REPLY_BYTES: Final = 11
NOTIFY: Final = 41
FAST_ACK: Final = struct.Struct(">HBHHIB")
ACK_TAG: Final = struct.Struct(">11sQH")

_inbox = bytearray(READ)  # one per process: what is only counted is not kept


@dataclass(frozen=True)
class Load:
    """One run. `publish` and `consume` are `mqtt`, `amqp` or `fast`, each with the port of its server.

    `window`: messages of one connection that are published and not acknowledged. `ahead_max`: messages of
    all connections that are published and have not arrived; so a server is measured at the rate that it
    sustains, and not while a backlog grows in it. `channels`: of each AMQP publisher, used in turn.
    `fan_out`: queues that each message arrives in, all of them consumed by the one consumer. `topics`: of
    each MQTT publisher, used in turn, ten at most. `vary`: what each message of a publisher differs in, until
    it has sent `distinct` of them, and begins again; topics come in an order of chance, a property that
    differs comes after `properties` that do not. `level` of MQTT: 5 where there are properties.
    `subscribers`: MQTT clients that consume; more than one have topics that differ in equal parts, by filters
    that name them. `tls`: MQTT publishers speak it.
    """

    publish: str
    consume: str
    publish_port: int
    consume_port: int
    connections: int = 20
    window: int = 100
    qos: int = 1
    acknowledge: bool = True
    body_bytes: int = 128
    ahead_max: int = 4_000
    seconds: float = 4.0
    warm_up_secs: float = 1.0
    queue: str = "bench"
    durable: bool = False
    exchange: str = "amq.topic"
    persistent: bool = True
    channels: int = 1
    fan_out: int = 1
    topics: int = 1
    vary: Literal["", "topic", "property"] = ""
    distinct: int = 1
    properties: int = 0
    level: int = 4
    subscribers: int = 1
    tls: bool = False

    @property
    def queues(self) -> list[str]:
        """The names of the queues."""
        return [self.queue] if self.fan_out == 1 else [f"{self.queue}{at:04d}" for at in range(self.fan_out)]

    @property
    def body(self) -> bytes:
        """What every message holds."""
        return b"x" * self.body_bytes

    def pairs(self, number: int, place: int) -> list[tuple[str, str]]:
        """User properties, or headers, of a publisher's message."""
        found = [(f"property-{at}", f"its constant value {at}") for at in range(self.properties)]
        if self.vary == "property":
            found.append(("trace", f"{number:05d}-{place % self.distinct:08d}"))
        return found

    def ring(self, window: int, make: Callable[[int], bytes]) -> list[bytes]:
        """What a publisher sends, again and again: a multiple of the window, and all that differ."""
        return [make(place) for place in range(-(-max(self.distinct, window) // window) * window)]

    def levels(self, number: int) -> list[str]:
        """What stands behind a publisher's own topic, in the order in which it is used."""
        if self.vary != "topic":
            return [f"/{place}" for place in range(self.topics)] if self.topics > 1 else [""]
        found = [f"/{place:06d}" for place in range(self.distinct)]
        Random(number).shuffle(found)
        return found

    @property
    def floods(self) -> bool:
        """Nothing is acknowledged to the publishers: they send whatever `ahead_max` allows."""
        return self.publish == "mqtt" and not self.qos


class Wrong(Exception):
    """What arrived is not what was published."""


class Role(Protocol):
    """One connection of the load."""

    @property
    def sock(self) -> socket.socket | Gathered: ...

    def readable(self) -> int:
        """Read once; returns how many messages that settled or brought."""


class Publisher(Role, Protocol):
    """A connection that publishes; `batch` is what it sends first, and at most, at once."""

    batch: int

    def send(self, count: int) -> None:
        """Publish that many messages."""


class MqttPublisher:
    """Publishes to one topic, or some in turn; window by packet identifiers, which are used in turn."""

    def __init__(self, load: Load, number: int) -> None:
        self.sock = wires.mqtt_connect(load.publish_port, f"pub-{number:05d}", load.level, tls=load.tls)
        topics = [wires.text(f"bench/{number:05d}{level}") for level in load.levels(number)]
        self.batch = load.window if load.qos else QOS0_BURST

        def make(place: int) -> bytes:
            told = topics[place % len(topics)]
            if load.qos:
                told += (place % load.window + 1).to_bytes(2, "big")
            if load.level == wires.MQTT_5:
                told += wires.user_properties(load.pairs(number, place))
            return wires.packet(0x32 if load.qos else 0x30, told + load.body)

        ring = load.ring(self.batch, make)
        self._size = len(ring[0])
        self._ring = b"".join(ring + ring[: self.batch])
        self._count = len(ring)
        self._next = 0
        self._rest = 0

    def send(self, count: int) -> None:
        """The next `count` packets of the ring."""
        begin = self._next * self._size
        wires.send_all(self.sock, self._ring[begin : begin + count * self._size])
        self._next = (self._next + count) % self._count

    def readable(self) -> int:
        """PUBACKs have four bytes each."""
        size = _count(self.sock)
        if not self._rest and size and _inbox[0] != 0x40:
            raise Wrong(f"no PUBACK: {bytes(_inbox[:size])!r}")
        count, self._rest = divmod(self._rest + size, 4)
        return count


class MqttSubscriber:
    """One subscriber of everything under `bench/`; acknowledges every message singly."""

    def __init__(self, load: Load, client_id: str = "sub", filters: Sequence[str] = ("bench/#",)) -> None:
        self.sock = wires.mqtt_connect(load.consume_port, client_id, load.level)
        wires.mqtt_subscribe(self.sock, filters, load.qos, load.level)
        self._level = load.level
        self._topic_bytes = len(f"bench/00000{load.levels(0)[0]}")
        self._qos = load.qos
        self._body = load.body
        self._rest = b""
        self._size = 0
        self._id_at = 0
        self._head = b""

    def _measure(self, data: bytes) -> None:
        parts = wires.publish_parts(data, self._level)
        if parts is None:
            return
        size, first, topic, id_at, body = parts
        if first & 6 != self._qos << 1 or not topic.startswith(b"bench/") or body != self._body:
            raise Wrong(f"{data[:size]!r}")
        self._size, self._id_at = size, id_at
        # Length and topic, without the publisher's number and what is behind it.
        self._head = data[1 : id_at - self._topic_bytes + len("bench/")]

    def readable(self) -> int:
        """All packets have the size of the first; the identifier stands behind the topic."""
        data = self._rest + _read(self.sock)
        if not self._size:
            self._measure(data)
            if not self._size:
                self._rest = data
                return 0
        size, at = self._size, self._id_at
        count = len(data) // size
        last = (count - 1) * size
        if count and data[last + 1 : last + 1 + len(self._head)] != self._head:
            raise Wrong(f"{data[last : last + size]!r}")
        self._rest = data[count * size :]
        if self._qos and count:
            ids = [b"\x40\x02" + data[begin : begin + 2] for begin in range(at, count * size, size)]
            wires.send_all(self.sock, b"".join(ids))
        return count


class Gathered:
    """Many sockets, which are readable when one of them is."""

    def __init__(self, socks: Iterable[socket.socket]) -> None:
        self._epoll = select.epoll()
        for sock in socks:
            sock.setblocking(False)
            self._epoll.register(sock, select.EPOLLIN)

    def fileno(self) -> int:
        """For whoever waits."""
        return self._epoll.fileno()

    def setblocking(self, blocking: bool) -> None:
        """None of them blocks."""

    def readable(self) -> list[int]:
        """The descriptors that are."""
        return [descriptor for descriptor, _ in self._epoll.poll(0)]


class MqttSubscribers:
    """Many subscribers, each of its own part of the topics."""

    def __init__(self, load: Load) -> None:
        topics = [
            f"bench/{number:05d}{level}"
            for number in range(load.connections)
            for level in load.levels(number)
        ]
        Random(0).shuffle(topics)
        part = len(topics) // load.subscribers
        every = [
            MqttSubscriber(load, f"sub-{at:05d}", topics[at * part : (at + 1) * part])
            for at in range(load.subscribers)
        ]
        self._by_descriptor = {one.sock.fileno(): one for one in every}
        self.sock = Gathered([one.sock for one in every])

    def readable(self) -> int:
        """All that can be read is."""
        return sum([self._by_descriptor[descriptor].readable() for descriptor in self.sock.readable()])


class AmqpConsumer:
    """One consumer for each queue; acknowledges every delivery singly, or is a no-ack consumer."""

    def __init__(self, load: Load) -> None:
        self.sock = wires.amqp_connect(load.consume_port)
        for queue in load.queues:
            wires.amqp_queue(self.sock, queue, load.exchange, "bench.#", durable=load.durable)
            wires.amqp_consume(self.sock, queue, acknowledge=load.acknowledge, tag=queue)
        self._acknowledge = load.acknowledge
        self._body = load.body
        self._rest = 0
        self._head = b""
        self._size = 0
        self._tag = 0

    def _measure(self) -> int:
        """The bytes of a delivery; 0 while the first one is not whole."""
        parts = wires.delivery_parts(self._head)
        if parts is None:
            return 0
        size, tag, key, body = parts
        if tag != 1 or not key.startswith(b"bench.") or body != self._body:
            raise Wrong(f"{self._head[:size]!r}")
        return size

    def readable(self) -> int:
        """All deliveries have the size of the first; their tags are consecutive."""
        if not self._size:
            self._head += _read(self.sock)
            self._size = self._measure()
            if self._size == 0:
                return 0
            self._rest = len(self._head)
        else:
            begin = (self._size - self._rest) % self._size
            read = _count(self.sock)
            if begin < read and (_inbox[begin] != 1 or (begin and _inbox[begin - 1] != 0xCE)):
                raise Wrong(f"{bytes(_inbox[:read])!r}")
            self._rest += read
        count, self._rest = divmod(self._rest, self._size)
        if self._acknowledge and count:
            first = self._tag + 1
            self._tag += count
            pack = ACK_TAG.pack
            wires.send_all(
                self.sock, b"".join([pack(ACK_HEAD, tag, 0xCE) for tag in range(first, first + count)])
            )
        return count


class AmqpPublisher:
    """Publishes with confirms to one key of the exchange, on each of its channels in turn."""

    def __init__(self, load: Load, number: int) -> None:
        self.sock = wires.amqp_connect(load.publish_port, load.channels)
        channels = range(1, load.channels + 1)
        for channel in channels:
            self.sock.sendall(wires.method(channel, 85, 10, b"\x00"))
            wires.expect(self.sock, 85, 11)
        keys = [f"bench.{number:05d}{level}".replace("/", ".") for level in load.levels(number)]
        self.batch = load.window

        def make(place: int) -> bytes:
            return wires.publish_frames(
                load.exchange,
                keys[place % len(keys)],
                load.body,
                channel=place % load.channels + 1,
                persistent=load.persistent,
                headers=load.pairs(number, place),
            )

        ring = load.ring(load.channels, make)
        self._size = len(ring[0])
        self._count = len(ring)
        self._ring = b"".join(ring * (-(-load.window // len(ring)) + 1))
        self._next = 0
        self._confirmed = [0] * (load.channels + 1)  # by channel: every message up to this number
        self._early: dict[int, set[int]] = {}  # and these above it
        self._rest = b""

    def send(self, count: int) -> None:
        """The next `count` messages of the ring."""
        begin = self._next * self._size
        wires.send_all(self.sock, self._ring[begin : begin + count * self._size])
        self._next = (self._next + count) % self._count

    def readable(self) -> int:
        """Confirms have twenty-one bytes; `multiple` covers all before."""
        data = self._rest + _read(self.sock)
        whole = len(data) - len(data) % CONFIRM.size
        self._rest = data[whole:]
        confirmed = self._confirmed
        settled = 0
        for kind, channel, method, tag, multiple in CONFIRM.iter_unpack(data[:whole]):
            if kind != 1 or method != CONFIRM_METHOD:
                raise Wrong(f"no confirm: {data[:whole]!r}")
            if tag == confirmed[channel] + 1 and channel not in self._early:
                confirmed[channel] = tag
                settled += 1
            else:
                settled += self._settle(channel, tag, multiple)
        return settled

    def _settle(self, channel: int, tag: int, multiple: int) -> int:
        """As above, with confirms that are not simply the next one."""
        early = self._early.setdefault(channel, set())
        floor = self._confirmed[channel]
        before = floor + len(early)
        if multiple:
            floor = max(floor, tag)
            early -= {one for one in early if one <= floor}
        else:
            early.add(tag)
        while floor + 1 in early:
            floor += 1
            early.remove(floor)
        self._confirmed[channel] = floor
        if not early:
            del self._early[channel]
        return floor + len(early) - before


class FastPublisher:
    """Sends persistent messages with confirm-tags, used in turn, to one queue."""

    def __init__(self, load: Load, number: int) -> None:
        self.sock = wires.fast_connect(load.publish_port, load.queue, producer=True)
        fragment = wires.fast_head(len(load.body), persistent=True) + load.body
        ring = [wires.fast_send(tag, fragment) for tag in range(1, load.window + 1)]
        self._size = len(ring[0])
        self._ring = b"".join(ring) * 2
        self.batch = load.window
        self._next = 0
        self._rest = 0

    def send(self, count: int) -> None:
        """The next `count` messages of the ring."""
        begin = self._next * self._size
        wires.send_all(self.sock, self._ring[begin : begin + count * self._size])
        self._next = (self._next + count) % self.batch

    def readable(self) -> int:
        """HANDLE REPLY 200 has eleven bytes."""
        size = _count(self.sock)
        if not self._rest and size and bytes(_inbox[:3]) != REPLY_HEAD:
            raise Wrong(f"no HANDLE REPLY: {bytes(_inbox[:size])!r}")
        count, self._rest = divmod(self._rest + size, REPLY_BYTES)
        return count


class FastConsumer:
    """Consumes one queue; acknowledges every message singly."""

    def __init__(self, load: Load) -> None:
        self.sock = wires.fast_connect(load.consume_port, load.queue, producer=False)
        wires.fast_consume(self.sock)
        self._body = load.body
        self._head = b""
        self._size = 0
        self._rest = 0
        self._number = 0

    def _measure(self) -> None:
        parts = wires.notify_parts(self._head)
        if parts is None:
            return
        size, number, body = parts
        if number != 1 or body != self._body:
            raise Wrong(f"{self._head[:size]!r}")
        self._size = size

    @property
    def measured(self) -> bool:
        """A whole message has been seen."""
        return self._size > 0

    def readable(self) -> int:
        """All messages have the size of the first; their numbers are consecutive."""
        if not self._size:
            self._head += _read(self.sock)
            self._measure()
            if not self.measured:
                return 0
            self._rest = len(self._head)
        else:
            begin = (self._size - self._rest) % self._size
            read = _count(self.sock)
            if begin + 3 <= read and _inbox[begin + 2] != NOTIFY:
                raise Wrong(f"{bytes(_inbox[:read])!r}")
            self._rest += read
        count, self._rest = divmod(self._rest, self._size)
        if count:
            first = self._number + 1
            self._number += count
            pack = FAST_ACK.pack
            wires.send_all(
                self.sock,
                b"".join([pack(10, 21, 1, 0, number, 0xCE) for number in range(first, first + count)]),
            )
        return count


PUBLISHERS: Final[dict[str, Callable[[Load, int], Publisher]]] = {
    "mqtt": MqttPublisher,
    "amqp": AmqpPublisher,
    "fast": FastPublisher,
}
CONSUMERS: Final[dict[str, Callable[[Load], Role]]] = {
    "mqtt": lambda load: MqttSubscriber(load) if load.subscribers == 1 else MqttSubscribers(load),
    "amqp": AmqpConsumer,
    "fast": FastConsumer,
}


def _read(sock: socket.socket) -> bytes:
    try:
        data = sock.recv(READ)
    except wires.NOT_NOW:
        return b""
    if not data:
        raise ConnectionError("the server closed the connection")
    return data


def _count(sock: socket.socket) -> int:
    """How many bytes were there; they stand in `_inbox` until the next call."""
    try:
        size = sock.recv_into(_inbox)
    except wires.NOT_NOW:
        return 0
    if not size:
        raise ConnectionError("the server closed the connection")
    return size
