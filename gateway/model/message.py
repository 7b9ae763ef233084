"""Message model: content on its way from one address to another, independent of any protocol.

The weight of a message, `byte_count`, is the size in bytes of its body and properties, plus MESSAGE_BYTES for
the objects of an empty one, plus twice what exceeds 256 bytes of its address. Every limit and metric in bytes
of stored messages counts weights. Messages that share an address or a property set each count all of it,
because any of them may be the last that holds it. A body on disk counts with its size, since it occupies that
much disk space.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from gateway.model.address import Address
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet
from gateway.model.spooled_bodies import Body

NEVER = 0.0
# Bytes. An object takes 160, its own property set another 170, its place in a queue or in flight 10 to 200.
MESSAGE_BYTES: Final = 256


class Sender(NamedTuple):
    """Connection from which a message was received, and the number of its channel (0: it has none).

    Each channel has one object, which its messages share. The channel is known in this process only, and is
    not stored.
    """

    endpoint: str
    client: str = ""
    user: str = ""
    address: str = ""
    channel: int = 0

    @property
    def connection(self) -> Sender:
        """Sender of the same connection without a channel."""
        return self if not self.channel else self._replace(channel=0)

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Endpoint, client, user and address: the fields that are also known in other processes."""
        return self.endpoint, self.client, self.user, self.address

    def to_dict(self) -> dict[str, str]:
        """Return the fields that are displayed and stored, by name."""
        return dict(zip(("endpoint", "client", "user", "address"), self.names, strict=True))


NOBODY = Sender("")


class Message:
    """Application message: address, body and properties. A message is never changed once created.

    `assurance` is the QoS of MQTT: 0 at most once, 1 at least once, 2 exactly once. `durable` means that the
    message must survive a restart. `expires` is in UTC seconds, or NEVER. `hops` is the number of routes that
    the message has crossed. `byte_count` is its weight for limits in bytes.
    """

    __slots__ = (
        "address",
        "assurance",
        "body",
        "byte_count",
        "durable",
        "expires",
        "hops",
        "property_set",
        "retain",
        "sender",
    )

    def __init__(
        self,
        address: Address,
        body: Body,
        property_set: PropertySet = NO_PROPERTIES,
        assurance: int = 0,
        durable: bool = False,
        retain: bool = False,
        expires: float = NEVER,
        hops: int = 0,
        sender: Sender = NOBODY,
    ) -> None:
        self.address = address
        self.body = body
        self.property_set = property_set
        self.assurance = assurance
        self.durable = durable
        self.retain = retain
        self.expires = expires
        self.hops = hops
        self.sender = sender
        self.byte_count = len(body) + property_set.byte_count + address.excess_bytes + MESSAGE_BYTES

    @property
    def properties(self) -> Properties:
        """Decoded properties. Raises RemoteProtocolError if the sender's bytes are malformed."""
        return self.property_set.properties

    def with_crossing(self, address: Address) -> Message:
        """Return a copy with another address and a hop count that is one higher: it has crossed a route."""
        return Message(
            address,
            self.body,
            self.property_set,
            self.assurance,
            self.durable,
            self.retain,
            self.expires,
            self.hops + 1,
            self.sender,
        )

    def with_body(self, body: Body) -> Message:
        """Return a copy with another body, such as one read from disk."""
        return Message(
            self.address,
            body,
            self.property_set,
            self.assurance,
            self.durable,
            self.retain,
            self.expires,
            self.hops,
            self.sender,
        )

    def crossed_with(self, others: list[Message], address: Address) -> list[Message]:
        """Return a copy of each of `others` with another address and a hop count that is one higher.

        The messages in `others` may differ from this message in their bodies only: everything else is copied
        from this message.
        """
        found, sender = self.property_set, self.sender
        assurance, durable, retain = self.assurance, self.durable, self.retain
        expires, hops = self.expires, self.hops + 1
        return [
            Message(address, one.body, found, assurance, durable, retain, expires, hops, sender)
            for one in others
        ]

    def __repr__(self) -> str:
        return f"Message({self.address!r}, {len(self.body)} bytes, assurance {self.assurance})"


def weight_of(messages: Iterable[Message]) -> int:
    """Return the total weight of the messages in bytes."""
    byte_count = 0  # compiled, sum() over a list would create the list and an object for each number
    for message in messages:
        byte_count += message.byte_count
    return byte_count


def bodies_of(messages: Iterable[Message]) -> int:
    """Return the total size of the message bodies in bytes, without properties."""
    byte_count = 0
    for message in messages:
        byte_count += len(message.body)
    return byte_count
