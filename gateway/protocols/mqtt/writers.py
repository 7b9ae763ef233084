"""Encoder of MQTT control packets of every version: the other half of codec.py.

`encode` is the entry point; a table maps each packet class to its writer. The encoders raise
LocalProtocolError for what the version or the specification forbids: the caller's mistake, never the peer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from gateway.errors import LocalProtocolError
from gateway.protocols.mqtt.data_types import (
    ByteOrder,
    encode_binary,
    encode_text,
    encode_varint,
    is_little,
)
from gateway.protocols.mqtt.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from gateway.protocols.mqtt.properties import PropertyMap, write_list
from gateway.protocols.mqtt.spec import (
    BRIDGE,
    DUP,
    FAILURE,
    FIRST_BYTE,
    PROTOCOL_NAMES,
    REASONS,
    RETAIN,
    WILL,
    PacketType,
    Version,
    return_code,
)


def frame(first: int, body: bytes) -> bytes:
    """Return a packet: its first byte, the remaining length, and its body."""
    return bytes((first,)) + encode_varint(len(body)) + body


def encode_connect(packet: Connect, byte_order: ByteOrder = "auto") -> bytes:
    """Encode a CONNECT in its own version (5: 3.1).

    Raises LocalProtocolError for credentials that the version cannot carry.
    """
    version, will = packet.version, packet.will
    flags = packet.clean_start << 1
    if will is not None:
        flags |= 0x04 | will.qos << 3 | will.retain << 5
    if version is Version.MQIPDP:
        if packet.user_name is not None or packet.password is not None:
            raise LocalProtocolError("level 2 has no user name and no password")
        flags |= packet.tncomp
    elif packet.password is not None and packet.user_name is None and version < Version.V5:
        raise LocalProtocolError("a password needs a user name before MQTT 5")
    flags |= (packet.user_name is not None) << 7 | (packet.password is not None) << 6
    order: Literal["little", "big"] = "little" if is_little(version, byte_order) else "big"
    level = version | BRIDGE if packet.bridge else int(version)
    pieces = [
        encode_binary(PROTOCOL_NAMES[version]),
        bytes((level, flags)),
        packet.keep_alive.to_bytes(2, order),
    ]
    if version is Version.V5:
        pieces.append(write_list(packet.properties, PacketType.CONNECT))
    pieces.append(encode_text(packet.client_id))
    if will is not None:
        if version is Version.V5:
            pieces.append(write_list(will.properties, WILL))
        pieces += (encode_text(will.topic), encode_binary(will.body))
    if packet.user_name is not None:
        pieces.append(encode_text(packet.user_name))
    if packet.password is not None:
        pieces.append(encode_binary(packet.password))
    return frame(FIRST_BYTE[PacketType.CONNECT], b"".join(pieces))


class _Writer:
    """Encoder for the fields of packets of one protocol version, in one byte order."""

    __slots__ = ("_order", "v5", "version")

    def __init__(self, version: Version, byte_order: ByteOrder) -> None:
        self.version = version
        self.v5 = version is Version.V5
        self._order: Literal["little", "big"] = "little" if is_little(version, byte_order) else "big"

    def packet_id(self, value: int) -> bytes:
        if not 0 < value <= 0xFFFF:
            raise LocalProtocolError(f"packet identifier {value}")
        return value.to_bytes(2, self._order)

    def properties(self, properties: PropertyMap, place: int) -> bytes:
        return write_list(properties, place) if self.v5 else b""

    def reason(self, reason: int, properties: PropertyMap, kind: PacketType) -> bytes:
        """Encode the reason code and properties of a packet in their shortest form (5: 3.4.2.1, 3.14.2.1)."""
        if not self.v5 or (not reason and not properties):
            return b""
        data = self.checked(reason, kind)
        return data + write_list(properties, kind) if properties else data

    def checked(self, reason: int, kind: PacketType) -> bytes:
        """Return the reason code as one byte.

        Raises LocalProtocolError if a packet of the type `kind` must not carry it.
        """
        if reason not in REASONS[kind]:
            raise LocalProtocolError(f"{kind.name} must not carry reason {reason:#04x}")
        return bytes((reason,))


def _connack(packet: Connack, w: _Writer) -> bytes:
    present = bytes((packet.session_present and w.version >= Version.V311,))
    if not w.v5:
        return present + bytes((return_code(packet.reason, w.version),))
    return present + w.checked(packet.reason, packet.kind) + w.properties(packet.properties, packet.kind)


def _publish(packet: Publish, w: _Writer) -> bytes:
    identifier = w.packet_id(packet.packet_id) if packet.qos else b""
    properties = w.properties(packet.properties, packet.kind)
    return encode_text(packet.topic) + identifier + properties + packet.body


def _ack(packet: Ack, w: _Writer) -> bytes:
    return w.packet_id(packet.packet_id) + w.reason(packet.reason, packet.properties, packet.kind)


def _subscribe(packet: Subscribe, w: _Writer) -> bytes:
    pieces = [w.packet_id(packet.packet_id), w.properties(packet.properties, packet.kind)]
    for one in packet.subscriptions:
        options = one.qos
        if w.v5:
            options |= one.no_local << 2 | one.retain_as_published << 3 | one.retain_handling << 4
        pieces += (encode_text(one.filter), bytes((options,)))
    return b"".join(pieces)


def _suback(packet: Suback, w: _Writer) -> bytes:
    head = w.packet_id(packet.packet_id) + w.properties(packet.properties, packet.kind)
    if w.v5:
        return head + b"".join(w.checked(reason, packet.kind) for reason in packet.reasons)
    # Before 3.1.1 SUBACK had no failure code. Those clients read the low bits of the byte, which mean QoS 0.
    return head + bytes(min(reason, FAILURE) for reason in packet.reasons)


def _unsubscribe(packet: Unsubscribe, w: _Writer) -> bytes:
    head = w.packet_id(packet.packet_id) + w.properties(packet.properties, packet.kind)
    return head + b"".join(encode_text(one) for one in packet.filters)


def _unsuback(packet: Unsuback, w: _Writer) -> bytes:
    head = w.packet_id(packet.packet_id) + w.properties(packet.properties, packet.kind)
    return head + b"".join(w.checked(reason, packet.kind) for reason in packet.reasons) if w.v5 else head


def _ending(packet: Disconnect | Auth, w: _Writer) -> bytes:
    if packet.kind is PacketType.AUTH and not w.v5:
        raise LocalProtocolError("AUTH before MQTT 5")
    return w.reason(packet.reason, packet.properties, packet.kind)


_WRITERS: Final[dict[type[Any], Callable[[Any, _Writer], bytes]]] = {
    Connack: _connack,
    Publish: _publish,
    Ack: _ack,
    Subscribe: _subscribe,
    Suback: _suback,
    Unsubscribe: _unsubscribe,
    Unsuback: _unsuback,
    Pingreq: lambda packet, w: b"",
    Pingresp: lambda packet, w: b"",
    Disconnect: _ending,
    Auth: _ending,
}


def encode(packet: Packet, version: Version, byte_order: ByteOrder = "auto") -> bytes:
    """Encode `packet` in `version`; a CONNECT is encoded in its own version.

    Raises LocalProtocolError if the version does not have the packet, or cannot express a part of it that
    must not be omitted.
    """
    if isinstance(packet, Connect):
        return encode_connect(packet, byte_order)
    body = _WRITERS[type(packet)](packet, _Writer(version, byte_order))
    first = FIRST_BYTE[packet.kind]
    if isinstance(packet, Publish):
        first |= packet.dup * DUP | packet.qos << 1 | packet.retain * RETAIN
    return frame(first, body)
