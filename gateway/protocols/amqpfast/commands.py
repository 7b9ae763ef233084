"""Table of the 28 commands of AMQP/Fast: types, directions and fields (3.1.1).

The annotation of a field is its domain on the wire, so a class is both the type that programs use and the
layout that the codec reads. A command whose `fragment` is True is followed by `fragment_size` bytes outside
its frame, unless they are sent out of band. The codec is in `codec.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Final, TypeVar, dataclass_transform, get_type_hints

from gateway.model.properties import Headers

Byte = Annotated[int, "o"]
Short = Annotated[int, "s"]
Long = Annotated[int, "l"]
ShortStr = Annotated[str, "ss"]
ShortBytes = Annotated[bytes, "sb"]  # a content hash may be raw bytes
LongStr = Annotated[bytes, "ls"]
Table = Annotated[Headers, "T"]
Bit = Annotated[bool, "b"]

TO_SERVER: Final = 1
TO_CLIENT: Final = 2
BOTH: Final = TO_SERVER | TO_CLIENT


class Command:
    """Base class of all commands of AMQP/Fast.

    `type` is the type byte, and `direction` states which end may send the command. `layout` has the pair
    (domain, name) of each field, in the order on the wire. `fragment` is True if a fragment follows the
    command's frame, `tagged` if the command has a confirm-tag.
    """

    __slots__ = ()
    name: ClassVar[str]
    type: ClassVar[int]
    direction: ClassVar[int]
    fragment: ClassVar[bool]
    tagged: ClassVar[bool]
    layout: ClassVar[tuple[tuple[str, str], ...]]


class HandleCommand(Command):
    """Base class of the commands that have a handle number."""

    __slots__ = ()
    handle_id: int


class ChannelCommand(Command):
    """Base class of the commands that have a channel number."""

    __slots__ = ()
    channel_id: int


COMMANDS: Final[dict[int, type[Command]]] = {}
C = TypeVar("C", bound=Command)


@dataclass_transform()
def command(name: str, kind: int, direction: int, fragment: bool = False) -> Callable[[type[C]], type[C]]:
    """Return a decorator that adds a class to COMMANDS as the command with this name and type byte (`kind`).

    `direction` and `fragment` are as in Command.
    """

    def enter(declared: type[C]) -> type[C]:
        made = dataclass(slots=True)(declared)
        hints = get_type_hints(made, globalns=globals(), include_extras=True)
        made.name = name
        made.type = kind
        made.direction = direction
        made.fragment = fragment
        made.layout = tuple(
            (hints[each.name].__metadata__[0], each.name)
            for each in fields(made)  # type: ignore[arg-type]
        )
        made.tagged = any(field == "tag" for _, field in made.layout) and not name.endswith("reply")
        COMMANDS[kind] = made
        return made

    return enter


@command("connection.challenge", 10, TO_CLIENT)
class ConnectionChallenge(Command):
    """Server's protocol version and login mechanisms, with their challenges (3.2.3)."""

    version: Byte = 1
    mechanisms: ShortStr = ""
    challenges: Table = ()


@command("connection.response", 11, TO_SERVER)
class ConnectionResponse(Command):
    """Client's choice of a mechanism, with its responses (3.2.4)."""

    mechanism: ShortStr = ""
    responses: Table = ()


@command("connection.tune", 12, BOTH)
class ConnectionTune(Command):
    """Limits of the connection: first the server's proposal, then the client's choice (3.2.5).

    `frame_max` is in bytes and `heartbeat` in seconds.
    """

    frame_max: Long = 0
    channel_max: Short = 0
    handle_max: Short = 0
    heartbeat: Short = 0
    options: Table = ()


@command("connection.open", 13, TO_SERVER)
class ConnectionOpen(Command):
    """Request to enter a virtual host, with the client-name to which durable subscriptions belong (3.2.6)."""

    tag: Short = 0
    virtual_path: ShortStr = "/"
    client_name: ShortStr = ""
    options: Table = ()


@command("connection.ping", 14, BOTH)
class ConnectionPing(Command):
    """Heartbeat of either side; `respond` requests a PING in return (3.2.7)."""

    respond: Bit = False


@command("connection.reply", 18, TO_CLIENT)
class ConnectionReply(Command):
    """Response to the CONNECTION OPEN with this tag (3.2.8)."""

    tag: Short = 0
    reply_code: Short = 200
    reply_text: ShortStr = ""


@command("connection.close", 19, BOTH)
class ConnectionClose(Command):
    """Request to close the connection, or the response to one, with a reply code (3.2.9)."""

    reply_code: Short = 200
    reply_text: ShortStr = ""


@command("channel.open", 20, TO_SERVER)
class ChannelOpen(ChannelCommand):
    """Request to open a channel, optionally with transactions or restartable transfers (3.3.2).

    `out_of_band` names where both sides store bodies that are not sent over the connection.
    """

    channel_id: Short = 0
    tag: Short = 0
    transacted: Bit = False
    restartable: Bit = False
    options: Table = ()
    out_of_band: ShortStr = ""


@command("channel.ack", 21, TO_SERVER)
class ChannelAck(ChannelCommand):
    """Acknowledgement of all outstanding messages of a channel up to `message_number` (3.3.3)."""

    channel_id: Short = 0
    tag: Short = 0
    message_number: Long = 0


@command("channel.commit", 22, TO_SERVER)
class ChannelCommit(ChannelCommand):
    """Request to commit the current transaction of a channel (3.3.4)."""

    channel_id: Short = 0
    tag: Short = 0
    options: Table = ()


@command("channel.rollback", 23, TO_SERVER)
class ChannelRollback(ChannelCommand):
    """Request to roll back the current transaction of a channel (3.3.5)."""

    channel_id: Short = 0
    tag: Short = 0
    options: Table = ()


@command("channel.reply", 28, TO_CLIENT)
class ChannelReply(ChannelCommand):
    """Response to the channel command with this tag (3.3.6)."""

    channel_id: Short = 0
    tag: Short = 0
    reply_code: Short = 200
    reply_text: ShortStr = ""


@command("channel.close", 29, BOTH)
class ChannelClose(ChannelCommand):
    """Request to close a channel, or the response to one, with a reply code (3.3.7)."""

    channel_id: Short = 0
    reply_code: Short = 200
    reply_text: ShortStr = ""


@command("handle.open", 30, TO_SERVER)
class HandleOpen(HandleCommand):
    """Request to open a handle on a destination of a service type (3.5.2).

    `producer`, `consumer` and `browser` request rights. `dest_name` is the name of the destination, or its
    beginning.
    """

    channel_id: Short = 0
    handle_id: Short = 0
    service_type: Short = 1
    tag: Short = 0
    producer: Bit = False
    consumer: Bit = False
    browser: Bit = False
    temporary: Bit = False
    dest_name: ShortStr = ""
    mime_type: ShortStr = ""
    encoding: ShortStr = ""
    options: Table = ()


@command("handle.send", 31, TO_SERVER, fragment=True)
class HandleSend(HandleCommand):
    """Message from a client, or a fragment of one; `partial` is False for the last fragment (3.5.3).

    The name of the destination is the name of the handle followed by `dest_name`.
    """

    handle_id: Short = 0
    tag: Short = 0
    fragment_size: Long = 0
    partial: Bit = False
    out_of_band: Bit = False
    recovery: Bit = False
    streaming: Bit = False
    dest_name: ShortStr = ""


@command("handle.consume", 32, TO_SERVER)
class HandleConsume(HandleCommand):
    """Request to consume a destination, or all destinations whose names begin with a prefix (3.5.4).

    `prefetch` limits the unacknowledged messages. `identifier` makes the subscription of a topic durable.
    """

    handle_id: Short = 0
    tag: Short = 0
    prefetch: Short = 0
    no_local: Bit = False
    unreliable: Bit = False
    dest_name: ShortStr = ""
    identifier: ShortStr = ""
    selector: LongStr = b""
    mime_type: ShortStr = ""


@command("handle.cancel", 33, TO_SERVER)
class HandleCancel(HandleCommand):
    """Request to end a durable subscription (3.5.5)."""

    handle_id: Short = 0
    tag: Short = 0
    dest_name: ShortStr = ""
    identifier: ShortStr = ""


@command("handle.flow", 34, TO_SERVER)
class HandleFlow(HandleCommand):
    """Request to stop the deliveries of a handle, or to resume them (3.5.6)."""

    handle_id: Short = 0
    tag: Short = 0
    flow_pause: Bit = False


@command("handle.unget", 35, TO_SERVER)
class HandleUnget(HandleCommand):
    """Return of a delivered message to its queue, for another consumer if there is one (3.5.7)."""

    handle_id: Short = 0
    tag: Short = 0
    message_number: Long = 0


@command("handle.query", 36, TO_SERVER)
class HandleQuery(HandleCommand):
    """Request for the numbers of a destination's messages that are above `message_number` (3.5.8)."""

    handle_id: Short = 0
    message_number: Long = 0
    dest_name: ShortStr = ""
    selector: LongStr = b""
    mime_type: ShortStr = ""


@command("handle.browse", 37, TO_SERVER)
class HandleBrowse(HandleCommand):
    """Request for a copy of the message with this number, which stays in the queue (3.5.9)."""

    handle_id: Short = 0
    tag: Short = 0
    message_number: Long = 0


@command("handle.created", 40, TO_CLIENT)
class HandleCreated(HandleCommand):
    """Name of a temporary destination that the server has created (3.5.10)."""

    handle_id: Short = 0
    dest_name: ShortStr = ""


@command("handle.notify", 41, TO_CLIENT, fragment=True)
class HandleNotify(HandleCommand):
    """Message from a server, or a fragment of one (3.5.11).

    `delivered` is True if the client must acknowledge the message, and False if the client has browsed it.
    """

    handle_id: Short = 0
    message_number: Long = 0
    fragment_size: Long = 0
    partial: Bit = False
    out_of_band: Bit = False
    recovery: Bit = False
    delivered: Bit = False
    redelivered: Bit = False
    streaming: Bit = False
    dest_name: ShortStr = ""


@command("handle.index", 42, TO_CLIENT)
class HandleIndex(HandleCommand):
    """Response to QUERY: a list of message numbers and of ranges of numbers (3.5.12)."""

    handle_id: Short = 0
    message_number: Long = 0
    message_list: LongStr = b""


@command("handle.prepare", 43, BOTH, fragment=True)
class HandlePrepare(HandleCommand):
    """Announcement of a message whose transfer can be resumed after a lost connection (3.5.13).

    The fragment that follows has the message's content header, and may have the first bytes of its body.
    """

    handle_id: Short = 0
    fragment_size: Long = 0
    content_hash: ShortBytes = b""


@command("handle.ready", 44, BOTH)
class HandleReady(HandleCommand):
    """Response to PREPARE: the number of body bytes that the receiver already has (3.5.14)."""

    handle_id: Short = 0
    message_size: Long = 0


@command("handle.reply", 48, TO_CLIENT)
class HandleReply(HandleCommand):
    """Response to the handle command with this tag (3.5.15)."""

    handle_id: Short = 0
    tag: Short = 0
    reply_code: Short = 200
    reply_text: ShortStr = ""


@command("handle.close", 49, BOTH)
class HandleClose(HandleCommand):
    """Request to close a handle, or the response to one, with a reply code (3.5.16)."""

    handle_id: Short = 0
    reply_code: Short = 200
    reply_text: ShortStr = ""


FRAME_NAMES: Final = tuple(
    COMMANDS[kind].name if kind in COMMANDS else "" for kind in range(max(COMMANDS) + 1)
)
"""Names of the commands by type, for counters; "" where there is no command."""
