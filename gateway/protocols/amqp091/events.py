"""Events that a connection reports from the bytes it received, in order.

The frequent events hold runs: one event for all messages (or acknowledgements) that came in a row, each a
plain tuple. Every other event stands for one method.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body
from gateway.protocols.amqp091.methods import BasicGetOk, BasicReturn, Method


@dataclass
class Authenticate:
    """Login request of a client; the server responds with `authenticated`, `secure` or `close`."""

    mechanism: str
    response: bytes
    client_properties: Headers


@dataclass
class SecureResponse:
    """Client's response to a SASL challenge.

    The server responds with `authenticated`, `secure` or `close`.
    """

    response: bytes


@dataclass
class Open:
    """Client's request for a virtual host; the server responds with `opened` or `close`."""

    virtual_host: str


@dataclass
class Challenged:
    """SASL challenge from the server, to which this client responds with `secure_ok`."""

    challenge: bytes


@dataclass
class Opened:
    """Completed opening of the connection by this client: the server has accepted the virtual host."""

    server_properties: Headers


@dataclass
class ChannelOpened:
    """Channel that the client has opened, and that can be used now.

    At the server, channel.open-ok is already queued.
    """

    channel: int


@dataclass
class ChannelClosed:
    """Channel that was closed by the peer, or by this end because of a fault of the peer.

    The close or close-ok is already queued. No such event is reported for a channel that the caller has
    closed.
    """

    channel: int
    reply_code: int
    text: str
    class_id: int
    method_id: int
    by_peer: bool


@dataclass
class Closed:
    """Connection that was closed by the peer, or by this end because of a fault of the peer.

    This is the last event.
    """

    reply_code: int
    text: str
    class_id: int
    method_id: int
    by_peer: bool


@dataclass
class MethodReceived:
    """Received method without an event class of its own, which the state of its channel allows."""

    channel: int
    method: Method


@dataclass
class Publishes:
    """Consecutive messages from a client, as rows of (channel, method, properties, body).

    `method` has the encoded arguments of basic.publish; `decode_publish` decodes them, and caches use them as
    keys. `properties` are the encoded property flags and property list.
    """

    contents: list[tuple[int, bytes, bytes, Body]]


@dataclass
class LargePublish:
    """Message from a client whose body was large and was written to a BodySink.

    `content` is a row as in Publishes.
    """

    content: tuple[int, bytes, bytes, bytes]


@dataclass
class Acks:
    """Consecutive basic.ack of a client, as rows of (channel, delivery tag, multiple)."""

    acks: list[tuple[int, int, bool]]


@dataclass
class Deliveries:
    """Consecutive messages that a server delivers.

    Rows are (channel, consumer tag, delivery tag, redelivered, address, properties, body). The consumer tag
    is a short string with its length byte. The address is an exchange and a routing key for `decode_address`.
    """

    contents: list[tuple[int, bytes, int, bool, bytes, bytes, Body]]


@dataclass
class Confirms:
    """Consecutive basic.ack and basic.nack of a server, as rows of (channel, tag, multiple, True for ack)."""

    confirms: list[tuple[int, int, bool, bool]]


@dataclass
class Returned:
    """Mandatory message that no queue received, returned by basic.return. Its confirm follows."""

    channel: int
    method: BasicReturn
    properties: bytes
    body: Body


@dataclass
class GetResponse:
    """Response to basic.get with a message."""

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
    | GetResponse
)
