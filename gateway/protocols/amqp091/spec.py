"""Numbers and names of AMQP 0-9-1, each tabulated once; the methods have their own table in `methods.py`.

Where the specification and RabbitMQ differ (field types, extensions), the tables follow RabbitMQ, because
every client in use was tested against it. Clause numbers are those of the 0-9-1 specification.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from gateway.model.properties import ValueType

PROTOCOL_HEADER: Final = b"AMQP\x00\x00\x09\x01"  # 4.2.2
OLD_HEADERS: Final = (
    b"AMQP\x01\x01\x09\x01",
    b"AMQP\x01\x01\x00\x09",
)  # of clients that mean 0-9-1 all the same

# Frames, 4.2.3: type u8, channel u16, size u32, payload, end byte.
FRAME_METHOD: Final = 1
FRAME_HEADER: Final = 2
FRAME_BODY: Final = 3
FRAME_HEARTBEAT: Final = 8
FRAME_END: Final = 0xCE
FRAME_KINDS: Final = frozenset((FRAME_METHOD, FRAME_HEADER, FRAME_BODY, FRAME_HEARTBEAT))
FRAME_PREFIX: Final = 7
FRAME_OVERHEAD: Final = 8  # bytes before the payload
HEARTBEAT_FRAME: Final = b"\x08\x00\x00\x00\x00\x00\x00\xce"

# Limits.
FRAME_MIN: Final = 4096  # 4.2.3: no peer may negotiate less
HANDSHAKE_FRAME_MAX: Final = 65_536  # before tune-ok: enough for a token as password, and no more
PAUSED_BYTES_MAX: Final = 131_072  # what may wait while the application authenticates a login
NESTING_MAX: Final = 32  # tables within tables; x-death needs 3
SHORT_STRING_MAX: Final = 255
PUBLISH_METHOD_MAX: Final = 2 + 256 + 256 + 1  # reserved-1, exchange, routing key, bits
DELIVER_METHOD_MAX: Final = (
    256 + 8 + 1 + 256 + 256 + 4 + 256
)  # the largest content method to a client, rounded up
# Number of largest messages that one connection may have incomplete, over all channels.
CONTENTS_IN_PARTS: Final = 4
CLOSE_WAIT_SECS: Final = 10.0  # how long a peer may take to send close-ok

# Class and method ids of the frequent methods, as the first four bytes of their payload.
BASIC: Final = 60
BASIC_PUBLISH: Final = 60 << 16 | 40
BASIC_RETURN: Final = 60 << 16 | 50
BASIC_DELIVER: Final = 60 << 16 | 60
BASIC_GET_OK: Final = 60 << 16 | 71
BASIC_ACK: Final = 60 << 16 | 80
BASIC_NACK: Final = 60 << 16 | 120
BASIC_WEIGHT: Final = 60 << 16  # class-id, and weight 0, with which a content header begins


class ReplyCode(IntEnum):
    """Reply codes of AMQP 0-9-1 (table in 1.1), and 312 (no route), which that table lacks."""

    SUCCESS = 200
    CONTENT_TOO_LARGE = 311
    NO_ROUTE = 312
    NO_CONSUMERS = 313
    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541


SOFT_CODES: Final = frozenset(
    {
        ReplyCode.CONTENT_TOO_LARGE,
        ReplyCode.NO_ROUTE,
        ReplyCode.NO_CONSUMERS,
        ReplyCode.ACCESS_REFUSED,
        ReplyCode.NOT_FOUND,
        ReplyCode.RESOURCE_LOCKED,
        ReplyCode.PRECONDITION_FAILED,
    }
)
"""Errors that close the channel; every other error closes the connection."""

PROPERTIES: Final = (
    ("content_type", "ss", 1 << 15),
    ("content_encoding", "ss", 1 << 14),
    ("headers", "T", 1 << 13),
    ("delivery_mode", "o", 1 << 12),
    ("priority", "o", 1 << 11),
    ("correlation_id", "sb", 1 << 10),
    ("reply_to", "ss", 1 << 9),
    ("expiration", "ss", 1 << 8),
    ("message_id", "ss", 1 << 7),
    ("timestamp", "ll", 1 << 6),
    ("type", "ss", 1 << 5),
    ("user_id", "ss", 1 << 4),
    ("app_id", "ss", 1 << 3),
    ("cluster_id", "ss", 1 << 2),
)
"""Name, domain and flag of class basic's properties in wire order (4.2.6.1).

Bit 1 is unused; bit 0 means that another word of flags follows. `sb` is a short string that is not decoded,
because applications put raw UUIDs there.
"""
FLAG_CONTINUED: Final = 1
FLAG_HEADERS: Final = 1 << 13
FLAG_DELIVERY_MODE: Final = 1 << 12
FLAG_REPLY_TO: Final = 1 << 9
FLAG_EXPIRATION: Final = 1 << 8
FLAG_USER_ID: Final = 1 << 4

FIXED_FIELDS: Final = (
    ("t", ValueType.BOOL, ">?"),
    ("b", ValueType.INT8, ">b"),
    ("B", ValueType.UINT8, ">B"),
    ("s", ValueType.INT16, ">h"),
    ("u", ValueType.UINT16, ">H"),
    ("I", ValueType.INT32, ">i"),
    ("i", ValueType.UINT32, ">I"),
    ("l", ValueType.INT64, ">q"),
    ("f", ValueType.FLOAT, ">f"),
    ("d", ValueType.DOUBLE, ">d"),
    ("T", ValueType.TIMESTAMP, ">Q"),
)
"""Field tags of fixed size, with their struct format."""
FIXED_FIELDS_READ_ONLY: Final = (
    ("L", ValueType.INT64, ">q"),
    ("U", ValueType.INT16, ">h"),
)
"""Tags that are read and never written: `L` is another int64; `U` is the specification's int16."""
FIELD_VOID: Final = ord("V")
FIELD_DECIMAL: Final = ord("D")
FIELD_STRING: Final = ord("S")
FIELD_BYTES: Final = ord("x")
FIELD_ARRAY: Final = ord("A")
FIELD_TABLE: Final = ord("F")
