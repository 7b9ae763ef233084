"""Channel of the client: opens handles, acknowledges, and passes on what the server sends."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import IO, Final, Protocol, TypeVar

from gateway.egress.amqpfast.deliveries import Unsettled
from gateway.egress.amqpfast.handles import (
    Carrier,
    ClientSender,
    ConsumerHandle,
    FastDelivery,
    OpenHandle,
    PeerStream,
    PendingReplies,
    RefusedByServer,
    StreamHandle,
)
from gateway.egress.amqpfast.login import open_for_sending, split_name
from gateway.egress.amqpfast.sources import is_prefix
from gateway.egress.amqpfast.upload import Digest
from gateway.errors import LinkError, RemoteProtocolError
from gateway.model.message import Message, Sender
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_message_list, read_content_hash
from gateway.protocols.amqpfast.dialect import SERVICES, fast_address
from gateway.protocols.amqpfast.events import NO_HANDLE, Fragment, NotifyRow, Prepared
from gateway.protocols.amqpfast.spec import (
    DELIVERED,
    NOTIFY_STREAMING,
    RECOVERY,
    REDELIVERED,
    ReplyCode,
    Scope,
)
from gateway.protocols.amqpfast.translate import NO_ESSENTIALS, essentials, head_properties

SERVER: Final = Sender("server")
OPEN_TAG: Final = 1  # of CHANNEL OPEN: the first tag of a channel
MEMORY_BYTES_MAX: Final = 16 * 1024 * 1024

Opened = TypeVar("Opened", ClientSender, ConsumerHandle, StreamHandle)


class ChannelConnection(Carrier, Protocol):
    """Interface of the client's connection that its channels use."""

    def adopt(self, handle: int, channel: ClientChannel) -> None:
        """Pass events of this handle to the channel from now on."""

    def forget(self, handles: Iterable[int]) -> None:
        """Stop passing events of these handles to their channels."""


class ClientChannel:
    """Channel of a client.

    A received body of more than `memory_bytes_max` bytes is delivered as a temporary file.
    """

    def __init__(self, client: ChannelConnection, number: int, *, restartable: bool) -> None:
        self.client = client
        self.number = number
        self.restartable = restartable
        self.memory_bytes_max = MEMORY_BYTES_MAX
        self.unsettled = Unsettled()
        self._awaited: dict[int, PendingReplies] = {}  # by tag
        self._handles: dict[int, OpenHandle] = {}
        self._failure: LinkError | None = None
        self._head = b""
        self._prepared: dict[int, Prepared] = {}  # large messages that were announced, by handle
        self._digest: Digest | None = None  # of the message being received, if its hash was announced
        self._spool: tempfile.SpooledTemporaryFile[bytes] | None = None

    # Opening of handles.

    async def sender(self, service: str, name: str) -> ClientSender:
        """Open a handle to send to the destination `name` of service `queue`, `topic` or `peer`."""
        self.check()
        number, own = open_for_sending(self.client.machine, self.number, service, name)
        return self._adopt(ClientSender(self, number, service, own))

    async def consume(
        self,
        service: str,
        name: str,
        *,
        prefetch: int = 100,
        identifier: str = "",
        selector: str = "",
        selector_type: str = "",
        no_local: bool = False,
        unreliable: bool = False,
    ) -> ConsumerHandle:
        """Consume a destination, or all whose names begin with `name` if it is empty or ends in a dot.

        `identifier` makes the subscription to a topic durable: it continues when the same client reconnects.
        With `unreliable` the server regards messages as acknowledged when it sends them, and `prefetch` has
        no effect.
        """
        begin, end = (name, "") if is_prefix(name) else split_name(service, name)
        consumer = self._open(service, begin)
        consumer.unreliable = unreliable
        tag = self.client.machine.new_tag(self.number)
        command = m.HandleConsume(
            consumer.number,
            tag,
            prefetch,
            no_local,
            unreliable,
            end,
            identifier,
            selector.encode(),
            selector_type,
        )
        await self.send_and_wait(command, tag, consumer.number)
        return consumer

    async def temporary(
        self, service: str = "queue", name: str = "", *, prefetch: int = 100
    ) -> ConsumerHandle:
        """Create a destination that is deleted with this channel, and consume it.

        Others send to its `name`, for example when they reply to a message that contains it. `name` may be
        chosen by the client; an existing queue of that name is emptied.
        """
        self.check()
        command = m.HandleOpen(
            self.number, service_type=SERVICES[service], consumer=True, temporary=True, dest_name=name
        )
        number = self.client.machine.open_handle(command, confirm=False)
        consumer = self._adopt(ConsumerHandle(self, number, service))
        self.client.flush()
        await consumer.created()
        tag = self.client.machine.new_tag(self.number)
        await self.send_and_wait(m.HandleConsume(number, tag, prefetch), tag, number)
        return consumer

    def stream(self, peer: str, head: bytes) -> PeerStream:
        """Open a byte stream to a peer service on this channel; see FastLinkClient.stream."""
        command = m.HandleOpen(self.number, service_type=SERVICES["peer"], dest_name=peer)
        number = self.client.machine.open_handle(command, confirm=False)
        return PeerStream(self, self._adopt(StreamHandle(self, number)), head)

    async def browse(
        self, service: str, name: str, *, selector: str = "", selector_type: str = ""
    ) -> AsyncGenerator[FastDelivery, None]:
        """Iterate over the messages at the destination `name` without consuming them.

        Messages that are consumed in the meantime are skipped.
        """
        begin, end = split_name(service, name)
        browser = self._open(service, begin, browses=True)
        machine, above = self.client.machine, 0
        while True:
            machine.send(m.HandleQuery(browser.number, above, end, selector.encode(), selector_type))
            self.client.flush()
            index = await browser.listed()
            for first, last in decode_message_list(index.message_list):
                for number in range(first, last + 1):
                    tag = machine.new_tag(self.number)
                    try:
                        await self.send_and_wait(
                            m.HandleBrowse(browser.number, tag, number), tag, browser.number
                        )
                    except RefusedByServer as refused:
                        if refused.code != ReplyCode.MESSAGE_NOT_FOUND or browser.failure is not None:
                            raise
                        continue
                    found = browser.pop_delivery()
                    if found is not None:
                        yield found
            above = index.message_number
            if not above:
                break
        await browser.aclose()

    def _open(self, service: str, name: str, *, browses: bool = False) -> ConsumerHandle:
        self.check()
        command = m.HandleOpen(
            self.number,
            service_type=SERVICES[service],
            consumer=not browses,
            browser=browses,
            dest_name=name,
        )
        number = self.client.machine.open_handle(command, confirm=False)
        return self._adopt(ConsumerHandle(self, number, service, browses=browses))

    # Acknowledgements and transactions.

    async def ack(self, delivery: FastDelivery) -> None:
        """Acknowledge a delivery, without waiting for a reply.

        The acknowledgement is sent when all earlier deliveries of the channel are acknowledged, too. Nothing
        is sent for a delivery whose `awaits_ack` is False.
        """
        if not delivery.awaits_ack:
            return
        last = self.unsettled.settle((delivery.number,))
        if last:
            self.client.machine.ack(self.number, last)
            self.client.flush()

    async def unget(self, consumer: ConsumerHandle, delivery: FastDelivery) -> None:
        """Requeue a delivered message at the server, for other consumers; wait for the reply."""
        tag = self.client.machine.new_tag(self.number)
        await self.send_and_wait(m.HandleUnget(consumer.number, tag, delivery.number), tag, consumer.number)
        await self.ack(delivery)

    async def commit(self) -> None:
        """Commit the messages and acknowledgements sent since the last commit; wait for the reply."""
        tag = self.client.machine.new_tag(self.number)
        await self.send_and_wait(m.ChannelCommit(self.number, tag), tag)

    async def rollback(self) -> None:
        """Drop the messages sent since the last commit; those received since then are redelivered."""
        tag = self.client.machine.new_tag(self.number)
        await self.send_and_wait(m.ChannelRollback(self.number, tag), tag)

    async def aclose(self) -> None:
        """Send CHANNEL CLOSE. Unacknowledged messages are requeued."""
        self.client.machine.close_channel(self.number)
        self.client.flush()

    # Interface for handles and the client.

    def check(self) -> None:
        """Raise the error that has closed the channel, if any."""
        self.client.check()
        if self._failure is not None:
            raise self._failure

    async def send_and_wait(self, command: m.Command, tag: int, handle: int = NO_HANDLE) -> None:
        """Send a command that has the tag `tag`, and wait for its reply.

        Raises RefusedByServer or ConnectionLost, or LocalProtocolError for a command that cannot be sent.
        """
        self.check()
        if not self.client.machine.send(command):
            found = self._handles.get(handle)
            raise (found and found.failure) or RefusedByServer(
                ReplyCode.HANDLE_NOT_READY, "the channel is closed", Scope.HANDLE
            )
        awaited = self.await_tags(handle, [tag])
        self.client.flush()
        await awaited.wait()

    def await_tags(self, handle: int, tags: Sequence[int]) -> PendingReplies:
        """Return an object whose `wait` returns when all commands with these tags have a reply."""
        awaited = PendingReplies(handle, len(tags))
        for tag in tags:
            self._awaited[tag] = awaited
        return awaited

    def close_handle(self, number: int) -> None:
        """Send HANDLE CLOSE for the handle with this number."""
        self.client.machine.close_handle(number)
        self.client.flush()

    def _adopt(self, handle: Opened) -> Opened:
        self._handles[handle.number] = handle
        self.client.adopt(handle.number, self)
        return handle

    def handle_reply(self, tag: int, code: int, text: str) -> None:
        """Process the server's reply to the command with this tag: complete or fail the wait for it."""
        awaited = self._awaited.pop(tag, None)
        if awaited is not None:
            failed = code >= ReplyCode.MESSAGE_NOT_FOUND
            awaited.count_reply(RefusedByServer(code, text, Scope.HANDLE) if failed else None)

    def handle_ready(self, handle: int, held_bytes: int) -> None:
        """Process READY: the server already has `held_bytes` of the handle's upload."""
        found = self._handles.get(handle)
        if isinstance(found, ClientSender):
            found.handle_ready(held_bytes)

    def handle_index(self, index: m.HandleIndex) -> None:
        """Process INDEX, which lists the messages of a QUERY, for its handle."""
        found = self._handles.get(index.handle_id)
        if isinstance(found, ConsumerHandle):
            found.handle_index(index)

    def handle_created(self, created: m.HandleCreated) -> None:
        """Process CREATED, which has the name of a temporary destination, for its handle."""
        found = self._handles.get(created.handle_id)
        if isinstance(found, ConsumerHandle):
            found.handle_created(created.dest_name)

    def handle_message(self, row: NotifyRow, file: IO[bytes] | None = None) -> None:
        """Pass a received message to its handle.

        `row` has the message as decoded; if its body is large, the body is in `file` instead.
        """
        handle, number, bits, head, body, name = row
        found = self._handles.get(handle)
        is_browsed = not bits & DELIVERED
        if found is None or (is_browsed and not (isinstance(found, ConsumerHandle) and found.browses)):
            if file is not None:  # unwanted, or not to be processed (3.5.11)
                file.close()
            return
        properties = head_properties(head)
        try:
            parsed = essentials(properties)
        except RemoteProtocolError:
            parsed = NO_ESSENTIALS  # reading the properties raises the error again
        message = Message(
            fast_address(found.service, name.decode()),
            body,
            properties,
            int(parsed.durable),
            parsed.durable,
            parsed.retain,
            parsed.expires,
            parsed.hops,
            SERVER,
        )
        awaits_ack = isinstance(found, ConsumerHandle) and not (is_browsed or found.unreliable)
        if awaits_ack:
            self.unsettled.add(number)
        found.add(FastDelivery(number, bits & REDELIVERED != 0, message, file, awaits_ack))

    def handle_prepare(self, prepared: Prepared) -> None:
        """Process PREPARE, which announces a large message: request the whole body from the server."""
        self._prepared[prepared.handle] = prepared
        self.client.machine.ready(prepared.handle, 0)
        self.client.flush()

    def _begin_message(self, fragment: Fragment) -> None:
        self._head, self._digest = fragment.head, None
        prepared = self._prepared.pop(fragment.handle, None)
        if fragment.bits & RECOVERY and prepared is not None:  # the head arrived with PREPARE
            self._head = prepared.head
            if prepared.content_hash:
                self._digest = Digest(read_content_hash(prepared.content_hash))
        if self._spool is not None:
            self._spool.close()
        # The user of the delivery closes it.
        self._spool = tempfile.SpooledTemporaryFile(self.memory_bytes_max)  # noqa: SIM115

    def _refuse(self, handle: int, code: ReplyCode, text: str) -> None:
        """Close a handle because the server has violated the protocol on it.

        Tasks that wait for its deliveries get a RefusedByServer error with this code and text.
        """
        self.client.machine.close_handle(handle, code, text)
        self.client.flush()
        self.handle_closed(handle, RefusedByServer(code, text, Scope.HANDLE))

    def handle_fragment(self, fragment: Fragment) -> None:
        """Process a fragment of a message or stream. The last fragment of a message delivers the message."""
        if fragment.bits & NOTIFY_STREAMING:
            stream = self._handles.get(fragment.handle)
            if isinstance(stream, StreamHandle):
                stream.handle_bytes(fragment.data)
            return
        if fragment.first:
            self._begin_message(fragment)
        spool = self._spool
        assert spool is not None
        spool.write(fragment.data)
        if self._digest is not None:
            self._digest.update(fragment.data)
        if not fragment.last:
            return
        self._spool = None
        if self._digest is not None and not self._digest.matches:
            spool.close()
            text = "the body does not match the announced hash"
            self._refuse(fragment.handle, ReplyCode.MESSAGE_CONTENTS_INVALID, text)
            return
        spool.seek(0)
        file: IO[bytes] | None = spool
        body = b""
        if fragment.body_size <= self.memory_bytes_max:
            body, file = spool.read(), None
            spool.close()
        row = (fragment.handle, fragment.number, fragment.bits, self._head, body, fragment.dest_name)
        self.handle_message(row, file)

    def forget_handle(self, number: int) -> None:
        """Forget the handle with this number, whose close the server has confirmed."""
        self._handles.pop(number, None)
        self._prepared.pop(number, None)
        self.client.forget((number,))

    def handle_closed(self, number: int, failure: LinkError) -> None:
        """Process the server's close of the handle with this number; its tasks get the error `failure`."""
        found = self._handles.pop(number, None)
        self._prepared.pop(number, None)
        if found is not None:
            found.closed(failure)
        for tag in [tag for tag, one in self._awaited.items() if one.handle == number]:
            self._awaited.pop(tag).count_reply(failure)

    def end(self, failure: LinkError) -> None:
        """End the channel and its handles, because the channel or the connection was closed.

        All tasks that wait for them get the error `failure`.
        """
        self._failure = self._failure or failure
        if self._spool is not None:
            self._spool.close()
            self._spool = None
        handles, self._handles = self._handles, {}
        self.client.forget(handles)
        for handle in handles.values():
            handle.closed(failure)
        awaited, self._awaited = self._awaited, {}
        for one in awaited.values():
            one.count_reply(failure)
