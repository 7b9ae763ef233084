"""Table of every method of AMQP 0-9-1 and RabbitMQ's extensions: ids, directions and arguments.

The annotation of an argument is its domain on the wire, so a class is both the type that programs use and the
layout that the codec reads. Reserved arguments are named in the decorator (`before` and `after` the others);
they are written as zeros and ignored when read. The codec is in `codec.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Final, TypeVar, dataclass_transform, get_type_hints

from gateway.model.properties import Headers

Byte = Annotated[int, "o"]
Short = Annotated[int, "s"]
Long = Annotated[int, "l"]
LongLong = Annotated[int, "ll"]
ShortStr = Annotated[str, "ss"]
LongStr = Annotated[bytes, "ls"]
Table = Annotated[Headers, "T"]
Bit = Annotated[bool, "b"]

TO_SERVER: Final = 1
TO_CLIENT: Final = 2
BOTH: Final = TO_SERVER | TO_CLIENT


class Method:
    """Base class of all methods of AMQP 0-9-1.

    `index` is class-id << 16 | method-id. `direction` states which end may send the method. `content` is True
    if a message header and body follow. `layout` has the pair (domain, name) of each argument; the name of a
    reserved argument is "".
    """

    __slots__ = ()
    name: ClassVar[str]
    index: ClassVar[int]
    direction: ClassVar[int]
    content: ClassVar[bool]
    layout: ClassVar[tuple[tuple[str, str], ...]]


METHODS: Final[dict[int, type[Method]]] = {}
M = TypeVar("M", bound=Method)


@dataclass_transform()
def method(
    name: str,
    class_id: int,
    method_id: int,
    direction: int,
    before: str = "",
    after: str = "",
    content: bool = False,
) -> Callable[[type[M]], type[M]]:
    """Return a decorator that adds a class to METHODS as the method with this name and these ids.

    `before` and `after` are the domains of the reserved arguments before and after the other arguments,
    separated by spaces. The other parameters are as in Method.
    """

    def enter(declared: type[M]) -> type[M]:
        made = dataclass(slots=True)(declared)
        hints = get_type_hints(made, globalns=globals(), include_extras=True)
        made.name = name
        made.index = class_id << 16 | method_id
        made.direction = direction
        made.content = content
        made.layout = (
            *((domain, "") for domain in before.split()),
            *((hints[each.name].__metadata__[0], each.name) for each in fields(made)),  # type: ignore[arg-type]
            *((domain, "") for domain in after.split()),
        )
        METHODS[made.index] = made
        return made

    return enter


@method("connection.start", 10, 10, TO_CLIENT)
class ConnectionStart(Method):
    """First method of a server, with its version, properties, login mechanisms and locales."""

    version_major: Byte = 0
    version_minor: Byte = 9
    server_properties: Table = ()
    mechanisms: LongStr = b""
    locales: LongStr = b"en_US"


@method("connection.start-ok", 10, 11, TO_SERVER)
class ConnectionStartOk(Method):
    """Client's choice of a mechanism and locale, with its properties and the first SASL response."""

    client_properties: Table = ()
    mechanism: ShortStr = ""
    response: LongStr = b""
    locale: ShortStr = "en_US"


@method("connection.secure", 10, 20, TO_CLIENT)
class ConnectionSecure(Method):
    """SASL challenge from the server, after an insufficient response."""

    challenge: LongStr = b""


@method("connection.secure-ok", 10, 21, TO_SERVER)
class ConnectionSecureOk(Method):
    """Client's response to a SASL challenge."""

    response: LongStr = b""


@method("connection.tune", 10, 30, TO_CLIENT)
class ConnectionTune(Method):
    """Limits of the connection that the server proposes.

    `frame_max` is in bytes and `heartbeat` in seconds; 0 means no limit, or no heartbeats.
    """

    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


@method("connection.tune-ok", 10, 31, TO_SERVER)
class ConnectionTuneOk(Method):
    """Limits of the connection that the client has chosen, in the units of ConnectionTune."""

    channel_max: Short = 0
    frame_max: Long = 0
    heartbeat: Short = 0


@method("connection.open", 10, 40, TO_SERVER, after="ss b")
class ConnectionOpen(Method):
    """Request to enter a virtual host."""

    virtual_host: ShortStr = "/"


@method("connection.open-ok", 10, 41, TO_CLIENT, after="ss")
class ConnectionOpenOk(Method):
    """Confirmation that the client has entered the virtual host; the connection is open."""


@method("connection.close", 10, 50, BOTH)
class ConnectionClose(Method):
    """Request to close the connection.

    The class and method ids name the method that caused an error, or are 0.
    """

    reply_code: Short = 200
    reply_text: ShortStr = ""
    class_id: Short = 0
    method_id: Short = 0


@method("connection.close-ok", 10, 51, BOTH)
class ConnectionCloseOk(Method):
    """Confirmation of connection.close; the socket may be closed."""


@method("connection.blocked", 10, 60, TO_CLIENT)
class ConnectionBlocked(Method):
    """Notice that the server does not read publishes because it lacks resources. RabbitMQ's extension."""

    reason: ShortStr = ""


@method("connection.unblocked", 10, 61, TO_CLIENT)
class ConnectionUnblocked(Method):
    """Notice that the server reads publishes again after connection.blocked. RabbitMQ's extension."""


@method("connection.update-secret", 10, 70, TO_SERVER)
class ConnectionUpdateSecret(Method):
    """Replacement of the client's expiring credentials, such as a token. RabbitMQ's extension."""

    new_secret: LongStr = b""
    reason: ShortStr = ""


@method("connection.update-secret-ok", 10, 71, TO_CLIENT)
class ConnectionUpdateSecretOk(Method):
    """Confirmation that the server has accepted the new credentials. RabbitMQ's extension."""


@method("channel.open", 20, 10, TO_SERVER, before="ss")
class ChannelOpen(Method):
    """Request to open a channel."""


@method("channel.open-ok", 20, 11, TO_CLIENT, before="ls")
class ChannelOpenOk(Method):
    """Confirmation that the channel is open."""


@method("channel.flow", 20, 20, BOTH)
class ChannelFlow(Method):
    """Request to the peer to stop sending contents (`active` False) or to resume."""

    active: Bit = True


@method("channel.flow-ok", 20, 21, BOTH)
class ChannelFlowOk(Method):
    """Confirmation of channel.flow, with the requested state."""

    active: Bit = True


@method("channel.close", 20, 40, BOTH)
class ChannelClose(Method):
    """Request to close a channel.

    The class and method ids name the method that caused an error, or are 0.
    """

    reply_code: Short = 200
    reply_text: ShortStr = ""
    class_id: Short = 0
    method_id: Short = 0


@method("channel.close-ok", 20, 41, BOTH)
class ChannelCloseOk(Method):
    """Confirmation of channel.close; the number of the channel may be used again."""


@method("access.request", 30, 10, TO_SERVER)
class AccessRequest(Method):
    """Method of AMQP 0-8 that old clients still send; the response is ticket 1."""

    realm: ShortStr = ""
    exclusive: Bit = False
    passive: Bit = False
    active: Bit = False
    write: Bit = False
    read: Bit = False


@method("access.request-ok", 30, 11, TO_CLIENT)
class AccessRequestOk(Method):
    """Response to access.request of AMQP 0-8; the ticket has no meaning in AMQP 0-9-1."""

    ticket: Short = 1


@method("exchange.declare", 40, 10, TO_SERVER, before="s")
class ExchangeDeclare(Method):
    """Request to create an exchange, or with `passive` to check that it exists."""

    exchange: ShortStr = ""
    type: ShortStr = "direct"
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    internal: Bit = False
    no_wait: Bit = False
    arguments: Table = ()


@method("exchange.declare-ok", 40, 11, TO_CLIENT)
class ExchangeDeclareOk(Method):
    """Confirmation that the exchange exists."""


@method("exchange.delete", 40, 20, TO_SERVER, before="s")
class ExchangeDelete(Method):
    """Request to delete an exchange, or with `if_unused` only one without bindings."""

    exchange: ShortStr = ""
    if_unused: Bit = False
    no_wait: Bit = False


@method("exchange.delete-ok", 40, 21, TO_CLIENT)
class ExchangeDeleteOk(Method):
    """Confirmation that the exchange is deleted."""


@method("exchange.bind", 40, 30, TO_SERVER, before="s")
class ExchangeBind(Method):
    """Request to bind the exchange `destination` to the exchange `source`. RabbitMQ's extension."""

    destination: ShortStr = ""
    source: ShortStr = ""
    routing_key: ShortStr = ""
    no_wait: Bit = False
    arguments: Table = ()


@method("exchange.bind-ok", 40, 31, TO_CLIENT)
class ExchangeBindOk(Method):
    """Confirmation that the exchange is bound. RabbitMQ's extension."""


@method("exchange.unbind", 40, 40, TO_SERVER, before="s")
class ExchangeUnbind(Method):
    """Request to remove a binding between two exchanges. RabbitMQ's extension."""

    destination: ShortStr = ""
    source: ShortStr = ""
    routing_key: ShortStr = ""
    no_wait: Bit = False
    arguments: Table = ()


@method("exchange.unbind-ok", 40, 51, TO_CLIENT)
class ExchangeUnbindOk(Method):
    """Confirmation that the binding between two exchanges is removed. RabbitMQ's extension."""


@method("queue.declare", 50, 10, TO_SERVER, before="s")
class QueueDeclare(Method):
    """Request to create a queue, or with `passive` to check that it exists.

    If `queue` is empty the server chooses the name.
    """

    queue: ShortStr = ""
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    no_wait: Bit = False
    arguments: Table = ()


@method("queue.declare-ok", 50, 11, TO_CLIENT)
class QueueDeclareOk(Method):
    """Confirmation that the queue exists, with its name and its numbers of ready messages and consumers."""

    queue: ShortStr = ""
    message_count: Long = 0
    consumer_count: Long = 0


@method("queue.bind", 50, 20, TO_SERVER, before="s")
class QueueBind(Method):
    """Request to bind a queue to an exchange."""

    queue: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    no_wait: Bit = False
    arguments: Table = ()


@method("queue.bind-ok", 50, 21, TO_CLIENT)
class QueueBindOk(Method):
    """Confirmation that the queue is bound."""


@method("queue.purge", 50, 30, TO_SERVER, before="s")
class QueuePurge(Method):
    """Request to delete all ready messages of a queue."""

    queue: ShortStr = ""
    no_wait: Bit = False


@method("queue.purge-ok", 50, 31, TO_CLIENT)
class QueuePurgeOk(Method):
    """Confirmation of queue.purge, with the number of deleted messages."""

    message_count: Long = 0


@method("queue.delete", 50, 40, TO_SERVER, before="s")
class QueueDelete(Method):
    """Request to delete a queue, optionally only if it has no consumers or no messages."""

    queue: ShortStr = ""
    if_unused: Bit = False
    if_empty: Bit = False
    no_wait: Bit = False


@method("queue.delete-ok", 50, 41, TO_CLIENT)
class QueueDeleteOk(Method):
    """Confirmation that the queue is deleted, with the number of its messages."""

    message_count: Long = 0


@method("queue.unbind", 50, 50, TO_SERVER, before="s")
class QueueUnbind(Method):
    """Request to remove a binding of a queue."""

    queue: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    arguments: Table = ()


@method("queue.unbind-ok", 50, 51, TO_CLIENT)
class QueueUnbindOk(Method):
    """Confirmation that the binding of the queue is removed."""


@method("basic.qos", 60, 10, TO_SERVER)
class BasicQos(Method):
    """Request to limit the unacknowledged deliveries, by their number or their bytes; 0 means no limit.

    RabbitMQ applies the limit to each consumer, or with `global_` to the channel.
    """

    prefetch_size: Long = 0
    prefetch_count: Short = 0
    global_: Bit = False


@method("basic.qos-ok", 60, 11, TO_CLIENT)
class BasicQosOk(Method):
    """Confirmation that the limits of basic.qos apply."""


@method("basic.consume", 60, 20, TO_SERVER, before="s")
class BasicConsume(Method):
    """Request to start a consumer of a queue.

    If `consumer_tag` is empty the server chooses the tag.
    """

    queue: ShortStr = ""
    consumer_tag: ShortStr = ""
    no_local: Bit = False
    no_ack: Bit = False
    exclusive: Bit = False
    no_wait: Bit = False
    arguments: Table = ()


@method("basic.consume-ok", 60, 21, TO_CLIENT)
class BasicConsumeOk(Method):
    """Confirmation that a consumer has started, with the consumer tag."""

    consumer_tag: ShortStr = ""


@method("basic.cancel", 60, 30, BOTH)
class BasicCancel(Method):
    """Request to end a consumer.

    A server sends it as a notice that the queue was deleted, which is an extension of RabbitMQ.
    """

    consumer_tag: ShortStr = ""
    no_wait: Bit = False


@method("basic.cancel-ok", 60, 31, BOTH)
class BasicCancelOk(Method):
    """Confirmation that the consumer has ended."""

    consumer_tag: ShortStr = ""


@method("basic.publish", 60, 40, TO_SERVER, before="s", content=True)
class BasicPublish(Method):
    """Method by which a client publishes a message to an exchange; the content follows.

    With `mandatory`, a message that is routed to no queue is returned by basic.return.
    """

    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    mandatory: Bit = False
    immediate: Bit = False


@method("basic.return", 60, 50, TO_CLIENT, content=True)
class BasicReturn(Method):
    """Method by which the server returns a published message that no queue received; the content follows."""

    reply_code: Short = 312
    reply_text: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""


@method("basic.deliver", 60, 60, TO_CLIENT, content=True)
class BasicDeliver(Method):
    """Method by which the server delivers a message to a consumer; the content follows."""

    consumer_tag: ShortStr = ""
    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortStr = ""
    routing_key: ShortStr = ""


@method("basic.get", 60, 70, TO_SERVER, before="s")
class BasicGet(Method):
    """Request for one message of a queue, without a consumer."""

    queue: ShortStr = ""
    no_ack: Bit = False


@method("basic.get-ok", 60, 71, TO_CLIENT, content=True)
class BasicGetOk(Method):
    """Response to basic.get with a message; the content follows.

    `message_count` is the number of messages left in the queue.
    """

    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    message_count: Long = 0


@method("basic.get-empty", 60, 72, TO_CLIENT, before="ss")
class BasicGetEmpty(Method):
    """Response to basic.get if the queue has no ready message."""


@method("basic.ack", 60, 80, BOTH)
class BasicAck(Method):
    """Acknowledgement of a delivery by a client, or confirm of a publish by a server.

    With `multiple` it also applies to all earlier tags. Confirms are RabbitMQ's extension.
    """

    delivery_tag: LongLong = 0
    multiple: Bit = False


@method("basic.reject", 60, 90, TO_SERVER)
class BasicReject(Method):
    """Rejection of one delivery, which is requeued, or without `requeue` discarded or dead-lettered."""

    delivery_tag: LongLong = 0
    requeue: Bit = True


@method("basic.recover-async", 60, 100, TO_SERVER)
class BasicRecoverAsync(Method):
    """Request to redeliver all unacknowledged messages of the channel, without a confirmation. Deprecated."""

    requeue: Bit = False


@method("basic.recover", 60, 110, TO_SERVER)
class BasicRecover(Method):
    """Request to redeliver all unacknowledged messages of the channel."""

    requeue: Bit = False


@method("basic.recover-ok", 60, 111, TO_CLIENT)
class BasicRecoverOk(Method):
    """Confirmation that the messages will be redelivered."""


@method("basic.nack", 60, 120, BOTH)
class BasicNack(Method):
    """Rejection of one or more deliveries by a client, or of publishes by a server. RabbitMQ's extension.

    With `multiple` it also applies to all earlier tags.
    """

    delivery_tag: LongLong = 0
    multiple: Bit = False
    requeue: Bit = True


@method("confirm.select", 85, 10, TO_SERVER)
class ConfirmSelect(Method):
    """Request to enable publisher confirms on the channel. RabbitMQ's extension."""

    no_wait: Bit = False


@method("confirm.select-ok", 85, 11, TO_CLIENT)
class ConfirmSelectOk(Method):
    """Confirmation that publisher confirms are enabled on the channel. RabbitMQ's extension."""


@method("tx.select", 90, 10, TO_SERVER)
class TxSelect(Method):
    """Request to use transactions on the channel."""


@method("tx.select-ok", 90, 11, TO_CLIENT)
class TxSelectOk(Method):
    """Confirmation that the channel uses transactions."""


@method("tx.commit", 90, 20, TO_SERVER)
class TxCommit(Method):
    """Request to commit the publishes and acknowledgements of the current transaction."""


@method("tx.commit-ok", 90, 21, TO_CLIENT)
class TxCommitOk(Method):
    """Confirmation that the transaction is committed."""


@method("tx.rollback", 90, 30, TO_SERVER)
class TxRollback(Method):
    """Request to abandon the publishes and acknowledgements of the current transaction."""


@method("tx.rollback-ok", 90, 31, TO_CLIENT)
class TxRollbackOk(Method):
    """Confirmation that the transaction is rolled back."""
