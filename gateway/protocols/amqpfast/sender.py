"""Fast encoding of outgoing messages: what does not change between messages is encoded once.

A Notifier belongs to one handle of a client's connection, a Producer to one of ours. Both append the pieces
of each message to their channel's `out`; most pieces are cached bytes. The pieces of the last message are
compared by identity, because names and heads are shared objects. A body that does not fit one fragment is
sent in several, one after the other.

A Transfer sends one message piece by piece as its body becomes available; other commands of its channel wait
until it is complete (2.2.8.8). A stream never completes, so only messages are kept off its channel. `head` is
the bytes of a message's head behind its body-size.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from gateway.errors import LocalProtocolError
from gateway.model.spooled_bodies import Body, Piece
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import END, U16, U32
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import (
    BODY_SIZE_MAX,
    DELIVERED,
    HANDLE_NOTIFY,
    HANDLE_SEND,
    ID_MAX,
    NOTIFY_STREAMING,
    OUT_OF_BAND,
    PARTIAL,
    RECOVERY,
    REDELIVERED,
    SEND_STREAMING,
    SHORT_STRING_MAX,
)
from gateway.protocols.amqpfast.states import Channel, Handle, HandleState

BEGIN: Final = Struct(">HBH").pack  # size, type, handle
FRAGMENT: Final = Struct(">IBB").pack  # fragment-size, bits, length of the name
NUMBER: Final = U32.pack
TAG: Final = U16.pack
NO_TAG: Final = TAG(0)  # of all fragments but the last: one message has one reply
SEND_FIELDS: Final = 12  # size of SEND with an empty name, in bytes
NOTIFY_FIELDS: Final = 14
PREPARED_HEAD_MAX: Final = 4096  # bytes; a larger head rarely repeats, caching it would cost memory
PREPARED_BYTES_MAX: Final = 65_536  # of the cached beginnings of messages of one handle
PREPARED_ENTRY_BYTES: Final = 400  # of a cached beginning, in addition to its name and twice its head

NotifyRow = tuple[bool, bytes, bytes, Body]
SendRow = tuple[bytes, bytes, Body]


def _entry_bytes(name: bytes, head: bytes) -> int:
    """Return the size in bytes of a cache entry of MessageWriter, which has the content header twice."""
    return PREPARED_ENTRY_BYTES + len(name) + 2 * len(head)


class MessageWriter:
    """Base class of Notifier and Producer: encodes messages, and caches the bytes that messages share.

    The cached bytes are those before and after the number (or confirm-tag) of a message.
    """

    _kind: int
    _fields: int

    def __init__(self, connection: ServerConnection | ClientConnection, handle: int) -> None:
        found = connection._handles.get(handle)
        if found is None or found.state is not HandleState.OPEN:
            raise LocalProtocolError(f"handle {handle} is not open")
        self._handle: Handle = found
        self._channel: Channel = found.channel
        self._sent = connection.sent
        self._frame_max = connection.frame_max
        self._prepared: dict[tuple[bytes, int, int], tuple[bytes, bytes, bytes, int]] = {}
        self._prepared_bytes = 0
        self._name = b""
        self._head = b""
        self._size = -1
        self._bits = 0
        self._begin = b""
        self._middle = b""
        self._room = 0

    @property
    def usable(self) -> bool:
        """True while the handle is open; otherwise messages are dropped, because the peer would discard them.

        Raises LocalProtocolError while this end sends a stream on the channel.
        """
        if self._channel.streaming:
            raise LocalProtocolError("no message may be sent on the channel of a stream")
        return self._handle.state is HandleState.OPEN

    def fits(self, name: bytes, head: bytes) -> bool:
        """Return True if a short string can hold `name`, and one fragment the content header `head`."""
        return len(head) + 4 <= self._frame_max and len(name) <= SHORT_STRING_MAX

    def _prepare(self, name: bytes, head: bytes, size: int, bits: int) -> bool:
        """Encode the bytes before and after the number (or confirm-tag), for messages with these properties.

        `head` is the content header, `size` the size of the body, `bits` are the flags of the command.
        `_room` is set to the number of body bytes in the first fragment. Return False if name, head or body
        is too large.
        """
        cached = self._prepared.get((name, size, bits))
        if cached is not None and cached[0] is head:
            _, self._begin, self._middle, self._room = cached
        else:
            room = self._frame_max - 4 - len(head)
            if room < 0 or size > BODY_SIZE_MAX or len(name) > SHORT_STRING_MAX:
                return False
            self._room = min(size, room)
            partial = size > room
            wire_name = b"" if partial else name
            self._begin = BEGIN(self._fields + len(wire_name), self._kind, self._handle.number)
            fragment = FRAGMENT(4 + len(head) + self._room, bits | partial, len(wire_name))
            self._middle = fragment + wire_name + END + NUMBER(size) + head
            if len(head) <= PREPARED_HEAD_MAX:
                self._cache(name, head, size, bits)
        self._name, self._head, self._size, self._bits = name, head, size, bits
        return True

    def _cache(self, name: bytes, head: bytes, size: int, bits: int) -> None:
        """Cache what `_prepare` has encoded, and evict the oldest entries of a cache that is too large."""
        prepared = self._prepared
        key = (name, size, bits)
        before = prepared.pop(key, None)
        if before is not None:
            self._prepared_bytes -= _entry_bytes(name, before[0])
        self._prepared_bytes += _entry_bytes(name, head)
        prepared[key] = (head, self._begin, self._middle, self._room)
        while self._prepared_bytes > PREPARED_BYTES_MAX:
            oldest = next(iter(prepared))
            self._prepared_bytes -= _entry_bytes(oldest[0], prepared.pop(oldest)[0])

    def forget(self) -> None:
        """Empty the cache, to free its memory."""
        self._prepared.clear()
        self._prepared_bytes = 0

    def _rest(self, key: bytes, last_key: bytes, body: Body) -> None:
        """Queue that part of a body which did not fit the first fragment, in further fragments.

        `last_key` is the encoded number (or confirm-tag) for the command of the last fragment, `key` that for
        the others.
        """
        out = self._channel.out
        most = self._frame_max
        size = len(body)
        for at in range(self._room, size, most):
            piece = body[at : at + most]
            partial = at + most < size
            name = b"" if partial else self._name
            out += (
                BEGIN(self._fields + len(name), self._kind, self._handle.number),
                key if partial else last_key,
                FRAGMENT(len(piece), self._bits | partial, len(name)),
                name,
                END,
                piece,
            )
            self._sent[self._kind] += 1


class Notifier(MessageWriter):
    """Encoder of the messages that a server delivers on one handle.

    `delivered` is False for messages that the client requested by BROWSE. The constructor raises
    LocalProtocolError if the handle is not open.
    """

    _kind = HANDLE_NOTIFY
    _fields = NOTIFY_FIELDS

    def __init__(self, connection: ServerConnection, handle: int, *, delivered: bool = True) -> None:
        super().__init__(connection, handle)
        self._delivered = DELIVERED if delivered else 0

    @property
    def has_due_reply(self) -> bool:
        """True if a reply is due on the channel: it must be sent before any message (3.2.11)."""
        return self._channel.has_due_reply()

    def notify(self, number: int, redelivered: bool, name: bytes, head: bytes, body: Body) -> bool:
        """Queue one message, as `notify_many` does. Return False if it could not be queued."""
        return not self.notify_many(number, ((redelivered, name, head, body),))

    def notify_many(self, first_number: int, rows: Iterable[NotifyRow]) -> list[int]:
        """Queue messages with consecutive numbers, beginning with `first_number`.

        A row is (redelivered, full name, encoded content header, body). Return the numbers of the messages
        that were not queued, because name, header or body is too large for the client.
        """
        unsent: list[int] = []
        if not self.usable:
            return unsent
        out = self._channel.out
        last_name, last_head, last_size, last_redelivered = self._name, self._head, self._size, False
        if self._bits & REDELIVERED:
            last_redelivered = True
        begin, middle, room = self._begin, self._middle, self._room
        number = first_number
        for redelivered, name, head, body in rows:
            size = len(body)
            if (
                head is not last_head
                or name is not last_name
                or size != last_size
                or redelivered is not last_redelivered
            ):
                if not self._prepare(name, head, size, self._delivered | (REDELIVERED if redelivered else 0)):
                    unsent.append(number)
                    number += 1
                    continue
                last_name, last_head, last_size, last_redelivered = name, head, size, redelivered
                begin, middle, room = self._begin, self._middle, self._room
            if size == room:
                out += (begin, NUMBER(number), middle, body)
            else:
                out += (begin, NUMBER(number), middle, body[:room])
                self._rest(NUMBER(number), NUMBER(number), body)
            number += 1
        self._sent[HANDLE_NOTIFY] += number - first_number - len(unsent)
        return unsent


class Producer(MessageWriter):
    """Encoder of the messages that a client sends on one handle.

    If `confirm` is True, each message has its own confirm-tag, and the event Replies reports the server's
    reply to it. The constructor raises LocalProtocolError if the handle is not open.
    """

    _kind = HANDLE_SEND
    _fields = SEND_FIELDS

    def __init__(self, connection: ClientConnection, handle: int, *, confirm: bool = False) -> None:
        super().__init__(connection, handle)
        self._confirm = confirm

    @property
    def capacity(self) -> int:
        """Number of messages that may be sent before the next reply: the number of unused confirm-tags."""
        return ID_MAX - len(self._channel.awaited)

    def send_many(self, rows: Iterable[SendRow]) -> list[int]:
        """Queue messages, and return the confirm-tag of each.

        A row is (rest of the name, encoded content header, body); the destination's name is the name of the
        handle followed by this rest. A tag is 0 if `confirm` is False, and -1 for a row that was not queued,
        because it is too large for the server or because the handle was closed. Raises LocalProtocolError if
        `capacity` is exceeded.
        """
        tags: list[int] = []
        channel = self._channel
        if not self.usable:
            return [-1 for _ in rows]
        out, awaited = channel.out, channel.awaited
        last_name, last_head, last_size = self._name, self._head, self._size
        begin, middle, room = self._begin, self._middle, self._room
        key = self._handle.number << 16
        confirm, tag, last_tag = self._confirm, 0, channel.last_tag
        count = 0
        for name, head, body in rows:
            size = len(body)
            if head is not last_head or name is not last_name or size != last_size:
                if not self._prepare(name, head, size, 0):
                    tags.append(-1)
                    continue
                last_name, last_head, last_size = name, head, size
                begin, middle, room = self._begin, self._middle, self._room
            if confirm:
                if len(awaited) >= ID_MAX:
                    raise LocalProtocolError(f"{ID_MAX} replies are pending already")
                tag = last_tag = last_tag % ID_MAX + 1
                channel.last_tag = tag
                awaited.append(key | tag)
            if size == room:
                out += (begin, TAG(tag), middle, body)
            else:
                out += (begin, NO_TAG, middle, body[:room])
                self._rest(NO_TAG, TAG(tag), body)
            tags.append(tag)
            count += 1
        self._sent[HANDLE_SEND] += count
        return tags


class Transfer:
    """Outgoing message on one handle that is sent in several parts.

    `head` is the content header. `number` and `bits` (DELIVERED, REDELIVERED) are for NOTIFY. If `resumed` is
    True, the peer has already received the head and the first part of the body, according to its READY, and
    `write` continues with the rest. If `streaming` is True, the message ends only with its handle. If
    `out_of_band` is True, only `announce_bytes` may be used. The constructor raises LocalProtocolError if the
    handle is not open, or if another message is being sent on its channel.
    """

    def __init__(
        self,
        connection: ServerConnection | ClientConnection,
        handle: int,
        head: bytes,
        body_size: int,
        *,
        name: bytes = b"",
        number: int = 0,
        bits: int = 0,
        resumed: bool = False,
        streaming: bool = False,
        out_of_band: bool = False,
    ) -> None:
        found = connection._handles.get(handle)
        if found is None or found.state is not HandleState.OPEN:
            raise LocalProtocolError(f"handle {handle} is not open")
        if found.channel.sending is not None:
            raise LocalProtocolError("another message is in progress on this channel")
        if len(name) > SHORT_STRING_MAX or len(head) + 4 > connection.frame_max:
            raise LocalProtocolError("name or head is too long")
        self._connection = connection
        self._handle = found
        self._notifies = isinstance(connection, ServerConnection)
        self._name = name
        self._number = number
        self._bits = bits | out_of_band * OUT_OF_BAND | resumed * RECOVERY
        if streaming:
            self._bits |= NOTIFY_STREAMING if self._notifies else SEND_STREAMING
        self._head = b"" if resumed or out_of_band else NUMBER(0 if streaming else body_size) + head
        channel = found.channel
        channel.sending = found
        channel.streaming = streaming
        if not streaming:
            channel.out = []

    @property
    def usable(self) -> bool:
        """True while the message is incomplete and its handle is open; otherwise writes are dropped."""
        return self._handle.channel.sending is self._handle

    @property
    def capacity(self) -> int:
        """Maximum number of bytes for the next call of `write`."""
        return self._connection.frame_max - len(self._head)

    def write(self, data: Piece, *, last: bool = False, tag: int = 0) -> None:
        """Queue the next bytes of the body, at most `capacity` bytes.

        `last` is True for the end of the body. `tag` is a client's confirm-tag, from `new_tag`. A piece on
        disk is read only when it is sent. Raises LocalProtocolError for too many bytes, and for `last` in a
        stream, which ends with its handle or channel.
        """
        if last and self._handle.channel.streaming:
            raise LocalProtocolError("a stream ends with its handle or channel")
        if len(data) > self.capacity:
            raise LocalProtocolError(f"a fragment has {self.capacity} bytes at most")
        if self._fragment(len(self._head) + len(data), last, tag):
            if self._head:
                self._connection.out.append(self._head)
                self._head = b""
            self._connection.queue(data)
            self._finish(last)

    def announce_bytes(self, size: int, *, last: bool = False, tag: int = 0) -> None:
        """Queue a command for the next `size` bytes of the message, which are sent out of band.

        The size includes the content header. `last` and `tag` are as in `write`. Raises LocalProtocolError if
        the transfer is not out of band.
        """
        if not self._bits & OUT_OF_BAND:
            raise LocalProtocolError("this transfer is not out of band")
        if self._fragment(size, last, tag):
            self._finish(last)

    def _fragment(self, size: int, last: bool, tag: int) -> bool:
        """Queue the command for a fragment of `size` bytes, which the caller then queues.

        Return False if the message is complete or its handle is closed.
        """
        if not self.usable:
            return False
        handle = self._handle
        name = self._name if last else b""
        bits = self._bits | (0 if last else PARTIAL)
        if self._notifies:
            key, kind, fields = NUMBER(self._number), HANDLE_NOTIFY, NOTIFY_FIELDS
        else:
            key, kind, fields = TAG(tag), HANDLE_SEND, SEND_FIELDS
            if tag:
                handle.channel.awaited.append(handle.number << 16 | tag)
        begin = BEGIN(fields + len(name), kind, handle.number)
        self._connection.out.append(begin + key + FRAGMENT(size, bits, len(name)) + name + END)
        self._connection.sent[kind] += 1
        return True

    def _finish(self, last: bool) -> None:
        """End the message if `last` is True, and queue the channel's commands that waited for its end."""
        if last:
            channel = self._handle.channel
            output = channel.out
            self._connection._drop_sending(channel)
            channel.out += output
