"""What a client of level 3 shows of its byte order, and what follows from that."""

from __future__ import annotations

from typing import Final

import pytest

from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.data_types import ByteOrder
from gateway.protocols.mqtt.server import ServerConnection

# The keep-alive's bytes are 3c 00: 60 s of a little-endian client, 15 360 of a big-endian one.
LITTLE, BIG = 60, 15_360


def subscribe(packet_id: str) -> str:
    return f"82 06 {packet_id} 0001 61 00"


def unsubscribe(packet_id: str) -> str:
    return f"a2 05 {packet_id} 0001 61"


def publish(packet_id: str) -> str:
    return f"32 06 0001 61 {packet_id} 78"


QOS_0: Final = "30 04 0001 61 78"
ROWS: Final = {
    "nothing": ([], True, BIG),
    "nothing with an identifier": ([QOS_0, "c0 00", QOS_0], True, BIG),
    "the first of a clean session": ([subscribe("0100")], True, LITTLE),
    "of one that goes on, that is no proof": ([subscribe("0100")], False, BIG),
    "two in a row": ([subscribe("0700"), publish("0800")], False, LITTLE),
    "two with others in between": ([publish("0700"), QOS_0, unsubscribe("0800")], False, LITTLE),
    "in one run": ([publish("0700") + publish("0800")], False, LITTLE),
    "the same again is no proof": ([publish("0700"), publish("0700")], False, BIG),
    "three, of which two are in a row": ([publish("0700"), publish("0300"), publish("0400")], False, LITTLE),
    "a big-endian client": ([subscribe("0001"), publish("0002")], True, BIG),
    "one that comes to 256 later": ([subscribe("00ff"), publish("0100"), publish("0200")], True, BIG),
    "one that comes to multiples of it first": (
        [publish("0300"), publish("0301"), publish("0400")],
        False,
        BIG,
    ),
}


def told(version: int, order: ByteOrder, said: list[str], clean: bool, name: bytes = b"MQIsdp") -> int:
    """The keep-alive in the end."""
    machine = ServerConnection(packet_bytes_max=1_000, byte_order=order)
    body = len(name).to_bytes(2, "big") + name + bytes([version, clean << 1, 0x3C, 0, 0, 1]) + b"c"
    machine.receive_data(bytes([0x10, len(body)]) + body, 0.0)
    machine.send_connack()
    for packet in said:
        machine.receive_data(bytes.fromhex(packet), 0.0)
    return machine.keep_alive


@pytest.mark.parametrize("name", ROWS)
def test_packet_identifiers_show_it(name: str) -> None:
    said, clean, keep_alive = ROWS[name]
    assert told(3, "auto", said, clean) == keep_alive


@pytest.mark.parametrize("name", ROWS)
def test_byte_by_byte(name: str) -> None:
    said, clean, keep_alive = ROWS[name]
    pieces = [f"{byte:02x}" for packet in said for byte in bytes.fromhex(packet)]
    assert told(3, "auto", pieces, clean) == keep_alive


@pytest.mark.parametrize("name", ROWS)
def test_who_says_which_it_is_is_believed(name: str) -> None:
    said, clean, _ = ROWS[name]
    assert told(3, "big", said, clean) == BIG
    assert told(3, "little", said, clean) == LITTLE
    assert told(4, "auto", said, clean, b"MQTT") == BIG
    assert told(2, "auto", said, clean, b"MQIpdp") == LITTLE


def test_a_bridge_of_level_3_is_watched_as_well() -> None:
    assert told(0x83, "auto", [subscribe("0100")], True) == LITTLE


def test_its_identifiers_are_repeated_as_they_came() -> None:
    machine = ServerConnection(packet_bytes_max=1_000)
    machine.receive_data(bytes.fromhex("10 0f 0006 4d5149736470 03 02 0001 0001 63"), 0.0)
    machine.send_connack()
    machine.data_to_send()
    assert machine.keep_alive == 1
    machine.receive_data(bytes.fromhex(subscribe("0100")), 0.0)
    machine.send_suback(0x0100, [0])
    assert machine.keep_alive == 256
    assert machine.data_to_send() == bytes.fromhex("90 03 0100 00")


def test_lengths_are_big_endian_in_all_of_them() -> None:
    machine = ServerConnection(packet_bytes_max=1_000)
    with pytest.raises(RemoteProtocolError, match="ends inside a field"):
        machine.receive_data(bytes.fromhex("10 0f 0600 4d5149736470 03 02 0001 0100 63"), 0.0)
