"""Decoder of MQTT control packets of every version.

`decode` has three results: a packet with the position behind it; None if more bytes are needed; or a
RemoteProtocolError for a corrupt packet, whose `reason` is the MQTT 5 reason code to respond with. The
connections of this package call `decode_packet` for every packet that their fast path leaves. The encoders
are in writers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.errors import RemoteProtocolError
from gateway.model.spooled_bodies import Body
from gateway.protocols.mqtt.data_types import (
    UNBOUNDED,
    Bounds,
    ByteOrder,
    Reader,
    decode_length,
    decode_topic,
    is_little,
    malformed,
    quota_exceeded,
    violation,
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
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from gateway.protocols.mqtt.properties import NO_PROPERTIES, PropertyMap, read_list
from gateway.protocols.mqtt.spec import (
    BRIDGE,
    DUP,
    FAILURE,
    FLAGS,
    PROTOCOLS,
    REASONS,
    RETAIN,
    RETURN_CODES,
    VARINT_MAX,
    WILL,
    PacketType,
    Property,
    ReasonCode,
    Version,
)


def read_version(reader: Reader) -> tuple[Version, bool]:
    """Read the protocol name and level of a CONNECT.

    Return the version, and True if the bridge bit (0x80) of the level is set. Raises RemoteProtocolError
    (0x84) if no version has this name and level.
    """
    name = reader.binary()
    level = reader.byte()
    version = PROTOCOLS.get((name, level & ~BRIDGE))
    if version is None or (level & BRIDGE and version not in (Version.V31, Version.V311)):
        raise RemoteProtocolError(
            f"protocol {name[:16]!r} level {level} is not supported",
            reason=ReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
        )
    return version, bool(level & BRIDGE)


def _connect_flags(flags: int, version: Version) -> int:
    """Return the connect flags `flags`, with those bits cleared that the version ignores (5: 3.1.2.3).

    Raises RemoteProtocolError (0x81) for flags that the version forbids.
    """
    if version is Version.MQIPDP:
        flags &= 0x3F
    elif version is Version.V31:
        flags &= 0xFE
    elif flags & 1:
        raise malformed("the reserved connect flag is set")
    if flags & 0x18 == 0x18:
        raise malformed("a will has QoS 3")
    if not flags & 0x04 and flags & 0x38:
        if version >= Version.V311:
            raise malformed("will flags without a will")
        flags &= ~0x38
    if flags & 0xC0 == 0x40 and version < Version.V5:
        raise malformed("a password without a user name")
    return flags


def decode_connect(reader: Reader, byte_order: ByteOrder) -> Connect:
    """Decode the body of a CONNECT packet of any protocol level, from 2 (MQIpdp) to 5 (MQTT 5).

    `byte_order` applies only to clients of levels 2 and 3, some of which send little-endian integers.
    Raises RemoteProtocolError, whose `reason` is the reason code for the CONNACK.
    """
    version, bridge = read_version(reader)
    flags = _connect_flags(reader.byte(), version)
    reader.little = is_little(version, byte_order)
    keep_alive = reader.dialect_word()
    properties = read_list(reader, PacketType.CONNECT) if version is Version.V5 else NO_PROPERTIES
    client_id = reader.text()
    clean_start = bool(flags & 0x02)
    if not client_id and (version < Version.V311 or (version is Version.V311 and not clean_start)):
        raise RemoteProtocolError("an empty client identifier", reason=ReasonCode.CLIENT_IDENTIFIER_NOT_VALID)
    will = _read_will(reader, flags, version) if flags & 0x04 else None
    user_name = password = None
    if version is Version.V31 and reader.at == reader.end:
        flags &= 0x3F  # in 3.1 the remaining length overrides these flags
    if flags & 0x80:
        user_name = reader.text()
        if version is Version.V31 and reader.at == reader.end:
            flags &= 0x3F
    if flags & 0x40:
        password = reader.binary()
    reader.finish()
    tncomp = version is Version.MQIPDP and bool(flags & 1)
    return Connect(
        client_id, version, clean_start, keep_alive, will, user_name, password, properties, bridge, tncomp
    )


def _read_will(reader: Reader, flags: int, version: Version) -> Will:
    properties = read_list(reader, WILL) if version is Version.V5 else NO_PROPERTIES
    topic = decode_topic(reader.binary())
    return Will(topic, reader.binary(), flags >> 3 & 3, bool(flags & 0x20), properties)


def _checked(reason: int, kind: PacketType) -> int:
    """Return the reason code `reason` unchanged.

    Raises RemoteProtocolError if a packet of the type `kind` must not carry it.
    """
    # Mosquitto refuses a PUBLISH that is too large with PUBACK 0x95, which the table does not allow. Any
    # failure code of PUBACK and PUBREC is accepted: closing the connection would cost more than one refused
    # message. So is any of DISCONNECT: a broker that is unavailable (0x88) does not blame a message.
    # The server refuses them (`REASONS`).
    refusal = reason >= FAILURE and kind in (PacketType.PUBACK, PacketType.PUBREC, PacketType.DISCONNECT)
    if reason not in REASONS[kind] and not refusal:
        raise violation(f"{kind.name} must not carry reason {reason:#04x}")
    return reason


def _read_connack(reader: Reader, version: Version) -> Connack:
    """Decode the body of a CONNACK; a return code of MQTT 3.x becomes a reason code."""
    flags, code = reader.byte(), reader.byte()
    if version < Version.V311:
        flags = 0  # reserved, or the response to a compression that was not requested
    elif flags > 1:
        raise malformed("reserved flags in CONNACK")
    if version is Version.V5:
        reason = _checked(code, PacketType.CONNACK)
        properties = read_list(reader, PacketType.CONNACK)
    else:
        reason_code = RETURN_CODES.get(code)
        if reason_code is None:
            raise malformed(f"CONNACK return code {code}")
        reason, properties = int(reason_code), NO_PROPERTIES
    if flags and reason:
        raise violation("a refused connection has no session")
    return Connack(bool(flags), reason, properties)


def _read_publish(reader: Reader, version: Version, flags: int) -> Publish:
    """Decode the body of a PUBLISH; `flags` are the low four bits of its first byte."""
    qos = flags >> 1 & 3
    if qos == 3:
        raise malformed("QoS 3")
    if flags & DUP and not qos and version >= Version.V311:
        raise malformed("DUP at QoS 0")
    wire = reader.binary()
    packet_id = reader.packet_id() if qos else 0
    properties = read_list(reader, PacketType.PUBLISH) if version is Version.V5 else NO_PROPERTIES
    aliased = not wire and Property.TOPIC_ALIAS in properties
    if not wire and not aliased and version is Version.V5:
        raise violation("neither a topic nor a topic alias")
    topic = "" if aliased else decode_topic(wire)
    return Publish(topic, reader.rest(), qos, bool(flags & RETAIN), bool(flags & DUP), packet_id, properties)


def _read_ack(reader: Reader, version: Version, kind: PacketType) -> Ack:
    packet_id = reader.packet_id()
    if reader.at == reader.end or version < Version.V5:
        return Ack(kind, packet_id)
    reason = _checked(reader.byte(), kind)
    properties = read_list(reader, kind) if reader.at < reader.end else NO_PROPERTIES
    return Ack(kind, packet_id, reason, properties)


def _read_options(options: int, filter: str, version: Version) -> Subscription:
    """Return the subscription for a topic filter and its options byte in a SUBSCRIBE (5: 3.8.3.1).

    Raises RemoteProtocolError if the options are invalid.
    """
    qos = options & 3
    if qos == 3:
        raise malformed("a subscription asks for QoS 3")
    if version < Version.V5:
        if options > 3 and version is Version.V311:
            raise malformed("reserved subscription options")
        return Subscription(filter, qos)
    if options & 0xC0:
        raise malformed("reserved subscription options")
    if options >> 4 == 3:
        raise violation("retain handling 3")
    no_local = bool(options & 4)
    if no_local and filter.startswith("$share/"):
        raise violation("no-local on a shared subscription")
    return Subscription(filter, qos, no_local, bool(options & 8), options >> 4)


def _read_filter(reader: Reader, before: int) -> str:
    """Read one topic filter; `before` is the number of filters before it in the packet.

    Raises RemoteProtocolError if the packet has too many filters (0x97) or the filter is empty (0x81).
    """
    if before == reader.bounds.filters_max:
        raise quota_exceeded(f"more than {before} topic filters in one packet")
    text = reader.text()
    if not text:
        raise malformed("an empty topic filter")
    return text


def _read_subscribe(reader: Reader, version: Version) -> Subscribe:
    packet_id = reader.packet_id()
    properties = read_list(reader, PacketType.SUBSCRIBE) if version is Version.V5 else NO_PROPERTIES
    found: list[Subscription] = []
    while reader.at < reader.end:
        filter = _read_filter(reader, len(found))
        found.append(_read_options(reader.byte(), filter, version))
    if not found:
        raise violation("SUBSCRIBE without a topic filter")
    return Subscribe(packet_id, tuple(found), properties)


def _read_unsubscribe(reader: Reader, version: Version) -> Unsubscribe:
    packet_id = reader.packet_id()
    properties = read_list(reader, PacketType.UNSUBSCRIBE) if version is Version.V5 else NO_PROPERTIES
    found: list[str] = []
    while reader.at < reader.end:
        found.append(_read_filter(reader, len(found)))
    if not found:
        raise violation("UNSUBSCRIBE without a topic filter")
    return Unsubscribe(packet_id, tuple(found), properties)


def _read_suback(reader: Reader, version: Version) -> Suback:
    packet_id = reader.packet_id()
    properties = read_list(reader, PacketType.SUBACK) if version is Version.V5 else NO_PROPERTIES
    reasons = tuple(reader.rest())
    if not reasons:
        raise violation("SUBACK without a reason")
    for reason in reasons:
        if version is Version.V5:
            _checked(reason, PacketType.SUBACK)
        elif reason > 2 and reason != FAILURE:
            raise malformed(f"SUBACK return code {reason:#04x}")
    return Suback(packet_id, reasons, properties)


def _read_unsuback(reader: Reader, version: Version) -> Unsuback:
    packet_id = reader.packet_id()
    if version < Version.V5:
        return Unsuback(packet_id)
    properties = read_list(reader, PacketType.UNSUBACK)
    reasons = tuple(_checked(reason, PacketType.UNSUBACK) for reason in reader.rest())
    if not reasons:
        raise violation("UNSUBACK without a reason")
    return Unsuback(packet_id, reasons, properties)


def _read_disconnect(reader: Reader, version: Version) -> Disconnect:
    return Disconnect(*_read_ending(reader, version, PacketType.DISCONNECT))


def _read_auth(reader: Reader, version: Version) -> Auth:
    if version < Version.V5:
        raise malformed("AUTH before MQTT 5")
    return Auth(*_read_ending(reader, version, PacketType.AUTH))


def _read_ending(reader: Reader, version: Version, kind: PacketType) -> tuple[int, PropertyMap]:
    """Read the reason code and properties of a DISCONNECT or AUTH; both may be omitted."""
    if reader.at == reader.end or version < Version.V5:
        return 0, NO_PROPERTIES
    reason = _checked(reader.byte(), kind)
    return reason, read_list(reader, kind) if reader.at < reader.end else NO_PROPERTIES


_READERS: Final[dict[PacketType, Callable[[Reader, Version], Packet]]] = {
    PacketType.CONNACK: _read_connack,
    PacketType.SUBSCRIBE: _read_subscribe,
    PacketType.SUBACK: _read_suback,
    PacketType.UNSUBSCRIBE: _read_unsubscribe,
    PacketType.UNSUBACK: _read_unsuback,
    PacketType.PINGREQ: lambda reader, version: Pingreq(),
    PacketType.PINGRESP: lambda reader, version: Pingresp(),
    PacketType.DISCONNECT: _read_disconnect,
    PacketType.AUTH: _read_auth,
}
_TYPES: Final = {int(kind): kind for kind in PacketType}


def decode_packet(
    first: int,
    body: Body,
    version: Version,
    byte_order: ByteOrder = "auto",
    bounds: Bounds = UNBOUNDED,
) -> Packet:
    """Decode a packet from its first byte and its body, the bytes behind the remaining length.

    `version` is the version of the connection; a CONNECT has its own version instead. Raises
    RemoteProtocolError if the packet is invalid.
    """
    kind = _TYPES.get(first >> 4)
    if kind is None:
        raise malformed("packet type 0")
    flags = first & 0x0F
    if kind is PacketType.CONNECT:
        packet = decode_connect(Reader(body, bounds=bounds), byte_order)
        if flags and packet.version >= Version.V311:
            raise malformed("reserved flags in CONNECT")
        return packet
    reader = Reader(body, little=is_little(version, byte_order), bounds=bounds)
    if kind is PacketType.PUBLISH:
        return _read_publish(reader, version, flags)
    if flags != FLAGS.get(kind, 0) and version >= Version.V311:
        raise malformed(f"reserved flags in {kind.name}")
    read = _READERS.get(kind)
    found = _read_ack(reader, version, kind) if read is None else read(reader, version)
    reader.finish()
    return found


def decode(
    data: bytes,
    at: int = 0,
    *,
    version: Version = Version.V5,
    byte_order: ByteOrder = "auto",
    packet_bytes_max: int = VARINT_MAX,
) -> tuple[Packet, int] | None:
    """Decode the packet at `at`. Return the packet and the position behind it, or None if it is incomplete.

    `packet_bytes_max` is the maximum size of the whole packet in bytes; a larger packet is refused as soon as
    its length field has arrived. Raises RemoteProtocolError if the packet is too large or invalid.
    """
    if at >= len(data):
        return None
    found = decode_length(data, at + 1)
    if found is None:
        return None
    size, start = found
    stop = start + size
    if stop - at > packet_bytes_max:
        raise RemoteProtocolError(
            f"a packet of {stop - at} bytes, over {packet_bytes_max}", reason=ReasonCode.PACKET_TOO_LARGE
        )
    if stop > len(data):
        return None
    return decode_packet(data[at], data[start:stop], version, byte_order), stop
