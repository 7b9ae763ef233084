"""What clients of AMQP may ask of the cluster through the gateway: what their roles give them, as in the
embedded broker, and of what belongs to the replicas themselves nothing at all.

The cluster sees one user, the gateway's, who may do everything with the names of the namespace. So these are
kept from clients wherever a method, an argument or a header could lead there.

Of an exchange's type nothing is known here: rules for routing keys hold at every exchange that is named in
them, whatever its type.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final, cast

from gateway.access.questions import Undecided
from gateway.broker.amqp091.arguments import ALTERNATE, DEAD_LETTER_EXCHANGE
from gateway.broker.amqp091.dead_lettering import copied_keys
from gateway.broker.amqp091.refusals import Refused, access_refused, failed
from gateway.broker.amqp091.replies import PREFIX, REPLY_TO
from gateway.engine.names import Names
from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.ingress.amqp091.admission import AmqpEntrance, AmqpNewcomer
from gateway.ingress.amqp091.checks import (
    DEAD_LETTER_KEY,
    binding_key,
    check_binding,
    check_leading,
    named,
)
from gateway.model.caches import make_room
from gateway.model.properties import Headers
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import decode_properties, decode_publish, encode_basic_properties
from gateway.protocols.amqp091.relaying import Relayed
from gateway.protocols.amqp091.translate import COPIES, ENGINE_HEADER

Allowed = dict[bytes, None]
"""Arguments of basic.publish that are allowed to all who have the same rights."""
TYPED: Final = frozenset({"amq.direct", "amq.fanout", "amq.headers", "amq.match"})
"""Exchanges that are no topic exchanges."""


class ClientJudge:
    """Of one client. `allowed` is what others with its rights have been allowed before."""

    def __init__(
        self,
        client: AmqpNewcomer,
        entrance: AmqpEntrance,
        names: Names,
        namespace: str,
        consumers: Callable[[], int],
    ) -> None:
        """`consumers`: how many it has."""
        self.question: Undecided | None = None  # what has to be known first
        self.allowed: Allowed = {}
        self._client = client
        self._entrance = entrance
        self._consumers = consumers
        self._own = f"{namespace}."
        self._topics = names.topics

    # What the relay asks.

    def remember(self, publish: bytes) -> None:
        """What is allowed once is to all who have the same rights, until the rules change."""
        make_room(self.allowed, self._entrance.limits.cache_entries_max)
        self.allowed[publish] = None

    def knows(self, publish: bytes) -> bool:
        """The octets of this publish have been allowed before."""
        return publish in self.allowed

    def allows(self, channel: Relayed, method: m.Method) -> bool:
        """Raises RemoteProtocolError for what is refused; False: there is a question."""
        try:
            ACTIONS[type(method)](self, channel, method)
        except Refused as error:
            ids = method.index >> 16, method.index & 0xFFFF
            raise RemoteProtocolError(
                str(error), reason=error.code, class_id=ids[0], method_id=ids[1]
            ) from None
        except Undecided as question:
            self.question = question
            return False
        return True

    def content(self, channel: Relayed, publish: bytes, raw: bytes) -> bytes | None:
        """The properties that a message may have; None: there is a question."""
        try:
            return self._content(publish, raw)
        except Refused as error:
            raise RemoteProtocolError(str(error), reason=error.code, class_id=60, method_id=40) from None
        except Undecided as question:
            self.question = question
            return None

    def _content(self, publish: bytes, raw: bytes) -> bytes:
        native = decode_properties(raw)
        principal = self._client.principal
        assert principal is not None
        if native.user_id is not None and native.user_id != principal.name:
            text = f"user_id property set to '{native.user_id}' but authenticated user was '{principal.name}'"
            raise failed(text)
        headers = native.headers or ()
        method = decode_publish(publish)
        for pair in headers:  # a server takes the first of two by one name, so each is looked at
            if pair[0] in COPIES:
                for key in copied_keys((pair,), pair[0]):
                    self.check_key("write", method.exchange, key)
        if all(name != ENGINE_HEADER for name, _ in headers):
            return raw
        native.headers = tuple([pair for pair in headers if pair[0] != ENGINE_HEADER])
        try:
            return encode_basic_properties(native)
        except LocalProtocolError:
            raise failed("invalid message: its headers are nested too deep") from None

    def check_consumed(self, queue: str) -> None:
        """Whether a queue may still be read. Raises Refused, and Undecided."""
        if queue != REPLY_TO:
            self.check("read", "queue", queue)

    # What it asks of the rules.

    def check(self, permission: str, kind: str, name: str) -> None:
        """As Checker, and nobody's what belongs to the replicas."""
        if name.startswith(self._own) and name != self._topics:
            self._refuse_own(permission, kind, name)
        self._client.check(permission, kind, name)

    def _refuse_own(self, permission: str, kind: str, name: str) -> None:
        client = self._client
        what = f"{kind} '{name}' in vhost '{client.host_name}'"
        self._entrance.denied(client.sender, permission, what, "the gateways keep their state there")
        raise access_refused(f"access to {what} refused: the gateways keep their state there")

    def check_key(self, permission: str, exchange: str, key: str | None) -> None:
        """As Checker, at every exchange that may be a topic exchange; of the default exchange a key is a
        queue."""
        if not exchange:
            if key is not None and key.startswith(self._own):
                self._refuse_own(permission, "queue", key)
        elif exchange not in TYPED:
            self._client.check_topic(permission, exchange, key)

    def _check_leading(self, kind: str, name: str, arguments: Headers, argument: str) -> None:
        """What leads on to the default exchange has to say with which key: or a message's own would name any
        queue."""
        check_leading(self, kind, name, arguments, argument)
        keyed = kind == "queue" and any(word == DEAD_LETTER_KEY for word, _ in arguments)
        if not keyed and any(word == argument and value.value == "" for word, value in arguments):
            needs = DEAD_LETTER_KEY if kind == "queue" else "another exchange"
            raise access_refused(f"{argument} '' of {kind} '{name}' needs {needs}")

    # Methods.

    def _nothing(self, channel: Relayed, method: m.Method) -> None:
        """It names nothing that is anybody's."""

    def _exchange_declare(self, channel: Relayed, method: m.ExchangeDeclare) -> None:
        name = named(method.exchange)
        if method.passive:
            if name.startswith(self._own) and name != self._topics:
                self._refuse_own("configure", "exchange", name)
            return
        self.check("configure", "exchange", name)
        self._check_leading("exchange", name, method.arguments, ALTERNATE)

    def _exchange_delete(self, channel: Relayed, method: m.ExchangeDelete) -> None:
        name = named(method.exchange)
        if name == self._topics:
            self._refuse_own("configure", "exchange", name)
        self.check("configure", "exchange", name)

    def _bind_exchange(self, channel: Relayed, method: m.ExchangeBind | m.ExchangeUnbind) -> None:
        destination, source = named(method.destination), named(method.source)
        check_binding(self, "exchange", destination, source, method.routing_key)

    def _bind_queue(self, channel: Relayed, method: m.QueueBind | m.QueueUnbind) -> None:
        queue = named(method.queue) or channel.last_queue
        check_binding(self, "queue", queue, named(method.exchange), binding_key(method, queue))

    def _queue_declare(self, channel: Relayed, method: m.QueueDeclare) -> None:
        name = named(method.queue)
        if name == REPLY_TO or name.startswith(PREFIX):
            return
        if method.passive:
            if name.startswith(self._own):
                self._refuse_own("read", "queue", name)
        else:
            # The server will make up a name like this one.
            name = name or f"amq.gen-{secrets.token_urlsafe(16)}"
            self.check("configure", "queue", name)
            self._check_leading("queue", name, method.arguments, DEAD_LETTER_EXCHANGE)
        channel.last_queue = name or channel.last_queue

    def _purge(self, channel: Relayed, method: m.QueuePurge) -> None:
        self._check_queue(channel, "read", named(method.queue))

    def _delete(self, channel: Relayed, method: m.QueueDelete) -> None:
        self._check_queue(channel, "configure", named(method.queue))

    def _get(self, channel: Relayed, method: m.BasicGet) -> None:
        self._check_queue(channel, "read", method.queue)

    def _check_queue(self, channel: Relayed, permission: str, name: str) -> None:
        """Whether the client may; where no queue is named at all the server says that."""
        if name or channel.last_queue:
            self.check(permission, "queue", name or channel.last_queue)

    def _consume(self, channel: Relayed, method: m.BasicConsume) -> None:
        queue = method.queue or channel.last_queue
        if method.queue != REPLY_TO:
            self._check_queue(channel, "read", method.queue)
        most = self._entrance.limits.consumers_max
        if self._consumers() >= most:
            raise failed(f"reached maximum ({most}) of consumers per connection (limits.consumers_max)")
        if method.consumer_tag:
            channel.consumers[method.consumer_tag] = queue
        elif method.no_wait:  # the server never says what it is called, so it stays
            channel.consumers[f"amq.ctag-{secrets.token_urlsafe(16)}"] = queue
        else:
            channel.unnamed.append(queue)

    def _cancel(self, channel: Relayed, method: m.BasicCancel) -> None:
        channel.consumers.pop(method.consumer_tag, None)

    def _publish(self, channel: Relayed, method: m.BasicPublish) -> None:
        self.check("write", "exchange", method.exchange)
        self.check_key("write", method.exchange, method.routing_key)


Action = Callable[[ClientJudge, Relayed, Any], None]
ACTIONS: Final = cast(
    "dict[type[m.Method], Action]",
    {
        m.AccessRequest: ClientJudge._nothing,
        m.ExchangeDeclare: ClientJudge._exchange_declare,
        m.ExchangeDelete: ClientJudge._exchange_delete,
        m.ExchangeBind: ClientJudge._bind_exchange,
        m.ExchangeUnbind: ClientJudge._bind_exchange,
        m.QueueDeclare: ClientJudge._queue_declare,
        m.QueueBind: ClientJudge._bind_queue,
        m.QueueUnbind: ClientJudge._bind_queue,
        m.QueuePurge: ClientJudge._purge,
        m.QueueDelete: ClientJudge._delete,
        m.BasicConsume: ClientJudge._consume,
        m.BasicCancel: ClientJudge._cancel,
        m.BasicGet: ClientJudge._get,
        m.BasicPublish: ClientJudge._publish,
    },
)
