"""AMQP/Fast for the command line: runs the client of `gateway.egress.amqpfast` until a command is complete.

A file of any size is sent a fragment at a time. If the server supports restartable transfers, an upload that
was interrupted, by a lost connection or because this command was stopped, is resumed when the same file is
sent to the same destination again: the client-name is derived from both.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio

from gateway.cli.publish_subscribe import Show, SubscribeOptions
from gateway.egress.amqpfast.channel import ClientChannel
from gateway.egress.amqpfast.client import ConnectionLost, RefusedByServer, ServerUnreachable, connect
from gateway.egress.amqpfast.handles import ConsumerHandle, FastDelivery, PeerStream
from gateway.errors import LinkError
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.protocols.amqpfast.translate import encode_properties
from gateway.settings import LinkUrl

NOT_RESTARTABLE: Final = frozenset((ReplyCode.COMMAND_NOT_VALID, ReplyCode.NOT_IMPLEMENTED))
ATTEMPTS_MAX: Final = 6  # connections for one upload
RETRY_SECS: Final = 1.0
PREFETCH: Final = 100
STDIN: Final = 0
READ_BYTES: Final = 65_536
MEGABYTE: Final = 1_000_000


@dataclass(frozen=True)
class FastCommands:
    """Implementation of the commands `publish` and `subscribe` for an AMQP/Fast server.

    Each call connects and disconnects. `timeout_secs` is the time limit in seconds for connecting and for
    each reply.
    """

    target: LinkUrl
    timeout_secs: float
    ca_file: str | None = None

    def publish(self, message: Message, transaction: int | None, show: Show) -> str:
        """Publish one message, or with `transaction` one message for each line of its body.

        `transaction` is the number of messages after which to commit. If the destination is a peer service,
        its replies that have arrived before the connection closes are passed to `show`. Return "" or the
        reason of a refusal. Raises LinkError if the connection fails.
        """
        return self._run(partial(self._send, message, transaction, show))

    def upload(self, message: Message, file: Path) -> str:
        """Publish one message whose body is the content of `file`, of any size.

        Return "" or the reason of a refusal. Raises LinkError if the connection fails.
        """
        return self._run(partial(self._upload, message, file))

    def _run(self, publish: Callable[[], Awaitable[None]]) -> str:
        """Run a function that publishes. Return "" or the reason of a refusal."""
        try:
            trio.run(publish)
        except RefusedByServer as refused:
            return str(refused)
        except trio.TooSlowError:
            return f"no reply within {self.timeout_secs} s"
        return ""

    async def _send(self, message: Message, transaction: int | None, show: Show) -> None:
        """Connect and send a message; with `transaction`, send the lines of its body in transactions."""
        address, head = message.address, encode_properties(message)
        async with connect(self.target, ca_file=self.ca_file, timeout_secs=self.timeout_secs) as client:
            channel = await client.channel(transacted=transaction is not None)
            sender = await channel.sender(address.scope, address.name)
            with trio.fail_after(self.timeout_secs):
                if transaction is None:
                    await sender.send(message.body, head)
                    while (answer := sender.pop_delivery()) is not None:
                        show(answer.message, None)
                    return
                lines = message.body.splitlines()
                for at in range(0, len(lines), transaction):
                    await sender.send_many(lines[at : at + transaction], head)
                    await channel.commit()

    async def _upload(self, message: Message, file: Path) -> None:
        """Send a file as one message, and continue the transfer after a lost connection."""
        restartable = True
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                await self._upload_once(message, file, restartable)
                return
            except RefusedByServer as refused:
                if not restartable or refused.code not in NOT_RESTARTABLE:
                    raise
                restartable = False  # the server does not support it
            except ConnectionLost as lost:
                never = attempt == 1 and isinstance(lost, ServerUnreachable)
                if never or attempt == ATTEMPTS_MAX or not restartable:
                    raise
                print(f"{lost}; reconnecting", file=sys.stderr)
                await trio.sleep(RETRY_SECS)

    async def _upload_once(self, message: Message, file: Path, restartable: bool) -> None:
        """Connect and send a file as one message; if `restartable`, continue an interrupted transfer."""
        address, head = message.address, encode_properties(message)
        async with connect(
            self.target,
            client_name=self._name(address, file),
            ca_file=self.ca_file,
            timeout_secs=self.timeout_secs,
        ) as client:
            channel = await client.channel(restartable=restartable)
            sender = await channel.sender(address.scope, address.name)
            line = ProgressLine(file.name)
            await sender.upload(file, head, progress=line.show)
            line.finish(sender.resumed_at)

    def _name(self, address: Address, file: Path) -> str:
        """Return the client-name for the upload of a file to a destination.

        The client-name is always the same for this file and destination, so that the server can resume the
        transfer.
        """
        stated = f"{self.target.host}:{self.target.port} {address.wire!r} {file.resolve()}"
        return f"gateway-cli-{hashlib.sha256(stated.encode()).hexdigest()[:16]}"

    # Receiving.

    def subscribe(
        self, address: Address, show: Show, seconds: float | None, options: SubscribeOptions
    ) -> bool:
        """Pass messages to `show` until it returns False, `seconds` are over, or the user interrupts.

        Each message is acknowledged after `show` has returned. If the destination is a peer service, copy
        bytes instead, from standard input to the service and from the service to standard output, until the
        service closes. Return True if the user interrupted. Raises LinkError.
        """
        return trio.run(self._subscribe, address, show, seconds, options)

    async def _subscribe(
        self, address: Address, show: Show, seconds: float | None, options: SubscribeOptions
    ) -> bool:
        """Run `_receive` until it ends, `seconds` are over, or the user interrupts.

        Return True if the user interrupted. Raises LinkError.
        """
        failure: LinkError | None = None
        async with trio.open_nursery() as nursery:
            scope = nursery.cancel_scope
            interrupted = trio.Event()
            nursery.start_soon(_stop_when_interrupted, scope, interrupted)
            if seconds is not None:
                scope.deadline = trio.current_time() + seconds
            try:
                await self._receive(address, show, options)
            except LinkError as error:
                failure = error  # raised again outside of the nursery, which would wrap it
            scope.cancel()
        if failure is not None:
            raise failure
        return interrupted.is_set()

    async def _receive(self, address: Address, show: Show, options: SubscribeOptions) -> None:
        """Connect, and pass the messages of a destination to `show` until it returns False."""
        async with connect(
            self.target,
            client_name=f"gateway-cli-{secrets.token_hex(4)}",
            ca_file=self.ca_file,
            timeout_secs=self.timeout_secs,
        ) as client:
            if address.scope == "peer":
                await _exchange(await client.stream(address.name))
                return
            channel = await client.channel(transacted=options.transaction is not None)
            if options.browse:
                deliveries = channel.browse(
                    address.scope,
                    address.name,
                    selector=options.selector,
                    selector_type=options.selector_type,
                )
                async with aclosing(deliveries) as waiting:
                    async for delivery in waiting:
                        if not show(delivery.message, await _save_body(delivery, options.save)):
                            break
            else:
                await _consume(channel, address, show, options)


async def _exchange(stream: PeerStream) -> None:
    """Copy standard input to a peer service, and its bytes to standard output, until the service closes.

    The end of standard input does not close the stream, because a reply may still arrive. Raises LinkError.
    """
    failure: LinkError | None = None

    async def send() -> None:
        while data := await trio.to_thread.run_sync(os.read, STDIN, READ_BYTES, abandon_on_cancel=True):
            with suppress(LinkError):  # the receiving task gets the error, too
                await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        try:
            while data := await stream.receive_some():
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except LinkError as error:
            failure = error  # raised again outside of the nursery, which would wrap it
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _begin(
    channel: ClientChannel, address: Address, prefetch: int, options: SubscribeOptions
) -> ConsumerHandle:
    return await channel.consume(
        address.scope,
        address.name,
        prefetch=prefetch,
        selector=options.selector,
        selector_type=options.selector_type,
        unreliable=options.unreliable,
    )


async def _consume(channel: ClientChannel, address: Address, show: Show, options: SubscribeOptions) -> None:
    """Consume messages, and pass them to `show` until it returns False."""
    if options.transaction is not None:
        await _consume_in_transactions(channel, address, show, options.transaction, options)
        return
    async for delivery in await _begin(channel, address, PREFETCH, options):
        wants = show(delivery.message, await _save_body(delivery, options.save))
        await channel.ack(delivery)
        if not wants:
            break


async def _consume_in_transactions(
    channel: ClientChannel, address: Address, show: Show, count: int, options: SubscribeOptions
) -> None:
    """Pass messages to `show`, and commit after each `count` messages, or when `show` returns False.

    COMMIT may confirm every delivered message, whether it was shown or not (clause 3.3.4). Therefore the
    prefetch window divides `count` evenly. Before the last window of a transaction is acknowledged, the
    consumer is paused. When `show` has returned False, messages of a queue that have not been shown are
    requeued.
    """
    window = max(size for size in range(1, PREFETCH + 1) if count % size == 0)
    consumer = await _begin(channel, address, window, options)
    received_count, wants = 0, True
    while wants:
        deliveries: list[FastDelivery] = []
        while wants and len(deliveries) < window:
            delivery = await anext(consumer)
            wants = show(delivery.message, await _save_body(delivery, options.save))
            deliveries.append(delivery)
        received_count += len(deliveries)
        ends = not wants or received_count % count == 0
        if ends:
            await consumer.pause(True)
        while not wants and address.scope == "queue" and (unseen := consumer.pop_delivery()) is not None:
            await channel.unget(consumer, unseen)
        for delivery in deliveries:
            await channel.ack(delivery)
        if ends:
            await channel.commit()
        if ends and wants:
            await consumer.pause(False)


async def _save_body(delivery: FastDelivery, folder: Path | None) -> Path | None:
    """Save the body of a message to a file and return its path.

    Return None without saving if `folder` is None and the body is in memory.
    """
    if folder is None and delivery.file is None:
        return None
    place = (folder or Path.cwd()) / f"{delivery.number:08d}"
    with place.open("wb") as saved:
        if delivery.file is None:
            saved.write(delivery.message.body)
        else:
            with delivery.file as body:
                await trio.to_thread.run_sync(shutil.copyfileobj, body, saved)
    return place


async def _stop_when_interrupted(scope: trio.CancelScope, interrupted: trio.Event) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as received:
        async for _ in received:
            interrupted.set()
            scope.cancel()


class ProgressLine:
    """Progress of an upload on standard error.

    On a terminal the line is updated all the time, otherwise it is printed once at the end.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._lively = sys.stderr.isatty()

    def show(self, done: int, size: int) -> None:
        """Show that `done` of `size` bytes are sent."""
        self._size = size
        if self._lively:
            share = done / size if size else 1.0
            print(f"\r{self._name}: {done / MEGABYTE:.1f} MB, {share:.0%}", end="", file=sys.stderr)

    def finish(self, resumed_at: int) -> None:
        """Show that the upload is complete.

        `resumed_at` is the number of bytes that the server already had from an earlier upload.
        """
        had = f", {resumed_at / MEGABYTE:.1f} MB of them before" if resumed_at else ""
        begin = "\r" if self._lively else ""
        print(f"{begin}{self._name}: {self._size / MEGABYTE:.1f} MB sent{had}", file=sys.stderr)
