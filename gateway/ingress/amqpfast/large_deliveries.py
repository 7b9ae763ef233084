"""Large messages to a client, written one fragment at a time as its connection accepts them.

A channel sends one message after the other. While a large message is in progress, or a response to its
PREPARE is pending, later messages of the channel wait in line, and the protocol machine holds back its
replies. Messages that must not come between a command and its reply (3.2.11) wait, too. No more of a body is
in memory than the connection has not written yet.

On a restartable channel a large message is announced by PREPARE, as the specification recommends (3.3.2.2),
and resumes from where the client has it. With a shared folder it is written to a file there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol

import trio

from gateway.broker.spool import Spool
from gateway.errors import LocalProtocolError
from gateway.ingress.amqpfast.shared_folder import SharedFolder
from gateway.model.spooled_bodies import Piece, ReadFault, Spooled, fault_in, fault_of
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.server import ServerConnection
from gateway.protocols.amqpfast.spec import DELIVERED, REDELIVERED, ReplyCode
from gateway.transport.stream import Stream

LARGE_BYTES: Final = 1_048_576  # of a body; smaller ones are written whole


class LargeDeliveryClient(Protocol):
    """Interface of a client connection to large deliveries."""

    machine: ServerConnection
    stream: Stream
    sending: dict[LargeDeliveries, None]

    @property
    def ingress(self) -> LargeDeliverySource:
        """Protocol side of the client's listener, which starts tasks and writes output."""

    def await_replies(self, channel: Any) -> None:
        """Call the channel's `send_held`, which sends waiting deliveries, when no reply is due any more."""

    def close_channel(self, channel: Any, code: int, text: str) -> None:
        """Send CHANNEL CLOSE with this reply code and text, and remove the channel."""


class LargeDeliverySource(Protocol):
    """Interface of a listener's protocol side to large deliveries: starts tasks and writes output."""

    spool: Spool

    def start(self, task: Callable[[], Awaitable[None]]) -> None:
        """Start a task in the background."""

    def call_after_turn(self, then: Callable[[], None]) -> None:
        """Call `then` when the current pass of the event loop has been processed."""

    def flush(self) -> None:
        """Write output that was encoded outside a pass of the event loop."""


class LargeDeliveryChannel(Protocol):
    """Interface of a channel to large deliveries."""

    next_number: int
    number: int
    restartable: bool
    folder: SharedFolder | None

    @property
    def connection(self) -> LargeDeliveryClient:
        """Client connection of the channel."""

    def resume(self) -> None:
        """Resume deliveries, because no large message is in progress or waits any more."""


class LargeDeliveryHandle(Protocol):
    """Interface of a handle to large deliveries."""

    number: int

    @property
    def silent(self) -> bool:
        """True if nothing more may be sent on the handle."""

    @property
    def channel(self) -> LargeDeliveryChannel:
        """Channel of the handle."""


class LargeDelivery:
    """Outgoing message that waits to be sent, or is being sent; `head` is its encoded content header.

    `then` is called with True when it has been sent completely, or with False if that failed. `limit` is the
    lowest message number of the channel that may be unsent when this message begins. `key` identifies the
    command to which the message responds and whose reply follows it; -1 if there is none.
    """

    __slots__ = ("at", "bits", "body", "handle", "head", "key", "limit", "name", "number", "then", "transfer")

    def __init__(
        self,
        handle: LargeDeliveryHandle,
        number: int,
        name: bytes,
        head: bytes,
        body: bytes,
        then: Callable[[bool], None],
        *,
        delivered: bool = True,
        redelivered: bool = False,
        key: int = -1,
    ) -> None:
        self.handle = handle
        self.key = key
        self.number = number
        self.name = name
        self.head = head
        self.body = body
        self.bits = DELIVERED * delivered | REDELIVERED * redelivered
        self.then = then
        self.limit = number if delivered else handle.channel.next_number
        self.at = 0
        self.transfer: Transfer | None = None

    @property
    def digest(self) -> bytes:
        """Content-hash of the body, or b"" if it arrived without one."""
        return self.body.file.checked.hex().encode() if isinstance(self.body, Spooled) else b""

    def piece(self, count: int, *, read: bool) -> Piece:
        """Return the next bytes of the body, at most `count`. Raises OSError.

        With `read`, they are read from disk. Otherwise the result may be a reference to the file.
        """
        body, at = self.body, self.at
        if not isinstance(body, Spooled):
            return memoryview(body)[at : at + count]
        piece = body.piece(at, min(count, body.size - at))
        return piece.data() if read else piece


class LargeDeliveries:
    """Outgoing messages of one channel that are sent one after the other."""

    def __init__(self, channel: LargeDeliveryChannel) -> None:
        self.active: LargeDelivery | None = None
        self.over = False
        self._channel = channel
        self._waiting: deque[LargeDelivery] = deque()
        self._answers: deque[LargeDelivery] = (
            deque()
        )  # those whose replies follow them, in the order of their commands
        self._choosing = False

    @property
    def idle(self) -> bool:
        """True if a new message can be sent at once."""
        return not (self.over or self.active is not None or self._waiting or self._answers)

    @property
    def limit(self) -> int:
        """Lowest message number that has not been sent completely."""
        return self._lowest(self.active)

    @property
    def unbegun(self) -> int:
        """Lowest message number of which nothing has been sent, except for a PREPARE."""
        active = self.active
        return self._lowest(None if active is None or active.transfer is not None else active)

    def _lowest(self, active: LargeDelivery | None) -> int:
        """Return the lowest message number that may be unsent, of `active` and of the queued messages.

        Return the channel's next number if there are none.
        """
        limit = self._channel.next_number
        if active is not None:
            limit = min(limit, active.limit)
        for line in (self._answers, self._waiting):
            if line:
                limit = min(limit, line[0].limit)
        return limit

    def queue_message(self, large: LargeDelivery) -> None:
        """Queue a message behind earlier ones and behind the replies that are due before it."""
        (self._waiting if large.key < 0 else self._answers).append(large)
        self.resume()

    def resume(self) -> None:
        """Start to send the next message, if none is in progress and no reply has to precede it."""
        if self._choosing:
            return  # the outer call continues
        self._choosing = True
        try:
            while self.active is None and (large := self._pop_next()) is not None:
                self.active = large
                self._begin(large)
        finally:
            self._choosing = False

    def _pop_next(self) -> LargeDelivery | None:
        """Remove and return the next message that no reply has to precede, or None."""
        channel = self._channel
        machine = channel.connection.machine
        if self._answers and not machine.has_due_reply(channel.number, self._answers[0].key):
            return self._answers.popleft()
        if self._waiting and not machine.has_due_reply(channel.number):
            return self._waiting.popleft()
        if self._waiting or self._answers:
            channel.connection.await_replies(channel)
        return None

    def _begin(self, large: LargeDelivery) -> None:
        """Start to send a message: announce it by PREPARE, or write it directly or to the shared folder."""
        channel = self._channel
        connection = channel.connection
        machine = connection.machine
        if not self._is_open(large):
            self._end(large, sent=False)
            return
        if channel.folder is not None:
            connection.ingress.start(partial(self._write_shared, large))
            return
        # Section 7 of the notes: no PREPARE for a message that fits a single fragment.
        if not channel.restartable or 4 + len(large.head) + len(large.body) <= machine.frame_max:
            self._write_from(large, 0, resumed=False)
            return
        try:
            machine.prepare(large.handle.number, large.head, len(large.body), b"", large.digest)
        except LocalProtocolError as error:
            self._fail(large, ReplyCode.INSUFFICIENT_RESOURCES, str(error))
        else:
            connection.stream.mark_for_flush()

    def _is_open(self, large: LargeDelivery) -> bool:
        """Return True if the handle of a message is open; the client's CLOSE may not be processed yet."""
        return large.handle.number in self._channel.connection.machine.handles and not large.handle.silent

    def ready(self, handle: LargeDeliveryHandle, size: int) -> None:
        """Send the announced message of a handle after the `size` body bytes that the client already has."""
        large = self.active
        if large is not None and large.handle is handle and large.transfer is None:
            self._write_from(large, size, resumed=True)

    def _write_from(self, large: LargeDelivery, at: int, *, resumed: bool) -> None:
        """Start to write the message to the client, from the offset `at` of its body in bytes.

        If `resumed` is True, the client has the header and the first `at` bytes from an earlier attempt;
        otherwise the header is written first.
        """
        large.at = at
        if (fault := fault_of(large.body)) is not None:
            if fault.is_lost and large.bits & DELIVERED and not resumed:
                self._end(large, sent=False)  # the client knows nothing of it
            else:
                self._cannot_read(large, fault, partial(self._write_from, large, at, resumed=resumed))
            return
        if self._transfer(large, resumed=resumed):
            self._resume()

    def _transfer(self, large: LargeDelivery, *, resumed: bool = False, out_of_band: bool = False) -> bool:
        """Create the encoder of a message's fragments. Return False if its handle is closed or that fails.

        A failure closes the channel. `resumed` True: the client has the header already. `out_of_band` True:
        the message is in the shared folder.
        """
        if not self._is_open(large):
            self._end(large, sent=False)
            return False
        try:
            large.transfer = Transfer(
                self._channel.connection.machine,
                large.handle.number,
                large.head,
                len(large.body),
                name=large.name,
                number=large.number,
                bits=large.bits,
                resumed=resumed,
                out_of_band=out_of_band,
            )
        except LocalProtocolError as error:
            self._fail(large, ReplyCode.INSUFFICIENT_RESOURCES, str(error))
            return False
        return True

    def write(self) -> None:
        """Write the next fragment of the message in progress."""
        large = self.active
        assert large is not None
        transfer = large.transfer
        assert transfer is not None
        if not transfer.usable:
            self._end(large, sent=False)
            return
        try:
            data = large.piece(transfer.capacity, read=self._channel.connection.stream.layer is not None)
        except OSError as error:
            self._cannot_read(large, fault_in(error), self._resume)
            return
        large.at += len(data)
        last = large.at == len(large.body)
        transfer.write(data, last=last)
        stream = self._channel.connection.stream
        stream.queued += len(data)
        stream.mark_for_flush()
        if last:
            self._end(large, sent=True)

    async def _write_shared(self, large: LargeDelivery) -> None:
        """Write the message to the shared folder in a thread, and notify the client."""
        channel = self._channel
        folder = channel.folder
        assert folder is not None
        head = len(large.body).to_bytes(4, "big") + large.head
        try:
            await trio.to_thread.run_sync(folder.put, large.number, head, large.body)
        except OSError as error:
            if self.active is large and (fault := fault_of(large.body)) is not None:
                start = channel.connection.ingress.start
                self._cannot_read(large, fault, partial(start, partial(self._write_shared, large)))
            elif self.active is large:
                self._fail(large, ReplyCode.INSUFFICIENT_RESOURCES, f"out of band: {error}")
        else:
            if self.active is large and self._transfer(large, out_of_band=True):
                assert large.transfer is not None
                large.transfer.announce_bytes(len(head) + len(large.body), last=True)
                self._end(large, sent=True)
        channel.connection.stream.mark_for_flush()
        channel.connection.ingress.flush()

    def _cannot_read(self, large: LargeDelivery, fault: ReadFault, again: Callable[[], None]) -> None:
        """Call `again` later if the body of the message in progress cannot be read now.

        Close the channel if the body is lost.
        """
        connection = self._channel.connection
        if fault.is_lost:
            self._fail(large, ReplyCode.INTERNAL_ERROR, fault.why)
            return
        connection.sending.pop(self, None)

        def retry() -> None:
            if self.active is large:
                again()

        connection.ingress.spool.delay_reads(fault.why).wait(retry)

    def _resume(self) -> None:
        """Continue to write the message in progress."""
        connection = self._channel.connection
        connection.sending[self] = None
        connection.stream.mark_for_flush()

    def _fail(self, large: LargeDelivery, code: int, text: str) -> None:
        """Close the channel, because the message cannot be sent on it; other clients may receive it."""
        self.over = True
        self._end(large, sent=False)
        connection = self._channel.connection
        connection.ingress.call_after_turn(lambda: connection.close_channel(self._channel, code, text))

    def _end(self, large: LargeDelivery, *, sent: bool) -> None:
        """Remove the message in progress, report `sent` to its callback, and start the next message."""
        self.active = None
        channel = self._channel
        channel.connection.sending.pop(self, None)
        large.then(sent)
        self.resume()
        if self.idle:
            channel.resume()

    def abandon_handle(self, handle: LargeDeliveryHandle) -> None:
        """End the message in progress if it belongs to a closed handle."""
        if self.active is not None and self.active.handle is handle:
            self._end(self.active, sent=False)

    def close(self) -> None:
        """Remove all messages, because the channel is closed; the callbacks of unsent messages get False."""
        self.over = True
        remaining = [*([] if self.active is None else [self.active]), *self._answers, *self._waiting]
        self._answers.clear()
        self._waiting.clear()
        self.active = None
        self._channel.connection.sending.pop(self, None)
        for large in remaining:
            large.then(False)
