"""Changes through RabbitMQ's HTTP API: declaring, binding, publishing and getting.

Each change acts as the AMQP 0-9-1 method of this name, and needs the same rights of the caller, besides the
right to change something at the console. Bodies of requests are those of RabbitMQ's management plug-in, in
which numbers and Booleans may be strings, because `rabbitmqadmin` sends them so.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from errno import EIO
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import orjson
import trio
from starlette.requests import Request

from gateway import clock
from gateway.access.authorization import Authorization
from gateway.access.rights import DEFAULT_EXCHANGE, AllRights, Rights
from gateway.admin.admission import Caller
from gateway.admin.messages import Hide, hide_nothing, plain
from gateway.admin.rabbitmq_lists import LoopTurns
from gateway.admin.selection import CallbackFuture, load_messages
from gateway.broker.amqp091.arguments import ALTERNATE, DEAD_LETTER_EXCHANGE, EXCHANGE_TYPES
from gateway.broker.amqp091.checks import check_binding, check_exchange_argument, without_line_ends
from gateway.broker.amqp091.dead_letter_routing import own_properties
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import access_refused, precondition_failed
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.operator_publish import Publishing
from gateway.broker.publish_permission import amqp_entry
from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.mapping.conditions import plain_headers
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.pending import Pending
from gateway.model.properties import Headers
from gateway.model.spooled_bodies import Body, Spooled, WithheldBody
from gateway.protocols.amqp091.codec import BasicProperties, decode_properties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.translate import COPIES, content_properties, essentials
from gateway.settings.declare import headers as typed_headers
from gateway.telemetry.audit import audit

GET_MAX: Final = 1_000  # messages in one response
GET_BYTES_MAX: Final = 16 * 1024 * 1024  # of their bodies, as far as they are shown
THREAD_BYTES_MIN: Final = 65_536  # of a body that is encoded in a thread
PUBLISH_SECS: Final = 5.0  # maximum time to wait for the outcome
ACK_MODES: Final = ("ack_requeue_true", "ack_requeue_false", "reject_requeue_true", "reject_requeue_false")
PUT_BACK: Final = ""  # instead of a mode, if the messages were not shown
TEXTS: Final = (
    *("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id"),
    *("type", "user_id", "app_id", "cluster_id"),
)
NUMBERS: Final = {"delivery_mode": 255, "priority": 255, "timestamp": (1 << 64) - 1}
REPLY_TO: Final = "amq.rabbitmq.reply-to"
R = TypeVar("R")


class BrokerAccess(NamedTuple):
    """Parts of the gateway that are needed to change the embedded broker.

    `endpoint_of` maps a virtual host to the endpoint whose routes apply to messages that are published there.
    `limit` is the maximum size of a message body in bytes. `hide` removes private fields from messages.
    """

    authorization: Authorization
    publishing: Publishing
    endpoint_of: Callable[[VirtualHost], str]
    limit: int
    hide: Hide = hide_nothing


class Actor:
    """Caller of the API in one virtual host, whose rights are checked like those of an AMQP 0-9-1 client.

    The class implements the protocol `Checker` of `broker/amqp091/checks.py`.
    """

    def __init__(self, caller: Caller, rights: Rights, host: VirtualHost) -> None:
        self.user = caller.principal.name
        self._rights = rights
        self._host = host

    def check(self, permission: str, kind: str, name: str) -> None:
        """Check that the caller has a permission for the exchange or queue `name`.

        `permission` is `configure`, `write` or `read`, and `kind` is `exchange` or `queue`. Raises Refused
        403 if the caller lacks the permission, and Pending while the right is still being requested from an
        authorization service.
        """
        name = name or DEFAULT_EXCHANGE
        decision = self._rights.amqp(self._host.name, permission, name, kind)
        if not decision.allowed:
            self._refuse(permission, f"{kind} '{name}'", decision.rule)

    def check_key(self, permission: str, exchange: str, key: str | None) -> None:
        """Check the caller's permission for a routing key of an exchange; the key None stands for every key.

        Only keys of topic exchanges, and of exchanges that do not exist, are checked. Raises Refused 403 if
        the caller lacks the permission, and Pending while the right is still being requested.
        """
        found = self._host.exchanges.get(exchange)
        if exchange and (found is None or found.is_topic):
            decision = self._rights.amqp_key(self._host.name, permission, exchange, key)
            if not decision.allowed:
                topic = "every topic" if key is None else f"topic '{key}'"
                self._refuse(permission, f"{topic} in exchange '{exchange}'", decision.rule)

    def check_entry(self) -> None:
        """Check that the caller may use the virtual host.

        Raises Refused 403 if the caller lacks the right, and Pending while it is still being requested.
        """
        decision = self._rights.enters_amqp(self._host.name)
        if not decision.allowed:
            self._refuse("connect", "it", decision.rule)

    @property
    def publish_rights(self) -> Rights | None:
        """Rights that limit what the caller may publish, or None if the caller may publish everything.

        The value is None for an administrator, and if no roles are configured.
        """
        return None if self._rights.unlimited else self._rights

    def refuse_publish(self, resource: str, rule: str) -> NoReturn:
        """Write to the audit log that `rule` denies publishing to `resource`, and raise Refused 403."""
        self._refuse("write", resource, rule)

    def _refuse(self, permission: str, resource: str, rule: str) -> NoReturn:
        target = f"{resource} in vhost '{self._host.name}'"
        audit("denied", endpoint="http", user=self.user, action=permission, target=target, rule=rule)
        raise access_refused(f"access to {target} refused for user '{self.user}'")


class RabbitChanges:
    """Changes of the embedded broker by callers of RabbitMQ's HTTP API.

    `flush` passes changes to the store and writes to sockets.
    """

    def __init__(self, broker: BrokerAccess, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._flush = flush

    async def permit(self, request: Request, host: VirtualHost, check: Callable[[Actor], R]) -> R:
        """Call `check` with the caller as an Actor, and return the result.

        If `check` raises Pending, wait for the right that it needs, and call it again. Raises Refused if the
        caller lacks a right.
        """
        caller: Caller = request.state.caller
        actor = Actor(caller, self._rights_of(caller), host)
        while True:
            try:
                actor.check_entry()
                return check(actor)
            except Pending as pending:
                await pending.awaited.wait()

    def _rights_of(self, caller: Caller) -> Rights:
        """Return the AMQP 0-9-1 rights of a caller.

        A caller without `maker` is an administrator and has all rights. Other callers have the rights of
        `maker`, the responsible user. There is one exception: if this user itself is the caller and its
        credential has scopes, fields or roles (as a JSON Web Token can have), the rights are those of the
        credential.
        """
        if caller.maker is None:
            return AllRights(key=caller.principal.name)
        own = caller.principal
        is_own = own.name == caller.maker.name and (own.scopes or own.fields or own.roles)
        return self._broker.authorization.rights_of(own if is_own else caller.maker.principal)

    # Definitions.

    async def declare_queue(self, request: Request, host: VirtualHost, name: str) -> bool:
        """Declare the queue `name` with the properties in a PUT request's body. Return True if it is new.

        Raises Refused as queue.declare would be refused, and ValueError for an invalid body.
        """
        body = await body_of(request)
        arguments = arguments_of(body)
        durable, auto_delete = flag(body, "durable"), flag(body, "auto_delete")

        def act(actor: Actor) -> bool:
            queue = without_line_ends(name)
            actor.check("configure", "queue", queue)
            check_exchange_argument(actor, "queue", queue, arguments, DEAD_LETTER_EXCHANGE)
            new = queue not in host.queues
            host.declare_queue(
                queue,
                self,
                user=actor.user,
                durable=durable,
                exclusive=False,
                auto_delete=auto_delete,
                arguments=arguments,
            )
            return new

        return await self.permit(request, host, act)

    async def declare_exchange(self, request: Request, host: VirtualHost, name: str) -> bool:
        """Declare the exchange `name` with the properties in a PUT request's body. Return True if it is new.

        Raises Refused as exchange.declare would be refused, and ValueError for an invalid body.
        """
        body = await body_of(request)
        arguments, kind = arguments_of(body), body.get("type", "direct")
        if kind not in EXCHANGE_TYPES:
            raise ValueError(f"invalid exchange type '{kind}'")
        flags = {word: flag(body, word) for word in ("durable", "auto_delete", "internal")}

        def act(actor: Actor) -> bool:
            exchange = without_line_ends(name)
            actor.check("configure", "exchange", exchange)
            check_exchange_argument(actor, "exchange", exchange, arguments, ALTERNATE)
            new = exchange not in host.exchanges
            host.declare_exchange(exchange, str(kind), user=actor.user, arguments=arguments, **flags)
            return new

        return await self.permit(request, host, act)

    async def bind(self, request: Request, host: VirtualHost, kind: str, source: str, name: str) -> str:
        """Bind the queue or exchange `name` to the exchange `source`, and return the routing key.

        `kind` is `queue` or `exchange`. The body of the POST request has routing key and arguments. Raises
        Refused if the caller may not bind, and ValueError for an invalid body.
        """
        body = await body_of(request)
        arguments, key = arguments_of(body), body.get("routing_key", "")
        if not isinstance(key, str) or len(key.encode()) > 255:
            raise ValueError("routing_key: a text of at most 255 bytes is wanted")

        def act(actor: Actor) -> str:
            check_binding(actor, kind, name, source, key)
            to = host.queue(name, self) if kind == "queue" else host.bindable(name)
            host.bind(source, to, key, arguments, user=actor.user)
            return key

        return await self.permit(request, host, act)

    # Messages.

    async def publish(self, request: Request, host: VirtualHost, exchange: str) -> bool:
        """Publish the message in the body of a POST request, and wait for its outcome.

        Return False if no queue or route accepts the message. Raises Refused if the caller may not publish
        it, and ValueError if the body is invalid, or the message is not accepted or not confirmed within
        PUBLISH_SECS.
        """
        body = await body_of(request)
        caller: Caller = request.state.caller
        message = self._message(body, host, exchange, caller)
        publishing, endpoint = self._broker.publishing, self._broker.endpoint_of(host)
        result = CallbackFuture[Outcome]()

        def act(actor: Actor) -> None:
            entry = amqp_entry(publishing.dispatcher, actor, endpoint, host, message.address)
            publishing.publish_by(entry, message, result.set)

        await self.permit(request, host, act)
        self._flush()
        outcome = await result.wait(PUBLISH_SECS)
        if outcome is None:
            raise ValueError(
                f"no confirmation of the message within {PUBLISH_SECS:g} s; it may still be delivered"
            )
        if outcome.verdict is not Verdict.ACCEPTED:
            if outcome.reason is Reason.NO_ROUTE:
                return False
            raise ValueError(f"the message was not accepted: {outcome.reason.value}: {outcome.text}")
        return True

    def _message(
        self, fields: Mapping[str, Any], host: VirtualHost, exchange: str, caller: Caller
    ) -> Message:
        """Return the message that `fields`, the body of a POST request, describe.

        `caller` becomes its sender. Raises ValueError for an invalid body, and Refused if the message is too
        large.
        """
        key = fields.get("routing_key")
        if not isinstance(key, str):
            raise ValueError("routing_key: a text is wanted")
        payload, encoding = fields.get("payload"), fields.get("payload_encoding")
        if not isinstance(payload, str) or encoding not in ("string", "base64"):
            raise ValueError("payload: a text is wanted, whose payload_encoding is string or base64")
        body = base64.b64decode(payload, validate=True) if encoding == "base64" else payload.encode()
        if len(body) > self._broker.limit:
            raise precondition_failed(
                f"message size {len(body)} is larger than configured max size {self._broker.limit}"
            )
        native = properties_of(fields.get("properties"), caller.principal.name)
        try:
            properties = content_properties(encode_basic_properties(native))
            durable, limit, retained, hops, _ = essentials(properties)
            address = amqp_address(exchange, key)
        except (LocalProtocolError, RemoteProtocolError) as error:
            raise ValueError(str(error)) from error
        return Message(
            address,
            body,
            properties,
            1,
            durable,
            retained,
            NEVER if limit is None else clock.utc() + limit / 1000,
            hops,
            Sender(self._broker.endpoint_of(host), "", caller.principal.name),
        )

    async def get(self, request: Request, host: VirtualHost, name: str) -> list[dict[str, Any]]:
        """Take messages from the head of the queue `name`, settle them by `ackmode`, and return them.

        `ackmode` is a field of the request's body. If one of the messages cannot be shown, all are put back
        at the head of the queue, and their delivery counts do not change. Raises Refused if the caller may
        not read the messages, and ValueError for an invalid body or a message that cannot be shown.
        """
        body = await body_of(request)
        mode, encoding = body.get("ackmode"), body.get("encoding")
        count, truncate = number(body, "count", None), number(body, "truncate", 1 << 62)
        if mode not in ACK_MODES:
            raise ValueError(f"ackmode: {', '.join(ACK_MODES)} are possible")
        if encoding not in ("auto", "base64"):
            raise ValueError("encoding: auto and base64 are possible")
        caller: Caller = request.state.caller
        if not caller.rights.shows_bodies(host.name):
            raise access_refused(f"user '{caller.principal.name}' may not read bodies of messages")

        def act(actor: Actor) -> AmqpQueue:
            actor.check("read", "queue", name)
            return host.queue(name, self)

        queue = await self.permit(request, host, act)
        if queue.options.quorum and queue.options.single_active:
            raise precondition_failed(f"queue '{name}' in vhost '{host.name}' has a single active consumer")
        deliveries: list[tuple[int, Message, bool]] = []
        rows: list[dict[str, Any]] = []
        settled = False
        try:
            await self._get_messages(queue, min(count, GET_MAX), truncate, deliveries)
            turns = LoopTurns()
            for position, message, redelivered in deliveries:
                row = await self._row(queue, position, message, encoding, truncate)
                rows.append({"redelivered": redelivered, "message_count": len(queue), **row})
                await turns.checkpoint()
            remaining = len(queue) + len(rows)
            for at, row in enumerate(rows, 1):
                row["message_count"] = remaining - at
            settled = True
        finally:
            settle(queue, deliveries, mode if settled else PUT_BACK)
        return rows

    @staticmethod
    async def _get_messages(
        queue: AmqpQueue, count: int, truncate: int, deliveries: list[tuple[int, Message, bool]]
    ) -> None:
        """Take up to `count` messages from the head of a queue, and append them to `deliveries`.

        An element of `deliveries` is (position in the queue, message, redelivered flag). It is appended as
        soon as the message is taken, so that the calling method can settle the message even after a
        cancellation. Stop before the sum of the body sizes exceeds GET_BYTES_MAX bytes; a body counts at most
        `truncate` bytes. Also stop if messages are not read from the disk within LOAD_SECS. Raises ValueError
        if the first message alone exceeds GET_BYTES_MAX.
        """
        queue.dispatch()
        byte_count = 0
        while len(deliveries) < count and not queue.deleted:
            found = queue.take_aside(_any) or queue.take()
            if found is not None:
                position, message, _ = found
                byte_count += min(len(message.body), truncate)
                if byte_count <= GET_BYTES_MAX:
                    deliveries.append(found)
                    continue
                queue.put_back([(position, message)])
                queue.dispatch()
                if not deliveries:
                    size = len(message.body)
                    raise ValueError(f"the message has {size} bytes: truncate it to {GET_BYTES_MAX} at most")
                return
            if not await load_messages(queue):
                return

    async def _row(
        self, queue: AmqpQueue, position: int, message: Message, encoding: str, truncate: int
    ) -> dict[str, Any]:
        """Return the message at `position` of a queue, with the field names of RabbitMQ's API.

        `encoding` is the requested one, `auto` or `base64`, and `truncate` the maximum number of bytes of the
        body. Raises ValueError if the message cannot be shown.
        """
        returns = None if queue.deliveries is None else queue.deliveries.of(position)
        visible = self._broker.hide("", message)
        try:
            native = decode_properties(own_properties(queue, visible, clock.utc(), returns))
            fields = {name: value for name, value in vars(native).items() if value is not None}
            text, word = await _payload(visible.body, encoding, truncate)
        except OSError as error:
            raise ValueError(f"the spool cannot be read: {error.strerror}") from error
        except (LocalProtocolError, RemoteProtocolError) as error:
            raise ValueError(f"the message at the head cannot be shown: {error}") from error
        headers = fields.pop("headers", None)
        properties = {name: plain(value) for name, value in fields.items()}
        if headers is not None:
            properties["headers"] = plain(plain_headers(headers))
        return {
            "exchange": message.address.scope,
            "routing_key": message.address.name,
            "payload_bytes": len(visible.body),
            "payload": text,
            "payload_encoding": word,
            "properties": properties or [],  # as Erlang writes an empty table
        }


async def _payload(body: Body, encoding: str, truncate: int) -> tuple[str, str]:
    """Return at most `truncate` bytes of a message body as text, and the encoding of this text.

    `encoding` is the requested one, `auto` or `base64`. The returned encoding is `string`, `base64`, or
    `withheld` with the text "" if the caller may not see the body. Raises OSError if the body cannot be read
    from the disk.
    """
    if isinstance(body, WithheldBody):
        return "", "withheld"
    count = min(len(body), truncate)
    if count < THREAD_BYTES_MIN and not isinstance(body, Spooled):
        return _encoded(body, encoding, count)
    return await trio.to_thread.run_sync(_encoded, body, encoding, count)


def _encoded(body: Body, encoding: str, count: int) -> tuple[str, str]:
    payload = body.read(0, count) if isinstance(body, Spooled) else body[:count]
    if len(payload) != count:
        raise OSError(EIO, "a body is shorter than it was")
    if encoding == "auto":
        try:
            return payload.decode(), "string"
        except UnicodeDecodeError:
            pass
    return base64.b64encode(payload).decode(), "base64"


def _any(message: Message) -> bool:
    return True


def settle(queue: AmqpQueue, deliveries: list[tuple[int, Message, bool]], mode: str) -> None:
    """Acknowledge, requeue, reject or put back messages that were taken from a queue.

    An element of `deliveries` is (position in the queue, message, redelivered flag). `mode` is a value of
    `ackmode` in RabbitMQ's API, or PUT_BACK: then the messages return to the queue as if they had not been
    delivered.
    """
    if not deliveries:
        return
    if queue.deleted or mode == "ack_requeue_false":
        queue.acknowledged([position for position, _, _ in deliveries])
    elif mode == "reject_requeue_false":
        for position, message, _ in deliveries:
            queue.reject(position, message)
    elif mode == PUT_BACK:
        queue.put_back([(position, message) for position, message, _ in deliveries])
    else:
        queue.requeue([(position, message) for position, message, _ in deliveries])
    if not queue.deleted:
        queue.dispatch()


# Bodies of requests.


async def body_of(request: Request) -> Mapping[str, Any]:
    """Return the JSON object in the body of a request; an empty body is an empty object.

    Raises ValueError if the body is not a JSON object.
    """
    data = await request.body()
    try:
        found = orjson.loads(data) if data.strip() else {}
    except orjson.JSONDecodeError:
        raise ValueError("not_json") from None
    if not isinstance(found, dict):
        raise ValueError("not_json")
    return found


def flag(body: Mapping[str, Any], word: str) -> bool:
    """Return the field `word` of a request's body as a Boolean, or False if the field is missing.

    The strings `true` and `false` are accepted, too. Raises ValueError for any other value.
    """
    value = body.get(word, False)
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise ValueError(f"{word}: true or false is wanted")
    return value


def number(body: Mapping[str, Any], word: str, default: int | None) -> int:
    """Return the field `word` of a request's body as a non-negative number.

    A string of digits is accepted, too. Return `default` if the field is missing. Raises ValueError for any
    other value, and if the field is missing and `default` is None.
    """
    value = body.get(word, default)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{word}: a number is wanted")
    return value


def arguments_of(body: Mapping[str, Any]) -> Headers:
    """Return the field `arguments` of a request's body as AMQP headers.

    Raises ValueError if the field is not an object, or has a value that AMQP cannot express.
    """
    arguments = body.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments: an object is wanted")
    return typed_headers(arguments)


def properties_of(properties: Any, user: str) -> BasicProperties:
    """Convert `properties`, the JSON object of a message that `user` publishes, to AMQP properties.

    Raises ValueError for invalid properties, and Refused 406 for another user's `user_id` or a direct
    reply-to address.
    """
    if not isinstance(properties, dict):
        raise ValueError("properties: an object is wanted")
    native = BasicProperties()
    for name, value in properties.items():
        if name == "headers" and isinstance(value, dict):
            native.headers = typed_headers(value)
        elif name in TEXTS and isinstance(value, str) and len(value.encode()) <= 255:
            setattr(native, name, value.encode() if name == "correlation_id" else value)
        elif name in NUMBERS and type(value) is int and 0 <= value <= NUMBERS[name]:
            setattr(native, name, value)
        else:
            raise ValueError(f"properties.{name}: there is no such property, or it cannot have that value")
    if native.user_id is not None and native.user_id != user:
        raise precondition_failed(
            f"user_id property set to '{native.user_id}' but authenticated user was '{user}'"
        )
    if native.reply_to == REPLY_TO:
        raise precondition_failed("fast reply consumer does not exist")
    if any(name in COPIES for name, _ in native.headers or ()):
        raise ValueError("properties.headers: CC and BCC are for messages that are published over AMQP")
    return native
