"""Messages on their way out: what does not change from one message to the next is encoded once.

A Notifier belongs to one handle of a client's connection, a Producer to one of ours; both append to what
their channel writes to the pieces of each message, most of them octets that were made before. The pieces of
the last message are recognised by identity, for names and heads are shared objects. A body that does not fit
a fragment goes out in several, one behind the other. A Transfer sends one message piece by piece as its body
becomes available; everything else that is said on its channel waits until it is done (2.2.8.8). A stream is
never done, so only messages are kept from its channel.

`head` stands for the octets of a message's head behind its body-size.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from typing import Final

from gateway.errors import LocalProtocolError
from gateway.model.caches import make_room
from gateway.model.spooled import Body, Piece
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
NO_TAG: Final = TAG(0)  # of all fragments but the last: a message is replied once
SEND_FIELDS: Final = 12  # the size of SEND with an empty name
NOTIFY_FIELDS: Final = 14
PREPARED_OCTETS_MAX: Final = 4096  # a larger head hardly repeats; remembering it would cost memory
PREPARED_MAX: Final = 4096  # beginnings of messages that one handle remembers

NotifyRow = tuple[bool, bytes, bytes, Body]
SendRow = tuple[bytes, bytes, Body]


class MessageWriter:
    """What notifying and sending have in common: the octets behind the part that changes."""

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
        self._name = b""
        self._head = b""
        self._size = -1
        self._bits = 0
        self._begin = b""
        self._middle = b""
        self._room = 0

    @property
    def usable(self) -> bool:
        """The handle is still open; otherwise what is sent is dropped, as the peer would discard it.

        Raises LocalProtocolError while a stream of ours is under way on the channel.
        """
        if self._channel.streaming:
            raise LocalProtocolError("no message may be sent on the channel of a stream")
        return self._handle.state is HandleState.OPEN

    def fits(self, name: bytes, head: bytes) -> bool:
        """Return True if the head fits a fragment that the peer takes."""
        return len(head) + 4 <= self._frame_max and len(name) <= SHORT_STRING_MAX

    def _prepare(self, name: bytes, head: bytes, size: int, bits: int) -> bool:
        """Encode what goes around tag or number and body; False when the head does not fit a fragment.

        `_room` is how much of the body goes into the first fragment.
        """
        known = self._prepared.get((name, size, bits))
        if known is not None and known[0] is head:
            _, self._begin, self._middle, self._room = known
        else:
            room = self._frame_max - 4 - len(head)
            if room < 0 or size > BODY_SIZE_MAX or len(name) > SHORT_STRING_MAX:
                return False
            self._room = min(size, room)
            partial = size > room
            given = b"" if partial else name
            self._begin = BEGIN(self._fields + len(given), self._kind, self._handle.number)
            fragment = FRAGMENT(4 + len(head) + self._room, bits | partial, len(given))
            self._middle = fragment + given + END + NUMBER(size) + head
            if len(self._prepared) >= PREPARED_MAX:
                make_room(self._prepared, PREPARED_MAX)
            if len(head) <= PREPARED_OCTETS_MAX:
                self._prepared[name, size, bits] = (head, self._begin, self._middle, self._room)
        self._name, self._head, self._size, self._bits = name, head, size, bits
        return True

    def _rest(self, key: bytes, last_key: bytes, body: Body) -> None:
        """What of a body did not fit the first fragment, with the tags or numbers of the fragments."""
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
    """Delivers on one handle of a client. Raises LocalProtocolError when it is not open.

    `delivered` is false for what BROWSE asked for.
    """

    _kind = HANDLE_NOTIFY
    _fields = NOTIFY_FIELDS

    def __init__(self, connection: ServerConnection, handle: int, *, delivered: bool = True) -> None:
        super().__init__(connection, handle)
        self._delivered = DELIVERED if delivered else 0

    @property
    def owes(self) -> bool:
        """A reply is owed on the channel: no message may come before it (3.2.11)."""
        return self._channel.owes()

    def notify(self, number: int, redelivered: bool, name: bytes, head: bytes, body: Body) -> bool:
        """Queue one message; see `notify_many`. Returns whether it could be sent."""
        return not self.notify_many(number, ((redelivered, name, head, body),))

    def notify_many(self, first_number: int, rows: Iterable[NotifyRow]) -> list[int]:
        """Queue messages with consecutive numbers from `first_number` on.

        A row is (redelivered, full name, head, body). Returns the numbers of those that were not sent,
        because the head does not fit a fragment that the client takes.
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
    """Sends on one handle of a server. Raises LocalProtocolError when it is not open.

    With `confirm` each message has a confirm-tag of its own, and Replies will tell of it.
    """

    _kind = HANDLE_SEND
    _fields = SEND_FIELDS

    def __init__(self, connection: ClientConnection, handle: int, *, confirm: bool = False) -> None:
        super().__init__(connection, handle)
        self._confirm = confirm

    @property
    def room(self) -> int:
        """How many messages may be sent until replies come."""
        return ID_MAX - len(self._channel.awaited)

    def send_many(self, rows: Iterable[SendRow]) -> list[int]:
        """Queue messages: (name behind that of the handle, head, body).

        Returns the tag of each; 0 when none was asked for; -1 for a row that was not sent, because its head
        does not fit a fragment that the server takes or the handle was closed. Raises LocalProtocolError when
        there is no `room`.
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
                    raise LocalProtocolError(f"{ID_MAX} replies are awaited already")
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
    """One message on one handle, sent piece by piece.

    Raises LocalProtocolError when the handle is not open or another message is under way on its channel.

    `number` and `bits` (DELIVERED, REDELIVERED) are for NOTIFY. With `resumed` the peer has the head and some
    of the body already (READY), and what is written goes on from there. `streaming` has no end but that of
    the handle. `out_of_band` is for `tell` alone.
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
            raise LocalProtocolError("another message is under way on this channel")
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
        """The message is still under way; otherwise what is written is dropped."""
        return self._handle.channel.sending is self._handle

    @property
    def room(self) -> int:
        """How many octets of the body the next `write` takes at most."""
        return self._connection.frame_max - len(self._head)

    def write(self, octets: Piece, *, last: bool = False, tag: int = 0) -> None:
        """The next octets of the body, `room` at most. `tag`: a client's confirm-tag, from `new_tag`.

        Octets that are on disk stay there until `pieces_to_send` has handed them on.
        """
        if last and self._handle.channel.streaming:
            raise LocalProtocolError("a stream ends with its handle or channel")
        if len(octets) > self.room:
            raise LocalProtocolError(f"a fragment has {self.room} octets at most")
        if self._fragment(len(self._head) + len(octets), last, tag):
            if self._head:
                self._connection.out.append(self._head)
                self._head = b""
            self._connection.queue(octets)
            self._finish(last)

    def tell(self, size: int, *, last: bool = False, tag: int = 0) -> None:
        """The next fragment has `size` octets, head included, and is not on the stream but out of band."""
        if not self._bits & OUT_OF_BAND:
            raise LocalProtocolError("this transfer is not out of band")
        if self._fragment(size, last, tag):
            self._finish(last)

    def _fragment(self, size: int, last: bool, tag: int) -> bool:
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
        """What had to wait for the end of the message follows it."""
        if last:
            channel = self._handle.channel
            held = channel.out
            self._connection._drop_sending(channel)
            channel.out += held
