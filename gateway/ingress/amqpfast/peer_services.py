"""Peer services: services of the gateway that respond on the handle on which they are called.

`echo` returns each message and each stream. `tcp` is a tunnel: a handle that streams to it gets its own
connection to the configured address. The bytes of that connection return as a stream until either side ends.
Peer messages use message numbers, but are never acknowledged (3.5.2.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import trio

from gateway.broker.amqpfast.virtual_host import FastRefused
from gateway.errors import LocalProtocolError
from gateway.ingress.amqpfast.channel import FastHandle, PeerSession, new_notifier
from gateway.ingress.amqpfast.large_deliveries import LARGE_BYTES, LargeDelivery
from gateway.protocols.amqpfast.events import Fragment
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.spec import DELIVERED, ReplyCode
from gateway.protocols.amqpfast.translate import fit_priority
from gateway.settings.amqpfast import PeerService

CONNECT_SECS_MAX: Final = 10.0
READ_BYTES: Final = 65_536
UNSENT_BYTES_HIGH: Final = 262_144  # bytes to the address above which the client is not read, down to half
CONGESTED_SECS: Final = 0.05  # between two checks if the client reads again


def begin_session(peer: PeerService, handle: FastHandle, name: str) -> PeerSession:
    """Return a new session between a handle and the peer service `peer`, which has the name `name`."""
    return TunnelSession(peer, handle, name) if peer.kind == "tcp" else EchoSession(handle, name)


class PeerReplyStream:
    """Stream of bytes from a peer service to the client, on one handle."""

    def __init__(self, handle: FastHandle, name: str, head: bytes) -> None:
        """Begin the stream with its content header (`head`); `name` is the name of the peer service.

        Raises FastRefused if the channel is sending another stream or large message.
        """
        channel = handle.channel
        try:
            self._transfer = Transfer(
                channel.connection.machine,
                handle.number,
                head,
                0,
                name=name.encode(),
                number=channel.take_numbers(1),
                bits=DELIVERED,
                streaming=True,
            )
        except LocalProtocolError as error:
            raise FastRefused(ReplyCode.COMMAND_NOT_VALID, str(error)) from None
        channel.streamed = True
        self._channel = channel
        self._connection = channel.connection
        self._buffer: list[bytes | memoryview] = []
        self.buffered_bytes = 0  # waiting for a reply on the channel, which nothing may precede (3.2.11)

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes to the stream, in fragments of the client's frame size.

        While a reply is due on the channel, the bytes wait.
        """
        if not self._buffer and not self._connection.machine.has_due_reply(self._channel.number):
            self._write(data)
            return
        if not self._buffer:
            self._channel.streams.append(self)
        self._buffer.append(data)
        self.buffered_bytes += len(data)
        self._connection.await_replies(self._channel)

    def resume(self) -> None:
        """Write the waiting bytes, because no reply is due on the channel any more."""
        pieces, self._buffer = self._buffer, []
        self.buffered_bytes = 0
        for data in pieces:
            self._write(data)

    def _write(self, data: bytes | memoryview) -> None:
        at = 0
        while at < len(data) or not data:
            piece = data[at : at + self._transfer.capacity]
            self._transfer.write(piece)
            at += len(piece)
            if not data:
                break
        self._connection.stream.queued += len(data)
        self._connection.stream.mark_for_flush()


class EchoSession:
    """Peer session that sends everything it receives back to the client."""

    def __init__(self, handle: FastHandle, name: str) -> None:
        self._handle = handle
        self._name = name
        self._notifier = new_notifier(handle)
        self._stream: PeerReplyStream | None = None

    def message(self, head: bytes, body: bytes) -> None:
        """Send a whole message back to the client; `head` is its content header.

        Raises FastRefused if an outgoing stream blocks the channel.
        """
        if self._notifier is None:
            return  # the handle is closed
        try:
            if not self._notifier.usable:
                return
        except LocalProtocolError as error:
            raise FastRefused(ReplyCode.COMMAND_NOT_VALID, str(error)) from None
        head = fit_priority(head)
        channel = self._handle.channel
        waits = self._notifier.has_due_reply  # includes the reply to this message
        if waits or len(body) > LARGE_BYTES or not channel.large_deliveries.idle:
            number, name = channel.take_numbers(1), self._name.encode()
            channel.large_deliveries.queue_message(
                LargeDelivery(self._handle, number, name, head, body, lambda sent: None)
            )
            channel.connection.delivered(channel, 1, 0)
            return
        self._notifier.notify(channel.take_numbers(1), False, self._name.encode(), head, body)
        channel.connection.delivered(channel, 1, len(body))

    def fragment(self, fragment: Fragment) -> None:
        """Send a fragment of a stream back to the client."""
        if self._stream is None:
            self._stream = PeerReplyStream(self._handle, self._name, fit_priority(fragment.head))
        self._stream.write(fragment.data)

    def end(self) -> None:
        """Do nothing: no resources are in use."""


class TunnelSession:
    """Peer session that forwards bytes between a handle and the service's TCP address, in both directions."""

    def __init__(self, peer: PeerService, handle: FastHandle, name: str) -> None:
        self._peer = peer
        self._handle = handle
        self._name = name
        self._returning: PeerReplyStream | None = None
        self._unsent: deque[bytes | memoryview] = deque()
        self._byte_count = 0
        self._release: Callable[[], None] | None = None
        self._more = trio.Event()
        self._running = trio.CancelScope()
        self._ended = False

    def message(self, head: bytes, body: bytes) -> None:
        """Raise FastRefused: a tunnel accepts streams only."""
        raise FastRefused(ReplyCode.COMMAND_NOT_VALID, f"peer {self._name!r} accepts only streams")

    def fragment(self, fragment: Fragment) -> None:
        """Queue the fragment's bytes for the TCP address. The first fragment also opens the connection.

        The client is not read while too many bytes wait.
        """
        if self._returning is None:
            self._returning = PeerReplyStream(self._handle, self._name, fragment.head)
            self._returning.write(b"")  # the content header: from now on the handle streams both ways
            self._handle.channel.connection.ingress.start(self._run)
        if not fragment.data:
            return
        self._unsent.append(fragment.data)
        self._byte_count += len(fragment.data)
        self._more.set()
        if self._byte_count > UNSENT_BYTES_HIGH and self._release is None:
            stream = self._handle.channel.connection.stream
            stream.hold()
            self._release = stream.release

    def end(self) -> None:
        """Close the TCP connection, because the handle is closed."""
        self._ended = True
        self._running.cancel()
        self._resume_reading()

    def _resume_reading(self) -> None:
        if self._release is not None:
            release, self._release = self._release, None
            release()

    async def _run(self) -> None:
        """Connect to the TCP address, and forward bytes in both directions until either side ends."""
        with self._running:
            try:
                with trio.fail_after(CONNECT_SECS_MAX):
                    stream = await trio.open_tcp_stream(self._peer.host, self._peer.port)
            except (OSError, trio.TooSlowError) as error:
                self._close(
                    ReplyCode.TEMPORARILY_FORBIDDEN, f"peer {self._name!r} cannot be reached: {error}"
                )
                return
            async with stream, trio.open_nursery() as nursery:
                nursery.start_soon(self._write, stream)
                try:
                    await self._read(stream)
                    self._close(ReplyCode.SUCCESS, "the peer has closed the connection")
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    self._close(ReplyCode.TEMPORARILY_FORBIDDEN, f"peer {self._name!r}: {error}")

    async def _read(self, stream: trio.SocketStream) -> None:
        """Forward bytes from the TCP connection to the client, as fast as the client reads them."""
        assert self._returning is not None
        connection = self._handle.channel.connection
        while data := await stream.receive_some(READ_BYTES):
            self._returning.write(data)
            connection.ingress.flush()
            while connection.stream.congested or self._returning.buffered_bytes > UNSENT_BYTES_HIGH:
                await trio.sleep(CONGESTED_SECS)
        while self._returning.buffered_bytes:
            await trio.sleep(CONGESTED_SECS)

    async def _write(self, stream: trio.SocketStream) -> None:
        """Forward the client's queued bytes to the TCP connection."""
        while True:
            while self._unsent:
                data = self._unsent.popleft()
                try:
                    await stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    self._close(ReplyCode.TEMPORARILY_FORBIDDEN, f"peer {self._name!r}: {error}")
                    return
                self._byte_count -= len(data)
                if self._byte_count <= UNSENT_BYTES_HIGH // 2:
                    self._resume_reading()
            self._more = trio.Event()
            await self._more.wait()

    def _close(self, code: ReplyCode, text: str) -> None:
        """Close the handle with this reply code and text, because the TCP connection has ended."""
        if not self._ended:
            connection = self._handle.channel.connection
            connection.close_handle(self._handle, code, text)  # which calls `end`
            connection.ingress.flush()
