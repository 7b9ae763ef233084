"""What a connection reports from the octets it was given, in their order.

The hot events hold runs: one event for as many messages (or acknowledgements) as came one after the other,
each a plain tuple. Everything else is one event per method.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.model.properties import Headers
from gateway.model.spooled import Body
from gateway.protocols.amqp091.methods import BasicGetOk, BasicReturn, Method


@dataclass
class Authenticate:
    """A client wants in; the server answers with `authenticated`, `secure` or `close`."""

    mechanism: str
    response: bytes
    client_properties: Headers


@dataclass
class SecureResponse:
    """The client's answer to a challenge; answer it as Authenticate."""

    response: bytes


@dataclass
class Open:
    """A client asks for a virtual host; the server answers with `opened` or `close`."""

    virtual_host: str


@dataclass
class Challenged:
    """A server challenges our login; the client answers with `secure_ok`."""

    challenge: bytes


@dataclass
class Opened:
    """The client's connection is open, with these limits agreed."""

    server_properties: Headers


@dataclass
class ChannelOpened:
    """A channel can be used. The server's open-ok is already queued."""

    channel: int


@dataclass
class ChannelClosed:
    """A channel is gone, by the peer's close or by a fault of the peer that we closed it for.

    Whatever has to be answered is queued. Not reported when the application itself closed the channel.
    """

    channel: int
    reply_code: int
    text: str
    class_id: int
    method_id: int
    by_peer: bool


@dataclass
class Closed:
    """The connection is over, by the peer's close or by a fault of the peer. No event follows."""

    reply_code: int
    text: str
    class_id: int
    method_id: int
    by_peer: bool


@dataclass
class MethodReceived:
    """Any other method, which the state of its channel allows."""

    channel: int
    method: Method


@dataclass
class Publishes:
    """Consecutive messages from a client: (channel, method, properties, body).

    `method` is what follows the ids of basic.publish, for `decode_publish` and as a key to what was found out
    about it; `properties` are the octets of the content header from the flags on.
    """

    contents: list[tuple[int, bytes, bytes, Body]]


@dataclass
class LargePublish:
    """A message from a client whose body went to a sink: a row as those of Publishes."""

    content: tuple[int, bytes, bytes, bytes]


@dataclass
class Acks:
    """Consecutive basic.ack of a client: (channel, delivery tag, multiple)."""

    acks: list[tuple[int, int, bool]]


@dataclass
class Deliveries:
    """Consecutive messages from a server.

    Rows of (channel, consumer tag, delivery tag, redelivered, address, properties, body). Consumer tag and
    address are short strings with their length octets; `decode_address` reads the latter.
    """

    contents: list[tuple[int, bytes, int, bool, bytes, bytes, Body]]


@dataclass
class Confirms:
    """Consecutive basic.ack and basic.nack of a server: (channel, tag, multiple, whether it is an ack)."""

    confirms: list[tuple[int, int, bool, bool]]


@dataclass
class Returned:
    """A mandatory message that no queue took. Its confirm comes after it."""

    channel: int
    method: BasicReturn
    properties: bytes
    body: Body


@dataclass
class Got:
    """The answer to basic.get when there is a message."""

    channel: int
    method: BasicGetOk
    properties: bytes
    body: Body


Event = (
    Authenticate
    | SecureResponse
    | Open
    | Challenged
    | Opened
    | ChannelOpened
    | ChannelClosed
    | Closed
    | MethodReceived
    | Publishes
    | LargePublish
    | Acks
    | Deliveries
    | Confirms
    | Returned
    | Got
)
