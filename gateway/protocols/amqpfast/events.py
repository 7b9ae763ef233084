"""What a connection reports from the octets it was given, in their order.

The hot events hold runs: one event for as many messages (acknowledgements, replies) as came one after the
other, each a plain tuple. Everything else is one event per command or fragment. `head` stands for the octets
of a message's head behind its body-size, see codec.py; `dest_name` for octets of UTF-8.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.model.properties import Headers
from gateway.model.spooled import Body
from gateway.protocols.amqpfast.commands import Command

SendRow = tuple[int, int, bytes, Body, bytes]
NotifyRow = tuple[int, int, int, bytes, Body, bytes]
ReplyRow = tuple[int, int, int, int, str]


@dataclass
class Authenticate:
    """A client wants in; the server answers with `tune`, `challenge` or `fail`.

    `offered` says whether the mechanism is one of those that we named, regardless of case.
    """

    mechanism: str
    responses: Headers
    offered: bool


@dataclass
class Open:
    """A client asks for a virtual host; the server answers with `opened` or `close` (402, 320)."""

    virtual_path: str
    client_name: str
    options: Headers


@dataclass
class Challenged:
    """A server wants to know more than our first response said; the client answers with `respond`."""

    mechanisms: str
    challenges: Headers


@dataclass
class Opened:
    """The client's connection is open, with the limits agreed."""


@dataclass
class NegotiationFailed:
    """A client failed before it was let in. The machine waits until `pause_until`, then ends (3.2.12).

    `begun` is False when its first bytes were no initiation: it speaks another protocol, or none.
    """

    reply_code: int
    text: str
    begun: bool = True


@dataclass
class Closed:
    """The connection is over, by the peer's close or by a fault of the peer. No event follows.

    By the peer: it still hears what is said before the next `data_to_send`, such as replies.
    """

    reply_code: int
    text: str
    by_peer: bool


@dataclass
class ChannelClosed:
    """A channel and its handles are over, by the peer's close or by a fault of the peer.

    Whatever has to be answered is queued. Not reported when the application itself closed the channel.
    """

    channel: int
    reply_code: int
    text: str
    by_peer: bool


@dataclass
class HandleClosed:
    """A handle is over, by the peer's close or by a fault of the peer; else as ChannelClosed."""

    handle: int
    channel: int
    reply_code: int
    text: str
    by_peer: bool


@dataclass
class Released:
    """The peer has agreed to our close: nothing more comes, the number is free. One of the two is 0."""

    channel: int
    handle: int


@dataclass
class CommandReceived:
    """Any other command, which the states of its channel and handle allow."""

    command: Command


@dataclass
class Sends:
    """Consecutive whole messages from a client: (handle, confirm-tag, head, body, dest_name)."""

    rows: list[SendRow]


@dataclass
class Notifies:
    """Consecutive whole messages from a server: (handle, message number, bits, head, body, dest_name).

    `bits` are those of the command: DELIVERED, REDELIVERED.
    """

    rows: list[NotifyRow]


@dataclass
class Acks:
    """Consecutive CHANNEL ACK: (channel, confirm-tag, message number)."""

    rows: list[tuple[int, int, int]]


@dataclass
class Replies:
    """Consecutive replies of a server: (channel, handle, tag, reply code, text).

    A CHANNEL REPLY has handle NO_HANDLE.
    """

    rows: list[ReplyRow]


NO_HANDLE = -1


@dataclass
class Fragment:
    """A part of a message that is not in one piece, or in a mode of its own.

    `head` is that of the message with its first fragment, unless it came with PREPARE or is out of band; else
    empty. `octets` belong at `offset` of the body, which has `body_size` octets in all (streaming: 0; out of
    band: both count whole fragments, head included, and `octets` are not here: there are `size` of them).
    A fragment may come in several of these. Long `octets` are a view of what was received, which they keep.
    `tag` and `dest_name` count with the last fragment, `tag` also with each while streaming. `number` is a
    server's message number. `bits` are those of NOTIFY, also for SEND. `first` and `last` say which it is.
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
    octets: bytes | memoryview
    dest_name: bytes


@dataclass
class Prepared:
    """The peer announces a large message with its head and the first octets of its body (3.5.13).

    Answer with `ready`, or with a close.
    """

    handle: int
    head: bytes
    body_size: int
    octets: bytes
    content_hash: bytes


@dataclass
class Ready:
    """The peer holds `message_size` octets of the body that we announced; go on from there."""

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
