"""Conversations with the three clients of 2005 (C, Java, Perl), byte for byte, as they have to go today.

Each line is what the client or the server says; frames are put together here, not by the codec. `TMP` stands
for the name that the gateway makes. What the first server did wrong has a conversation that goes on.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Final

import pytest

from gateway.settings import Limits, ListenerSettings
from gateway.settings.amqpfast import DestinationNames, FastVirtualHost
from tests.configured import make_listener
from tests.ingress.clients import Raw
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

MODES: Final = ("rfc", "openamq-2005")
OLD: Final = ("openamq-2005",)
QUEUE, TOPIC = 1, 2
TMP: Final = b"\x14" + b"?" * 20
# Bits of HANDLE OPEN: producer, consumer, browser, temporary.
ALL, TEMPORARY = 7, 15
PARTIAL, DELIVERED, REDELIVERED = 1, 8, 16


def listener(mode: str, anonymous: str = "always") -> ListenerSettings:
    host = FastVirtualHost(destinations=DestinationNames(queues=("q", "r"), topics=("t",)), auto_create=False)
    limits = Limits(heartbeat_secs=0, frame_bytes_max=48_000, channels_max=1_024, handles_max=0x2000)
    return make_listener(
        protocol="amqpfast",
        host=LOOPBACK,
        port=0,
        compatibility=mode,
        anonymous=anonymous,
        negotiation_pause_secs=0.0,
        limits=limits,
        virtual_hosts={"/": host},
    )


@pytest.fixture(scope="module")
def both() -> Iterator[Running]:
    with running(settings_of(listeners={mode: listener(mode) for mode in MODES})) as one:
        yield one


# Frames.


def two(number: int) -> bytes:
    return number.to_bytes(2, "big")


def four(number: int) -> bytes:
    return number.to_bytes(4, "big")


def text(said: str) -> bytes:
    return bytes([len(said)]) + said.encode()


def frame(kind: int, *fields: bytes) -> bytes:
    data = bytes([kind]) + b"".join(fields) + b"\xce"
    return two(len(data)) + data


def tune(frame_max: int, channels: int, handles: int) -> bytes:
    return frame(12, four(frame_max), two(channels), two(handles), two(0), b"\0\0")


def response(mechanism: str) -> bytes:
    return frame(11, text(mechanism), b"\0\0")


def opens(tag: int, name: str) -> bytes:
    return frame(13, two(tag), text("/"), text(name), b"\0\0")


def channel(number: int, tag: int = 0, bits: int = 0) -> bytes:
    return frame(20, two(number), two(tag), bytes([bits]), b"\0\0", b"\0")


def channel_reply(number: int, tag: int) -> bytes:
    return frame(28, two(number), two(tag), two(200), b"\0")


def handle(number: int, tag: int, service: int, bits: int, name: str, *, channel: int = 1) -> bytes:
    return frame(
        30, two(channel), two(number), two(service), two(tag), bytes([bits]), text(name), b"\0\0\0\0"
    )


def reply(number: int, tag: int) -> bytes:
    return frame(48, two(number), two(tag), two(200), b"\0")


MINUS_ONE: Final = b"\0\x07\x01nI\xff\xff\xff\xff"  # a table of which the first server lost the sign
HEAD: Final = b"\0\0\0\0\0\0\0\0\0" + MINUS_ONE


def message(body: bytes, priority: int = 0, expiration: int = 0) -> bytes:
    head = b"\0" + bytes([priority]) + four(expiration) + b"\0\0\0" + MINUS_ONE
    return four(len(body)) + head + body


def send(number: int, tag: int, data: bytes, bits: int = 0) -> bytes:
    return frame(31, two(number), two(tag), four(len(data)), bytes([bits]), b"\0") + data


def notify(number: int, nbr: int, bits: int, name: str, data: bytes) -> bytes:
    return frame(41, two(number), four(nbr), four(len(data)), bytes([bits]), text(name)) + data


def consume(number: int, tag: int, prefetch: int = 10, bits: int = 0) -> bytes:
    return frame(32, two(number), two(tag), two(prefetch), bytes([bits]), b"\0\0\0\0\0")


def query(number: int) -> bytes:
    return frame(36, two(number), four(0), b"\0\0\0\0")


def index(number: int, listed: bytes, more: int = 0) -> bytes:
    return frame(42, two(number), four(more), two(len(listed)), listed)


def browse(number: int, tag: int, nbr: int) -> bytes:
    return frame(37, two(number), two(tag), four(nbr))


def ack(tag: int, nbr: int, *, channel: int = 1) -> bytes:
    return frame(21, two(channel), two(tag), four(nbr))


def created(number: int, name: bytes) -> bytes:
    return frame(40, two(number), name)


def close(kind: int, number: int | None = None, code: int = 200, said: str = "") -> bytes:
    return frame(kind, b"" if number is None else two(number), two(code), text(said))


PING, PONG = frame(14, b"\x01"), frame(14, b"\0")
CHALLENGE: Final = frame(10, b"\x01", text("PLAIN"), b"\0\0")
TUNE: Final = tune(32_000, 255, 255)
OFFER: Final = tune(48_000, 1_024, 0x2000)
Line = tuple[str, bytes]


def greeting(mechanism: str, name: str) -> list[Line]:
    return [
        ("C", b"\x80\x01"),
        ("S", CHALLENGE),
        ("C", response(mechanism)),
        ("S", OFFER),
        ("C", TUNE + opens(1, name)),
        ("S", frame(18, two(1), two(200), b"\0")),
        ("C", channel(1, 2)),
        ("S", channel_reply(1, 2)),
    ]


FAREWELL: Final[list[Line]] = [
    ("C", close(29, 1)),
    ("S", close(29, 1)),
    ("C", close(19)),
    ("S", close(19)),
]
THREE: Final = b"".join(send(1, 0, message(b"%d" % at)) for at in range(3))
C = greeting("plain", "c")
PERL = greeting("plain", "perl")

ROWS: Final[list[tuple[str, tuple[str, ...], list[Line]]]] = [
    (
        "C: what a queue holds, one of it, all of it",
        OLD,
        [
            *C,
            ("C", handle(1, 3, QUEUE, ALL, "q")),
            ("S", reply(1, 3)),
            ("C", THREE + query(1)),
            ("S", index(1, b"0 1 2")),
            ("C", browse(1, 4, 1)),
            ("S", reply(1, 4) + notify(1, 0, 0, "q", message(b"1"))),
            ("C", consume(1, 5)),
            ("S", reply(1, 5)),
            ("S", b"".join(notify(1, at + 1, DELIVERED, "q", message(b"%d" % at)) for at in range(3))),
            ("C", query(1)),
            ("S", index(1, b"")),
            ("C", ack(6, 3)),
            ("S", channel_reply(1, 6)),
            ("C", close(49, 1)),
            ("S", close(49, 1)),
            *FAREWELL,
        ],
    ),
    (
        "C: no bit says that a handle will be browsed, or that it may do anything else",
        OLD,
        [
            *C,
            ("C", handle(1, 3, QUEUE, 1, "q") + handle(2, 4, QUEUE, 0, "q")),
            ("S", reply(1, 3) + reply(2, 4)),
            ("C", send(1, 0, message(b"0")) + query(1) + query(2)),
            ("S", index(1, b"0") + index(2, b"0")),
            ("C", browse(2, 5, 0)),
            ("S", reply(2, 5) + notify(2, 0, 0, "q", message(b"0"))),
            ("C", consume(2, 6)),
            ("S", close(49, 2, 403, "*")),
            ("C", close(49, 2) + handle(3, 7, QUEUE, 2, "q") + consume(3, 8)),
            ("S", reply(3, 7) + reply(3, 8)),
            ("S", notify(3, 1, DELIVERED, "q", message(b"0"))),
            ("C", ack(9, 1)),
            ("S", channel_reply(1, 9)),
            *FAREWELL,
        ],
    ),
    (
        "C: where the text is followed, the bit is needed",
        ("rfc",),
        [
            *C,
            ("C", handle(1, 3, QUEUE, 3, "q")),
            ("S", reply(1, 3)),
            ("C", query(1)),
            ("S", close(49, 1, 403, "*")),
            ("C", close(49, 1)),
            *FAREWELL,
        ],
    ),
    (
        "C: ids count from 0 anew at each QUERY, and what was taken has none",
        OLD,
        [
            *C,
            ("C", handle(1, 0, QUEUE, ALL, "q") + THREE + consume(1, 0, 1)),
            ("S", notify(1, 1, DELIVERED, "q", message(b"0"))),
            ("C", query(1)),
            ("S", index(1, b"0 1")),
            ("C", ack(0, 1) + query(1)),
            ("S", notify(1, 2, DELIVERED, "q", message(b"1")) + index(1, b"0")),
            ("C", ack(7, 2)),
            ("S", channel_reply(1, 7) + notify(1, 3, DELIVERED, "q", message(b"2"))),
            ("C", ack(8, 3)),
            ("S", channel_reply(1, 8)),
            *FAREWELL,
        ],
    ),
    (
        "Java: any mechanism, everything at once with tag 0, CREATED is the first frame",
        MODES,
        [
            ("C", b"\x80\x01"),
            ("S", CHALLENGE),
            ("C", response("none")),
            ("S", OFFER),
            (
                "C",
                tune(32_000, 255, 255) + opens(0, "java") + channel(1) + handle(1, 0, TOPIC, TEMPORARY, ""),
            ),
            ("S", created(1, TMP)),
            ("C", consume(1, 0) + handle(2, 0, TOPIC, ALL, "t") + consume(2, 0) + send(2, 0, message(b"x"))),
            ("S", notify(2, 1, DELIVERED, "t", message(b"x"))),
            ("C", ack(0, 1)),
            *FAREWELL,
        ],
    ),
    (
        "Perl: REPLY before CREATED, and a name with slashes",
        OLD,
        [
            *PERL,
            ("C", handle(1, 3, QUEUE, TEMPORARY, "tmp/000000001")),
            ("S", reply(1, 3) + created(1, text("tmp/000000001"))),
            ("C", send(1, 4, message(b"a"))),
            ("S", reply(1, 4)),
            ("C", consume(1, 5)),
            ("S", reply(1, 5)),
            ("S", notify(1, 1, DELIVERED, "tmp/000000001", message(b"a"))),
            ("C", ack(0, 1)),
            *FAREWELL,
        ],
    ),
    (
        "Perl: browsing what is gone closes the channel; its own CLOSE behind that frees the number",
        OLD,
        [
            *PERL,
            ("C", handle(1, 0, QUEUE, ALL, "q") + browse(1, 3, 9)),
            ("S", close(29, 1, 310, "*")),
            ("C", close(29, 1)),
            ("C", channel(1, 4)),
            ("S", channel_reply(1, 4)),
            ("C", handle(1, 5, QUEUE, ALL, "q")),
            ("S", reply(1, 5)),
            *FAREWELL,
        ],
    ),
    (
        "reading goes on after a PING",
        MODES,
        [
            *C,
            ("C", PING),
            ("S", PONG),
            ("C", PING + handle(1, 3, QUEUE, ALL, "q")),
            ("S", PONG + reply(1, 3)),
            *FAREWELL,
        ],
    ),
    (
        "HANDLE OPEN of an unknown queue with a tag",
        MODES,
        [
            *C,
            ("C", handle(1, 3, QUEUE, ALL, "none")),
            ("S", close(49, 1, 404, "*")),
            ("C", close(49, 1) + handle(1, 4, QUEUE, ALL, "q")),
            ("S", reply(1, 4)),
            *FAREWELL,
        ],
    ),
    (
        "PREPARE before any NOTIFY",
        MODES,
        [
            *C[:-2],
            ("C", channel(1, 2, 2) + handle(1, 3, QUEUE, ALL, "q")),
            ("S", channel_reply(1, 2) + reply(1, 3)),
            ("C", frame(43, two(1), four(len(message(b"ab"))), b"\0") + message(b"ab")),
            ("S", frame(44, two(1), four(2))),
            ("C", send(1, 4, b"", 4)),
            ("S", reply(1, 4)),
            ("C", consume(1, 5)),
            ("S", reply(1, 5)),
            ("S", notify(1, 1, DELIVERED, "q", message(b"ab"))),
            ("C", ack(6, 1)),
            ("S", channel_reply(1, 6)),
            *FAREWELL,
        ],
    ),
    (
        "ACK is answered on its own channel, and takes only what was there when it was read",
        MODES,
        [
            *C,
            ("C", channel(2, 3) + handle(1, 4, QUEUE, ALL, "q", channel=2) + THREE),
            ("S", channel_reply(2, 3) + reply(1, 4)),
            ("C", consume(1, 0, 1)),
            ("S", notify(1, 1, DELIVERED, "q", message(b"0"))),
            ("C", ack(5, 99, channel=2)),
            ("S", channel_reply(2, 5) + notify(1, 2, DELIVERED, "q", message(b"1"))),
            ("C", close(29, 2)),
            ("S", close(29, 2)),
            ("C", handle(1, 6, QUEUE, ALL, "q") + consume(1, 0)),
            ("S", reply(1, 6)),
            ("S", notify(1, 1, DELIVERED | REDELIVERED, "q", message(b"1"))),
            ("S", notify(1, 2, DELIVERED, "q", message(b"2"))),
            ("C", ack(7, 2)),
            ("S", channel_reply(1, 7)),
            *FAREWELL,
        ],
    ),
    (
        "unreliable deliveries need no acknowledgement",
        MODES,
        [
            *C,
            ("C", handle(1, 3, QUEUE, ALL, "q") + THREE + consume(1, 0, 1, 2)),
            ("S", reply(1, 3)),
            ("S", b"".join(notify(1, at + 1, DELIVERED, "q", message(b"%d" % at)) for at in range(3))),
            *FAREWELL,
        ],
    ),
    (
        "what has expired is not delivered, and low priorities come behind high ones",
        MODES,
        [
            *C,
            ("C", handle(1, 3, QUEUE, ALL, "q")),
            ("S", reply(1, 3)),
            ("C", send(1, 0, message(b"low")) + send(1, 0, message(b"old", 5, 1))),
            ("C", send(1, 0, message(b"high", 9)) + consume(1, 4)),
            ("S", reply(1, 4)),
            ("S", notify(1, 1, DELIVERED, "q", message(b"high", 9))),
            ("S", notify(1, 2, DELIVERED, "q", message(b"low"))),
            ("C", ack(5, 2)),
            ("S", channel_reply(1, 5)),
            *FAREWELL,
        ],
    ),
    (
        "a name with slashes is none for a new destination",
        ("rfc",),
        [
            *PERL,
            ("C", handle(1, 3, QUEUE, TEMPORARY, "tmp/000000001")),
            ("S", close(49, 1, 502, "*")),
            ("C", close(49, 1)),
            *FAREWELL,
        ],
    ),
    (
        "the end of a second channel is nothing to the first, and its handles are free",
        MODES,
        [
            *C,
            ("C", channel(2, 3) + handle(1, 4, QUEUE, ALL, "q", channel=2) + consume(1, 0)),
            ("S", channel_reply(2, 3) + reply(1, 4)),
            ("C", close(29, 2)),
            ("S", close(29, 2)),
            ("C", handle(1, 5, QUEUE, ALL, "r") + send(1, 6, message(b"x")) + consume(1, 0)),
            ("S", reply(1, 5) + reply(1, 6)),
            ("S", notify(1, 1, DELIVERED, "r", message(b"x"))),
            ("C", ack(0, 1)),
            *FAREWELL,
        ],
    ),
    (
        "a wrong total costs the handle",
        MODES,
        [
            *C,
            ("C", handle(1, 0, QUEUE, ALL, "q") + send(1, 3, four(9) + HEAD + b"abc")),
            ("S", close(49, 1, 542, "*")),
            ("C", close(49, 1)),
            *FAREWELL,
        ],
    ),
    (
        "a fragment that is too long ends the connection, and is no command",
        MODES,
        [
            *C,
            ("C", handle(1, 3, QUEUE, ALL, "q")),
            ("S", reply(1, 3)),
            ("C", send(1, 4, channel(7) * 3_000)),
            ("S", close(19, None, 501, "*")),
        ],
    ),
    ("channel 0", MODES, [*C, ("C", channel(0, 3)), ("S", close(19, None, 502, "*")), ("C", close(19))]),
    (
        "TUNE beyond what was offered",
        MODES,
        [
            ("C", b"\x80\x01"),
            ("S", CHALLENGE),
            ("C", response("plain")),
            ("S", OFFER),
            ("C", tune(48_001, 255, 255)),
            ("S", close(19, None, 502, "*")),
        ],
    ),
]


def expected(data: bytes) -> re.Pattern[bytes]:
    """What a line of the server has to be: names that it makes, and texts for people (`*`), are free."""
    pattern = re.escape(data).replace(re.escape(TMP), rb"\x14tmp-[0-9a-f]{16}")
    begin, free, end = data.partition(text("*"))
    if free:
        pattern = rb".." + re.escape(begin[2:]) + rb"[^\0].+?" + re.escape(end)
    return re.compile(pattern, re.DOTALL)


def converse(gateway: Running, mode: str, lines: list[Line]) -> None:
    with Raw(gateway.port(mode)) as raw:
        heard = b""
        for at, (who, data) in enumerate(lines):
            if who == "C":
                assert not heard, f"unasked, before line {at}: {heard!r}"
                raw.send(data)
                continue
            pattern = expected(data)
            while not (found := pattern.match(heard)):
                heard += raw.sock.recv(65_536) or pytest.fail(f"line {at}: {data!r}, but {heard!r}")
                assert len(heard) <= len(data) + 1_000, f"line {at}: {data!r}, but {heard!r}"
            heard = heard[found.end() :]
        raw.sock.shutdown(socket.SHUT_WR)
        assert heard + raw.rest() == b""


@pytest.mark.parametrize(
    "mode, lines",
    [pytest.param(mode, lines, id=f"{what}-{mode}") for what, modes, lines in ROWS for mode in modes],
)
def test_a_conversation_goes_as_it_did(both: Running, mode: str, lines: list[Line]) -> None:
    converse(both, mode, lines)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mechanism, code", [("plain", 403), ("none", 403)])
def test_who_names_nobody_is_refused_where_that_is_not_allowed(mode: str, mechanism: str, code: int) -> None:
    with running(settings_of(listeners={mode: listener(mode, "never")})) as gateway:
        lines = [*greeting(mechanism, "c")[:3], ("S", close(19, None, code, "*"))]
        converse(gateway, mode, lines)
