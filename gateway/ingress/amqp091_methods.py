"""What each AMQP 0-9-1 method does on the broker, in one table.

An action replies through its connection, or raises Refused with the code that RabbitMQ answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from gateway.broker.amqp091.virtual_host import AmqpQueue, Refused
from gateway.ingress.amqp091_channel import AmqpChannel, AmqpConsumer, sound_properties
from gateway.model.address import AmqpAddress
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.spec import ReplyCode

if TYPE_CHECKING:
    from gateway.ingress.amqp091_connection import AmqpConnection


class Loading(Exception):
    """The method has to wait until `queue` has been read from the disk."""

    def __init__(self, queue: AmqpQueue) -> None:
        super().__init__(queue.name)
        self.queue = queue


def _reply(connection: AmqpConnection, channel: AmqpChannel, wanted: bool, method: m.Method) -> None:
    if wanted:
        connection.machine.send_method(channel.number, method)


def _queue(connection: AmqpConnection, channel: AmqpChannel, name: str) -> AmqpQueue:
    """An empty name is the last queue declared on the channel."""
    if not name and not channel.last_queue:
        raise Refused(
            ReplyCode.NOT_FOUND, f"NOT_FOUND - no previously declared queue in vhost '{connection.host.name}'"
        )
    return connection.host.queue(name or channel.last_queue, connection)


def access_request(connection: AmqpConnection, channel: AmqpChannel, method: m.AccessRequest) -> None:
    _reply(connection, channel, True, m.AccessRequestOk(1))


def channel_flow(connection: AmqpConnection, channel: AmqpChannel, method: m.ChannelFlow) -> None:
    channel.flowing = method.active
    _reply(connection, channel, True, m.ChannelFlowOk(method.active))
    for consumer in list(channel.consumers.values()):
        consumer.queue.dispatch()


def exchange_declare(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeDeclare) -> None:
    if method.passive:
        if method.exchange:
            connection.host.exchange(method.exchange)
    else:
        connection.host.declare_exchange(
            method.exchange,
            method.type,
            durable=method.durable,
            auto_delete=method.auto_delete,
            internal=method.internal,
            arguments=method.arguments,
        )
    _reply(connection, channel, not method.no_wait, m.ExchangeDeclareOk())


def exchange_delete(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeDelete) -> None:
    connection.host.delete_exchange(method.exchange, if_unused=method.if_unused)
    _reply(connection, channel, not method.no_wait, m.ExchangeDeleteOk())


def exchange_bind(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeBind) -> None:
    to = connection.host.exchange(method.destination)
    connection.host.bind(method.source, to, method.routing_key, method.arguments)
    _reply(connection, channel, not method.no_wait, m.ExchangeBindOk())


def exchange_unbind(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeUnbind) -> None:
    to = connection.host.exchange(method.destination)
    connection.host.unbind(method.source, to, method.routing_key, method.arguments)
    _reply(connection, channel, not method.no_wait, m.ExchangeUnbindOk())


def queue_declare(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueDeclare) -> None:
    if method.passive:
        queue = _queue(connection, channel, method.queue)
    else:
        queue = connection.host.declare_queue(
            method.queue,
            connection,
            durable=method.durable,
            exclusive=method.exclusive,
            auto_delete=method.auto_delete,
            arguments=method.arguments,
        )
    channel.last_queue = queue.name
    _reply(
        connection,
        channel,
        not method.no_wait,
        m.QueueDeclareOk(queue.name, len(queue), len(queue.consumers)),
    )


def queue_bind(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueBind) -> None:
    queue = _queue(connection, channel, method.queue)
    key = method.routing_key if method.queue or method.routing_key else queue.name
    connection.host.bind(method.exchange, queue, key, method.arguments)
    _reply(connection, channel, not method.no_wait, m.QueueBindOk())


def queue_unbind(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueUnbind) -> None:
    queue = _queue(connection, channel, method.queue)
    connection.host.unbind(method.exchange, queue, method.routing_key, method.arguments)
    _reply(connection, channel, True, m.QueueUnbindOk())


def queue_purge(connection: AmqpConnection, channel: AmqpChannel, method: m.QueuePurge) -> None:
    count = _queue(connection, channel, method.queue).purge()
    _reply(connection, channel, not method.no_wait, m.QueuePurgeOk(count))


def queue_delete(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueDelete) -> None:
    name = method.queue or channel.last_queue
    count = 0
    if name in connection.host.queues:  # deleting what is not there is no error in RabbitMQ
        queue = connection.host.queue(name, connection)
        count = connection.host.delete_queue(queue, if_unused=method.if_unused, if_empty=method.if_empty)
    _reply(connection, channel, not method.no_wait, m.QueueDeleteOk(count))


def basic_qos(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicQos) -> None:
    if method.prefetch_size:
        raise Refused(
            ReplyCode.NOT_IMPLEMENTED, f"NOT_IMPLEMENTED - prefetch_size!=0 ({method.prefetch_size})"
        )
    if method.global_:
        channel.prefetch_all = method.prefetch_count
    else:
        most = connection.ingress.limits.prefetch_max
        channel.prefetch = min(method.prefetch_count or most, most)
    _reply(connection, channel, True, m.BasicQosOk())
    for consumer in list(channel.consumers.values()):
        consumer.queue.dispatch()


def basic_consume(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicConsume) -> None:
    queue = _queue(connection, channel, method.queue)
    ingress = connection.ingress
    assert connection.principal is not None
    if not ingress.access.may_subscribe(connection.principal, ingress.name, queue.name):
        raise Refused(
            ReplyCode.ACCESS_REFUSED, f"ACCESS_REFUSED - reading queue '{queue.name}' is not allowed"
        )
    if queue.exclusive_consumer or (method.exclusive and queue.consumers):
        raise Refused(
            ReplyCode.ACCESS_REFUSED,
            f"ACCESS_REFUSED - queue '{queue.name}' in vhost '{connection.host.name}' in exclusive use",
        )
    tag = method.consumer_tag or ingress.new_consumer_tag()
    if tag in channel.consumers:
        raise Refused(ReplyCode.NOT_ALLOWED, f"NOT_ALLOWED - attempt to reuse consumer tag '{tag}'")
    if sum(len(other.consumers) for other in connection.channels.values()) >= ingress.limits.consumers_max:
        raise Refused(ReplyCode.RESOURCE_ERROR, "RESOURCE_ERROR - limits.consumers_max is reached")
    consumer = AmqpConsumer(channel, queue, tag, no_ack=method.no_ack, prefetch=channel.prefetch)
    channel.consumers[tag] = consumer
    queue.exclusive_consumer = method.exclusive
    _reply(connection, channel, not method.no_wait, m.BasicConsumeOk(tag))
    queue.add(consumer)


def basic_cancel(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicCancel) -> None:
    consumer = channel.consumers.pop(method.consumer_tag, None)
    if consumer is not None:
        consumer.queue.remove(consumer)
        connection.host.consumer_left(consumer.queue)
    _reply(connection, channel, not method.no_wait, m.BasicCancelOk(method.consumer_tag))


def basic_get(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicGet) -> None:
    queue = _queue(connection, channel, method.queue)
    if queue.loading:
        raise Loading(queue)
    taken = queue.take()
    if taken is None:
        _reply(connection, channel, True, m.BasicGetEmpty())
        return
    position, message, redelivered = taken
    tag = channel.next_tag
    channel.next_tag += 1
    if method.no_ack:
        queue.acknowledged((position,))
    else:
        channel.unacknowledged[tag] = (queue, None, position, message)
        channel.outstanding += 1
    address = message.address
    assert isinstance(address, AmqpAddress)
    connection.machine.send_content(
        channel.number,
        m.BasicGetOk(tag, redelivered, address.exchange, address.routing_key, len(queue)),
        sound_properties(message, time.time()),
        message.body,
    )


def basic_reject(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicReject) -> None:
    taken = channel.take_one(method.delivery_tag)
    if not taken:
        raise Refused(
            ReplyCode.PRECONDITION_FAILED, f"PRECONDITION_FAILED - unknown delivery tag {method.delivery_tag}"
        )
    channel.give_back(taken, requeue=method.requeue)


def basic_nack(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicNack) -> None:
    tag = method.delivery_tag
    taken = channel.take(tag) if method.multiple else channel.take_one(tag)
    if not taken and tag:
        raise Refused(ReplyCode.PRECONDITION_FAILED, f"PRECONDITION_FAILED - unknown delivery tag {tag}")
    channel.give_back(taken, requeue=method.requeue)


def basic_recover(
    connection: AmqpConnection, channel: AmqpChannel, method: m.BasicRecover | m.BasicRecoverAsync
) -> None:
    if not method.requeue:
        raise Refused(ReplyCode.NOT_IMPLEMENTED, "NOT_IMPLEMENTED - recover without requeue")
    channel.give_back(channel.take(0), requeue=True)
    _reply(connection, channel, isinstance(method, m.BasicRecover), m.BasicRecoverOk())


def confirm_select(connection: AmqpConnection, channel: AmqpChannel, method: m.ConfirmSelect) -> None:
    channel.confirming = True
    _reply(connection, channel, not method.no_wait, m.ConfirmSelectOk())


Action = Callable[["AmqpConnection", AmqpChannel, Any], None]
METHODS: Final = cast(
    "dict[type[m.Method], Action]",
    {
        m.AccessRequest: access_request,
        m.ChannelFlow: channel_flow,
        m.ExchangeDeclare: exchange_declare,
        m.ExchangeDelete: exchange_delete,
        m.ExchangeBind: exchange_bind,
        m.ExchangeUnbind: exchange_unbind,
        m.QueueDeclare: queue_declare,
        m.QueueBind: queue_bind,
        m.QueueUnbind: queue_unbind,
        m.QueuePurge: queue_purge,
        m.QueueDelete: queue_delete,
        m.BasicQos: basic_qos,
        m.BasicConsume: basic_consume,
        m.BasicCancel: basic_cancel,
        m.BasicGet: basic_get,
        m.BasicReject: basic_reject,
        m.BasicNack: basic_nack,
        m.BasicRecover: basic_recover,
        m.BasicRecoverAsync: basic_recover,
        m.ConfirmSelect: confirm_select,
    },
)
