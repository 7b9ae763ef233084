"""Numbers and names of MQTT, each tabulated once.

Clauses are those of the OASIS documents: "5: 2.1.2" is section 2.1.2 of MQTT 5.0, "3: 2.2" is section 2.2 of
MQTT 3.1.1. Packet types, reason codes and properties have the names of MQTT 5. The tables also say which
reason codes and properties each packet may carry. Nothing here parses or writes.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple


class Version(IntEnum):
    """MQTT version, as the protocol level (5: 3.1.2.2; 3: 3.1.2.2)."""

    MQIPDP = 2
    V31 = 3
    V311 = 4
    V5 = 5


VERSIONS: Final = {
    "5.0": Version.V5,
    "3.1.1": Version.V311,
    "3.1": Version.V31,
    "mqipdp": Version.MQIPDP,
}
"""Versions by their names in options."""
PROTOCOLS: Final[dict[tuple[bytes, int], Version]] = {
    (b"MQIpdp", 2): Version.MQIPDP,
    (b"MQIsdp", 3): Version.V31,
    (b"MQTT", 4): Version.V311,
    (b"MQTT", 5): Version.V5,
}
PROTOCOL_NAMES: Final = {version: name for (name, _), version in PROTOCOLS.items()}
BRIDGE: Final = 0x80
"""Level bit with which brokers of the RSMB and Mosquitto family mark a client that is a broker."""

LENGTH_BYTES_MAX: Final = 4  # of a variable length integer (5: 1.5.5)
VARINT_MAX: Final = 268_435_455
STRING_BYTES_MAX: Final = 65_535
CONNECT_BYTES_MAX: Final = 196_608  # the client is not yet authenticated, so it gets little memory
CONTROL_BYTES_MAX: Final = 1_048_576  # all packets but PUBLISH: the longest has a thousand topic filters
PIPELINED_BYTES_MAX: Final = 262_144  # what may wait behind a CONNECT that is still being authenticated
WORD_MAX: Final = 65_535
LONG_MAX: Final = 0xFFFF_FFFF


class PacketType(IntEnum):
    """Control packet types (5: 2.1.2)."""

    CONNECT = 1
    CONNACK = 2
    PUBLISH = 3
    PUBACK = 4
    PUBREC = 5
    PUBREL = 6
    PUBCOMP = 7
    SUBSCRIBE = 8
    SUBACK = 9
    UNSUBSCRIBE = 10
    UNSUBACK = 11
    PINGREQ = 12
    PINGRESP = 13
    DISCONNECT = 14
    AUTH = 15


FLAGS: Final = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
"""Low four bits of the first byte, where they are neither 0 nor the flags of PUBLISH (5: 2.1.3)."""

FIRST_BYTE: Final = {kind: kind << 4 | FLAGS.get(kind, 0) for kind in PacketType}

DUP: Final = 8
QOS: Final = 6
RETAIN: Final = 1


class ReasonCode(IntEnum):
    """Reason codes of MQTT 5 (5: 2.4). 0 is also NORMAL_DISCONNECTION and GRANTED_QOS_0."""

    SUCCESS = 0x00
    GRANTED_QOS_1 = 0x01
    GRANTED_QOS_2 = 0x02
    DISCONNECT_WITH_WILL = 0x04
    NO_MATCHING_SUBSCRIBERS = 0x10
    NO_SUBSCRIPTION_EXISTED = 0x11
    CONTINUE_AUTHENTICATION = 0x18
    REAUTHENTICATE = 0x19
    UNSPECIFIED_ERROR = 0x80
    MALFORMED_PACKET = 0x81
    PROTOCOL_ERROR = 0x82
    IMPLEMENTATION_SPECIFIC_ERROR = 0x83
    UNSUPPORTED_PROTOCOL_VERSION = 0x84
    CLIENT_IDENTIFIER_NOT_VALID = 0x85
    BAD_USER_NAME_OR_PASSWORD = 0x86
    NOT_AUTHORIZED = 0x87
    SERVER_UNAVAILABLE = 0x88
    SERVER_BUSY = 0x89
    BANNED = 0x8A
    SERVER_SHUTTING_DOWN = 0x8B
    BAD_AUTHENTICATION_METHOD = 0x8C
    KEEP_ALIVE_TIMEOUT = 0x8D
    SESSION_TAKEN_OVER = 0x8E
    TOPIC_FILTER_INVALID = 0x8F
    TOPIC_NAME_INVALID = 0x90
    PACKET_IDENTIFIER_IN_USE = 0x91
    PACKET_IDENTIFIER_NOT_FOUND = 0x92
    RECEIVE_MAXIMUM_EXCEEDED = 0x93
    TOPIC_ALIAS_INVALID = 0x94
    PACKET_TOO_LARGE = 0x95
    MESSAGE_RATE_TOO_HIGH = 0x96
    QUOTA_EXCEEDED = 0x97
    ADMINISTRATIVE_ACTION = 0x98
    PAYLOAD_FORMAT_INVALID = 0x99
    RETAIN_NOT_SUPPORTED = 0x9A
    QOS_NOT_SUPPORTED = 0x9B
    USE_ANOTHER_SERVER = 0x9C
    SERVER_MOVED = 0x9D
    SHARED_SUBSCRIPTIONS_NOT_SUPPORTED = 0x9E
    CONNECTION_RATE_EXCEEDED = 0x9F
    MAXIMUM_CONNECT_TIME = 0xA0
    SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED = 0xA1
    WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED = 0xA2


def reason_name(reason: int) -> str:
    """Return the name of a reason code as a label for metrics; "other" for an unknown code."""
    return ReasonCode(reason).name.lower() if reason in ReasonCode.__members__.values() else "other"


FAILURE: Final = 0x80
"""Lowest reason code that means failure (5: 2.4)."""

_PUBLISH_ANSWERS: Final = frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99))
_RELEASE_ANSWERS: Final = frozenset((0x00, 0x92))
REASONS: Final[dict[PacketType, frozenset[int]]] = {
    PacketType.CONNACK: frozenset(
        (0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F)
    ),
    PacketType.PUBACK: _PUBLISH_ANSWERS,
    PacketType.PUBREC: _PUBLISH_ANSWERS,
    PacketType.PUBREL: _RELEASE_ANSWERS,
    PacketType.PUBCOMP: _RELEASE_ANSWERS,
    PacketType.SUBACK: frozenset((0, 1, 2, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2)),
    PacketType.UNSUBACK: frozenset((0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91)),
    PacketType.DISCONNECT: frozenset(
        (0x00, 0x04, *range(0x80, 0x84), 0x87, 0x89, 0x8B, *range(0x8D, 0x91), *range(0x93, 0xA3))
    ),
    PacketType.AUTH: frozenset((0x00, 0x18, 0x19)),
}
"""Reason codes that each packet may carry (5: the tables of 3.2.2.2 to 3.15.2.1)."""

RETURN_CODES: Final[dict[int, ReasonCode]] = {
    0: ReasonCode.SUCCESS,
    1: ReasonCode.UNSUPPORTED_PROTOCOL_VERSION,
    2: ReasonCode.CLIENT_IDENTIFIER_NOT_VALID,
    3: ReasonCode.SERVER_UNAVAILABLE,
    4: ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    5: ReasonCode.NOT_AUTHORIZED,
}
"""Reason code for each CONNACK return code of MQTT 3 (3: 3.2.2.3). Level 2 knows 0 to 3 only."""

SERVER_UNAVAILABLE_CODE: Final = 3


def return_code(reason: int, version: Version) -> int:
    """Return the CONNACK return code that `version`, a version before 5, has for a reason code of MQTT 5.

    Return 3 (server unavailable) if it has none.
    """
    for code, known in RETURN_CODES.items():
        if known == reason and (code <= SERVER_UNAVAILABLE_CODE or version >= Version.V31):
            return code
    if reason in (ReasonCode.BANNED, ReasonCode.BAD_AUTHENTICATION_METHOD) and version >= Version.V31:
        return 5
    return SERVER_UNAVAILABLE_CODE


class Kind(Enum):
    """Data type of a property's value (5: 1.5). BIT is a byte of 0 or 1."""

    BIT = "bit"
    WORD = "word"
    LONG = "long"
    VARINT = "varint"
    TEXT = "text"
    BINARY = "binary"
    PAIR = "pair"


class Property(IntEnum):
    """Property identifiers (5: 2.2.2.2)."""

    PAYLOAD_FORMAT_INDICATOR = 0x01
    MESSAGE_EXPIRY_INTERVAL = 0x02
    CONTENT_TYPE = 0x03
    RESPONSE_TOPIC = 0x08
    CORRELATION_DATA = 0x09
    SUBSCRIPTION_IDENTIFIER = 0x0B
    SESSION_EXPIRY_INTERVAL = 0x11
    ASSIGNED_CLIENT_IDENTIFIER = 0x12
    SERVER_KEEP_ALIVE = 0x13
    AUTHENTICATION_METHOD = 0x15
    AUTHENTICATION_DATA = 0x16
    REQUEST_PROBLEM_INFORMATION = 0x17
    WILL_DELAY_INTERVAL = 0x18
    REQUEST_RESPONSE_INFORMATION = 0x19
    RESPONSE_INFORMATION = 0x1A
    SERVER_REFERENCE = 0x1C
    REASON_STRING = 0x1F
    RECEIVE_MAXIMUM = 0x21
    TOPIC_ALIAS_MAXIMUM = 0x22
    TOPIC_ALIAS = 0x23
    MAXIMUM_QOS = 0x24
    RETAIN_AVAILABLE = 0x25
    USER_PROPERTY = 0x26
    MAXIMUM_PACKET_SIZE = 0x27
    WILDCARD_SUBSCRIPTION_AVAILABLE = 0x28
    SUBSCRIPTION_IDENTIFIER_AVAILABLE = 0x29
    SHARED_SUBSCRIPTION_AVAILABLE = 0x2A


WILL: Final = 0
"""Key of the will's properties among the packet types that may carry properties."""


class PropertyRule(NamedTuple):
    """Rule for one property: its data type, the packets that may carry it (`places`), and its allowed values.

    `low` is the smallest allowed number, and `fault` the reason code for a smaller one. `repeats` are the
    packets in which the property may occur more than once.
    """

    kind: Kind
    places: frozenset[int]
    repeats: frozenset[int] = frozenset()
    low: int = 0
    fault: ReasonCode = ReasonCode.PROTOCOL_ERROR


def _rules() -> dict[Property, PropertyRule]:
    """Return the rule of each property."""
    p, t, k = Property, PacketType, Kind
    message = frozenset((int(t.PUBLISH), WILL))
    publish = frozenset((int(t.PUBLISH),))
    connect = frozenset((int(t.CONNECT),))
    connack = frozenset((int(t.CONNACK),))
    both = connect | connack
    auth = both | {int(t.AUTH)}
    everywhere = frozenset(range(16)) - {int(t.PINGREQ), int(t.PINGRESP)}
    answers = connack | {int(x) for x in (t.PUBACK, t.PUBREC, t.PUBREL, t.PUBCOMP, t.SUBACK, t.UNSUBACK)}
    ends = frozenset((int(t.DISCONNECT),))
    return {
        p.PAYLOAD_FORMAT_INDICATOR: PropertyRule(k.BIT, message),
        p.MESSAGE_EXPIRY_INTERVAL: PropertyRule(k.LONG, message),
        p.CONTENT_TYPE: PropertyRule(k.TEXT, message),
        p.RESPONSE_TOPIC: PropertyRule(k.TEXT, message),
        p.CORRELATION_DATA: PropertyRule(k.BINARY, message),
        p.SUBSCRIPTION_IDENTIFIER: PropertyRule(
            k.VARINT, publish | {int(t.SUBSCRIBE)}, repeats=publish, low=1
        ),
        p.SESSION_EXPIRY_INTERVAL: PropertyRule(k.LONG, both | ends),
        p.ASSIGNED_CLIENT_IDENTIFIER: PropertyRule(k.TEXT, connack),
        p.SERVER_KEEP_ALIVE: PropertyRule(k.WORD, connack),
        p.AUTHENTICATION_METHOD: PropertyRule(k.TEXT, auth),
        p.AUTHENTICATION_DATA: PropertyRule(k.BINARY, auth),
        p.REQUEST_PROBLEM_INFORMATION: PropertyRule(k.BIT, connect),
        p.WILL_DELAY_INTERVAL: PropertyRule(k.LONG, frozenset((WILL,))),
        p.REQUEST_RESPONSE_INFORMATION: PropertyRule(k.BIT, connect),
        p.RESPONSE_INFORMATION: PropertyRule(k.TEXT, connack),
        p.SERVER_REFERENCE: PropertyRule(k.TEXT, connack | ends),
        p.REASON_STRING: PropertyRule(k.TEXT, answers | ends | {int(t.AUTH)}),
        p.RECEIVE_MAXIMUM: PropertyRule(k.WORD, both, low=1),
        p.TOPIC_ALIAS_MAXIMUM: PropertyRule(k.WORD, both),
        p.TOPIC_ALIAS: PropertyRule(k.WORD, publish, low=1, fault=ReasonCode.TOPIC_ALIAS_INVALID),
        p.MAXIMUM_QOS: PropertyRule(k.BIT, connack),
        p.RETAIN_AVAILABLE: PropertyRule(k.BIT, connack),
        p.USER_PROPERTY: PropertyRule(k.PAIR, everywhere, repeats=everywhere),
        p.MAXIMUM_PACKET_SIZE: PropertyRule(k.LONG, both, low=1),
        p.WILDCARD_SUBSCRIPTION_AVAILABLE: PropertyRule(k.BIT, connack),
        p.SUBSCRIPTION_IDENTIFIER_AVAILABLE: PropertyRule(k.BIT, connack),
        p.SHARED_SUBSCRIPTION_AVAILABLE: PropertyRule(k.BIT, connack),
    }


PROPERTIES: Final = _rules()
"""Rule of each property, from table 2-4 (5: 2.2.2.2)."""
