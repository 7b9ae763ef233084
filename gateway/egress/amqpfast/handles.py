"""The handles of the client: what they send, what they have heard, and who waits for what.

Whoever waits has an Awaited, which is told of the reply, or of the close that came instead of it. Deliveries
wait in their handle until they are asked for; the server sends no more than the prefetch window of them.
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
from gateway.protocols.amqpfast.sending import Producer, Transfer
from gateway.protocols.amqpfast.spec import ReplyCode, Scope

PLAIN_HEAD: Final = encode_head_properties(Head())
WRITE_OCTETS_MAX: Final = 1_048_576  # of an upload, until the network has taken them

ARRIVED_OCTETS_HIGH: Final = 1_048_576  # of a stream: then the connection is not read until half is taken

Progress = Callable[[int, int], None]


class Refused(LinkError):
    """The server refused something by closing a handle, a channel or the connection (`scope`), or in reply to
    a BROWSE."""

    def __init__(self, code: int, text: str, scope: Scope) -> None:
        super().__init__(f"{text} ({code})" if text else f"refused with code {code}")
        self.code = code
        self.text = text
        self.scope = scope


class Delivery(NamedTuple):
    """A message that came. `number` is the server's on its channel; what BROWSE has shown has its id instead.
    `awaits_ack` is False for what BROWSE has shown, a peer has sent, or came by an unreliable CONSUME.

    The body of a message that is larger than the channel's `memory_octets_max` is in `file`, which is open
    for reading and goes when it is closed; the message's own body is then empty.
    """

    number: int
    redelivered: bool
    message: Message
    file: IO[bytes] | None = None
    awaits_ack: bool = True


class Awaited:
    """One reply, or several, that somebody waits for."""

    __slots__ = ("_done", "_failure", "_left", "handle")

    def __init__(self, handle: int, count: int = 1) -> None:
        self.handle = handle
        self._left = count
        self._failure: LinkError | None = None
        self._done = trio.Event()

    def came(self, failure: LinkError | None = None) -> None:
        """A reply, or what came instead of all that are left."""
        self._left -= 1
        self._failure = self._failure or failure
        if not self._left or failure is not None:
            self._done.set()

    async def wait(self) -> None:
        """Until all have come. Raises what came instead."""
        await self._done.wait()
        if self._failure is not None:
            raise self._failure


class Carrier(Protocol):
    """The client's connection, as its handles see it."""

    machine: ClientConnection

    def check(self) -> None:
        """Raises what has ended it."""

    def flush(self) -> None:
        """Write what has been encoded."""

    async def drained(self) -> None:
        """Wait until the network has taken what was written."""

    def hold(self) -> None:
        """Stop reading."""

    def release(self) -> None:
        """Undo one `hold`."""


class Channel(Protocol):
    """The channel of a handle, as that sees it."""

    number: int
    restartable: bool

    @property
    def client(self) -> Carrier:
        """Its connection."""

    def await_tags(self, handle: int, tags: Sequence[int]) -> Awaited:
        """What waits for the replies to all of these."""

    async def say(self, command: m.Command, tag: int, handle: int = ...) -> None:
        """Say something and wait for its reply."""

    def close_handle(self, number: int) -> None:
        """From our side."""

    async def aclose(self) -> None:
        """CHANNEL CLOSE."""


class Handle:
    """An open handle. Its deliveries come one after the other with `async for`, which ends when it is closed
    from here."""

    def __init__(self, channel: Channel, number: int, service: str) -> None:
        self.number = number
        self.service = service
        self.failure: LinkError | None = None
        self._channel = channel
        self._came: deque[Delivery] = deque()
        self._more = trio.Event()
        self._ended = False

    def check(self) -> None:
        """Raises what has closed it."""
        if self.failure is not None:
            raise self.failure

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        """The next delivery. Raises Refused or Lost when no more can come."""
        while not self._came:
            if self._ended:
                raise StopAsyncIteration
            await self.news()
        return self._came.popleft()

    def taken(self) -> Delivery | None:
        """The next delivery, if it is here already."""
        return self._came.popleft() if self._came else None

    async def news(self) -> None:
        """Wait until something has been heard. Raises what has closed it."""
        self.check()
        await self._more.wait()

    async def aclose(self) -> None:
        """HANDLE CLOSE. What was delivered and not acknowledged stays so until its channel is closed."""
        self._ended = True
        self._channel.close_handle(self.number)
        self.wake()

    # For the channel.

    def add(self, delivery: Delivery) -> None:
        """A delivery has come."""
        self._came.append(delivery)
        self.wake()

    def wake(self) -> None:
        """Something was heard."""
        self._more.set()
        self._more = trio.Event()

    def closed(self, failure: LinkError) -> None:
        """The server has closed it, or more than it."""
        self.failure = self.failure or failure
        self.wake()


class ClientSender(Handle):
    """Sends to one destination. The answers of a peer service are its deliveries, which want no ack."""

    def __init__(self, channel: Channel, number: int, service: str, name: bytes) -> None:
        super().__init__(channel, number, service)
        self._name = name
        self._producer = Producer(channel.client.machine, number, confirm=True)
        self.resumed_at = 0  # octets of the last upload that the server had from an earlier attempt
        self._held: list[int] = []  # of READY

    async def send(self, body: bytes, head: bytes = PLAIN_HEAD) -> None:
        """Send one message; returns when the server has taken it. Raises Refused or Lost."""
        await self.send_many([body], head)

    async def send_many(self, bodies: Sequence[bytes], head: bytes = PLAIN_HEAD) -> None:
        """Send messages with the same head, without waiting in between; returns when all have been taken."""
        self.check()
        if not bodies:
            return
        channel = self._channel
        tags = self._producer.send_many([(self._name, head, body) for body in bodies])
        if -1 in tags:
            raise Refused(
                ReplyCode.FRAMING_ERROR, "the head does not fit the server's frame-max", Scope.HANDLE
            )
        awaited = channel.await_tags(self.number, tags)
        channel.client.flush()
        await awaited.wait()

    async def upload(
        self, source: Path | bytes, head: bytes = PLAIN_HEAD, *, progress: Progress | None = None
    ) -> None:
        """Send a file, or octets, of any size, a fragment at a time; returns when the server has them all.

        `progress` is told of the octets that are there and of all. On a restartable channel an upload that
        was broken off goes on where it was, given the same head, body and client-name; a server that has no
        such channels raises Refused 503 or 540, and can be sent to over another one.
        """
        self.check()
        channel = self._channel
        if isinstance(source, bytes):
            octets = source
            digest = content_hash(octets) if channel.restartable else b""
            await self._upload(head, len(octets), lambda at, size: octets[at : at + size], digest, progress)
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
        channel = self._channel
        client = channel.client
        upload = Upload(
            client.machine, channel.number, self.number, head, size, read, name=self._name, digest=digest
        )
        upload.begin(restartable=channel.restartable)
        if channel.restartable:
            self._held.clear()
            client.flush()
            while not self._held:
                await self.news()
            upload.ready(self._held[0])
            self.resumed_at = upload.resumed_at
        while upload.writable:
            octets = 0
            while upload.writable and octets < WRITE_OCTETS_MAX:
                octets += upload.write()
            if upload.tag:
                awaited = channel.await_tags(self.number, [upload.tag])
            await client.drained()
            self.check()
            if progress is not None:
                progress(upload.at, size)
        self.check()
        await awaited.wait()

    def heard_ready(self, held: int) -> None:
        """READY."""
        self._held.append(held)
        self.wake()


class StreamHandle(Handle):
    """What has come of a stream."""

    def __init__(self, channel: Channel, number: int) -> None:
        super().__init__(channel, number, "peer")
        self._arrived = bytearray()
        self._holding = False

    def heard_octets(self, octets: bytes | memoryview) -> None:
        """A fragment has come."""
        self._arrived += octets
        if len(self._arrived) > ARRIVED_OCTETS_HIGH and not (self._holding or self._ended):
            self._holding = True
            self._channel.client.hold()
        self.wake()

    async def take(self, most: int | None) -> bytes:
        """What has come, `most` octets of it; b"" at the end of the stream."""
        while not self._arrived:
            self.check_ended()
            if isinstance(self.failure, Refused) and self.failure.code < ReplyCode.MESSAGE_NOT_FOUND:
                return b""
            await self.news()
        octets = bytes(self._arrived[:most])
        del self._arrived[:most]
        if len(self._arrived) <= ARRIVED_OCTETS_HIGH // 2:
            self._let_go()
        return octets

    def check_ended(self) -> None:
        """Raises trio.ClosedResourceError when it was closed from here."""
        if self._ended:
            raise trio.ClosedResourceError

    async def aclose(self) -> None:
        """The end of the stream, and of its channel."""
        self._let_go()
        if not self._ended:
            await super().aclose()
            await self._channel.aclose()

    def _let_go(self) -> None:
        if self._holding:
            self._holding = False
            self._channel.client.release()


class PeerStream(trio.abc.Stream):
    """Octets to and from a peer service, as long as both sides like (3.5.3.1); a stream as Trio has them.

    It has a channel of its own. Who does not take what comes holds up everything on the connection. Refused
    says why the server has ended it, Lost that the connection is gone.
    """

    def __init__(self, channel: Channel, handle: StreamHandle, head: bytes) -> None:
        """Raises LocalProtocolError when the head does not fit a fragment."""
        self._client = channel.client
        self._handle = handle
        self._transfer = Transfer(channel.client.machine, handle.number, head, 0, streaming=True)
        self._sending = trio.StrictFIFOLock()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when the network has taken all of it."""
        octets = memoryview(data)
        async with self._sending:
            while True:
                self._handle.check_ended()
                self._handle.check()
                size = min(self._transfer.room, len(octets))
                self._transfer.write(bytes(octets[:size]))
                await self._client.drained()
                octets = octets[size:]
                if not octets:
                    return

    async def wait_send_all_might_not_block(self) -> None:
        """Until what was sent before has gone."""
        await self._client.drained()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """What has come; b"" when the peer has ended the stream."""
        return await self._handle.take(max_bytes)

    async def aclose(self) -> None:
        """The end of the stream, and of its channel."""
        await self._handle.aclose()


class Consumer(Handle):
    """What is delivered to a CONSUME, or with `browses` to a BROWSE. `name` is that of a temporary
    destination."""

    def __init__(self, channel: Channel, number: int, service: str, *, browses: bool = False) -> None:
        super().__init__(channel, number, service)
        self.name = ""
        self.browses = browses
        self.unreliable = False
        self._index: m.HandleIndex | None = None

    async def pause(self, paused: bool) -> None:
        """HANDLE FLOW: nothing more comes, or all goes on; returns when the server has said so."""
        channel = self._channel
        tag = channel.client.machine.new_tag(channel.number)
        await channel.say(m.HandleFlow(self.number, tag, paused), tag, self.number)

    async def created(self) -> None:
        """Wait for the name of a temporary destination."""
        while not self.name:
            await self.news()

    def heard_created(self, name: str) -> None:
        """CREATED."""
        self.name = name
        self.wake()

    async def listed(self) -> m.HandleIndex:
        """The answer to a QUERY."""
        while self._index is None:
            await self.news()
        index, self._index = self._index, None
        return index

    def heard_index(self, index: m.HandleIndex) -> None:
        """INDEX."""
        self._index = index
        self.wake()
