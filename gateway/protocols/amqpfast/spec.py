"""Numbers and names of AMQP/Fast 0.7c0, tabulated once; the commands have a table of their own.

Clause numbers are those of AMQ RFC 006. Reply codes are those of its RFC 011, which share some numbers with
AMQP 0-9-1 and mean other things by them (310, 320, 505).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

# Initiation, 3.2.2: protocol id and version, two octets.
PROTOCOL_ID: Final = 0x80
PROTOCOL_VERSION: Final = 1
INITIATION: Final = bytes((PROTOCOL_ID, PROTOCOL_VERSION))

# Command frames, 2.2.4: size u16, or an escape and u32; type octet, fields, end octet. The size counts
# everything behind itself.
FRAME_END: Final = 0xCE
SIZE_ESCAPE: Final = 0xFFFF
SHORT_SIZE_MAX: Final = 0xFFFE
LONG_SIZE_MAX: Final = 0xFFFF_FFFE
FRAME_SIZE_MIN: Final = 3  # type, one field at least, end

# Types of the commands that messages go through in number.
CONNECTION_TUNE: Final = 12
CHANNEL_ACK: Final = 21
HANDLE_SEND: Final = 31
HANDLE_NOTIFY: Final = 41
HANDLE_REPLY: Final = 48

# Bits of HANDLE SEND (3.5.3) and HANDLE NOTIFY (3.5.11), whose first three are the same.
PARTIAL: Final = 0x01
OUT_OF_BAND: Final = 0x02
RECOVERY: Final = 0x04
SEND_STREAMING: Final = 0x08
DELIVERED: Final = 0x08
REDELIVERED: Final = 0x10
NOTIFY_STREAMING: Final = 0x20

# Limits.
FRAME_MAX_MIN: Final = 1024  # 3.2.5: no peer may negotiate less
HANDSHAKE_FRAME_MAX: Final = 4096  # 3.2.3 - 3.2.5: challenge, response and tune; everything before tuning
HANDSHAKE_TYPE_MAX: Final = CONNECTION_TUNE
FRAME_MAX: Final = 131_072  # what both sides ask for unless told otherwise
SHORT_STRING_MAX: Final = 255
LONG_STRING_MAX: Final = 65_535
NAME_OCTETS_MAX: Final = 128  # of a header in a field table
BODY_SIZE_MAX: Final = 0xFFFF_FFFF
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
PRIORITY_MAX: Final = 9  # 3.4.4: of an octet that could say more
ID_MAX: Final = 65_535  # channels, handles, confirm-tags
MESSAGE_NUMBER_MAX: Final = 0xFFFF_FFFF
PAUSED_BYTES_MAX: Final = 131_072  # what may wait while the application decides about a login
INDEX_OCTETS_MAX: Final = 60_000  # of one message list: a frame of the short form holds it
INDEX_FIELDS: Final = 10  # the size of INDEX with an empty message list

# Times.
CLOSE_WAIT_SECS: Final = 5.0  # how long a close may wait for its answer, and a socket for its end
CLOSE_AGAIN_SECS: Final = 0.1  # a command behind our close is answered by another close, but no faster
NEGOTIATION_PAUSE_SECS: Final = 3.0  # 3.2.12: before a failed negotiation is ended
SILENT_INTERVALS: Final = 2  # heartbeats without an octet until we ask, with one more to answer


class Service(IntEnum):
    """The types of service that a handle opens (3.5.2)."""

    QUEUE = 1
    TOPIC = 2
    PEER = 3


class Scope(Enum):
    """What a fault costs its author."""

    CONNECTION = "connection"
    CHANNEL = "channel"
    HANDLE = "handle"


class ReplyCode(IntEnum):
    """RFC 011. First digit: 2 done, 3 more is needed, 4 may succeed later, 5 needs intervention."""

    SUCCESS = 200
    MESSAGE_NOT_FOUND = 310
    MESSAGE_TOO_LARGE = 311
    CLIENT_ALREADY_ACTIVE = 320
    SERVICE_TYPE_NOT_VALID = 401
    VIRTUAL_PATH_NOT_VALID = 402
    ACCESS_REFUSED = 403
    DESTINATION_NOT_FOUND = 404
    FRAMING_ERROR = 501
    BAD_FIELD_VALUE = 502
    COMMAND_NOT_VALID = 503
    CHANNEL_NOT_READY = 504
    HANDLE_NOT_READY = 505
    INSUFFICIENT_RESOURCES = 506
    TEMPORARILY_FORBIDDEN = 507
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541
    MESSAGE_CONTENTS_INVALID = 542


# Field tables, which 0.7c0 leaves open, as 0.7d0 defines them: name, type octet, value.
FIELD_STRING: Final = ord("S")  # u16 length, octets
FIELD_INTEGER: Final = ord("I")  # signed, 32 bits
FIELD_DECIMAL: Final = ord("D")  # digits behind the point, signed 32 bits
FIELD_TIME: Final = ord("T")  # POSIX seconds, unsigned, 32 bits

# Security mechanisms.
PLAIN: Final = "PLAIN"
NONE: Final = "NONE"
LOGIN_FIELD: Final = "LOGIN"
PASSWORD_FIELD: Final = "PASSWORD"
