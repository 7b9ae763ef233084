"""The little-endian dialect over a socket: no client of it survives, so its bytes are written out here.

16-bit words (keep-alive, packet identifiers) have their low byte first, string lengths do not.
"""

from __future__ import annotations

import socket

import pytest

from gateway.protocols.mqtt.spec import Version
from tests.configured import make_listener
from tests.ingress.clients import Raw, connect, eventually, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

CONNECT = bytes.fromhex("10 11 0006 4d51 4970 6470 02 02 3c00 0003 6f6c64".replace(" ", ""))
SUBSCRIBE = bytes.fromhex("82 08 0100 0003 612f62 01".replace(" ", ""))
PUBLISH = bytes.fromhex("32 0c 0003 612f62 0200 68656c6c6f".replace(" ", ""))


def converse(byte_order: str) -> bytes:
    """Everything that the listener answers to CONNECT, SUBSCRIBE to a/b and PUBLISH of hello, QoS 1."""
    listener = make_listener(protocol="mqtt", host=LOOPBACK, port=0, byte_order=byte_order)
    with (
        running(settings_of(listeners={"mqtt": listener})) as gateway,
        socket.create_connection((LOOPBACK, gateway.mqtt), 5) as sock,
    ):
        sock.settimeout(5)
        sock.sendall(CONNECT + SUBSCRIBE + PUBLISH)
        answer = b""
        while len(answer) < 4 + 5 + 4 + 14:
            answer += sock.recv(1024)
        return answer


@pytest.mark.parametrize("byte_order", ["auto", "little"])
def test_words_are_little_endian(byte_order: str) -> None:
    answer = converse(byte_order)
    assert answer[:9] == bytes.fromhex("20020000 9003 0100 01".replace(" ", ""))
    assert bytes.fromhex("4002 0200".replace(" ", "")) in answer  # PUBACK 2
    assert (
        bytes.fromhex("320c 0003 612f62 0100 68656c6c6f".replace(" ", "")) in answer
    )  # our own identifier 1


def test_big_is_obeyed() -> None:
    answer = converse("big")
    assert bytes.fromhex("320c 0003 612f62 0001 68656c6c6f".replace(" ", "")) in answer


# Each line: what the client says, and what it must hear before it goes on.
SCRIPTS = {
    "a ping": [("c000", "d000")],
    "several filters": [("82 0c 0500 0003 612f62 00 0001 23 02", "90 04 0500 00 02")],
    "unsubscribing": [
        ("82 08 0100 0003 612f62 01", "90 03 0100 01"),
        ("a2 07 0300 0003 612f62", "b0 02 0300"),
        ("30 06 0003 612f62 78 c000", "d000"),
    ],
    "QoS 2, sent twice and taken once": [
        ("82 08 0100 0003 612f62 00", "90 03 0100 00"),
        ("34 08 0003 612f62 0700 78", "30 06 0003 612f62 78 50 02 0700"),
        ("3c 08 0003 612f62 0700 78", "50 02 0700"),
        ("62 02 0700", "70 02 0700"),
    ],
    "QoS 2 towards the client": [
        ("82 08 0100 0003 612f62 02", "90 03 0100 02"),
        ("34 08 0003 612f62 0200 78", "34 08 0003 612f62 0100 78 50 02 0200"),
        ("50 02 0100", "62 02 0100"),
        ("70 02 0100 c000", "d000"),
    ],
    "identifiers above 255": [("32 08 0003 612f62 0102 78", "40 02 0102")],
    "a retained message, cleared by an empty one": [
        ("33 08 0003 612f62 0200 78", "40 02 0200"),
        ("82 08 0100 0003 612f62 00", "90 03 0100 00 31 06 0003 612f62 78"),
        ("33 07 0003 612f62 0300", "30 05 0003 612f62 40 02 0300"),
    ],
    "a message identifier of 0": [("32 08 0003 612f62 0000 78", None)],
    "a second CONNECT": [(CONNECT.hex(), None)],
    "goodbye": [("e000", None)],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(gateway: Running, name: str) -> None:
    with Raw(gateway.mqtt) as client:
        assert client.send(CONNECT).sock.recv(4) == b"\x20\x02\0\0"
        for said, heard in SCRIPTS[name]:
            client.send(bytes.fromhex(said))
            if heard is None:
                assert client.rest() == b""
            else:
                wanted = bytes.fromhex(heard)
                assert packets(exactly(client, len(wanted))) == packets(wanted)


def packets(data: bytes) -> list[bytes]:
    """Sorted: what is delivered and what is acknowledged may come in either order."""
    found = []
    while data:
        size = 2 + data[1]
        found.append(data[:size])
        data = data[size:]
    return sorted(found)


def exactly(client: Raw, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = client.sock.recv(count - len(found))
        assert data, f"closed after {found.hex(' ')}"
        found += data
    return found


HELLOS = {
    "compression is asked for and not granted": (
        "10 11 0006 4d5149706470 02 03 3c00 0003 6f6c64",
        "20 02 00 00",
        False,
    ),
    "a will": ("10 18 0006 4d5149706470 02 06 3c00 0003 6f6c64 0002 772f 0001 78", "20 02 00 00", False),
    "level 1": ("10 13 0008 4172676f4f545750 01 02 3c00 0003 6f6c64", "20 02 00 01", True),
    "level 3 with its name": ("10 11 0006 4d5149706470 03 02 3c00 0003 6f6c64", "20 02 00 01", True),
    "level 2 with the next one's": ("10 11 0006 4d5149736470 02 02 3c00 0003 6f6c64", "20 02 00 01", True),
    "no identifier": ("10 0e 0006 4d5149706470 02 02 3c00 0000", "20 02 00 02", True),
}


@pytest.mark.parametrize("name", HELLOS)
def test_a_connect(gateway: Running, name: str) -> None:
    said, heard, closed = HELLOS[name]
    with Raw(gateway.mqtt) as client:
        client.send(bytes.fromhex(said))
        assert exactly(client, 4) == bytes.fromhex(heard)
        if closed:
            assert client.rest() == b""


def test_a_will_is_published_and_an_interval_is_read_in_its_order() -> None:
    """3c00 is 60 s and would be over 15 000 in the other order; 0100 is one second."""
    silent = bytes.fromhex("10 18 0006 4d5149706470 02 06 0100 0003 6f6c64 0002 7769 0001 78")
    with running() as gateway, connect(gateway, "reader")[0] as reader:
        reader.subscribe("wi")
        with Raw(gateway.mqtt) as client:
            client.send(silent).rest()
        assert reader.body() == b"x"
        eventually(lambda: stats(gateway).protocol_errors.counts == {"keep_alive_timeout": 1})


@pytest.mark.parametrize("hello", ["0006 4d5149736470 83", "0004 4d515454 84"])
def test_a_bridge_of_an_older_version_hears_nothing_of_its_own_and_all_of_retain(
    gateway: Running, hello: str
) -> None:
    body = bytes.fromhex(f"{hello} 02 003c 0003 6f6c64")
    with Raw(gateway.mqtt) as bridge, connect(gateway, "w", version=Version.V311)[0] as writer:
        bridge.send(bytes([0x10, len(body)]) + body)
        assert exactly(bridge, 4) == b"\x20\x02\0\0"
        bridge.send(bytes.fromhex("82 06 0001 0001 61 00"))
        assert exactly(bridge, 5) == bytes.fromhex("90 03 0001 00")
        bridge.send(bytes.fromhex("30 04 0001 61 78"))  # its own
        writer.publish("a", b"y", retain=True)
        assert exactly(bridge, 6) == bytes.fromhex("31 04 0001 61 79")
