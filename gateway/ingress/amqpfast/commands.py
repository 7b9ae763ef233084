"""AMQP/Fast commands on the embedded broker: one action per command, in two tables.

An action changes channels, handles or destinations and sends the reply through its connection. It raises
FastRefused on an error. Most codes close the handle, those for lack of resources or excessive size the
channel. Messages that report effects (CREATED, NOTIFY, INDEX) precede the reply, except for CONSUME, and
except for clients of 2005, which expect the reply first (section 12 of the notes). SEND is handled by the
module `publisher`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, cast

from gateway.broker.amqpfast.destinations import FastQueue, Interest
from gateway.broker.amqpfast.selection import LanguageUnknown, selection
from gateway.broker.amqpfast.selector import SelectorRefused
from gateway.broker.amqpfast.virtual_host import TEMPORARY, FastRefused
from gateway.broker.priorities import PriorityQueue
from gateway.broker.selection_work import Selects
from gateway.broker.shares import CHANNEL_BYTES, HANDLE_BYTES, text_bytes
from gateway.errors import LocalProtocolError
from gateway.ingress.amqpfast.channel import (
    FastChannel,
    FastConsumer,
    FastHandle,
    FastListenerClient,
    encoded_header_or_empty,
    name_bytes,
    new_notifier,
)
from gateway.ingress.amqpfast.ingress import FastIngress
from gateway.ingress.amqpfast.large_deliveries import LARGE_BYTES, LargeDelivery
from gateway.ingress.amqpfast.publisher import FastPublisher
from gateway.ingress.amqpfast.query_scan import NEXT_TURN, ListedIdentifiers, QueryScan
from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.pending import Pending
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import encode_message_list
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.protocols.amqpfast.translate import REFUSALS


def _selects(selector: bytes, mime_type: str) -> Selects | None:
    """Return the compiled selector, or None for an empty one, which selects all messages.

    `mime_type` names the selector's language. Raises FastRefused: NOT_IMPLEMENTED for an unknown language,
    BAD_FIELD_VALUE for a malformed selector.
    """
    try:
        return selection(mime_type, selector)
    except LanguageUnknown as unknown:
        raise FastRefused(ReplyCode.NOT_IMPLEMENTED, str(unknown)) from None
    except SelectorRefused as error:
        raise FastRefused(ReplyCode.BAD_FIELD_VALUE, f"selector: {error}") from None


def _selects_of_topic(name: bytes, selects: Selects | None, *, whole: bool) -> Selects:
    """Return a selector for messages of the topic `name` that `selects` selects.

    With `whole`, all topics whose names begin with `name` are included. `selects` None selects all messages.
    """

    def matches(message: Message) -> bool:
        topic = name_bytes(message.address)
        if not (topic.startswith(name) if whole else topic == name):
            return False
        return selects is None or selects(message)

    return matches


def _waiting(queues: list[PriorityQueue]) -> Iterator[tuple[PriorityQueue, int, Message]]:
    """Yield each message that waits in these queues, as queue, position and message."""
    for queue in queues:
        for position, message in queue.browse():
            yield queue, position, message


class FastActions(FastListenerClient):
    """Client connection with one action per command.

    Each action sends its reply, or raises FastRefused.
    """

    publisher: FastPublisher

    @property
    @abstractmethod
    def ingress(self) -> FastIngress:
        """Protocol side of the client's listener."""

    @abstractmethod
    def check_folder(self, path: Path) -> None:
        """Check the right to use the folder `path` for out-of-band transfers. Raises FastRefused 403."""

    def _channel_open(self, command: m.ChannelOpen) -> None:
        self.reopen_channel(command.channel_id)
        channel = FastChannel(self, command)
        self.channels[command.channel_id] = channel
        if reached := self.holding.take(CHANNEL_BYTES):
            self.close_channel(channel, ReplyCode.INSUFFICIENT_RESOURCES, f"{reached} is reached")
            return
        channel.counted_bytes = CHANNEL_BYTES
        if command.out_of_band:
            try:
                path = self.ingress.find_folder(command.out_of_band)
                self.check_folder(path)
                channel.folder = self.ingress.share_folder(path)
            except FastRefused as error:
                self.close_channel(channel, error.code, str(error))
                return
        self.machine.reply_channel(command.channel_id, command.tag)

    def _channel_commit(self, command: m.ChannelCommit) -> None:
        channel = self.channels.get(command.channel_id)
        if channel is not None:
            self.publisher.commit(channel, command)

    def _channel_rollback(self, command: m.ChannelRollback) -> None:
        channel = self.channels.get(command.channel_id)
        if channel is not None:
            channel.rollback()
            self.machine.reply_channel(command.channel_id, command.tag)

    def _check_opening(self, handle: FastHandle, command: m.HandleOpen) -> None:
        """Check that the client has a right on the destinations of a new handle. Raises FastRefused 403.

        Any right on them is enough, because the use of the handle is not known yet: each later command is
        checked as well.
        """
        rights, host, service, name = self.rights, self.host, handle.service, handle.name
        if rights.unlimited:
            return
        if command.temporary:
            self.check("create", service, name or TEMPORARY)
            return
        if service != "peer" and name.startswith(AMQPFAST.return_prefix):
            return
        self.demand(rights.fast_concerns(host.name, service, name), "open", service, name)
        if service != "peer" and not host.means_several(service, name) and host.would_create(service, name):
            self.check("create", service, name)

    def _handle_open(self, command: m.HandleOpen) -> None:
        """Open a handle, and create a temporary destination for it if the command requests one.

        The handle is refused if its name is forbidden or invalid.
        """
        channel = self.channels.get(command.channel_id)
        if channel is None:
            return
        handle = FastHandle(channel, command, command.dest_name)
        self.handles[handle.number] = channel.handles[handle.number] = handle
        ingress, host = self.ingress, self.host
        machine = self.machine
        byte_count = HANDLE_BYTES + text_bytes(handle.name)
        try:
            if reached := self.holding.take(byte_count):
                raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, f"{reached} is reached")
            handle.counted_bytes = byte_count
            self._check_opening(handle, command)
            if command.temporary:
                made = host.create_temporary(
                    handle.service,
                    handle.name,
                    self.owner,
                    channel,
                    slashes=ingress.slashes,
                    maker=self.sender.user,
                )
                handle.name = made.name
            else:
                host.check_open(handle.service, handle.name, slashes=ingress.slashes, maker=self.sender.user)
        except FastRefused as error:
            self.refuse(handle, error.code, str(error))
            return
        created = m.HandleCreated(handle.number, handle.name)
        if command.temporary and not ingress.replies_first:
            machine.send(created)
        machine.reply(handle.number, command.tag)
        if command.temporary and ingress.replies_first:
            machine.send(created)

    def _check_consuming(self, handle: FastHandle, name: str, right: str, *, whole: bool) -> None:
        """Check `right` on the destination `name` that a command consumes or reads. Raises FastRefused 403.

        With `whole`, a name that no destination has stands for all whose names begin with it. The owner of a
        temporary destination needs no permission.
        """
        host = self.host
        if handle.service == "peer":
            self.check("talk", "peer", name)
            return
        destination = host.queues.get(name) if handle.service == "queue" else host.topics.get(name)
        if destination is None or destination.owner != self.owner:
            self.check_named(right, handle.service, name, whole=whole)

    def _handle_consume(self, handle: FastHandle, command: m.HandleConsume) -> None:
        name = handle.name + command.dest_name
        self._check_consuming(handle, name, "read", whole=not command.dest_name)
        limits = self.ingress.limits
        if sum(len(one.consumers) for one in self.handles.values()) >= limits.consumers_max:
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, "limits.consumers_max is reached")
        selects = _selects(command.selector, command.mime_type)
        consumer = FastConsumer(
            handle, prefetch=min(command.prefetch or 1, limits.prefetch_max), unreliable=command.unreliable
        )
        if handle.service == "queue":
            self._consume_queues(handle, command, consumer, selects)
        else:
            self._consume_topic(handle, command, consumer, selects)

    def _consume_queues(
        self,
        handle: FastHandle,
        command: m.HandleConsume,
        consumer: FastConsumer,
        selects: Selects | None,
    ) -> None:
        """Consume the queues that the command names; `selects` None selects all messages.

        Raises FastRefused 403 for another client's temporary queue.
        """
        if command.identifier:
            raise FastRefused(ReplyCode.BAD_FIELD_VALUE, "identifier: durable subscriptions are for topics")
        found = self.host.find(
            "queue",
            handle.name + command.dest_name,
            whole=not command.dest_name,
            slashes=self.ingress.slashes,
            maker=self.sender.user,
        )
        for queue in found:
            if queue.owner not in (None, self.owner):
                raise FastRefused(
                    ReplyCode.ACCESS_REFUSED, f"only its owner may consume the temporary queue {queue.name!r}"
                )
        self.machine.reply(handle.number, command.tag)
        handle.consumers.append(consumer)
        queues = [queue for queue in found if isinstance(queue, FastQueue)]
        consumer.queues += queues
        for queue in queues:
            queue.add(consumer, selects)

    def _consume_topic(
        self,
        handle: FastHandle,
        command: m.HandleConsume,
        consumer: FastConsumer,
        selects: Selects | None,
    ) -> None:
        """Subscribe to the topics that the command names; `selects` None selects all messages.

        The reply to a new durable subscription is sent when the subscription is on disk.
        """
        host = self.host
        name = handle.name + command.dest_name
        key = (self.client_name, command.identifier) if command.identifier else None
        if key is not None and not self.client_name:
            raise FastRefused(
                ReplyCode.BAD_FIELD_VALUE, "identifier: a durable subscription needs a client-name"
            )
        user = self.sender.user
        prefix = host.is_prefix(name, whole=not command.dest_name, slashes=self.ingress.slashes, maker=user)
        topic = None if prefix else host.topics[name]
        if topic is not None and topic.owner is not None:
            if key is not None:
                text = "a temporary topic has no durable subscriptions"
                raise FastRefused(ReplyCode.TEMPORARILY_FORBIDDEN, text)
            if topic.owner != self.owner:
                text = f"only its owner may consume the temporary topic {name!r}"
                raise FastRefused(ReplyCode.ACCESS_REFUSED, text)
        interest = Interest(
            name,
            prefix=prefix,
            selector=command.selector,
            mime_type=command.mime_type,
            selects=selects,
            no_local=command.no_local,
        )
        existing = None if key is None else host.known_durable(key, None if self.rights.unlimited else user)
        subscription = host.subscribe(interest, key, user)
        subscription.attached = True
        subscription.local = self.sender if subscription.interest.no_local else None
        handle.subscriptions.append(subscription)

        def begin(outcome: Outcome) -> None:
            if handle.silent:
                return
            if outcome is not ACCEPTED:
                self.refuse(handle, REFUSALS[outcome.reason][1], outcome.text)
                return
            self.machine.reply(handle.number, command.tag)
            self.stream.mark_for_flush()
            if subscription in handle.subscriptions:
                handle.consumers.append(consumer)
                consumer.queues.append(subscription)
                subscription.add(consumer)

        if key is None or subscription is existing:
            begin(ACCEPTED)
        else:  # a new durable subscription is confirmed when it is on disk
            self.ingress.after_commit(begin)

    def _handle_cancel(self, handle: FastHandle, command: m.HandleCancel) -> None:
        """End a durable subscription. The reply is sent when its deletion is on disk."""
        if not command.identifier:
            raise FastRefused(ReplyCode.BAD_FIELD_VALUE, "identifier: missing; name the subscription to end")
        host = self.host
        key, limited = (self.client_name, command.identifier), not self.rights.unlimited
        found = host.find_durable(key, self.sender.user if limited else None)
        if found is None:
            text = f"no durable subscription {command.identifier!r}"
            raise FastRefused(ReplyCode.DESTINATION_NOT_FOUND, text)
        interest, name = found.interest, handle.name + command.dest_name
        if interest.name or interest.prefix:  # unknown for a subscription in the cluster
            if limited:
                self.check("read", "topic", interest.name, whole=interest.prefix)
            if interest.name != name:
                text = f"the durable subscription {command.identifier!r} is not for {name!r}"
                raise FastRefused(ReplyCode.DESTINATION_NOT_FOUND, text)
        for one in self.handles.values():
            if found in one.subscriptions:
                one.subscriptions.remove(found)
        host.unsubscribe(found)

        def on_outcome(outcome: Outcome) -> None:
            if handle.silent:
                return
            if outcome is ACCEPTED:
                self.machine.reply(handle.number, command.tag)
                self.stream.mark_for_flush()
            else:
                self.refuse(handle, ReplyCode.INSUFFICIENT_RESOURCES, outcome.text)

        self.ingress.after_commit(on_outcome)

    def _handle_flow(self, handle: FastHandle, command: m.HandleFlow) -> None:
        self.machine.reply(handle.number, command.tag)
        handle.pause(command.flow_pause)

    def _handle_unget(self, handle: FastHandle, command: m.HandleUnget) -> None:
        if not handle.channel.unget(handle, command.message_number):
            text = f"message {command.message_number} is not outstanding here"
            raise FastRefused(ReplyCode.MESSAGE_NOT_FOUND, text)
        self.machine.reply(handle.number, command.tag)

    def _handle_query(self, handle: FastHandle, command: m.HandleQuery) -> None:
        """Send an INDEX with the identifiers of the messages that the command selects.

        Raises Pending if the connection's time slice is used up; the command is then continued later.
        """
        spent = self.stream.is_turn_spent
        if spent():
            raise Pending(NEXT_TURN)
        if handle.scan is None:
            handle.scan = self._begin_scan(handle, command)
        scan = handle.scan
        ended = scan.scan(spent)
        if reached := handle.count_identifiers():
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, f"{reached} is reached")
        if not ended:
            raise Pending(NEXT_TURN)
        handle.scan = None
        numbers, more = scan.result()
        most = self.machine.index_bytes_max
        data, count = encode_message_list(numbers, singly=self.ingress.replies_first, bytes_max=most)
        highest = numbers[count - 1] if count and (more or count < len(numbers)) else 0
        self.machine.send(m.HandleIndex(handle.number, highest, data))

    def _begin_scan(self, handle: FastHandle, command: m.HandleQuery) -> QueryScan:
        """Return the scan that executes a QUERY.

        For clients of 2005, each QUERY assigns new identifiers to messages, beginning with 0.
        """
        selects = _selects(command.selector, command.mime_type)
        name, whole = handle.name + command.dest_name, not command.dest_name
        self._check_consuming(handle, name, "browse", whole=whole)
        queues = self._queried_queues(handle, name, whole=whole)
        if handle.service == "topic":
            selects = _selects_of_topic(name.encode(), selects, whole=whole)
        anew = self.ingress.replies_first
        if anew:
            handle.index = ListedIdentifiers(0)
        elif not command.message_number:
            handle.index = handle.listed().renewed()
        above = -1 if anew and not command.message_number else command.message_number
        return QueryScan(_waiting(queues), selects, handle.listed(), above)

    def _queried_queues(self, handle: FastHandle, name: str, *, whole: bool) -> list[PriorityQueue]:
        """Return the queues, or the handle's own subscriptions, whose messages a QUERY covers.

        With `whole`, these are all queues whose names begin with `name`, if no queue has this name.
        """
        if handle.service != "queue":
            return list(handle.subscriptions)
        queues = self.host.find("queue", name, whole=whole, creates=False)
        return [one for one in queues if isinstance(one, FastQueue)]

    def _handle_browse(self, handle: FastHandle, command: m.HandleBrowse) -> None:
        """Send a copy of one message that QUERY has listed, without removing it from its queue.

        Clients of 2005 get the reply before the message, others after it. Raises Pending if the connection's
        time slice is used up: finding a message takes long if its queue has many requeued ones.
        """
        if self.stream.is_turn_spent():
            raise Pending(NEXT_TURN)
        machine = self.machine
        first = self.ingress.replies_first
        found = handle.listed().find(command.message_number)
        if found is None:
            text = f"no message {command.message_number}"
            if first:
                self.close_channel(handle.channel, ReplyCode.MESSAGE_NOT_FOUND, text)
            else:
                machine.reply(handle.number, command.tag, ReplyCode.MESSAGE_NOT_FOUND, text)
            return
        if not self.rights.unlimited:
            where = found[0].address if isinstance(found[0], FastQueue) else found[1].address
            self._check_consuming(handle, where.name, "browse", whole=False)
        if handle.browser is None:
            handle.browser = new_notifier(handle, delivered=False)
            if handle.browser is None:
                machine.reply(handle.number, command.tag, ReplyCode.MESSAGE_NOT_FOUND, "the handle is closed")
                return
        queue, message = found
        address = queue.address if isinstance(queue, FastQueue) else message.address
        if first:
            machine.reply(handle.number, command.tag)
        number = 0 if first else command.message_number
        large_deliveries = handle.channel.large_deliveries
        key = -1 if first else handle.number << 16 | command.tag
        waits = machine.has_due_reply(handle.channel.number, key)
        if waits or len(message.body) > LARGE_BYTES or not large_deliveries.idle:

            def on_sent(sent: bool) -> None:
                if sent and not first and not handle.silent:
                    machine.reply(handle.number, command.tag)

            name = name_bytes(address)
            large = LargeDelivery(
                handle,
                number,
                name,
                encoded_header_or_empty(message),
                message.body,
                on_sent,
                delivered=False,
                key=key,
            )
            large_deliveries.queue_message(large)
            self.delivered(handle.channel, 1, 0)
            return
        try:
            sent = handle.browser.notify(
                number, False, name_bytes(address), encoded_header_or_empty(message), message.body
            )
        except LocalProtocolError as error:  # an outgoing stream is in progress on the channel
            raise FastRefused(ReplyCode.COMMAND_NOT_VALID, str(error)) from None
        if not sent:
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, "the head of the message exceeds frame-max")
        self.delivered(handle.channel, 1, message.byte_count - MESSAGE_BYTES)
        if not first:
            machine.reply(handle.number, command.tag)


CONNECTION_COMMANDS: Final = cast(
    "dict[type[m.Command], Callable[[FastActions, Any], None]]",
    {
        m.ChannelOpen: FastActions._channel_open,
        m.ChannelCommit: FastActions._channel_commit,
        m.ChannelRollback: FastActions._channel_rollback,
        m.HandleOpen: FastActions._handle_open,
    },
)
"""Commands that belong to no open handle."""
HANDLE_COMMANDS: Final = cast(
    "dict[type[m.Command], Callable[[FastActions, FastHandle, Any], None]]",
    {
        m.HandleConsume: FastActions._handle_consume,
        m.HandleCancel: FastActions._handle_cancel,
        m.HandleFlow: FastActions._handle_flow,
        m.HandleUnget: FastActions._handle_unget,
        m.HandleQuery: FastActions._handle_query,
        m.HandleBrowse: FastActions._handle_browse,
    },
)
