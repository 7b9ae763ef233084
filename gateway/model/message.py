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
    """Connection from which a message was received, and its channel number (0: no channel).

    The messages of one channel share one Sender. The channel number is known in this process only, and is not
    stored.
    """

    endpoint: str
    client: str = ""
    user: str = ""
    address: str = ""
    channel: int = 0

    @property
    def connection(self) -> Sender:
        """Sender with the same connection and without a channel."""
        return self if not self.channel else self._replace(channel=0)

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Endpoint, client, user and address: the fields that have a meaning in other processes, too."""
        return self.endpoint, self.client, self.user, self.address

    def to_dict(self) -> dict[str, str]:
        """Return endpoint, client, user and address by these names, for display and storage."""
        return dict(zip(("endpoint", "client", "user", "address"), self.names, strict=True))


NOBODY = Sender("")


class Message:
    """Application message: address, body and properties. A message is never changed once created.

    `assurance` is the QoS of MQTT: 0 at most once, 1 at least once, 2 exactly once. `durable` means that the
    message must survive a restart. `expires` is in UTC seconds, or NEVER. `hops` is the number of routes that
    the message has crossed. `byte_count` is the size in bytes that counts toward all limits of stored
    messages.
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
        """Return a copy with the given address, and the hop count increased by one."""
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
        """Return a copy of each of `others` with the given address, and the hop count increased by one.

        Each of `others` must equal this message in everything but the body: all other fields are copied from
        this message.
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
    """Return the total size in bytes that the messages count toward limits: the sum of `byte_count`."""
    byte_count = 0  # compiled, sum() over a list would create the list and an object for each number
    for message in messages:
        byte_count += message.byte_count
    return byte_count


def bodies_of(messages: Iterable[Message]) -> int:
    """Return the total size of the messages' bodies, in bytes."""
    byte_count = 0
    for message in messages:
        byte_count += len(message.body)
    return byte_count
