"""What each AMQP 0-9-1 method does on the broker, in one table.

An action replies through its connection, or raises Refused with the code that RabbitMQ answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from gateway.broker.amqp091.arguments import ALTERNATE, DEAD_LETTER_EXCHANGE, consumer_priority
from gateway.broker.amqp091.dead_lettering import own_properties
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import Refused, access_refused, failed, not_found
from gateway.broker.amqp091.replies import PREFIX, REPLY_TO
from gateway.broker.poison import poisoned
from gateway.ingress.amqp091.channel import AmqpChannel, AmqpConsumer
from gateway.ingress.amqp091.transaction import Transaction
from gateway.model.message import Message
from gateway.model.properties import Headers
from gateway.model.spooled import Spooled
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.spec import ReplyCode

if TYPE_CHECKING:
    from gateway.ingress.amqp091.connection import AmqpConnection


class Later(Exception):
    """What follows has to wait: `when` is given what goes on then. `again`: begin with the same method."""

    def __init__(self, when: Callable[[Callable[[], None]], None], *, again: bool) -> None:
        super().__init__()
        self.when = when
        self.again = again


def _reply(connection: AmqpConnection, channel: AmqpChannel, wanted: bool, method: m.Method) -> None:
    if wanted:
        connection.machine.send_method(channel.number, method)


def _queue(connection: AmqpConnection, channel: AmqpChannel, name: str) -> AmqpQueue:
    """An empty name is the last queue declared on the channel."""
    if not name and not channel.last_queue:
        raise not_found("no previously declared queue")
    return connection.host.queue(name or channel.last_queue, connection)


def _named(name: str) -> str:
    """A name as whatever declares, binds or deletes takes it: without the line ends that a program has read
    with it. Those that publish and consume are taken by their word, as in RabbitMQ.
    """
    return name.replace("\r", "").replace("\n", "")


def _check_queue(connection: AmqpConnection, channel: AmqpChannel, permission: str, name: str) -> None:
    """Whether the client may; where no queue is named at all it is told that."""
    if name or channel.last_queue:
        connection.check(permission, "queue", name or channel.last_queue)


def _bindable(connection: AmqpConnection, channel: AmqpChannel, name: str) -> AmqpQueue | None:
    """The queue of an unbinding: that it is not there is no error."""
    if name and name not in connection.host.queues:
        return None
    return _queue(connection, channel, name)


def access_request(connection: AmqpConnection, channel: AmqpChannel, method: m.AccessRequest) -> None:
    _reply(connection, channel, True, m.AccessRequestOk(1))


def channel_flow(connection: AmqpConnection, channel: AmqpChannel, method: m.ChannelFlow) -> None:
    if not method.active:  # prefetch is how a client bounds what it gets
        raise Refused(ReplyCode.NOT_IMPLEMENTED, "NOT_IMPLEMENTED - active=false")
    _reply(connection, channel, True, m.ChannelFlowOk(True))


def exchange_declare(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeDeclare) -> None:
    name = _named(method.exchange)
    if method.passive:
        if not name:
            raise access_refused("operation not permitted on the default exchange")
        connection.host.exchange(name)
    else:
        connection.check("configure", "exchange", name)
        _check_leading(connection, "exchange", name, method.arguments, ALTERNATE)
        connection.host.declare_exchange(
            name,
            method.type,
            durable=method.durable,
            auto_delete=method.auto_delete,
            internal=method.internal,
            arguments=method.arguments,
        )
    _reply(connection, channel, not method.no_wait, m.ExchangeDeclareOk())


def _check_leading(
    connection: AmqpConnection, kind: str, name: str, arguments: Headers, argument: str
) -> None:
    """What leads on to an exchange by an argument is read here, and written there."""
    found = None if connection.rights.unlimited else dict(arguments).get(argument)
    if found is not None and isinstance(found.value, str):
        connection.check("read", kind, name)
        connection.check("write", "exchange", found.value)


def exchange_delete(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeDelete) -> None:
    if method.exchange:
        connection.check("configure", "exchange", _named(method.exchange))
    connection.host.delete_exchange(_named(method.exchange), if_unused=method.if_unused)
    _reply(connection, channel, not method.no_wait, m.ExchangeDeleteOk())


def _check_binding(connection: AmqpConnection, kind: str, destination: str, source: str, key: str) -> None:
    """A binding is written to its destination, and read from its source."""
    if destination:
        connection.check("write", kind, _named(destination))
    if source:  # that the default exchange cannot be bound is said otherwise
        connection.check("read", "exchange", _named(source))
        connection.check_key("read", _named(source), key)


def exchange_bind(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeBind) -> None:
    _check_binding(connection, "exchange", method.destination, method.source, method.routing_key)
    to = connection.host.bindable(_named(method.destination))
    connection.host.bind(_named(method.source), to, method.routing_key, method.arguments)
    _reply(connection, channel, not method.no_wait, m.ExchangeBindOk())


def exchange_unbind(connection: AmqpConnection, channel: AmqpChannel, method: m.ExchangeUnbind) -> None:
    _check_binding(connection, "exchange", method.destination, method.source, method.routing_key)
    to = connection.host.exchanges.get(_named(method.destination))
    connection.host.unbind(_named(method.source), to, method.routing_key, method.arguments)
    _reply(connection, channel, not method.no_wait, m.ExchangeUnbindOk())


def queue_declare(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueDeclare) -> None:
    name = _named(method.queue)
    if name == REPLY_TO or name.startswith(PREFIX):
        if name != REPLY_TO and connection.host.replies.find(name) is None:
            raise not_found(f"no queue '{name}' in vhost '{connection.host.name}'")
        _reply(connection, channel, not method.no_wait, m.QueueDeclareOk(name, 0, 1))
        return
    if method.passive:
        queue = _queue(connection, channel, name)
    else:
        if not name:  # which is asked for by name, and perhaps again
            channel.generated = channel.generated or connection.host.new_queue_name()
        generated = "" if name else channel.generated
        connection.check("configure", "queue", name or generated)
        _check_leading(connection, "queue", name or generated, method.arguments, DEAD_LETTER_EXCHANGE)
        queue = connection.host.declare_queue(
            name,
            connection,
            user=connection.sender.user,
            durable=method.durable,
            exclusive=method.exclusive,
            auto_delete=method.auto_delete,
            arguments=method.arguments,
            generated=generated,
        )
        channel.generated = ""
    queue.settle_head()
    channel.last_queue = queue.name
    _reply(
        connection,
        channel,
        not method.no_wait,
        m.QueueDeclareOk(queue.name, len(queue), len(queue.consumers)),
    )


def queue_bind(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueBind) -> None:
    _check_binding(
        connection, "queue", method.queue or channel.last_queue, method.exchange, method.routing_key
    )
    queue = _queue(connection, channel, _named(method.queue))
    key = method.routing_key if method.queue or method.routing_key else queue.name
    connection.host.bind(_named(method.exchange), queue, key, method.arguments)
    _reply(connection, channel, not method.no_wait, m.QueueBindOk())


def queue_unbind(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueUnbind) -> None:
    _check_binding(
        connection, "queue", method.queue or channel.last_queue, method.exchange, method.routing_key
    )
    queue = _bindable(connection, channel, _named(method.queue))
    connection.host.unbind(_named(method.exchange), queue, method.routing_key, method.arguments)
    _reply(connection, channel, True, m.QueueUnbindOk())


def queue_purge(connection: AmqpConnection, channel: AmqpChannel, method: m.QueuePurge) -> None:
    _check_queue(connection, channel, "read", method.queue)
    queue = _queue(connection, channel, method.queue)
    queue.settle_head()
    count = queue.purge()
    _reply(connection, channel, not method.no_wait, m.QueuePurgeOk(count))


def queue_delete(connection: AmqpConnection, channel: AmqpChannel, method: m.QueueDelete) -> None:
    count = 0
    _check_queue(connection, channel, "configure", _named(method.queue))
    queue = _bindable(connection, channel, _named(method.queue))
    if queue is not None and queue.options.quorum:
        _check_unconditional(connection, queue, method)
    if queue is not None:  # deleting what is not there is no error in RabbitMQ
        count = connection.host.delete_queue(queue, if_unused=method.if_unused, if_empty=method.if_empty)
    _reply(connection, channel, not method.no_wait, m.QueueDeleteOk(count))


def _check_unconditional(connection: AmqpConnection, queue: AmqpQueue, method: m.QueueDelete) -> None:
    """Of a quorum queue, which knows too late what it holds. Refused 540."""
    for flag, wanted in (("if-unused", method.if_unused), ("if-empty", method.if_empty)):
        if wanted:
            text = (
                f"NOT_IMPLEMENTED - cannot delete queue '{queue.name}' in vhost '{connection.host.name}'. "
                f"queue.delete operations with {flag} flag set are not supported by quorum queues"
            )
            raise Refused(ReplyCode.NOT_IMPLEMENTED, text)


def basic_qos(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicQos) -> None:
    if method.prefetch_size:
        raise Refused(
            ReplyCode.NOT_IMPLEMENTED, f"NOT_IMPLEMENTED - prefetch_size!=0 ({method.prefetch_size})"
        )
    _reply(connection, channel, True, m.BasicQosOk())
    if method.global_:
        channel.limit(method.prefetch_count)
    else:
        most = connection.ingress.limits.prefetch_max
        channel.prefetch = min(method.prefetch_count or most, most)


def basic_consume(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicConsume) -> None:
    ingress = connection.ingress
    tag = method.consumer_tag or ingress.new_consumer_tag()
    if method.queue == REPLY_TO:
        _consume_replies(connection, channel, method, tag)
        return
    _check_queue(connection, channel, "read", method.queue)
    queue = _queue(connection, channel, method.queue)
    _check_tag(channel, tag)
    what = f"queue '{queue.name}' in vhost '{connection.host.name}'"
    rank = consumer_priority(method.arguments, what)
    if queue.options.quorum and channel.prefetch_all:
        raise Refused(ReplyCode.NOT_IMPLEMENTED, f"NOT_IMPLEMENTED - {what} does not support global qos")
    exclusive = method.exclusive and not queue.options.quorum  # which takes no notice of it
    single = exclusive and (queue.consumers or queue.options.single_active)
    if queue.exclusive_consumer is not None or single:
        raise access_refused(f"{what} in exclusive use")
    if sum(len(other.consumers) for other in connection.channels.values()) >= ingress.limits.consumers_max:
        most = ingress.limits.consumers_max
        raise failed(f"reached maximum ({most}) of consumers per connection (limits.consumers_max)")
    consumer = AmqpConsumer(channel, queue, tag, no_ack=method.no_ack, prefetch=channel.prefetch)
    channel.consumers[tag] = consumer
    _reply(connection, channel, not method.no_wait, m.BasicConsumeOk(tag))
    queue.add_ranked(consumer, rank, exclusive=exclusive)


def _check_tag(channel: AmqpChannel, tag: str) -> None:
    if tag in channel.consumers or (channel.requester is not None and tag == channel.requester_tag):
        raise Refused(ReplyCode.NOT_ALLOWED, f"NOT_ALLOWED - attempt to reuse consumer tag '{tag}'")


def _consume_replies(
    connection: AmqpConnection, channel: AmqpChannel, method: m.BasicConsume, tag: str
) -> None:
    if channel.requester is not None:
        raise failed("reply consumer already set")
    if not method.no_ack:
        raise failed("reply consumer cannot acknowledge")
    _check_tag(channel, tag)
    channel.request(tag)
    _reply(connection, channel, not method.no_wait, m.BasicConsumeOk(tag))


def basic_cancel(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicCancel) -> None:
    consumer = channel.consumers.pop(method.consumer_tag, None)
    if consumer is not None:
        consumer.queue.remove(consumer)
        connection.host.consumer_left(consumer.queue)
    elif channel.requester is not None and method.consumer_tag == channel.requester_tag:
        channel.request_no_more()
    _reply(connection, channel, not method.no_wait, m.BasicCancelOk(method.consumer_tag))


def basic_get(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicGet) -> None:
    _check_queue(connection, channel, "read", method.queue)
    queue = _queue(connection, channel, method.queue)
    if queue.loading:
        assert queue.storage is not None
        raise Later(queue.storage.when_loaded, again=True)
    if queue.gate.shut:  # what is there may be withdrawn, and come again
        raise Later(queue.gate.wait, again=True)
    if not method.no_ack:
        _check_unacknowledged(connection, channel)
    taken = _take_sound(connection, queue)
    if taken is None:
        _reply(connection, channel, True, m.BasicGetEmpty())
        return
    position, message, redelivered, properties = taken
    tag = channel.next_tag
    channel.next_tag += 1
    if method.no_ack:
        queue.acknowledged((position,))
    else:
        channel.unacknowledged[tag] = (queue, None, position, message)
        connection.outstanding.octets += message.octets
    address = message.address
    connection.machine.send_content(
        channel.number,
        m.BasicGetOk(tag, redelivered, address.scope, address.name, len(queue)),
        properties,
        message.body,
    )
    connection.stream.queued += len(message.body)


def _take_sound(connection: AmqpConnection, queue: AmqpQueue) -> tuple[int, Message, bool, bytes] | None:
    """The next message that can be said, with its properties; those before it are done with."""
    while (taken := queue.take()) is not None:
        position, message, redelivered = taken
        try:
            if isinstance(message.body, Spooled):
                message.body.check()
            returns = None if queue.deliveries is None else queue.deliveries.of(position)
            return position, message, redelivered, own_properties(queue, message, time.time(), returns)
        except OSError:
            queue.acknowledged((position,))
            connection.ingress.undeliverable(message)
        except Exception as error:
            queue.acknowledged((position,))
            connection.ingress.undeliverable(message, poisoned(error, queue=queue.name))
    return None


def _check_unacknowledged(connection: AmqpConnection, channel: AmqpChannel) -> None:
    """No prefetch holds back a `get`. Refused 406 for a client that only takes."""
    if len(channel.unacknowledged) >= connection.ingress.limits.prefetch_max:
        raise failed("limits.prefetch_max messages of this channel are not acknowledged")
    if connection.outstanding.full:
        raise failed("limits.unacknowledged_bytes_max of this connection are not acknowledged")


def basic_reject(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicReject) -> None:
    if not channel.give_back(method.delivery_tag, False, requeue=method.requeue):
        raise failed(f"unknown delivery tag {method.delivery_tag}")


def basic_nack(connection: AmqpConnection, channel: AmqpChannel, method: m.BasicNack) -> None:
    if not channel.give_back(method.delivery_tag, method.multiple, requeue=method.requeue):
        raise failed(f"unknown delivery tag {method.delivery_tag}")


def basic_recover(
    connection: AmqpConnection, channel: AmqpChannel, method: m.BasicRecover | m.BasicRecoverAsync
) -> None:
    if not method.requeue:
        raise Refused(ReplyCode.NOT_IMPLEMENTED, "NOT_IMPLEMENTED - requeue=false")
    _reply(connection, channel, isinstance(method, m.BasicRecover), m.BasicRecoverOk())
    channel.recover()


def confirm_select(connection: AmqpConnection, channel: AmqpChannel, method: m.ConfirmSelect) -> None:
    if channel.transaction is not None:
        raise failed("cannot switch from tx to confirm mode")
    channel.confirming = True
    _reply(connection, channel, not method.no_wait, m.ConfirmSelectOk())


def tx_select(connection: AmqpConnection, channel: AmqpChannel, method: m.TxSelect) -> None:
    if channel.confirming:
        raise failed("cannot switch from confirm to tx mode")
    if channel.transaction is None:
        channel.transaction = Transaction(channel)
    _reply(connection, channel, True, m.TxSelectOk())


def tx_commit(connection: AmqpConnection, channel: AmqpChannel, method: m.TxCommit) -> None:
    """What the client says next waits for the commit, or it could overtake it."""
    told: list[bool] = []
    waiting: list[Callable[[], None]] = []

    def committed(whole: bool) -> None:
        told.append(whole)
        if whole:
            _reply(connection, channel, True, m.TxCommitOk())
        else:
            connection.refuse(channel.number, failed("partial tx completion"), method)
        connection.stream.mark()
        for go_on in waiting:
            go_on()

    _transaction(channel).commit(committed)
    if not told:
        raise Later(waiting.append, again=False)


def tx_rollback(connection: AmqpConnection, channel: AmqpChannel, method: m.TxRollback) -> None:
    _transaction(channel).rollback()
    _reply(connection, channel, True, m.TxRollbackOk())


def _transaction(channel: AmqpChannel) -> Transaction:
    if channel.transaction is None:
        raise failed("channel is not transactional")
    return channel.transaction


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
        m.TxSelect: tx_select,
        m.TxCommit: tx_commit,
        m.TxRollback: tx_rollback,
    },
)
