"""Addresses of messages in the terms of their own protocol.

The dialect of a protocol creates each address once, and all messages to it share the object. `wire` holds the
bytes that its own protocol uses for it; caches on the message path use these as keys, because bytes store
their hash.
"""

from __future__ import annotations

from typing import Final

ADDRESS_BYTES_FEW: Final = 512  # of an address, which the weight of an empty message includes


class Address:
    """Destination of messages in one protocol: `name` within `scope`.

    MQTT: the name is a topic, and there are no scopes. AMQP 0-9-1: a routing key within an exchange, or a
    queue with the scope "". AMQP/Fast: a destination within a service type.

    Memory limits count an address of up to ADDRESS_BYTES_FEW bytes as part of each empty message.
    `excess_bytes` is the size beyond that, as text and as `wire`, which is counted in addition for each
    message.
    """

    __slots__ = ("excess_bytes", "name", "protocol", "scope", "wire")

    def __init__(self, protocol: str, scope: str, name: str, wire: bytes) -> None:
        self.protocol = protocol
        self.scope = scope
        self.name = name
        self.wire = wire
        self.excess_bytes = max(2 * len(wire) - ADDRESS_BYTES_FEW, 0)

    def __repr__(self) -> str:
        return f"Address({self.protocol!r}, {self.scope!r}, {self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and other.wire == self.wire and other.protocol == self.protocol

    def __hash__(self) -> int:
        return hash(self.wire)
