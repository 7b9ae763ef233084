"""AMQP 0-9-1 methods on the embedded broker: one action per method, in one table (`METHODS`).

An action receives a channel and a decoded method, changes exchanges, queues or the channel, and sends the
reply through its connection. It raises AmqpRefused with RabbitMQ's reply code and text on an error. Publishes
and basic.ack, which are far more frequent, are handled by the connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, cast

import trio

from gateway import clock
from gateway.broker.amqp091.arguments import ALTERNATE, DEAD_LETTER_EXCHANGE, consumer_priority
from gateway.broker.amqp091.checks import (
    binding_key,
    check_binding,
    check_exchange_argument,
    without_line_ends,
)
from gateway.broker.amqp091.dead_letter_routing import own_properties
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import AmqpRefused, access_refused, not_found, precondition_failed
from gateway.broker.amqp091.replies import PREFIX, REPLY_TO
from gateway.broker.poison import outcome_of_error
from gateway.ingress.amqp091.channel import AmqpChannel, AmqpConsumer, AmqpListenerClient, Transaction
from gateway.model.message import Message
from gateway.model.pending import Pending
from gateway.model.spooled_bodies import Spooled, is_lost
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.sender import HEADER_SIZE
from gateway.protocols.amqp091.spec import ReplyCode
from gateway.store.gate import Gate

RETURNS_BYTES_MAX: Final = 64  # bytes that a quorum queue adds for the number of earlier deliveries


def _check_tag(channel: AmqpChannel, tag: str) -> None:
    if tag in channel.consumers or (channel.requester is not None and tag == channel.requester_tag):
        raise AmqpRefused(ReplyCode.NOT_ALLOWED, f"NOT_ALLOWED - attempt to reuse consumer tag '{tag}'")


def _opened(gate: Gate) -> trio.Event:
    """Return a new event that is set as soon as the gate is open."""
    opened = trio.Event()
    gate.wait(opened.set)
    return opened


def _transaction(channel: AmqpChannel) -> Transaction:
    if channel.transaction is None:
        raise precondition_failed("channel is not transactional")
    return channel.transaction


class AmqpActions(AmqpListenerClient):
    """Client connection with one action per method.

    Each action sends its reply, or raises AmqpRefused with RabbitMQ's reply code.
    """

    def _reply(self, channel: AmqpChannel, wants_reply: bool, method: m.Method) -> None:
        if wants_reply:
            self.machine.send_method(channel.number, method)

    def _queue(self, channel: AmqpChannel, name: str) -> AmqpQueue:
        """Return the queue `name`; an empty name means the last queue declared on the channel.

        Raises AmqpRefused 404 if there is none.
        """
        if not name and not channel.last_queue:
            raise not_found("no previously declared queue")
        return self.host.queue(name or channel.last_queue, self)

    def _check_queue(self, channel: AmqpChannel, permission: str, name: str) -> None:
        """Check a permission on the queue `name`, or on the last declared one if it is empty.

        Raises AmqpRefused 403 if it is not granted. Does nothing if the name is empty and no queue was
        declared, because `_queue` refuses that.
        """
        if name or channel.last_queue:
            self.check(permission, "queue", name or channel.last_queue)

    def _bindable(self, channel: AmqpChannel, name: str) -> AmqpQueue | None:
        """Return the queue to unbind or delete, or None if it does not exist.

        As in RabbitMQ, unbinding or deleting such a queue is no error.
        """
        if name and name not in self.host.queues:
            return None
        return self._queue(channel, name)

    def _access_request(self, channel: AmqpChannel, method: m.AccessRequest) -> None:
        self._reply(channel, True, m.AccessRequestOk(1))

    def _channel_flow(self, channel: AmqpChannel, method: m.ChannelFlow) -> None:
        if not method.active:  # prefetch is how a client bounds what it gets
            raise AmqpRefused(ReplyCode.NOT_IMPLEMENTED, "NOT_IMPLEMENTED - active=false")
        self._reply(channel, True, m.ChannelFlowOk(True))

    def _exchange_declare(self, channel: AmqpChannel, method: m.ExchangeDeclare) -> None:
        name = without_line_ends(method.exchange)
        if method.passive:
            if not name:
                raise access_refused("operation not permitted on the default exchange")
            self.host.exchange(name)
        else:
            self.check("configure", "exchange", name)
            check_exchange_argument(self, "exchange", name, method.arguments, ALTERNATE)
            self.host.declare_exchange(
                name,
                method.type,
                durable=method.durable,
                auto_delete=method.auto_delete,
                internal=method.internal,
                arguments=method.arguments,
                user=self.sender.user,
            )
        self._reply(channel, not method.no_wait, m.ExchangeDeclareOk())

    def _exchange_delete(self, channel: AmqpChannel, method: m.ExchangeDelete) -> None:
        name = without_line_ends(method.exchange)
        if name:
            self.check("configure", "exchange", name)
        self.host.delete_exchange(name, if_unused=method.if_unused)
        self._reply(channel, not method.no_wait, m.ExchangeDeleteOk())

    def _exchange_bind(self, channel: AmqpChannel, method: m.ExchangeBind) -> None:
        destination, source = without_line_ends(method.destination), without_line_ends(method.source)
        check_binding(self, "exchange", destination, source, method.routing_key)
        to = self.host.bindable(destination)
        self.host.bind(source, to, method.routing_key, method.arguments, user=self.sender.user)
        self._reply(channel, not method.no_wait, m.ExchangeBindOk())

    def _exchange_unbind(self, channel: AmqpChannel, method: m.ExchangeUnbind) -> None:
        destination, source = without_line_ends(method.destination), without_line_ends(method.source)
        check_binding(self, "exchange", destination, source, method.routing_key)
        if not destination:
            raise access_refused("operation not permitted on the default exchange")
        to = self.host.exchanges.get(destination)
        self.host.unbind(source, to, method.routing_key, method.arguments)
        self._reply(channel, not method.no_wait, m.ExchangeUnbindOk())

    def _queue_declare(self, channel: AmqpChannel, method: m.QueueDeclare) -> None:
        """Declare a queue or check that it exists (`passive`); it becomes the channel's last declared queue.

        For `amq.rabbitmq.reply-to`, and names derived from it, the reply is sent without creating a queue.
        """
        name = without_line_ends(method.queue)
        if name == REPLY_TO or name.startswith(PREFIX):
            if name != REPLY_TO and self.host.replies.find(name) is None:
                raise not_found(f"no queue '{name}' in vhost '{self.host.name}'")
            self._reply(channel, not method.no_wait, m.QueueDeclareOk(name, 0, 1))
            return
        if method.passive:
            queue = self._queue(channel, name)
        else:
            if not name:  # the name must survive a retry while a permission check is pending
                channel.generated = channel.generated or self.host.new_queue_name()
            generated = "" if name else channel.generated
            self.check("configure", "queue", name or generated)
            check_exchange_argument(self, "queue", name or generated, method.arguments, DEAD_LETTER_EXCHANGE)
            queue = self.host.declare_queue(
                name,
                self,
                user=self.sender.user,
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
                arguments=method.arguments,
                generated=generated,
            )
            channel.generated = ""
        queue.settle_head()
        channel.last_queue = queue.name
        self._reply(
            channel,
            not method.no_wait,
            m.QueueDeclareOk(queue.name, len(queue), len(queue.consumers)),
        )

    def _queue_bind(self, channel: AmqpChannel, method: m.QueueBind) -> None:
        name, exchange = (
            without_line_ends(method.queue) or channel.last_queue,
            without_line_ends(method.exchange),
        )
        key = binding_key(method, name)
        check_binding(self, "queue", name, exchange, key)
        queue = self._queue(channel, name)
        self.host.bind(exchange, queue, key, method.arguments, user=self.sender.user)
        self._reply(channel, not method.no_wait, m.QueueBindOk())

    def _queue_unbind(self, channel: AmqpChannel, method: m.QueueUnbind) -> None:
        name, exchange = (
            without_line_ends(method.queue) or channel.last_queue,
            without_line_ends(method.exchange),
        )
        check_binding(self, "queue", name, exchange, method.routing_key)
        self.host.unbind(exchange, self._bindable(channel, name), method.routing_key, method.arguments)
        self._reply(channel, True, m.QueueUnbindOk())

    def _queue_purge(self, channel: AmqpChannel, method: m.QueuePurge) -> None:
        self._check_queue(channel, "read", method.queue)
        queue = self._queue(channel, method.queue)
        queue.settle_head()
        count = queue.purge()
        self._reply(channel, not method.no_wait, m.QueuePurgeOk(count))

    def _queue_delete(self, channel: AmqpChannel, method: m.QueueDelete) -> None:
        count = 0
        name = without_line_ends(method.queue)
        self._check_queue(channel, "configure", name)
        queue = self._bindable(channel, name)
        if queue is not None and queue.options.quorum:
            self._check_unconditional(queue, method)
        if queue is not None:  # deleting what is not there is no error in RabbitMQ
            count = self.host.delete_queue(queue, if_unused=method.if_unused, if_empty=method.if_empty)
        self._reply(channel, not method.no_wait, m.QueueDeleteOk(count))

    def _check_unconditional(self, queue: AmqpQueue, method: m.QueueDelete) -> None:
        """Raise AmqpRefused 540 for a conditional delete (`if-unused`, `if-empty`) of a quorum queue.

        Its message count is not available when the method is executed.
        """
        for flag, wanted in (("if-unused", method.if_unused), ("if-empty", method.if_empty)):
            if wanted:
                text = (
                    f"NOT_IMPLEMENTED - cannot delete queue '{queue.name}' in vhost '{self.host.name}'. "
                    f"queue.delete operations with {flag} flag set are not supported by quorum queues"
                )
                raise AmqpRefused(ReplyCode.NOT_IMPLEMENTED, text)

    def _basic_qos(self, channel: AmqpChannel, method: m.BasicQos) -> None:
        if method.prefetch_size:
            raise AmqpRefused(
                ReplyCode.NOT_IMPLEMENTED, f"NOT_IMPLEMENTED - prefetch_size!=0 ({method.prefetch_size})"
            )
        self._reply(channel, True, m.BasicQosOk())
        if method.global_:
            channel.limit(method.prefetch_count)
        else:
            most = self.ingress.limits.prefetch_max
            channel.prefetch = min(method.prefetch_count or most, most)

    def _basic_consume(self, channel: AmqpChannel, method: m.BasicConsume) -> None:
        """Add a consumer to a queue, or start to consume direct replies.

        Raises AmqpRefused if the queue is in exclusive use, or if limits.consumers_max is reached.
        """
        ingress = self.ingress
        tag = method.consumer_tag or f"amq.ctag-{secrets.token_urlsafe(16)}"
        if method.queue == REPLY_TO:
            self._consume_replies(channel, method, tag)
            return
        self._check_queue(channel, "read", method.queue)
        queue = self._queue(channel, method.queue)
        _check_tag(channel, tag)
        resource = f"queue '{queue.name}' in vhost '{self.host.name}'"
        rank = consumer_priority(method.arguments, resource, quorum=queue.options.quorum)
        if queue.options.quorum and channel.prefetch_all:
            raise AmqpRefused(
                ReplyCode.NOT_IMPLEMENTED, f"NOT_IMPLEMENTED - {resource} does not support global qos"
            )
        exclusive = method.exclusive and not queue.options.quorum  # quorum queues ignore it
        single = exclusive and (queue.consumers or queue.options.single_active)
        if queue.exclusive_consumer is not None or single:
            raise access_refused(f"{resource} in exclusive use")
        if sum(len(other.consumers) for other in self.channels.values()) >= ingress.limits.consumers_max:
            most = ingress.limits.consumers_max
            raise precondition_failed(
                f"reached maximum ({most}) of consumers per connection (limits.consumers_max)"
            )
        consumer = AmqpConsumer(channel, queue, tag, no_ack=method.no_ack, prefetch=channel.prefetch)
        channel.consumers[tag] = consumer
        self._reply(channel, not method.no_wait, m.BasicConsumeOk(tag))
        queue.add_ranked(consumer, rank, exclusive=exclusive)

    def _consume_replies(self, channel: AmqpChannel, method: m.BasicConsume, tag: str) -> None:
        if channel.requester is not None:
            raise precondition_failed("reply consumer already set")
        if not method.no_ack:
            raise precondition_failed("reply consumer cannot acknowledge")
        _check_tag(channel, tag)
        channel.request(tag)
        self._reply(channel, not method.no_wait, m.BasicConsumeOk(tag))

    def _basic_cancel(self, channel: AmqpChannel, method: m.BasicCancel) -> None:
        consumer = channel.consumers.pop(method.consumer_tag, None)
        if consumer is not None:
            consumer.queue.remove(consumer)
            self.host.delete_if_unused(consumer.queue)
        elif channel.requester is not None and method.consumer_tag == channel.requester_tag:
            channel.request_no_more()
        self._reply(channel, not method.no_wait, m.BasicCancelOk(method.consumer_tag))

    def _basic_get(self, channel: AmqpChannel, method: m.BasicGet) -> None:
        """Send the queue's next message, or basic.get-empty.

        Raises Pending while the queue reads messages from disk or removes many expired ones, or while
        deliveries may still be withdrawn. Raises AmqpRefused 405 for a quorum queue with a single active
        consumer, and 406 if too many messages are unacknowledged.
        """
        self._check_queue(channel, "read", method.queue)
        queue = self._queue(channel, method.queue)
        if queue.options.quorum and queue.options.single_active:
            text = (
                f"RESOURCE_LOCKED - cannot obtain access to locked queue '{queue.name}' in vhost "
                f"'{self.host.name}'. basic.get operations are not supported by quorum queues with single "
                "active consumer"
            )
            raise AmqpRefused(ReplyCode.RESOURCE_LOCKED, text)
        for gate in (queue.gate, queue.reads):  # its messages may be withdrawn, or cannot be read now
            if gate.shut:
                raise Pending(_opened(gate))
        if not method.no_ack:
            self._check_unacknowledged(channel)
        head = self._take_sound(queue)
        if head is None:
            takeable = trio.Event()
            if queue.when_takeable(takeable.set):
                raise Pending(takeable)
            self._reply(channel, True, m.BasicGetEmpty())
            return
        position, message, redelivered, properties = head
        tag = channel.next_tag
        channel.next_tag += 1
        if method.no_ack:
            queue.acknowledged((position,))
        else:
            channel.unacknowledged[tag] = (queue, None, position, message)
            self.outstanding.byte_count += message.byte_count
        address = message.address
        self.machine.send_content(
            channel.number,
            m.BasicGetOk(tag, redelivered, address.scope, address.name, len(queue)),
            properties,
            message.body,
        )
        self.stream.queued += len(message.body)

    def _take_sound(self, queue: AmqpQueue) -> tuple[int, Message, bool, bytes] | None:
        """Remove from a queue the next message that can be sent to this client, and return it.

        The result has the position, the message, the redelivered flag and the encoded properties. Return None
        if there is no such message. Messages that do not fit the client's frames are left to other consumers;
        others that cannot be sent become dead letters. Raises Pending if a body cannot be read from disk now.
        """
        utc = clock.utc()
        most = self.machine.payload_max - HEADER_SIZE

        def fits(message: Message) -> bool:
            return len(own_properties(queue, message, utc, None)) + RETURNS_BYTES_MAX <= most

        while (head := queue.take_aside(fits) or queue.take()) is not None:
            position, message, redelivered = head
            try:
                if isinstance(message.body, Spooled):
                    message.body.check()
                returns = None if queue.deliveries is None else queue.deliveries.of(position)
                properties = own_properties(queue, message, utc, returns)
                if len(properties) <= most:
                    return position, message, redelivered, properties
                if queue.owner is None:  # other consumers may accept it
                    queue.set_aside(None, position, message, redelivered)
                    self.ingress.log_oversized(self.sender, queue.name)
                else:
                    queue.acknowledged((position,))
                    self.ingress.undeliverable(message)
            except OSError as unread:
                if not is_lost(unread):
                    queue.hold_back([(position, message)], self.ingress.spool.delay_reads(str(unread)))
                    raise Pending(_opened(queue.reads)) from unread
                queue.acknowledged((position,))
                self.ingress.undeliverable(message)
            except Exception as error:
                queue.acknowledged((position,))
                self.ingress.undeliverable(message, outcome_of_error(error, queue=queue.name))
        return None

    def _check_unacknowledged(self, channel: AmqpChannel) -> None:
        """Raise AmqpRefused 406 if the client has too many unacknowledged messages for another basic.get.

        Prefetch does not limit basic.get, so the limits of channel and connection do.
        """
        if len(channel.unacknowledged) >= self.ingress.limits.prefetch_max:
            raise precondition_failed("limits.prefetch_max messages of this channel are not acknowledged")
        if self.outstanding.full:
            raise precondition_failed(
                "limits.unacknowledged_bytes_max of this connection are not acknowledged"
            )

    def _basic_reject(self, channel: AmqpChannel, method: m.BasicReject) -> None:
        if not channel.reject(method.delivery_tag, False, requeue=method.requeue):
            raise precondition_failed(f"unknown delivery tag {method.delivery_tag}")

    def _basic_nack(self, channel: AmqpChannel, method: m.BasicNack) -> None:
        if not channel.reject(method.delivery_tag, method.multiple, requeue=method.requeue):
            raise precondition_failed(f"unknown delivery tag {method.delivery_tag}")

    def _basic_recover(self, channel: AmqpChannel, method: m.BasicRecover | m.BasicRecoverAsync) -> None:
        if not method.requeue:
            raise AmqpRefused(ReplyCode.NOT_IMPLEMENTED, "NOT_IMPLEMENTED - requeue=false")
        self._reply(channel, isinstance(method, m.BasicRecover), m.BasicRecoverOk())
        channel.recover()

    def _confirm_select(self, channel: AmqpChannel, method: m.ConfirmSelect) -> None:
        if channel.transaction is not None:
            raise precondition_failed("cannot switch from tx to confirm mode")
        channel.confirming = True
        self._reply(channel, not method.no_wait, m.ConfirmSelectOk())

    def _tx_select(self, channel: AmqpChannel, method: m.TxSelect) -> None:
        if channel.confirming:
            raise precondition_failed("cannot switch from confirm to tx mode")
        if channel.transaction is None:
            channel.transaction = Transaction(channel)
        self._reply(channel, True, m.TxSelectOk())

    def _tx_commit(self, channel: AmqpChannel, method: m.TxCommit) -> None:
        """Commit the transaction; later input of the client waits until the commit is complete."""
        transaction, replied, suspended = _transaction(channel), False, False

        def committed(whole: bool) -> None:
            nonlocal replied
            replied = True
            if channel.closed:
                pass  # by new rules, for example: no client waits for a response
            elif whole:
                self._reply(channel, True, m.TxCommitOk())
            else:
                self.refuse(channel.number, precondition_failed("partial tx completion"), method)
            self.stream.mark_for_flush()
            if suspended:
                self.stream.resume()

        transaction.commit(committed)
        if not replied:
            suspended = True
            self.stream.suspend()

    def _tx_rollback(self, channel: AmqpChannel, method: m.TxRollback) -> None:
        _transaction(channel).rollback()
        self._reply(channel, True, m.TxRollbackOk())


Action = Callable[[AmqpActions, AmqpChannel, Any], None]
METHODS: Final = cast(
    "dict[type[m.Method], Action]",
    {
        m.AccessRequest: AmqpActions._access_request,
        m.ChannelFlow: AmqpActions._channel_flow,
        m.ExchangeDeclare: AmqpActions._exchange_declare,
        m.ExchangeDelete: AmqpActions._exchange_delete,
        m.ExchangeBind: AmqpActions._exchange_bind,
        m.ExchangeUnbind: AmqpActions._exchange_unbind,
        m.QueueDeclare: AmqpActions._queue_declare,
        m.QueueBind: AmqpActions._queue_bind,
        m.QueueUnbind: AmqpActions._queue_unbind,
        m.QueuePurge: AmqpActions._queue_purge,
        m.QueueDelete: AmqpActions._queue_delete,
        m.BasicQos: AmqpActions._basic_qos,
        m.BasicConsume: AmqpActions._basic_consume,
        m.BasicCancel: AmqpActions._basic_cancel,
        m.BasicGet: AmqpActions._basic_get,
        m.BasicReject: AmqpActions._basic_reject,
        m.BasicNack: AmqpActions._basic_nack,
        m.BasicRecover: AmqpActions._basic_recover,
        m.BasicRecoverAsync: AmqpActions._basic_recover,
        m.ConfirmSelect: AmqpActions._confirm_select,
        m.TxSelect: AmqpActions._tx_select,
        m.TxCommit: AmqpActions._tx_commit,
        m.TxRollback: AmqpActions._tx_rollback,
    },
)
