"""Events that a connection reports from the bytes it received, in order.

The frequent events hold runs: one event for all messages (acknowledgements, replies) that came in a row, each
a plain tuple. Every other event stands for one command or fragment. `head` is the bytes of a message's head
behind its body-size (see codec.py); `dest_name` is UTF-8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body
from gateway.protocols.amqpfast.commands import Command

SendRow = tuple[int, int, bytes, Body, bytes]
NotifyRow = tuple[int, int, int, bytes, Body, bytes]
ReplyRow = tuple[int, int, int, int, str]


@dataclass
class Authenticate:
    """Login request of a client; the server responds with `tune`, `challenge` or `fail`.

    `offered` is True if the server offers the client's mechanism, compared case-insensitively.
    """

    mechanism: str
    responses: Headers
    offered: bool


@dataclass
class Open:
    """Client's request for a virtual host; the server responds with `opened` or `close` (402, 320)."""

    virtual_path: str
    client_name: str
    options: Headers


@dataclass
class Challenged:
    """Further challenge from the server, to which this client responds with `respond`."""

    mechanisms: str
    challenges: Headers


@dataclass
class Opened:
    """Completed opening of the connection by this client: the server has accepted the virtual host."""


@dataclass
class NegotiationFailed:
    """Failed negotiation with a client that was not accepted yet.

    The connection ends at `pause_until` (3.2.12). `begun` is False if the client's first bytes were not those
    of AMQP/Fast, but for example of another protocol.
    """

    reply_code: int
    text: str
    begun: bool = True


@dataclass
class Closed:
    """Connection that was closed by the peer, or by this end because of a fault of the peer.

    This is the last event. If the peer has sent CLOSE, it still receives what the caller queues before the
    next `data_to_send`, such as replies.
    """

    reply_code: int
    text: str
    by_peer: bool


@dataclass
class ChannelClosed:
    """Channel that was closed with its handles, by the peer or because of a fault of the peer.

    The response is already queued. No such event is reported for a channel that the caller has closed.
    """

    channel: int
    reply_code: int
    text: str
    by_peer: bool


@dataclass
class HandleClosed:
    """Handle that was closed by the peer, or by this end because of a fault of the peer.

    The response is already queued. No such event is reported if the caller has closed the handle or its
    channel.
    """

    handle: int
    channel: int
    reply_code: int
    text: str
    by_peer: bool


@dataclass
class Released:
    """Peer's response to a CLOSE from this end, after which the channel or handle number may be used again.

    No more commands arrive for the closed channel or handle. If a handle was closed, `channel` is 0; if a
    channel was closed, `handle` is 0.
    """

    channel: int
    handle: int


@dataclass
class CommandReceived:
    """Received command without an event class of its own, which its channel and handle allow now."""

    command: Command


@dataclass
class Sends:
    """Consecutive messages from a client, each in a single fragment.

    Rows are (handle, confirm-tag, encoded content header, body, dest_name).
    """

    rows: list[SendRow]


@dataclass
class Notifies:
    """Consecutive messages from a server, each in a single fragment.

    Rows are (handle, message number, bits, encoded content header, body, dest_name). `bits` are the flags
    DELIVERED and REDELIVERED of the command.
    """

    rows: list[NotifyRow]


@dataclass
class Acks:
    """Consecutive CHANNEL ACK, as rows of (channel, confirm-tag, message number)."""

    rows: list[tuple[int, int, int]]


@dataclass
class Replies:
    """Consecutive replies of a server, as rows of (channel, handle, tag, reply code, text).

    In the row of a CHANNEL REPLY, the handle is NO_HANDLE.
    """

    rows: list[ReplyRow]


NO_HANDLE = -1


@dataclass
class Fragment:
    """Part of a message that has several fragments, or that is a stream, resumed or out of band.

    `head` is the message's content header in the first fragment, and otherwise empty. In the first fragment
    it is empty, too, if the header has come with PREPARE or is out of band. `data` begins at `offset` of the
    body, which has `body_size` bytes in all; for a stream and out of band `body_size` is 0. Out of band,
    `data` is empty, because `size` bytes are stored elsewhere; `offset` and `size` then include the content
    header.

    One fragment may be reported in several events. Long `data` is a view of the received bytes, and keeps
    them in memory. `tag` and `dest_name` are valid in the last fragment, `tag` also in each fragment of a
    stream. `number` is the message number from a server. `bits` are flags of NOTIFY, also for a SEND. `first`
    and `last` mark the first and the last fragment.
    """

    handle: int
    tag: int
    number: int
    bits: int
    first: bool
    last: bool
    head: bytes
    body_size: int
    offset: int
    size: int
    data: bytes | memoryview
    dest_name: bytes


@dataclass
class Prepared:
    """Peer's announcement of a large message, with content header and first body bytes (3.5.13).

    The caller responds with `ready`, or closes the handle.
    """

    handle: int
    head: bytes
    body_size: int
    data: bytes
    content_hash: bytes


@dataclass
class Ready:
    """Peer's response to a PREPARE from this end.

    The peer has the first `message_size` bytes of the body. The caller continues with the next byte.
    """

    handle: int
    message_size: int


Event = (
    Authenticate
    | Open
    | Challenged
    | Opened
    | NegotiationFailed
    | Closed
    | ChannelClosed
    | HandleClosed
    | Released
    | CommandReceived
    | Sends
    | Notifies
    | Acks
    | Replies
    | Fragment
    | Prepared
    | Ready
)
