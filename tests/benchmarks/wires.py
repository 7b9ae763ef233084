"""The three protocols by hand, as far as a load needs them.

Nothing here is shared with the gateway, so that a fault of its codecs cannot hide itself.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

WAIT_SECS: Final = 30.0
FRAME_OVERHEAD: Final = 8
BODY_MAX: Final = 131_072 - FRAME_OVERHEAD  # of a frame, as both servers offer it
MQTT_5: Final = 5
Pairs = Sequence[tuple[str, str]]
NOT_NOW: Final = BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError


def exactly(sock: socket.socket, size: int) -> bytes:
    """`size` bytes of a blocking socket. Raises ConnectionError at its end."""
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionError("the server closed the connection")
        data += piece
    return data


def send_all(sock: socket.socket, data: bytes) -> None:
    """Everything, though the socket does not block."""
    try:
        sent = sock.send(data)
    except NOT_NOW:
        sent = 0
    while sent < len(data):
        waiting = select.poll()
        waiting.register(sock, select.POLLOUT)
        if not waiting.poll(WAIT_SECS * 1000):
            raise TimeoutError("the server takes no more bytes")
        try:
            sent += sock.send(memoryview(data)[sent:])
        except NOT_NOW:
            continue


def open_socket(port: int, *, tls: bool = False) -> socket.socket:
    """A connection to the loopback interface, without Nagle's delay; with `tls` to whoever answers."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not tls:
        return sock
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(sock)


# MQTT 3.1.1.


def text(value: str) -> bytes:
    """A string with its length in two bytes."""
    return len(value).to_bytes(2, "big") + value.encode()


def packet(first: int, rest: bytes) -> bytes:
    """A control packet."""
    size, length = len(rest), b""
    while True:
        size, low = divmod(size, 128)
        length += bytes((low | (128 if size else 0),))
        if not size:
            return bytes((first,)) + length + rest


def mqtt_say_connect(
    port: int, client_id: str, level: int = 4, *, clean: bool = True, tls: bool = False
) -> socket.socket:
    """A client without keep-alive, and mostly with a clean session, that has said CONNECT."""
    sock = open_socket(port, tls=tls)
    properties = b"\x00" if level == MQTT_5 else b""
    told = text("MQTT") + bytes((level, 2 * clean, 0, 0)) + properties + text(client_id)
    sock.sendall(packet(0x10, told))
    return sock


def mqtt_answer(sock: socket.socket, kind: int) -> bytes:
    """What follows the head of the next packet, which is of that kind and shorter than 128 bytes."""
    head = exactly(sock, 2)
    rest = exactly(sock, head[1])
    if head[0] != kind or head[1] > 127:
        raise ConnectionError(f"{head + rest!r} instead of {kind:#x}")
    return rest


def mqtt_expect_connack(sock: socket.socket) -> None:
    """Wait until the server has accepted the client."""
    answer = mqtt_answer(sock, 0x20)
    if answer[1]:
        raise ConnectionError(f"CONNACK {answer!r}")


def mqtt_connect(port: int, client_id: str, level: int = 4, *, tls: bool = False) -> socket.socket:
    """A connected client with a clean session."""
    sock = mqtt_say_connect(port, client_id, level, tls=tls)
    mqtt_expect_connack(sock)
    return sock


@contextmanager
def mqtt_connection(port: int, client_id: str) -> Iterator[socket.socket]:
    """A client whose session stays when it goes, which it does with a DISCONNECT."""
    with mqtt_say_connect(port, client_id, clean=False) as sock:
        mqtt_expect_connack(sock)
        yield sock
        sock.sendall(packet(0xE0, b""))


def mqtt_publish(sock: socket.socket, topic: str, body: bytes, *, retain: bool = False) -> None:
    """Publish with QoS 1, MQTT 3.1.1, and wait for the acknowledgement."""
    sock.sendall(packet(0x33 if retain else 0x32, text(topic) + b"\x00\x01" + body))
    if mqtt_answer(sock, 0x40) != b"\x00\x01":
        raise ConnectionError("no PUBACK")


def mqtt_subscribe(sock: socket.socket, topic_filters: Sequence[str], qos: int, level: int = 4) -> None:
    """Subscribe to them with one packet, and be granted that QoS."""
    properties = b"\x00" if level == MQTT_5 else b""
    asked = b"".join([text(one) + bytes((qos,)) for one in topic_filters])
    sock.sendall(packet(0x82, b"\x00\x01" + properties + asked))
    answer = mqtt_answer(sock, 0x90)
    if answer != b"\x00\x01" + properties + bytes((qos,)) * len(topic_filters):
        raise ConnectionError(f"SUBACK {answer!r}")


def mqtt_unsubscribe(sock: socket.socket, topic_filter: str) -> None:
    """Unsubscribe, MQTT 3.1.1."""
    sock.sendall(packet(0xA2, b"\x00\x01" + text(topic_filter)))
    if mqtt_answer(sock, 0xB0) != b"\x00\x01":
        raise ConnectionError("no UNSUBACK")


def user_properties(pairs: Pairs) -> bytes:
    """The property section of an MQTT 5 PUBLISH; shorter than 16 384 bytes."""
    data = b"".join([b"\x26" + text(name) + text(value) for name, value in pairs])
    size = len(data)
    return (bytes((size,)) if size < 128 else bytes((size % 128 | 128, size // 128))) + data


def publish_parts(data: bytes, level: int = 4) -> tuple[int, int, bytes, int, bytes] | None:
    """The PUBLISH at the start of `data`: its bytes, first byte, topic, where that ends and a packet
    identifier begins, if it has one, body. None when it is not whole. Its remaining length has one or two
    bytes, and so has that of its properties."""
    if len(data) < 4:
        return None
    size, head = (data[1], 2) if data[1] < 128 else (data[1] - 128 + data[2] * 128, 3)
    if len(data) < head + size:
        return None
    topic_end = head + 2 + int.from_bytes(data[head : head + 2], "big")
    body_at = topic_end + (2 if data[0] & 6 else 0)
    if level == MQTT_5:
        low, high = data[body_at], data[body_at + 1]
        body_at += 1 + low if low < 128 else 2 + low - 128 + high * 128
    return head + size, data[0], data[head + 2 : topic_end], topic_end, data[body_at : head + size]


# AMQP 0-9-1.


def short(value: str) -> bytes:
    """A string with its length in one byte."""
    return bytes((len(value),)) + value.encode()


def frame(kind: int, channel: int, payload: bytes) -> bytes:
    """One frame."""
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def method(channel: int, class_id: int, method_id: int, arguments: bytes = b"") -> bytes:
    """A method frame."""
    return frame(1, channel, struct.pack(">HH", class_id, method_id) + arguments)


def content(channel: int, opening: bytes, properties: bytes, body: bytes) -> bytes:
    """A method frame with its content: `properties` are the bytes from the flags on."""
    return (
        opening
        + frame(2, channel, struct.pack(">HHQ", 60, 0, len(body)) + properties)
        + b"".join([frame(3, channel, body[at : at + BODY_MAX]) for at in range(0, len(body), BODY_MAX)])
    )


def publish_frames(
    exchange: str,
    routing_key: str,
    body: bytes,
    *,
    channel: int = 1,
    persistent: bool = True,
    headers: Pairs = (),
) -> bytes:
    """A basic.publish; the body has as many frames as it needs."""
    opening = method(channel, 60, 40, b"\x00\x00" + short(exchange) + short(routing_key) + b"\x00")
    mode = b"\x02" if persistent else b"\x01"
    if not headers:
        return content(channel, opening, b"\x10\x00" + mode, body)
    entries = b"".join(
        [short(name) + b"S" + struct.pack(">I", len(value)) + value.encode() for name, value in headers]
    )
    properties = b"\x30\x00" + struct.pack(">I", len(entries)) + entries + mode
    return content(channel, opening, properties, body)


def expect(sock: socket.socket, class_id: int, method_id: int) -> bytes:
    """The arguments of that method; whatever comes before it is passed over."""
    while True:
        kind, _, size = struct.unpack(">BHI", exactly(sock, 7))
        payload = exactly(sock, size + 1)[:-1]
        if kind == 1:
            found = struct.unpack(">HH", payload[:4])
            if found == (class_id, method_id):
                return payload[4:]
            if found in ((10, 50), (20, 40)):
                raise ConnectionError(f"the server closed: {payload!r}")


def amqp_connect(port: int, channels: int = 1) -> socket.socket:
    """A connection of guest with the first `channels` open and no heartbeat."""
    sock = open_socket(port)
    sock.sendall(b"AMQP\x00\x00\x09\x01")
    expect(sock, 10, 10)
    response = b"\x00guest\x00guest"
    answer = b"\x00" * 4 + short("PLAIN") + struct.pack(">I", len(response)) + response + short("en_US")
    sock.sendall(method(0, 10, 11, answer))
    channel_max, frame_max, _ = struct.unpack(">HIH", expect(sock, 10, 30))
    sock.sendall(method(0, 10, 31, struct.pack(">HIH", channel_max, frame_max, 0)))
    sock.sendall(method(0, 10, 40, short("/") + b"\x00\x00"))
    expect(sock, 10, 41)
    for channel in range(1, channels + 1):
        sock.sendall(method(channel, 20, 10, b"\x00"))
        expect(sock, 20, 11)
    return sock


def amqp_delete(sock: socket.socket, queue: str) -> None:
    """Delete a queue, whether or not it is there."""
    sock.sendall(method(1, 50, 40, b"\x00\x00" + short(queue) + b"\x00"))
    expect(sock, 50, 41)


def amqp_queue(sock: socket.socket, queue: str, exchange: str, binding_key: str, *, durable: bool) -> None:
    """A new and empty queue with one binding."""
    amqp_delete(sock, queue)
    flags = bytes((0x02 if durable else 0,))
    sock.sendall(method(1, 50, 10, b"\x00\x00" + short(queue) + flags + b"\x00" * 4))
    expect(sock, 50, 11)
    amqp_bind(sock, queue, exchange, binding_key)


def amqp_bind(sock: socket.socket, queue: str, exchange: str, binding_key: str) -> None:
    """One more binding."""
    names = b"\x00\x00" + short(queue) + short(exchange) + short(binding_key)
    sock.sendall(method(1, 50, 20, names + b"\x00" + b"\x00" * 4))
    expect(sock, 50, 21)


def amqp_unbind(sock: socket.socket, queue: str, exchange: str, binding_key: str) -> None:
    """One binding less."""
    names = b"\x00\x00" + short(queue) + short(exchange) + short(binding_key)
    sock.sendall(method(1, 50, 50, names + b"\x00" * 4))
    expect(sock, 50, 51)


def amqp_consume(
    sock: socket.socket, queue: str, *, acknowledge: bool, prefetch: int = 2000, tag: str = "c"
) -> None:
    """Begin to consume."""
    if acknowledge:
        sock.sendall(method(1, 60, 10, struct.pack(">IHB", 0, prefetch, 0)))
        expect(sock, 60, 11)
    bits = b"\x00" if acknowledge else b"\x02"
    sock.sendall(method(1, 60, 20, b"\x00\x00" + short(queue) + short(tag) + bits + b"\x00" * 4))
    expect(sock, 60, 21)


def delivery_parts(data: bytes) -> tuple[int, int, bytes, bytes] | None:
    """The basic.deliver at the start of `data`: its bytes, delivery tag, routing key, body.

    None when it is not whole.
    """
    at, payloads, left = 0, [b"", b"", b""], 1
    kind = 1
    while left > 0:
        if len(data) < at + 7:
            return None
        found, _, size = struct.unpack_from(">BHI", data, at)
        end = at + size + FRAME_OVERHEAD
        if len(data) < end:
            return None
        if found != kind or data[end - 1] != 0xCE:
            raise ConnectionError(f"not a delivery: {data[at:end]!r}")
        payloads[kind - 1] += data[at + 7 : end - 1]
        at = end
        if kind == 3:
            left -= size
        elif kind == 2:
            left = int.from_bytes(payloads[1][4:12], "big")
        kind = min(kind + 1, 3)
    opening, _, body = payloads
    if opening[:4] != b"\x00\x3c\x00\x3c":
        raise ConnectionError(f"not a delivery: {opening!r}")
    tag_at = 5 + opening[4]
    tag = int.from_bytes(opening[tag_at : tag_at + 8], "big")
    exchange_at = tag_at + 9
    key_at = exchange_at + 1 + opening[exchange_at]
    return at, tag, opening[key_at + 1 : key_at + 1 + opening[key_at]], body


# AMQP/Fast.


def fast_frame(kind: int, fields: bytes) -> bytes:
    """A command."""
    return struct.pack(">HB", len(fields) + 2, kind) + fields + b"\xce"


def fast_expect(sock: socket.socket, kind: int) -> bytes:
    """The fields of that command; nothing else may come before it."""
    size = int.from_bytes(exactly(sock, 2), "big")
    content = exactly(sock, size)
    if content[0] != kind:
        raise ConnectionError(f"the server says {content!r}")
    return content[1:-1]


def fast_connect(port: int, name: str, *, producer: bool) -> socket.socket:
    """A connection of guest without heartbeat; handle 1 of channel 1 is open for queue `name`."""
    sock = open_socket(port)
    sock.sendall(b"\x80\x01")
    fast_expect(sock, 10)
    table = b"".join(short(key) + b"S" + text("guest") for key in ("LOGIN", "PASSWORD"))
    sock.sendall(fast_frame(11, short("PLAIN") + len(table).to_bytes(2, "big") + table))
    frame_max, channels, handles = struct.unpack(">IHH", fast_expect(sock, 12)[:8])
    sock.sendall(fast_frame(12, struct.pack(">IHHH", frame_max, channels, handles, 0) + b"\0\0"))
    sock.sendall(fast_frame(13, b"\0\1" + short("/") + short("") + b"\0\0"))
    fast_expect(sock, 18)
    sock.sendall(fast_frame(20, b"\0\1\0\1\0\0\0\0"))
    fast_expect(sock, 28)
    rights = b"\x01" if producer else b"\x02"
    opened = struct.pack(">HHHH", 1, 1, 1, 2) + rights + short(name) + b"\0\0\0\0"
    sock.sendall(fast_frame(30, opened))
    fast_expect(sock, 48)
    return sock


def fast_consume(sock: socket.socket, prefetch: int = 2_000) -> None:
    """Begin to consume on handle 1."""
    sock.sendall(fast_frame(32, struct.pack(">HHHB", 1, 3, prefetch, 0) + b"\0\0\0\0\0"))
    fast_expect(sock, 48)


def fast_head(body_size: int, *, persistent: bool) -> bytes:
    """The head of a message that says nothing else."""
    return struct.pack(">IBBI", body_size, persistent, 0, 0) + b"\0\0\0\0\0"


def fast_send(tag: int, fragment: bytes, *, partial: bool = False) -> bytes:
    """HANDLE SEND on handle 1."""
    fields = struct.pack(">HHIB", 1, tag, len(fragment), partial)
    return fast_frame(31, fields + b"\0") + fragment


def notify_parts(data: bytes) -> tuple[int, int, bytes] | None:
    """The HANDLE NOTIFY at the start of `data`: its bytes, message number, body. None when it is not whole.
    Its body is in one fragment, behind a head of fifteen bytes."""
    if len(data) < 12:
        return None
    size, kind, _, number, fragment = struct.unpack_from(">HBHII", data)
    end = size + 2 + fragment
    if kind != 41:
        raise ConnectionError(f"not a NOTIFY: {data[:64]!r}")
    return None if len(data) < end else (end, number, data[size + 2 + 15 : end])
