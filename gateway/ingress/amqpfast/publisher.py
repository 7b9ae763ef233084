"""Publishing side of an AMQP/Fast connection: SENDs become messages of the batch, and outcomes replies.

The receipt of a message is (handle, confirm-tag), or the handle alone if no reply is requested; a refused
message closes the handle or channel in either case. A message to several destinations, and a transaction,
have an OutcomeJoin as receipt. Receipts refer to the handle's object instead of its number, because the
number may be reused before the outcome is known. Messages to peer services, fragments of streams, and
transactions are handled here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gateway import clock
from gateway.broker.amqpfast.partials import Partial
from gateway.broker.amqpfast.virtual_host import FastRefused
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.memory_shares import BEYOND_SHARE
from gateway.broker.publish_permission import PublishRefused, permitted_entry
from gateway.broker.routing import RoutingEntry
from gateway.errors import RemoteProtocolError
from gateway.ingress.amqpfast.channel import (
    DeliveryRun,
    FastChannel,
    FastHandle,
    FastListenerClient,
    OutcomeJoin,
    PeerCall,
    PeerSession,
    Receipt,
)
from gateway.ingress.amqpfast.ingress import FastIngress
from gateway.ingress.amqpfast.peer_services import begin_session
from gateway.ingress.waiting_publishes import EVERY_CHANNEL
from gateway.model.address import Address
from gateway.model.caches import make_room
from gateway.model.delivery_mode import QOS_OF_DURABLE
from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.pending import Awaited, Pending
from gateway.model.properties import PropertySet
from gateway.model.spooled_bodies import Body, Spooled
from gateway.protocols.amqpfast.commands import ChannelCommit
from gateway.protocols.amqpfast.dialect import AMQPFAST, fast_address
from gateway.protocols.amqpfast.events import Fragment, SendRow
from gateway.protocols.amqpfast.spec import ReplyCode, Scope
from gateway.protocols.amqpfast.translate import (
    REFUSALS,
    essentials,
    fill_defaults,
    head_properties,
    refusal,
)

HANDLE_ENTRIES_MAX: Final = 10_000  # cached names per handle; a client may have many handles


def _properties(handle: FastHandle, head: bytes) -> PropertySet:
    """Return the properties in an encoded content header (`head`), with the handle's defaults.

    A mime-type or encoding that the header lacks is taken from the handle.
    """
    if handle.mime_type or handle.encoding:
        head = fill_defaults(head, handle.mime_type, handle.encoding)
    return head_properties(head)


class FastPublisher:
    """Publishing side of one connection; `unsettled` is the number of its messages without outcome."""

    def __init__(self, connection: FastListenerClient, ingress: FastIngress) -> None:
        self.unsettled = 0
        self._connection = connection
        self._ingress = ingress
        self._release_publishes: Callable[[], None] | None = None  # None: the client is not held

    def publish_rows(self, rows: list[SendRow]) -> list[SendRow]:  # noqa: C901, PLR0912, PLR0915 - every message
        """Publish whole messages. Return the rows that are postponed to a later time slice of the connection.

        A row is one SEND. Rows are postponed if the time slice is used up by messages whose routing entries
        the handle has not cached, or if a permission decision is pending.
        """
        connection = self._connection
        ingress = self._ingress
        memory = ingress.dispatcher.memory
        if memory.short and not memory.admit(connection, len(rows)):
            for number, tag, *_ in rows:
                self._refuse(number, tag)
            return []
        batch = ingress.begun_batch()
        dispatcher = ingress.dispatcher
        handles = connection.handles
        sender = connection.sender
        replies: list[tuple[int, int]] = []
        handle: FastHandle | None = None
        cached: dict[bytes, tuple[RoutingEntry, ...]] = {}
        last_number, last_head = -1, b""
        in_turn = iter(rows)
        postponed: list[SendRow] = []
        for row in in_turn:
            number, tag, head, body, name = row
            if number != last_number or handle is None or handle.is_closed:
                handle = handles.get(number)
                if handle is None:
                    continue  # closed by an earlier row
                last_number, last_head = number, b""
                sender = handle.channel.sender
                cached = self._cached(handle)
            entries = cached.get(name)
            if head is not last_head:
                try:
                    properties = _properties(handle, head)
                    durable, _, expires, retained, hops = essentials(properties)
                    expires = clock.from_wall(expires)
                except RemoteProtocolError as error:
                    connection.refuse(handle, ReplyCode.MESSAGE_CONTENTS_INVALID, str(error))
                    continue
                last_head = head
            if handle.service == "peer" or handle.channel.transacted or entries is None or len(entries) != 1:
                if connection.stream.is_turn_spent():
                    postponed = [row, *in_turn]
                    break
                try:
                    self._send(handle, tag, properties.raw, body, name)
                except Pending as pending:
                    ingress.suspend(connection.stream, pending.awaited)
                    postponed = [row, *in_turn]
                    break
                cached = self._cached(handle)
                continue
            entry = entries[0]
            message = Message(
                entry.address,
                body,
                properties,
                QOS_OF_DURABLE[durable or tag > 0],
                durable,
                retained,
                expires,
                hops,
                sender,
            )
            if dispatcher.publish(batch, entry, message, (handle, tag) if tag else handle):
                if tag:
                    self.unsettled += 1
            else:
                ingress.record_unreceived(entry, message)
                if tag:
                    replies.append((number, tag))
        if replies:
            connection.machine.reply_many(replies)
        done = len(rows) - len(postponed)
        ingress.stats.messages_in += done
        if (rate := connection.stream.rate) is not None:
            rate.messages += done
        self._hold_back()
        return postponed

    def _refuse(self, number: int, tag: int) -> None:
        """Refuse the message `tag` of the handle `number`, because memory is short."""
        ingress = self._ingress
        ingress.stats.messages_in += 1
        ingress.stats.refuse(LOW_ON_MEMORY)
        handle = self._connection.handles.get(number)
        if handle is not None:  # or it was closed for an earlier message
            self.unsettled += bool(tag)
            self.report_outcome((handle, tag), LOW_ON_MEMORY)

    def _hold_back(self) -> None:
        """Stop accepting publishes of the client for now if too many of its messages have no outcome yet."""
        if self.unsettled >= self._ingress.unsettled_max and self._release_publishes is None:
            self._release_publishes = self._connection.waiting.hold(EVERY_CHANNEL)

    def _send(
        self,
        handle: FastHandle,
        tag: int,
        head: bytes,
        body: Body,
        name: bytes,
        partial: Partial | None = None,
    ) -> None:
        """Publish a message whose routing entries are not cached, or add it to its transaction.

        If the handle belongs to peer services, the message is sent to these. `name` completes the handle's
        name; `partial` is the restartable transfer by which the message arrived, if any. A refusal closes the
        handle or channel. Raises Pending if a permission decision is pending.
        """
        connection = self._connection
        partials = self._ingress.partials
        try:
            if handle.service == "peer":
                called = self._peers(handle, name)
                calls = [PeerCall(handle, peer, head, body) for peer in called]
                if handle.channel.transacted:
                    if partial is not None:
                        handle.channel.transferred.append(partial)
                    self._hold_calls(handle, tag, calls)
                    return
                for call in calls:
                    self._call(call)
                if partial is not None:
                    partials.drop(partial)
                connection.machine.reply(handle.number, tag)
                return
            entries = self._entries(handle, name)
        except FastRefused as error:
            if partial is not None:
                partials.release(partial)
            address = fast_address(handle.service, handle.name + name.decode(errors="replace"))
            message = Message(address, body, head_properties(head), sender=connection.sender)
            self._ingress.record_refused(message, refusal(error.code), str(error))
            connection.refuse(handle, error.code, str(error))
            return
        channel = handle.channel
        parsed = essentials(head_properties(head))
        messages = [
            Message(
                entry.address,
                body,
                head_properties(head),
                2 if channel.transacted else QOS_OF_DURABLE[parsed.durable or tag > 0],
                parsed.durable,
                parsed.retain,
                clock.from_wall(parsed.expires),
                parsed.hops,
                channel.sender,
            )
            for entry in entries
        ]
        if channel.transacted:
            if partial is not None:
                channel.transferred.append(partial)
            self._provisional(handle, tag, list(zip(entries, messages, strict=True)))
        elif len(entries) == 1 and partial is None:
            self._publish(entries[0], messages[0], (handle, tag) if tag else handle, counts=bool(tag))
        else:
            self._publish_joined(handle, tag, list(zip(entries, messages, strict=True)), partial)

    def _peers(self, handle: FastHandle, name: bytes) -> list[str]:
        """Return the names of the peer services that the handle's name followed by `name` stands for.

        Raises FastRefused if the client may not use one of them.
        """
        connection = self._connection
        found = connection.host.find_peers(handle.name + name.decode(), whole=not name)
        for peer in found:
            connection.check("talk", "peer", peer)
        return found

    def _publish_joined(
        self, handle: FastHandle, tag: int, sent: list[tuple[RoutingEntry, Message]], partial: Partial | None
    ) -> None:
        """Publish copies of a message to several destinations (`sent`), with one reply for all of them.

        `partial` is the transfer by which the message arrived, if any; it ends when the message is accepted
        or refused.
        """
        partials = self._ingress.partials
        if partial is not None:
            partials.delete_record(partial)

        def on_outcome(outcome: Outcome) -> None:
            if partial is not None:
                partials.end(partial, accepted=outcome is ACCEPTED)
            self.report_outcome((handle, tag), outcome)

        join = OutcomeJoin(len(sent), on_outcome)
        self.unsettled += bool(tag)
        for entry, message in sent:
            self._publish(entry, message, join)

    def _publish(
        self, entry: RoutingEntry, message: Message, receipt: Receipt, *, counts: bool = False
    ) -> None:
        """Publish a message whose outcome is reported to `receipt`; `counts` True adds it to `unsettled`."""
        ingress = self._ingress
        self.unsettled += counts
        if isinstance(message.body, Spooled):
            most = ingress.limits.message_bytes_max
            accepted = ingress.dispatcher.publish_large(ingress.batch, entry, message, receipt, most)
        else:
            accepted = ingress.dispatcher.publish(ingress.batch, entry, message, receipt)
        if not accepted:
            self.report_outcome(receipt, ingress.handle_unrouted(entry, message))

    def _entries(self, handle: FastHandle, name: bytes) -> tuple[RoutingEntry, ...]:
        """Return the routing entries of the destinations that the handle's name plus `name` stands for.

        Raises FastRefused if the client may not send to one of them, and Pending if a decision is pending.
        """
        found = self._cached(handle).get(name)
        if found is not None:
            return found
        connection = self._connection
        ingress, host = self._ingress, connection.host
        full = handle.name + name.decode()
        if AMQPFAST.return_part(address := fast_address(handle.service, full)) is not None:
            return (self.permitted_entry(address),)  # not cached: there are as many as there are requesters
        if not connection.rights.unlimited:
            self._check(handle.service, full, whole=not name)
        entries = [
            self.permitted_entry(one.address)
            for one in host.find(
                handle.service,
                full,
                whole=not name,
                slashes=ingress.slashes,
                maker=connection.sender.user,
            )
        ]
        cached = self._cached(handle)  # a destination may have been created
        make_room(cached, min(ingress.limits.cache_entries_max, HANDLE_ENTRIES_MAX))
        cached[name] = tuple(entries)
        return cached[name]

    def _cached(self, handle: FastHandle) -> dict[bytes, tuple[RoutingEntry, ...]]:
        """Return the routing entries that a handle has cached, after dropping those that are out of date."""
        generation = self._ingress.dispatcher.generation
        if handle.generation != generation:
            handle.generation = generation
            handle.entries.clear()
        return handle.entries

    def check_destination(self, handle: FastHandle, name: bytes) -> None:
        """Check the permission to send to a destination when the first fragment of a message arrives.

        Raises Pending if a decision is pending. Refusals are reported when the message is complete.
        """
        rights = self._connection.rights
        if handle.service != "peer" and not rights.unlimited and name not in self._cached(handle):
            with suppress(FastRefused):
                self._check(handle.service, handle.name + name.decode(), whole=not name)

    def permitted_entry(self, address: Address) -> RoutingEntry:
        """Return the routing entry of an address. Raises FastRefused 403 if the client may not send to it."""
        connection, ingress = self._connection, self._ingress
        host, dispatcher = connection.host, ingress.dispatcher

        def find(address: Address) -> RoutingEntry:
            return dispatcher.entry(ingress.endpoint_of(host), host, address)

        try:
            return permitted_entry(dispatcher, connection.rights, address, find, host.name)
        except PublishRefused as refused:
            ingress.record_denial(connection.sender, "write", f"{address.scope}:{address.name}", str(refused))
            text = f"permission to send to {address.name!r} refused"
            raise FastRefused(ReplyCode.ACCESS_REFUSED, text) from refused

    def _check(self, service: str, name: str, *, whole: bool) -> None:
        """Check the permission to write to a destination and, if it does not exist, to create it.

        With `whole`, nothing is checked if `name` stands for several destinations. Raises FastRefused 403.
        """
        host = self._connection.host
        if not (whole and host.means_several(service, name)):
            self._connection.check_named("write", service, name, whole=False)

    def _call(self, call: PeerCall) -> None:
        """Pass a message to its peer service. Raises FastRefused."""
        self._peer_session(call.handle, call.peer).message(call.head, call.body)

    def _peer_session(self, handle: FastHandle, peer: str) -> PeerSession:
        """Return the handle's session with the peer service `peer`, created at first use."""
        found = handle.peer_sessions.get(peer)
        if found is None:
            options = self._ingress.peers[self._connection.host.name][peer]
            found = handle.peer_sessions[peer] = begin_session(options, handle, peer)
        return found

    def stream(self, handle: FastHandle, event: Fragment) -> None:
        """Forward a fragment of a stream to the handle's peers, unless the handle's number is in use again.

        The handle or channel is closed if a peer refuses the fragment.
        """
        if handle.silent:
            return
        connection = self._connection
        try:
            if handle.channel.transacted:
                raise FastRefused(ReplyCode.COMMAND_NOT_VALID, "a stream cannot be part of a transaction")
            for peer in self._peers(handle, b""):
                self._peer_session(handle, peer).fragment(event)
        except FastRefused as error:
            connection.refuse(handle, error.code, str(error))
            return
        connection.machine.reply(event.handle, event.tag)

    def send_whole(
        self,
        handle: FastHandle,
        tag: int,
        head: bytes,
        body: bytes,
        name: bytes,
        partial: Partial | None = None,
    ) -> None:
        """Publish a message that has arrived in fragments; its body may be on disk.

        `head` is the content header, `name` completes the handle's name. `partial` is the restartable
        transfer by which the message arrived, if any.
        """
        connection = self._connection
        ingress = self._ingress
        memory = ingress.dispatcher.memory
        if memory.short and not memory.admit(connection, 1):
            if partial is not None:
                ingress.partials.release(partial)
            self._refuse(handle.number, tag)
            return
        ingress.begun_batch()
        try:
            properties = _properties(handle, head)
            essentials(properties)
        except RemoteProtocolError as error:
            if partial is not None:
                ingress.partials.drop(partial)
            connection.refuse(handle, ReplyCode.MESSAGE_CONTENTS_INVALID, str(error))
            return
        try:
            self._send(handle, tag, properties.raw, body, name, partial)
        except Pending as pending:
            self._send_whole_later(pending.awaited, handle, tag, head, body, name, partial)
            return
        ingress.stats.messages_in += 1
        if (rate := connection.stream.rate) is not None:
            rate.messages += 1
        self._hold_back()

    def _send_whole_later(
        self,
        awaited: Awaited,
        handle: FastHandle,
        tag: int,
        head: bytes,
        body: bytes,
        name: bytes,
        partial: Partial | None,
    ) -> None:
        """Publish a complete message when the pending permission decision (`awaited`) is available.

        The arguments from `handle` on are those of `send_whole`. Later input of the client waits until then.
        """
        connection, ingress = self._connection, self._ingress

        def send_or_release() -> None:
            if not handle.is_closed and not connection.is_closing:
                self.send_whole(handle, tag, head, body, name, partial)
            elif partial is not None:
                ingress.partials.release(partial)

        ingress.suspend(connection.stream, awaited, send_or_release)

    # Transactions.

    def _provisional(self, handle: FastHandle, tag: int, sent: list[tuple[RoutingEntry, Message]]) -> None:
        """Add messages to the transaction, and reply to the SEND (`tag`) that they can be committed."""
        channel = handle.channel
        channel.pending += sent
        for _, message in sent:
            channel.pending_bytes += message.byte_count - len(message.body) * isinstance(
                message.body, Spooled
            )
        self._reply_in_transaction(handle, tag)

    def _hold_calls(self, handle: FastHandle, tag: int, calls: list[PeerCall]) -> None:
        """Add messages for peer services to the transaction and reply to the SEND. COMMIT sends them."""
        channel = handle.channel
        channel.calls += calls
        for call in calls:
            byte_count = 0 if isinstance(call.body, Spooled) else len(call.body)
            channel.pending_bytes += MESSAGE_BYTES + len(call.head) + byte_count
        self._reply_in_transaction(handle, tag)

    def _reply_in_transaction(self, handle: FastHandle, tag: int) -> None:
        """Reply to a message of the transaction.

        The channel is closed instead if the transaction exceeds its limits.
        """
        channel = handle.channel
        limits = self._ingress.limits
        if channel.is_restrained:
            self._connection.close_channel(channel, ReplyCode.INSUFFICIENT_RESOURCES, BEYOND_SHARE)
            return
        if len(channel.pending) + len(channel.calls) > limits.transaction_messages_max or (
            channel.pending_bytes > limits.transaction_bytes_max
        ):
            text = "the transaction exceeds limits.transaction_..."
            self._connection.close_channel(channel, ReplyCode.INSUFFICIENT_RESOURCES, text)
            return
        self._connection.machine.reply(handle.number, tag)

    def commit(self, channel: FastChannel, command: ChannelCommit) -> None:
        """Execute CHANNEL COMMIT, all or nothing.

        The reply is sent when all messages have been accepted and all acknowledgements are on disk. If a
        message is refused, nothing is acknowledged, and the channel is closed.
        """
        ingress = self._ingress
        entries = self._entries_of(channel)
        if entries is None:
            return
        pending, acknowledged = channel.commit(everything=ingress.commits_all)
        transferred, channel.transferred = channel.transferred, []
        for partial in transferred:
            ingress.partials.delete_record(partial)
        commit = _Commit(self, channel, command.tag, acknowledged, transferred)
        self.unsettled += 1
        lasting = any(message.durable for _, message in pending)
        if lasting and not ingress.disk_healthy() and (acknowledged or len(pending) > 1):
            assert ingress.store is not None
            commit.finish(ingress.store.refusal)
            return
        join = OutcomeJoin(len(pending) + 1, commit.finish)
        postponed = ingress.dispatcher.postponed_count()
        batch = ingress.begun_batch()
        first = len(batch)
        for entry, message in pending:
            self._publish(entries[entry.address], message, join)
        ingress.end_turn()
        here = ingress.dispatcher.postponed_count() == postponed
        is_refused = join.worst is not ACCEPTED or any(slot >= first for slot in batch.unaccepted_slots)
        if here and not is_refused and all(ingress.delivers_locally(entry) for entry in entries.values()):
            for delivery in acknowledged:
                delivery.delete_with_publishes()
        if lasting:
            ingress.after_commit(join.add_outcome)
        else:
            join.add_outcome(ACCEPTED)

    def answer_commit(self, channel: FastChannel, tag: int, calls: list[PeerCall], outcome: Outcome) -> None:
        """Reply to CHANNEL COMMIT and send its messages to peer services (`calls`) if it was accepted.

        Otherwise close the channel with the refusal in `outcome`.
        """
        self.unsettled -= 1
        if channel.silent:
            return
        connection = self._connection
        if outcome is ACCEPTED:
            self._make_calls(calls)
            connection.machine.reply_channel(channel.number, tag)
            connection.stream.mark_for_flush()
        else:
            _, code = REFUSALS[outcome.reason]
            connection.close_channel(channel, code, outcome.text)

    def _entries_of(self, channel: FastChannel) -> dict[Address, RoutingEntry] | None:
        """Return the routing entries of a transaction's addresses by the current rules and routes.

        Return None, after closing the channel, if the client may no longer send one of the messages.
        """
        entries: dict[Address, RoutingEntry] = {}
        for entry, _ in channel.pending:
            address = entry.address
            try:
                if address not in entries:
                    entries[address] = self.permitted_entry(address)
            except FastRefused as error:
                self._connection.close_channel(channel, error.code, str(error))
                return None
        return entries

    def _make_calls(self, calls: list[PeerCall]) -> None:
        """Send the messages for peer services of a committed transaction.

        Messages of handles that were closed meanwhile are dropped, because responses could not be sent.
        Handles whose peer service may not be used any more are closed.
        """
        connection = self._connection
        for call in calls:
            if connection.handles.get(call.handle.number) is not call.handle:
                continue
            try:
                connection.check("talk", "peer", call.peer)
                self._call(call)
            except FastRefused as error:
                connection.refuse(call.handle, error.code, str(error))

    # Replies.

    def report_outcome(self, receipt: Receipt, outcome: Outcome) -> None:
        """Report the outcome of the message `receipt`: reply to it, or close its handle or channel."""
        connection = self._connection
        if isinstance(receipt, OutcomeJoin):
            receipt.add_outcome(outcome)
            return
        handle, tag = receipt if isinstance(receipt, tuple) else (receipt, 0)
        if tag:
            self.count_replied(1)
        if handle.silent:
            return
        if outcome is ACCEPTED:
            connection.machine.reply(handle.number, tag)
        else:
            scope, code = REFUSALS[outcome.reason]
            if scope is Scope.CHANNEL:
                connection.close_channel(handle.channel, code, outcome.text)
            else:
                connection.close_handle(handle, code, outcome.text)
        connection.stream.mark_for_flush()

    def count_replied(self, count: int) -> None:
        """Subtract `count` messages with a tag from the unsettled ones: their replies have been encoded.

        Publishes that wait in the connection continue when the number of unsettled ones has fallen to half of
        its limit.
        """
        self.unsettled -= count
        if self._release_publishes is not None and self.unsettled <= self._ingress.unsettled_max // 2:
            release_publishes, self._release_publishes = self._release_publishes, None
            release_publishes()


class _Commit:
    """CHANNEL COMMIT whose messages are not all settled yet.

    This is an object and not a nested function, because mypyc stores a nested function in the frame that it
    refers to. Such a cycle would keep the files of large bodies until the garbage collector runs.
    """

    __slots__ = ("_acknowledged", "_calls", "_channel", "_publisher", "_tag", "_transferred")

    def __init__(
        self,
        publisher: FastPublisher,
        channel: FastChannel,
        tag: int,
        acknowledged: list[DeliveryRun],
        transferred: list[Partial],
    ) -> None:
        self._publisher = publisher
        self._channel = channel
        self._tag = tag
        self._acknowledged = acknowledged
        self._transferred = transferred
        self._calls = channel.take_calls()

    def finish(self, outcome: Outcome) -> None:
        """Settle the transaction's acknowledgements, then reply. `outcome` is the worst of its messages."""
        publisher = self._publisher
        ingress = publisher._ingress
        for partial in self._transferred:
            ingress.partials.end(partial, accepted=outcome is ACCEPTED)
        if self._channel.finish(self._acknowledged, accepted=outcome is ACCEPTED):
            # Settlements remain valid if the disk is full: they are written once there is space.
            ingress.after_commit(self._answer_accepted)
        else:
            publisher.answer_commit(self._channel, self._tag, self._calls, outcome)

    def _answer_accepted(self, written: Outcome) -> None:
        self._publisher.answer_commit(self._channel, self._tag, self._calls, ACCEPTED)
