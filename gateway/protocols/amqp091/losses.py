"""What AMQP 0-9-1 cannot say of a message of another protocol, and what it says when one is refused."""

from __future__ import annotations

from typing import Final

from gateway.model.losses import Loss, losing

LOSSES: Final = (
    Loss("header_name_long", "headers", "a name longer than 255 octets", "drop"),
    Loss("header_name", "headers", "a name that is no Unicode: half a character", "drop"),
    Loss("header_value", "headers", "a value that its type cannot hold on the wire", "downgrade"),
    Loss("header_repeated", "headers", "repeated with values that are not all strings", "downgrade"),
    Loss("header_order", "headers", "a repeated name with others between", "downgrade"),
    Loss("header_own", "headers", "a name that the gateway uses for itself", "drop"),
    Loss("priority_range", "priority", "not within 0 to 255", "drop"),
    Loss("timestamp_range", "timestamp", "negative, or beyond 64 bits", "drop"),
    Loss("text", "texts", "no Unicode: half a character", "drop"),
    Loss("long_text", "texts", "longer than 255 octets: in a header of its own", "encode"),
    Loss("correlation_octets", "correlation", "not UTF-8, or too long: base64, or a header", "encode"),
)
"""The named losses of this translation. `losses` tells which of them a message suffers."""
LOSING: Final = losing(LOSSES)
