"""Messages that arrive in fragments, and the restartable and out-of-band transfer of large ones.

Section 7 of the notes describes the protocol. Small messages are collected in memory; large ones are written
to the spool as they arrive. A message announced by PREPARE is always written, because the transfer may be
interrupted at any time, also by the end of this process, and resumed later. A message that must survive a
restart is published after its file is on disk. That, the check of its hash, and files in a shared folder are
processed in a thread; later input of the client waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

import trio

from gateway.broker.amqpfast.partials import Partial
from gateway.broker.amqpfast.virtual_host import FastRefused
from gateway.broker.spool import PIECE_BYTES, Spool, SpoolFile, SpoolFull
from gateway.errors import GatewayError, RemoteProtocolError
from gateway.ingress.amqpfast.channel import FastHandle, FastListenerClient
from gateway.ingress.amqpfast.ingress import FastIngress
from gateway.ingress.amqpfast.publisher import FastPublisher
from gateway.model.outcome import Outcome
from gateway.protocols.amqpfast.codec import (
    BODY_SIZE,
    decode_head_properties,
    find_head_end,
    read_content_hash,
)
from gateway.protocols.amqpfast.events import Fragment, Prepared
from gateway.protocols.amqpfast.spec import NOTIFY_STREAMING, OUT_OF_BAND, RECOVERY, ReplyCode

PART_BYTES_MIN: Final = 4_096  # smaller parts are joined on arrival
STREAMING: Final = NOTIFY_STREAMING  # events use this bit for either direction
T = TypeVar("T")
HEAD_BYTES_MAX: Final = 131_072  # bytes read for a content header: texts, and a table of 65 535 bytes


class TransferFault(GatewayError):
    """Error in the transfer of a message, which closes its handle or channel.

    Lack of resources and excessive size close the channel, other errors the handle.
    """

    def __init__(self, code: ReplyCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class IncomingTransfer:
    """Message that is arriving on a channel; its body is collected in `parts` or written to `file`."""

    __slots__ = (
        "_is_reserved",
        "body_size",
        "digest",
        "file",
        "handle",
        "head",
        "partial",
        "parts",
        "size",
        "spool",
    )

    def __init__(
        self,
        spool: Spool,
        handle: FastHandle,
        head: bytes,
        body_size: int,
        *,
        user: str,
        transfer: Partial | None = None,
        digest: bytes = b"",
    ) -> None:
        """Reserve memory or create a file for the body of `body_size` bytes. Raises SpoolFull.

        `head` is the encoded content header, `digest` the content-hash or b"". A new file counts toward the
        per-user limit of `user`. `transfer` is the restartable transfer that already has a file; None if
        there is none.
        """
        self.spool = spool
        self.handle = handle
        self.head = head
        self.body_size = body_size
        self.partial = transfer
        self.digest = digest
        self.size = 0
        self.parts: list[bytes | bytearray | memoryview] = []  # the body, or its unwritten part
        self.file: SpoolFile | None = None
        self._is_reserved = False  # True while the body has memory
        if transfer is not None:
            self.file = transfer.file
            self.size = transfer.file.size
        elif spool.reserve(body_size):
            self._is_reserved = True
        else:
            spool.check_room(body_size, user)
            self.file = spool.draft(user)

    def add(self, data: bytes | memoryview) -> None:
        """Append the next bytes of the body. If the body is in a file, `write` must be called later.

        A memoryview retains its whole read buffer, so small views are copied if the body remains in memory.
        """
        self.size += len(data)
        parts = self.parts
        if isinstance(data, memoryview):
            last = parts[-1] if parts else None
            beside = isinstance(last, memoryview) and last.obj is data.obj
            is_small_part = self.file is None and not beside and 2 * len(data) < len(data.obj)  # type: ignore[arg-type]
            parts.append(bytes(data) if is_small_part else data)
        elif len(data) >= PART_BYTES_MIN:
            parts.append(data)
        elif parts and isinstance(parts[-1], bytearray):
            parts[-1] += data
        else:
            parts.append(bytearray(data))

    def write(self) -> None:
        """Write the added parts to the file, if there is one. Raises SpoolFull."""
        if self.file is not None:
            parts, self.parts = self.parts, []
            self.file.write(*parts)

    def release(self) -> None:
        """Release the reserved memory of a complete or abandoned transfer. Repeated calls do nothing."""
        if self._is_reserved:
            self._is_reserved = False
            self.spool.release_reservation(self.body_size)

    def seal(self, sync: bool) -> bool:
        """Verify the file's hash and, with `sync`, synchronise the file to disk.

        The method blocks, so call it in a thread. Return False if the hash is wrong. Raises OSError.
        """
        assert self.file is not None
        if self.digest and self.file.digest() != self.digest:
            return False
        self.file.checked = self.digest
        if sync:
            self.file.sync()
        return True


class IncomingTransfers:
    """Messages that are arriving in fragments on one connection."""

    def __init__(
        self, connection: FastListenerClient, ingress: FastIngress, publisher: FastPublisher
    ) -> None:
        self._connection = connection
        self._ingress = ingress
        self._publisher = publisher
        self.unwritten: dict[IncomingTransfer, None] = {}  # transfers with unwritten bytes
        self._prepared: dict[FastHandle, tuple[Partial, bytes, bytes]] = {}  # transfer, header, digest

    # Fragments.

    def fragment(self, event: Fragment) -> None:
        """Process a fragment of a message or of a stream.

        The last fragment completes a message. A stream is forwarded as it arrives. Raises Pending if a
        permission decision is pending.
        """
        connection = self._connection
        handle = connection.handles.get(event.handle)
        if handle is None:
            return
        if event.first:
            self._publisher.check_destination(handle, event.dest_name)
        if event.bits & STREAMING:
            self._publisher.stream(handle, event)
        elif event.bits & OUT_OF_BAND:
            self._out_of_band(handle, event)
        else:
            self._part(handle, event)

    def _part(self, handle: FastHandle, event: Fragment) -> None:
        """Add a fragment to its transfer; the last one completes the message."""
        channel = handle.channel
        try:
            if event.first:
                channel.incoming = self._begin(handle, event)
            incoming = channel.incoming
            assert isinstance(incoming, IncomingTransfer)
            incoming.add(event.data)
            if event.last:
                incoming.write()
        except SpoolFull as error:
            self._connection.refuse(handle, ReplyCode.INSUFFICIENT_RESOURCES, str(error))
            return
        stream = self._connection.stream
        if event.last:
            stream.expect(0)
            self._complete(incoming, event)
            return
        if incoming.file is not None:
            self.unwritten[incoming] = None
        stream.expect(incoming.body_size)

    def write(self) -> None:
        """Write the bytes received in this pass of the event loop to their files.

        If the spool, which limits the space for such files, is full, the handle or channel of the message is
        closed.
        """
        unwritten = list(self.unwritten)
        self.unwritten.clear()
        for incoming in unwritten:
            try:
                incoming.write()
            except SpoolFull as error:
                self._connection.refuse(incoming.handle, ReplyCode.INSUFFICIENT_RESOURCES, str(error))

    def _begin(self, handle: FastHandle, event: Fragment) -> IncomingTransfer:
        """Return the transfer to which the first fragment of a message belongs. Raises SpoolFull.

        It is the transfer announced by PREPARE if the fragment resumes that one, and otherwise a new one.
        """
        spool, user = self._ingress.spool, self._connection.sender.user
        prepared = self._prepared.pop(handle, None)
        if event.bits & RECOVERY:
            assert prepared is not None
            transfer, head, digest = prepared
            return IncomingTransfer(
                spool, handle, head, event.body_size, user=user, transfer=transfer, digest=digest
            )
        if prepared is not None:
            transfer, head, _ = prepared
            anew = (head, transfer.body_size) == (event.head, event.body_size)
            self._ingress.partials.end(transfer, accepted=anew)
        return IncomingTransfer(spool, handle, event.head, event.body_size, user=user)

    # Restartable transfers (3.5.13).

    def handle_prepare(self, event: Prepared) -> None:
        """Process PREPARE: send READY with the number of bytes already received."""
        connection = self._connection
        handle = connection.handles.get(event.handle)
        if handle is None:
            return
        try:
            size = self._prepare(handle, event)
        except SpoolFull as error:
            connection.refuse(handle, ReplyCode.INSUFFICIENT_RESOURCES, str(error))
            return
        except (TransferFault, FastRefused) as error:
            connection.refuse(handle, error.code, str(error))
            return

        def on_recorded(outcome: Outcome) -> None:
            """Send READY. After a failed write the transfer can be resumed only while this process runs."""
            if not handle.silent:
                connection.machine.ready(handle.number, size)
                connection.stream.mark_for_flush()
            connection.stream.resume()

        connection.stream.suspend()
        self._ingress.after_commit(on_recorded)

    def _prepare(self, handle: FastHandle, event: Prepared) -> int:
        """Register the transfer that PREPARE announces. Return the number of body bytes already received.

        Raises FastRefused 403, TransferFault for a malformed content header or hash, and SpoolFull.
        """
        connection = self._connection
        ingress = self._ingress
        if not connection.rights.unlimited:  # the complete message is checked again
            decision = connection.rights.fast_concerns(connection.host.name, handle.service, handle.name)
            connection.demand(decision, "write", handle.service, handle.name)
        digest = read_content_hash(event.content_hash)
        if digest is None:
            raise TransferFault(ReplyCode.BAD_FIELD_VALUE, "content-hash is not a SHA-1 hash")
        try:
            decode_head_properties(event.head)
        except RemoteProtocolError as error:
            raise TransferFault(ReplyCode.MESSAGE_CONTENTS_INVALID, str(error)) from None
        if before := self._prepared.pop(handle, None):
            ingress.partials.release(before[0])
        transfer = ingress.partials.claim(
            connection.host.name, connection.sender.user, connection.owner, event.head, event.body_size
        )
        self._prepared[handle] = (transfer, event.head, digest)
        file = transfer.file
        ingress.spool.check_room(event.body_size - file.size, connection.sender.user)
        if file.size < len(event.data):
            file.write(event.data[file.size :])
        return file.size

    # Complete messages.

    def _complete(self, incoming: IncomingTransfer, event: Fragment) -> None:
        """Publish a message that has arrived completely; `event` is its last fragment.

        The file of a persistent message, or of one with a hash, is first sealed in a thread.
        """
        incoming.handle.channel.incoming = None
        incoming.release()
        if incoming.file is None:
            body = b"".join(incoming.parts)
            self._publisher.send_whole(incoming.handle, event.tag, incoming.head, body, event.dest_name)
            return
        sync = self._ingress.has_store and bool(incoming.head[0] & 1)  # persistent
        if sync or incoming.digest:
            self._run_in_thread(
                incoming.handle,
                partial(incoming.seal, sync),
                partial(self._sealed, incoming, event),
                partial(self._unsealed, incoming),
            )
        else:
            self._sealed(incoming, event, True)

    def _sealed(self, incoming: IncomingTransfer, event: Fragment, whole: bool) -> None:
        """Publish a message whose file is sealed.

        Raises TransferFault if `whole` is False, which means that its hash is wrong.
        """
        connection = self._connection
        handle, transfer = incoming.handle, incoming.partial
        partials = self._ingress.partials
        if not whole:
            assert transfer is not None
            partials.drop(transfer)
            text = "the body does not match the announced content-hash"
            raise TransferFault(ReplyCode.MESSAGE_CONTENTS_INVALID, text)
        if handle.is_closed or (connection.is_closing and handle.channel.transacted):
            if transfer is not None:
                partials.release(transfer)
            return
        assert incoming.file is not None
        body = incoming.file.body()
        self._publisher.send_whole(handle, event.tag, incoming.head, body, event.dest_name, transfer)

    def _unsealed(self, incoming: IncomingTransfer) -> None:
        """Interrupt a transfer whose file could not be sealed because of a disk error.

        A restartable transfer can be resumed later.
        """
        if incoming.partial is not None:
            self._ingress.partials.release(incoming.partial)

    def _run_in_thread(
        self,
        handle: FastHandle,
        work: Callable[[], T],
        then: Callable[[T], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `work` in a thread, then call `then` with its result; later input of the client waits.

        An error of `work` or `then` closes the handle or its channel. If it is a disk error or a full spool,
        `failed` is called first.
        """
        connection = self._connection

        async def task() -> None:
            try:
                then(await trio.to_thread.run_sync(work))
            except TransferFault as error:
                connection.refuse(handle, error.code, str(error))
            except (OSError, SpoolFull) as error:
                failed()
                connection.refuse(handle, ReplyCode.INSUFFICIENT_RESOURCES, str(error))
            connection.stream.resume()
            self._ingress.flush()

        connection.stream.suspend()
        self._ingress.start(task)

    # Out-of-band transfers (3.5.3.1).

    def _out_of_band(self, handle: FastHandle, event: Fragment) -> None:
        """Read a fragment from a file in the shared folder."""
        channel = handle.channel
        folder = channel.folder
        assert folder is not None
        if event.bits & RECOVERY:
            text = "recovery out of band is not available"
            self._connection.refuse(handle, ReplyCode.NOT_IMPLEMENTED, text)
            return
        name = folder.next_name(handle.number)

        def work() -> IncomingTransfer:
            try:
                with folder.reading(name, event.size) as descriptor:
                    return self._read(handle, event, descriptor)
            except OSError as error:
                raise TransferFault(ReplyCode.MESSAGE_CONTENTS_INVALID, f"out of band: {error}") from None

        def on_read(incoming: IncomingTransfer) -> None:
            if self._connection.handles.get(handle.number) is not handle:
                incoming.release()
                return
            channel.incoming = incoming
            if event.last:
                if incoming.size != incoming.body_size:
                    text = f"the body ended after {incoming.size} of {incoming.body_size} bytes"
                    raise TransferFault(ReplyCode.MESSAGE_CONTENTS_INVALID, text)
                self._complete(incoming, event)

        self._run_in_thread(handle, work, on_read)

    def _read(self, handle: FastHandle, event: Fragment, descriptor: int) -> IncomingTransfer:
        """Return the transfer after reading a fragment from an open file.

        Raises TransferFault, OSError or SpoolFull.
        """
        incoming = handle.channel.incoming
        at = 0
        begins = not isinstance(incoming, IncomingTransfer)
        if not isinstance(incoming, IncomingTransfer):
            incoming, at = self._read_head(handle, descriptor)
        try:
            if incoming.size + event.size - at > incoming.body_size:
                text = f"the body has more than the announced {incoming.body_size} bytes"
                raise TransferFault(ReplyCode.MESSAGE_CONTENTS_INVALID, text)
            while at < event.size:
                data = os.pread(descriptor, PIECE_BYTES, at)
                if not data:
                    raise OSError("the file was truncated")
                incoming.add(data)
                incoming.write()
                at += len(data)
        except (GatewayError, OSError):
            if begins:  # no channel has it yet
                incoming.release()
            raise
        return incoming

    def _read_head(self, handle: FastHandle, descriptor: int) -> tuple[IncomingTransfer, int]:
        """Read a content header from an open file. Return a new transfer and the body's offset in bytes.

        Raises TransferFault if the content header is malformed or the message is too large.
        """
        ingress = self._ingress
        begin = os.pread(descriptor, HEAD_BYTES_MAX, 0)
        try:
            end = find_head_end(begin, 0, len(begin))
        except RemoteProtocolError as error:
            raise TransferFault(ReplyCode.MESSAGE_CONTENTS_INVALID, str(error)) from None
        (body_size,) = BODY_SIZE.unpack_from(begin)
        most = ingress.limits.fast_message_bytes_max
        if body_size > most:
            raise TransferFault(ReplyCode.MESSAGE_TOO_LARGE, f"a message of {body_size} bytes exceeds {most}")
        head, user = begin[BODY_SIZE.size : end], self._connection.sender.user
        return IncomingTransfer(ingress.spool, handle, head, body_size, user=user), end

    # Closed handles.

    def abandon_handle(self, handle: FastHandle) -> None:
        """Abandon the transfer of a closed handle; a transfer announced by PREPARE can be resumed later."""
        partials = self._ingress.partials
        channel = handle.channel
        incoming = channel.incoming
        if isinstance(incoming, IncomingTransfer) and incoming.handle is handle:
            channel.incoming = None
            incoming.release()
            if incoming in self.unwritten:
                del self.unwritten[incoming]
                with suppress(SpoolFull):  # the part that did fit counts, the rest must be sent again
                    incoming.write()
            if incoming.partial is not None:
                partials.release(incoming.partial)
        if prepared := self._prepared.pop(handle, None):
            partials.release(prepared[0])
