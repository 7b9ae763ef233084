"""The message: content on its way from one address to another, in no protocol's form."""

from __future__ import annotations

from typing import NamedTuple

from gateway.model.address import Address
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet

NEVER = 0.0


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
        "property_set",
        "retain",
        "sender",
    )

    def __init__(
        self,
        address: Address,
        body: bytes,
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
