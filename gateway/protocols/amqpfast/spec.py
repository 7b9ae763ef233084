"""Numbers and names of AMQP/Fast 0.7c0, each tabulated once; the commands have their own table.

Clause numbers are those of AMQ RFC 006. Reply codes are those of its RFC 011, which share some numbers with
AMQP 0-9-1 but mean something else (310, 320, 505).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final

# Initiation, 3.2.2: protocol id and version, two bytes.
PROTOCOL_ID: Final = 0x80
PROTOCOL_VERSION: Final = 1
INITIATION: Final = bytes((PROTOCOL_ID, PROTOCOL_VERSION))

# Command frames, 2.2.4: size u16, or an escape and u32; type byte, fields, end byte. The size counts
# everything behind itself.
FRAME_END: Final = 0xCE
SIZE_ESCAPE: Final = 0xFFFF
SHORT_SIZE_MAX: Final = 0xFFFE
LONG_SIZE_MAX: Final = 0xFFFF_FFFE
FRAME_SIZE_MIN: Final = 3  # type, one field at least, end

# Types of the frequent commands.
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
FRAME_MAX: Final = 131_072  # what both ends request by default
SHORT_STRING_MAX: Final = 255
LONG_STRING_MAX: Final = 65_535
NAME_BYTES_MAX: Final = 128  # of a header in a field table
BODY_SIZE_MAX: Final = 0xFFFF_FFFF
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
PRIORITY_MAX: Final = 9  # 3.4.4: the byte could hold more
ID_MAX: Final = 65_535  # channels, handles, confirm-tags
MESSAGE_NUMBER_MAX: Final = 0xFFFF_FFFF
PAUSED_BYTES_MAX: Final = 131_072  # what may wait while the application authenticates a login
INDEX_BYTES_MAX: Final = 60_000  # of one message list: it fits a frame of the short form
INDEX_FIELDS: Final = 10  # the size of INDEX with an empty message list

# Times.
CLOSE_WAIT_SECS: Final = 5.0  # how long a close may wait for its response, and a socket for its end
# A command behind our close is answered by another close, but not more often than this.
CLOSE_AGAIN_SECS: Final = 0.1
NEGOTIATION_PAUSE_SECS: Final = 3.0  # 3.2.12: before a failed negotiation is ended
# Heartbeat intervals without a byte until we send PING, with one more for the response.
SILENT_INTERVALS: Final = 2


class Service(IntEnum):
    """Service types of handles (3.5.2)."""

    QUEUE = 1
    TOPIC = 2
    PEER = 3


class Scope(Enum):
    """Object that is closed because of a fault of the peer: the connection, a channel or a handle."""

    CONNECTION = "connection"
    CHANNEL = "channel"
    HANDLE = "handle"


class ReplyCode(IntEnum):
    """Reply codes of AMQP/Fast (RFC 011).

    The first digit means: 2 success, 3 more is needed, 4 the request may succeed later, 5 the request fails
    until somebody corrects the cause.
    """

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


# Field tables, which 0.7c0 does not define, as in 0.7d0: name, type byte, value.
FIELD_STRING: Final = ord("S")  # u16 length, bytes
FIELD_INTEGER: Final = ord("I")  # signed, 32 bits
FIELD_DECIMAL: Final = ord("D")  # digits behind the point, signed 32 bits
FIELD_TIME: Final = ord("T")  # POSIX seconds, unsigned, 32 bits

# Security mechanisms.
PLAIN: Final = "PLAIN"
NONE: Final = "NONE"
LOGIN_FIELD: Final = "LOGIN"
PASSWORD_FIELD: Final = "PASSWORD"
