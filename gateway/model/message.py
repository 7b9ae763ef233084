"""The message: content on its way from one address to another, in no protocol's form.

What a message weighs is its `octets`: those of its body and its properties, and MESSAGE_OCTETS for what an
empty one costs. Every limit and figure in octets of what is held counts these. Messages that share a property
set each count it whole, for any of them may be the last that keeps it. A body on disk counts with its size:
it takes that much of somewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from gateway.model.address import Address
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet
from gateway.model.spooled import Body

NEVER = 0.0
# An object takes 160 octets, its own property set another 170, its place in a queue or in flight 10 to 200.
MESSAGE_OCTETS: Final = 256


class Sender(NamedTuple):
    """Who brought a message in; one object per connection, shared by its messages."""

    endpoint: str
    client: str = ""
    user: str = ""
    address: str = ""


NOBODY = Sender("")


class Message:
    """Application content with its properties. Not changed once it has been made.

    `assurance` is 0, 1 or 2: at most once, at least once, once (the QoS of MQTT). `durable` says that it must
    survive a restart. `expires` is UTC in seconds, or NEVER. `hops` counts the routes that it has crossed.
    """

    __slots__ = (
        "address",
        "assurance",
        "body",
        "durable",
        "expires",
        "hops",
        "octets",
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
        self.octets = len(body) + property_set.octets + MESSAGE_OCTETS

    @property
    def properties(self) -> Properties:
        """The decoded properties; raises RemoteProtocolError when the sender's octets are malformed."""
        return self.property_set.properties

    def crossed(self, address: Address) -> Message:
        """The same at another address, one hop further."""
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

    def holding(self, body: Body) -> Message:
        """The same with another body, as one that was on disk."""
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
        """`crossed` of others, which differ from this one in nothing but their bodies."""
        found, sender = self.property_set, self.sender
        assurance, durable, retain = self.assurance, self.durable, self.retain
        expires, hops = self.expires, self.hops + 1
        return [
            Message(address, one.body, found, assurance, durable, retain, expires, hops, sender)
            for one in others
        ]

    def __repr__(self) -> str:
        return f"Message({self.address!r}, {len(self.body)} octets, assurance {self.assurance})"


def weight_of(messages: Iterable[Message]) -> int:
    """What they weigh together."""
    octets = 0  # compiled, a sum of a list would make the list and an object for each number
    for message in messages:
        octets += message.octets
    return octets


def bodies_of(messages: Iterable[Message]) -> int:
    """Octets of their bodies alone, for those limits that say so."""
    octets = 0
    for message in messages:
        octets += len(message.body)
    return octets
