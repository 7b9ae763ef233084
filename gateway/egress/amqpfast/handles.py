"""Handles of the AMQP/Fast client: what they send and receive, and the tasks that wait for replies.

A task that waits has a PendingReplies, which is completed by the reply, or by a close that arrives in its
place. Deliveries wait in their handle until they are read; the server sends at most the prefetch window of
them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple, Protocol, Self

import trio

from gateway.egress.amqpfast.upload import Upload, content_hash, file_hash
from gateway.errors import LinkError
from gateway.model.message import Message
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import Head, encode_head_properties
from gateway.protocols.amqpfast.sender import Producer, Transfer
from gateway.protocols.amqpfast.spec import ReplyCode, Scope

PLAIN_HEAD: Final = encode_head_properties(Head())
# Bytes of an upload that are written before the network must have accepted them.
WRITE_BYTES_MAX: Final = 1_048_576

# Unread bytes of a stream at which the connection is not read until half of them were read.
ARRIVED_BYTES_HIGH: Final = 1_048_576

Progress = Callable[[int, int], None]


class RefusedByServer(LinkError):
    """Refusal by the server, which closed a handle, channel or connection (`scope`), or failed a BROWSE.

    `code` is the server's reply code.
    """

    def __init__(self, code: int, text: str, scope: Scope) -> None:
        super().__init__(f"{text} ({code})" if text else f"refused with code {code}")
        self.code = code
        self.text = text
        self.scope = scope


class FastDelivery(NamedTuple):
    """Message that the client has received.

    `number` is the server's number on its channel, or the message id for a browsed one. `awaits_ack` is False
    for messages that were browsed, sent by a peer, or received by an unreliable CONSUME. A body larger than
    the channel's `memory_bytes_max` is in `file`, which is open for reading and is deleted when it is closed;
    the message's own body is then empty.
    """

    number: int
    redelivered: bool
    message: Message
    file: IO[bytes] | None = None
    awaits_ack: bool = True


class PendingReplies:
    """Replies of the server that one task waits for."""

    __slots__ = ("_done", "_failure", "_remaining", "handle")

    def __init__(self, handle: int, count: int = 1) -> None:
        self.handle = handle
        self._remaining = count
        self._failure: LinkError | None = None
        self._done = trio.Event()

    def count_reply(self, failure: LinkError | None = None) -> None:
        """Count one reply. With a `failure`, end the wait at once, without the other replies."""
        self._remaining -= 1
        self._failure = self._failure or failure
        if not self._remaining or failure is not None:
            self._done.set()

    async def wait(self) -> None:
        """Wait for all replies. Raises the failure that `count_reply` got, if any."""
        await self._done.wait()
        if self._failure is not None:
            raise self._failure


class Carrier(Protocol):
    """Interface of the client's connection that its handles use."""

    machine: ClientConnection

    def check(self) -> None:
        """Raise the error that ended the connection, if any."""

    def flush(self) -> None:
        """Send the encoded output soon."""

    async def drain(self) -> None:
        """Wait until all encoded output has been accepted by the network."""

    def hold(self) -> None:
        """Stop reading from the connection."""

    def release(self) -> None:
        """Undo one `hold`; reading resumes when all are undone."""


class HandleChannel(Protocol):
    """Interface of a channel that its handles use."""

    number: int
    restartable: bool

    @property
    def client(self) -> Carrier:
        """Connection of the channel."""

    def await_tags(self, handle: int, tags: Sequence[int]) -> PendingReplies:
        """Return an object whose `wait` returns when all commands with these tags have a reply."""

    async def send_and_wait(self, command: m.Command, tag: int, handle: int = ...) -> None:
        """Send a command that has the tag `tag`, and wait for its reply."""

    def close_handle(self, number: int) -> None:
        """Send HANDLE CLOSE for the handle with this number."""

    async def aclose(self) -> None:
        """Send CHANNEL CLOSE."""


class OpenHandle:
    """Open handle of a channel.

    `async for` yields its deliveries, and ends after `aclose`.
    """

    def __init__(self, channel: HandleChannel, number: int, service: str) -> None:
        self.number = number
        self.service = service
        self.failure: LinkError | None = None
        self._channel = channel
        self._came: deque[FastDelivery] = deque()
        self._more = trio.Event()
        self._ended = False

    def check(self) -> None:
        """Raise the error that has closed the handle, if any."""
        if self.failure is not None:
            raise self.failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FastDelivery:
        """Return the next delivery; wait for it if necessary.

        Raises StopAsyncIteration after `aclose`, and RefusedByServer or ConnectionLost if no more can arrive.
        """
        while not self._came:
            if self._ended:
                raise StopAsyncIteration
            await self.wait_for_news()
        return self._came.popleft()

    def pop_delivery(self) -> FastDelivery | None:
        """Return the next delivery if one has arrived, else None."""
        return self._came.popleft() if self._came else None

    async def wait_for_news(self) -> None:
        """Wait until something arrives for the handle, or it is closed.

        Raises the error that has closed the handle, if it was closed before the call.
        """
        self.check()
        await self._more.wait()

    async def aclose(self) -> None:
        """Send HANDLE CLOSE.

        Deliveries that are not acknowledged stay unacknowledged until the channel is closed.
        """
        self._ended = True
        self._channel.close_handle(self.number)
        self.wake()

    # Interface for the channel.

    def add(self, delivery: FastDelivery) -> None:
        """Add a received delivery."""
        self._came.append(delivery)
        self.wake()

    def wake(self) -> None:
        """Wake the tasks that wait in `wait_for_news`."""
        self._more.set()
        self._more = trio.Event()

    def closed(self, failure: LinkError) -> None:
        """Record the error with which the server has closed the handle, its channel or the connection."""
        self.failure = self.failure or failure
        self.wake()


class ClientSender(OpenHandle):
    """Handle that sends to one destination.

    Its deliveries are the responses of a peer service, which are not acknowledged.
    """

    def __init__(self, channel: HandleChannel, number: int, service: str, name: bytes) -> None:
        super().__init__(channel, number, service)
        self._name = name
        self._producer = Producer(channel.client.machine, number, confirm=True)
        self.resumed_at = 0  # bytes of the last upload that the server had from an earlier attempt
        self._ready_sizes: list[int] = []  # sizes from READY

    async def send(self, body: bytes, head: bytes = PLAIN_HEAD) -> None:
        """Send one message. Return when the server has accepted it.

        `head` is the encoded content header (see `head_of`). Raises RefusedByServer or ConnectionLost.
        """
        await self.send_many([body], head)

    async def send_many(self, bodies: Sequence[bytes], head: bytes = PLAIN_HEAD) -> None:
        """Send messages with the same content header (`head`), without pauses.

        Return when the server has accepted all of them. Raises RefusedByServer or ConnectionLost.
        """
        self.check()
        if not bodies:
            return
        channel = self._channel
        tags = self._producer.send_many([(self._name, head, body) for body in bodies])
        if -1 in tags:
            raise RefusedByServer(
                ReplyCode.FRAMING_ERROR, "the head does not fit the server's frame-max", Scope.HANDLE
            )
        awaited = channel.await_tags(self.number, tags)
        channel.client.flush()
        await awaited.wait()

    async def upload(
        self, source: Path | bytes, head: bytes = PLAIN_HEAD, *, progress: Progress | None = None
    ) -> None:
        """Send a file, or bytes, of any size in fragments. Return when the server has accepted all of it.

        `head` is the encoded content header. `progress` is called with the number of bytes sent and the
        total. On a restartable channel, a second call with the same head, body and client-name continues an
        interrupted upload. A server without such channels raises RefusedByServer 503 or 540; use a plain
        channel with it.
        """
        self.check()
        channel = self._channel
        if isinstance(source, bytes):
            data = source
            digest = content_hash(data) if channel.restartable else b""
            await self._upload(head, len(data), lambda at, size: data[at : at + size], digest, progress)
            return
        with source.open("rb") as file:
            digest = await trio.to_thread.run_sync(file_hash, file) if channel.restartable else b""
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            await self._upload(head, size, lambda at, most: os.pread(descriptor, most, at), digest, progress)

    async def _upload(
        self,
        head: bytes,
        size: int,
        read: Callable[[int, int], bytes],
        digest: bytes,
        progress: Progress | None,
    ) -> None:
        """Send a body of `size` bytes in fragments, without the bytes that the server already has.

        `read` is called with an offset and a size, and returns these bytes of the body. `digest` is the hash
        for PREPARE. `progress` is called with the number of bytes sent and the total.
        """
        channel = self._channel
        client = channel.client
        upload = Upload(
            client.machine, channel.number, self.number, head, size, read, name=self._name, digest=digest
        )
        upload.begin(restartable=channel.restartable)
        if channel.restartable:
            self._ready_sizes.clear()
            client.flush()
            while not self._ready_sizes:
                await self.wait_for_news()
            upload.ready(self._ready_sizes[0])
            self.resumed_at = upload.resumed_at
        while upload.writable:
            byte_count = 0
            while upload.writable and byte_count < WRITE_BYTES_MAX:
                byte_count += upload.write()
            if upload.tag:
                awaited = channel.await_tags(self.number, [upload.tag])
            await client.drain()
            self.check()
            if progress is not None:
                progress(upload.at, size)
        self.check()
        await awaited.wait()

    def handle_ready(self, held_bytes: int) -> None:
        """Process READY: the server already has `held_bytes` of the upload's body."""
        self._ready_sizes.append(held_bytes)
        self.wake()


class StreamHandle(OpenHandle):
    """Handle of a stream from and to a peer service, with the received bytes that are not read yet."""

    def __init__(self, channel: HandleChannel, number: int) -> None:
        super().__init__(channel, number, "peer")
        self._arrived = bytearray()
        self._holding = False

    def handle_bytes(self, data: bytes | memoryview) -> None:
        """Add a received fragment. Pause reading from the connection if too many bytes wait."""
        self._arrived += data
        if len(self._arrived) > ARRIVED_BYTES_HIGH and not (self._holding or self._ended):
            self._holding = True
            self._channel.client.hold()
        self.wake()

    async def take(self, most: int | None) -> bytes:
        """Remove and return received bytes, at most `most` (None: all). Wait until there are some.

        Return b"" at the end of the stream.
        """
        while not self._arrived:
            self.check_ended()
            if isinstance(self.failure, RefusedByServer) and self.failure.code < ReplyCode.MESSAGE_NOT_FOUND:
                return b""
            await self.wait_for_news()
        data = bytes(self._arrived[:most])
        del self._arrived[:most]
        if len(self._arrived) <= ARRIVED_BYTES_HIGH // 2:
            self._resume_reading()
        return data

    def check_ended(self) -> None:
        """Raise trio.ClosedResourceError if the client has closed the handle."""
        if self._ended:
            raise trio.ClosedResourceError

    async def aclose(self) -> None:
        """End the stream and close its channel."""
        self._resume_reading()
        if not self._ended:
            await super().aclose()
            await self._channel.aclose()

    def _resume_reading(self) -> None:
        if self._holding:
            self._holding = False
            self._channel.client.release()


class PeerStream(trio.abc.Stream):
    """Byte stream to and from a peer service (3.5.3.1), as a Trio stream.

    It has a channel of its own. A program that does not read from it blocks everything else on the
    connection. RefusedByServer is raised if the server has ended the stream, ConnectionLost if the connection
    is lost.
    """

    def __init__(self, channel: HandleChannel, handle: StreamHandle, head: bytes) -> None:
        """Begin the stream with the content header `head`. Raises LocalProtocolError if it is too long."""
        self._client = channel.client
        self._handle = handle
        self._transfer = Transfer(channel.client.machine, handle.number, head, 0, streaming=True)
        self._sending = trio.StrictFIFOLock()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send data; return when the network has accepted all of it."""
        raw = memoryview(data)
        async with self._sending:
            while True:
                self._handle.check_ended()
                self._handle.check()
                size = min(self._transfer.capacity, len(raw))
                self._transfer.write(bytes(raw[:size]))
                await self._client.drain()
                raw = raw[size:]
                if not raw:
                    return

    async def wait_send_all_might_not_block(self) -> None:
        """Wait until the network has accepted the earlier data."""
        await self._client.drain()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return received bytes; b"" when the peer has ended the stream."""
        return await self._handle.take(max_bytes)

    async def aclose(self) -> None:
        """End the stream and close its channel."""
        await self._handle.aclose()


class ConsumerHandle(OpenHandle):
    """Handle that receives the deliveries of a CONSUME, or with `browses` the messages of a BROWSE.

    `name` is the name of the temporary destination, if the handle has created one.
    """

    def __init__(self, channel: HandleChannel, number: int, service: str, *, browses: bool = False) -> None:
        super().__init__(channel, number, service)
        self.name = ""
        self.browses = browses
        self.unreliable = False
        self._index: m.HandleIndex | None = None

    async def pause(self, paused: bool) -> None:
        """Send HANDLE FLOW, which pauses or resumes deliveries; return when the server has confirmed it."""
        channel = self._channel
        tag = channel.client.machine.new_tag(channel.number)
        await channel.send_and_wait(m.HandleFlow(self.number, tag, paused), tag, self.number)

    async def created(self) -> None:
        """Wait until the server has sent the name of a temporary destination."""
        while not self.name:
            await self.wait_for_news()

    def handle_created(self, name: str) -> None:
        """Process CREATED, which has the name of the temporary destination."""
        self.name = name
        self.wake()

    async def listed(self) -> m.HandleIndex:
        """Wait for the INDEX that a QUERY has requested. Return it."""
        while self._index is None:
            await self.wait_for_news()
        index, self._index = self._index, None
        return index

    def handle_index(self, index: m.HandleIndex) -> None:
        """Process INDEX, which lists the messages of a QUERY."""
        self._index = index
        self.wake()
