"""AMQP/Fast client for programs on Trio.

  from gateway.egress.amqpfast.client import connect, head_of

  async with connect("amqpfast://guest:guest@localhost:3018/", client_name="billing") as client:
      channel = await client.channel()
      orders = await channel.sender("queue", "orders")
      await orders.send(b"one", head_of(persistent=True, headers={"customer": "7"}))
      await orders.upload(Path("scan.tiff"), progress=lambda done, size: print(done, size))
      async for delivery in await channel.consume("queue", "orders", prefetch=10):
          print(delivery.message.body)
          await channel.ack(delivery)

`send` returns when the server has accepted the message. A refusal raises RefusedByServer; its `code` gives
the reason and its `scope` says what is closed now. A lost connection raises ConnectionLost and is not
reopened automatically.

The client uses the same code as the gateway's links: the protocol machine, names and numbers, uploads. One
task reads, one writes, one sends heartbeats; several tasks of the program may share a client.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from gateway import clock
from gateway.egress.amqpfast.channel import OPEN_TAG, ClientChannel
from gateway.egress.amqpfast.handles import PLAIN_HEAD, FastDelivery, PeerStream, RefusedByServer
from gateway.egress.amqpfast.login import client_machine
from gateway.egress.connect_errors import GARBLED, LOOK_BYTES, explain_end, reason
from gateway.errors import LinkError, LocalProtocolError
from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqpfast.codec import Head, encode_head_properties
from gateway.protocols.amqpfast.commands import HandleCreated, HandleIndex
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.amqpfast.events import (
    NO_HANDLE,
    Challenged,
    ChannelClosed,
    Closed,
    CommandReceived,
    Event,
    Fragment,
    HandleClosed,
    Notifies,
    Opened,
    Prepared,
    Ready,
    Released,
    Replies,
)
from gateway.protocols.amqpfast.spec import BODY_SIZE_MAX, FRAME_MAX, PRIORITY_MAX, Scope
from gateway.settings.endpoints import LinkUrl, address_of, parse_url

__all__ = [
    "ClientChannel",
    "ConnectionLost",
    "FastDelivery",
    "FastLinkClient",
    "PeerStream",
    "RefusedByServer",
    "ServerUnreachable",
    "connect",
    "head_of",
]

READ_BYTES: Final = 65_536
TICK_SECS: Final = 1.0
FAREWELL_SECS: Final = 5.0  # how long the server may take to confirm a close


class ConnectionLost(LinkError):
    """Error for a lost connection."""


class ServerUnreachable(ConnectionLost):
    """Error for a failure to connect: no server responded, or a server of another protocol."""


def head_of(
    *,
    persistent: bool = False,
    priority: int = 0,
    expiration: int = 0,
    mime_type: str = "",
    encoding: str = "",
    identifier: str = "",
    headers: Mapping[str, str | int] | None = None,
) -> bytes:
    """Return the encoded properties of a message, which can be used for many messages.

    `priority` is 0 to 9; `expiration` is in UTC seconds, 0 means never. Raises LocalProtocolError if a value
    does not fit.
    """
    if not 0 <= priority <= PRIORITY_MAX:
        raise LocalProtocolError(f"priority: 0 to {PRIORITY_MAX}, not {priority}")
    stated = tuple(
        (name, string(value) if isinstance(value, str) else Value(ValueType.INT32, value))
        for name, value in (headers or {}).items()
    )
    return encode_head_properties(
        Head(persistent, priority, expiration, mime_type, encoding, identifier, stated)
    )


@asynccontextmanager
async def connect(
    url: str | LinkUrl,
    *,
    client_name: str = "",
    ca_file: str | None = None,
    timeout_secs: float = 10.0,
    heartbeat_secs: int = 30,
    frame_max: int = FRAME_MAX,
) -> AsyncIterator[FastLinkClient]:
    """Open a connection, and close it with the protocol's handshake at the end of the block.

    The server stores durable subscriptions, temporary destinations and interrupted uploads under
    `client_name`; only one client may use the name at a time. Raises LinkError if the server cannot be
    reached or refuses the client, and ValueError for a URL of another protocol.
    """
    target = parse_url(url) if isinstance(url, str) else url
    if target.protocol != AMQPFAST.name:
        raise ValueError("the URL of an AMQP/Fast server begins with amqpfast:// or amqpfasts://")
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        client = FastLinkClient(target, client_name, heartbeat_secs, frame_max)
        try:
            await client.start(nursery, ca_file, timeout_secs)
            yield client
        except Exception as error:
            failure = error  # raised again outside the nursery, which would wrap it
        finally:
            with trio.move_on_after(FAREWELL_SECS, shield=True):
                await client.aclose()
    if failure is not None:
        raise failure


class FastLinkClient:
    """Open connection of a program to an AMQP/Fast server, created by `connect`."""

    def __init__(self, target: LinkUrl, client_name: str, heartbeat_secs: int, frame_max: int) -> None:
        self.machine = client_machine(
            target,
            client_name,
            frame_max=frame_max,
            heartbeat=heartbeat_secs,
            message_bytes_max=BODY_SIZE_MAX,
        )
        self._target = target
        self._place = address_of(target)
        self._first = b""
        self._stream: trio.abc.Stream | None = None
        self._opened = trio.Event()
        self._ended = trio.Event()
        self._failure: LinkError | None = None
        self._to_write = trio.Event()
        self._written = trio.Event()
        self._holds = 0
        self._leaving = False
        self._released = trio.Event()
        self._background: list[trio.CancelScope] = []
        self._channels: dict[int, ClientChannel] = {}
        self._by_handle: dict[int, ClientChannel] = {}

    async def start(self, nursery: trio.Nursery, ca_file: str | None, timeout_secs: float) -> None:
        """Connect, negotiate, and start the background tasks. Called by `connect`."""
        try:
            with trio.fail_after(timeout_secs):
                stream = self._stream = await self._reach(ca_file)
                for task in (self._read, self._write, self._tick):
                    nursery.start_soon(self._run, task, stream)
                self.flush()
                await self._opened.wait()
        except trio.TooSlowError:
            self._end(self._loss_error(f"no response within {timeout_secs:g} s"))
        self.check()

    async def _reach(self, ca_file: str | None) -> trio.abc.Stream:
        """Connect to the server, with TLS if the URL requires it. Raises Unreached.

        `ca_file` has the certificate authorities to trust; None trusts those of the system.
        """
        target = self._target
        try:
            opened = await trio.open_tcp_stream(target.host, target.port)
            if not target.tls:
                return opened
            context = ssl.create_default_context(cafile=ca_file)
            secured = trio.SSLStream(opened, context, server_hostname=target.host)
            try:
                await secured.do_handshake()
            except BaseException:
                await trio.aclose_forcefully(opened)
                raise
        except (OSError, trio.BrokenResourceError) as error:
            raise ServerUnreachable(f"{self._place}: {reason(error)}") from error
        return secured

    def _loss_error(self, why: str) -> ConnectionLost:
        if self._opened.is_set():
            return ConnectionLost(f"{self._place}: {why}")
        return ServerUnreachable(f"{self._place}: {explain_end(self._target.protocol, self._first, why)}")

    async def _run(self, task: Callable[[trio.abc.Stream], Awaitable[None]], stream: trio.abc.Stream) -> None:
        """Run a background task until `aclose` cancels it.

        The task is shielded from a cancellation of the program's block, so that the closing handshake can
        still be sent.
        """
        with trio.CancelScope(shield=True) as scope:
            self._background.append(scope)
            await task(stream)

    async def aclose(self) -> None:
        """Close the connection and wait for the reply.

        The server replies after it has read everything that was sent earlier.
        """
        stream = self._stream
        if stream is None:
            return
        try:
            self._leaving = True
            self._released.set()
            if self._failure is None:
                self.machine.close()
                self.flush()
                await self._ended.wait()
        finally:
            for scope in self._background:
                scope.cancel()
            await trio.aclose_forcefully(stream)

    async def channel(self, *, transacted: bool = False, restartable: bool = False) -> ClientChannel:
        """Open a new channel.

        With `transacted`, sent messages and acknowledgements take effect at `commit`. With `restartable`, an
        interrupted upload continues where it stopped.
        """
        self.check()
        number = self.machine.open_channel(transacted=transacted, restartable=restartable)
        channel = self._channels[number] = ClientChannel(self, number, restartable=restartable)
        awaited = channel.await_tags(NO_HANDLE, [OPEN_TAG])
        self.flush()
        await awaited.wait()
        return channel

    async def stream(self, peer: str, head: bytes = PLAIN_HEAD) -> PeerStream:
        """Open a byte stream to a peer service, on a channel of its own.

        `head` is the encoded content header that describes the bytes (see `head_of`).
        """
        channel = await self.channel()
        return channel.stream(peer, head)

    # Interface for channels.

    def check(self) -> None:
        """Raise the error that ended the connection, if any."""
        if self._failure is not None:
            raise self._failure

    def flush(self) -> None:
        """Send the encoded output soon: wake the background task that writes."""
        self._to_write.set()

    async def drain(self) -> None:
        """Wait until all encoded output has been accepted by the network."""
        self._written = trio.Event()
        self.flush()
        await self._written.wait()
        self.check()

    def hold(self) -> None:
        """Stop reading until `release` has been called as often as `hold`."""
        self._holds += 1

    def release(self) -> None:
        """Undo one `hold`."""
        self._holds -= 1
        if not self._holds:
            self._released.set()
            self._released = trio.Event()

    def adopt(self, handle: int, channel: ClientChannel) -> None:
        """Pass events of the handle to the channel from now on."""
        self._by_handle[handle] = channel

    def forget(self, handles: Iterable[int]) -> None:
        """Stop passing events of these handles to their channels."""
        for handle in handles:
            self._by_handle.pop(handle, None)

    # Background tasks.

    async def _read(self, stream: trio.abc.Stream) -> None:
        try:
            while data := await stream.receive_some(READ_BYTES):
                if not self._opened.is_set():
                    self._first += data[:LOOK_BYTES]
                for event in self.machine.receive_data(bytes(data), clock.now()):
                    self._event(event)
                self.flush()
                if self.machine.closed:
                    break
                while self._holds and not self._leaving:
                    await self._released.wait()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._end(self._loss_error(reason(error)))
        else:
            self._end(self._loss_error("the server closed the connection"))

    async def _write(self, stream: trio.abc.Stream) -> None:
        while True:
            await self._to_write.wait()
            self._to_write = trio.Event()
            data = self.machine.data_to_send()
            if data:
                try:
                    await stream.send_all(data)
                except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                    self._end(self._loss_error(reason(error)))
            if not self._to_write.is_set():
                self._written.set()

    async def _tick(self, stream: trio.abc.Stream) -> None:
        while True:
            await trio.sleep(TICK_SECS)
            now = clock.now()
            self.machine.tick(now)
            self.flush()
            if self.machine.timed_out(now):
                self._end(self._loss_error("the server is silent"))
                await trio.aclose_forcefully(stream)
                return

    def _end(self, failure: LinkError) -> None:
        if self._failure is None:
            self._failure = failure
        for channel in list(self._channels.values()):
            channel.end(self._failure)
        self._channels.clear()
        self._by_handle.clear()
        for event in (self._opened, self._ended, self._written):
            event.set()

    # Handlers of received events; HEARD maps event types to them.

    def _event(self, event: Event) -> None:
        hear = HEARD.get(type(event))
        if hear is not None:
            hear(self, event)

    def _replies(self, event: Replies) -> None:
        for number, _, tag, code, text in event.rows:
            if number in self._channels:
                self._channels[number].handle_reply(tag, code, text)

    def _notifies(self, event: Notifies) -> None:
        for row in event.rows:
            if row[0] in self._by_handle:
                self._by_handle[row[0]].handle_message(row)

    def _fragment(self, event: Fragment) -> None:
        if event.handle in self._by_handle:
            self._by_handle[event.handle].handle_fragment(event)

    def _ready(self, event: Ready) -> None:
        if event.handle in self._by_handle:
            self._by_handle[event.handle].handle_ready(event.handle, event.message_size)

    def _command(self, event: CommandReceived) -> None:
        command = event.command
        if not isinstance(command, HandleIndex | HandleCreated):
            return
        channel = self._by_handle.get(command.handle_id)
        if channel is None:
            return
        if isinstance(command, HandleIndex):
            channel.handle_index(command)
        else:
            channel.handle_created(command)

    def _handle_released(self, event: Released) -> None:
        if event.handle in self._by_handle:
            self._by_handle[event.handle].forget_handle(event.handle)

    def _handle_prepare(self, event: Prepared) -> None:
        if event.handle in self._by_handle:
            self._by_handle[event.handle].handle_prepare(event)

    def _handle_closed(self, event: HandleClosed) -> None:
        found = self._by_handle.pop(event.handle, None)
        if found is not None:
            found.handle_closed(event.handle, RefusedByServer(event.reply_code, event.text, Scope.HANDLE))

    def _channel_closed(self, event: ChannelClosed) -> None:
        found = self._channels.pop(event.channel, None)
        if found is not None:
            found.end(RefusedByServer(event.reply_code, event.text, Scope.CHANNEL))

    def _handle_open(self, event: Opened) -> None:
        self._opened.set()

    def _challenged(self, event: Challenged) -> None:
        self._end(
            ConnectionLost(
                f"{self._place}: the server requires another authentication than name and password"
            )
        )

    def _closed(self, event: Closed) -> None:
        refused = RefusedByServer(event.reply_code, event.text, Scope.CONNECTION)
        strange = not event.by_peer and not self._opened.is_set()
        self._end(self._loss_error(f"{GARBLED}: {refused}") if strange else refused)


HEARD: Final[dict[type[Event], Callable[[FastLinkClient, Any], None]]] = {
    Replies: FastLinkClient._replies,
    Notifies: FastLinkClient._notifies,
    Fragment: FastLinkClient._fragment,
    Ready: FastLinkClient._ready,
    CommandReceived: FastLinkClient._command,
    Released: FastLinkClient._handle_released,
    Prepared: FastLinkClient._handle_prepare,
    HandleClosed: FastLinkClient._handle_closed,
    ChannelClosed: FastLinkClient._channel_closed,
    Opened: FastLinkClient._handle_open,
    Challenged: FastLinkClient._challenged,
    Closed: FastLinkClient._closed,
}
