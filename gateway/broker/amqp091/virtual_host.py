"""A virtual host: exchanges and queues by name, and what declaring, binding and deleting them means.

Refusals carry RabbitMQ's reply codes and texts, for its clients tell them apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from gateway.broker.amqp091.definitions import QUEUE, Definitions
from gateway.broker.amqp091.exchange import TYPES, Exchange
from gateway.broker.queue import Consumer, Queue
from gateway.errors import GatewayError
from gateway.model.address import Address, AmqpAddress
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.model.properties import Headers, ValueType

QUEUE_ARGUMENTS: Final = ("x-message-ttl", "x-expires", "x-queue-type", "x-queue-mode", "x-queue-version")
ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
RESOURCE_ERROR, NOT_ALLOWED, COMMAND_INVALID = 506, 530, 503


class Refused(GatewayError):
    """An operation on the virtual host that AMQP answers with a reply code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class AmqpQueue(Queue):
    """A queue with what AMQP says of it."""

    def __init__(
        self, name: str, host: VirtualHost, *, durable: bool, auto_delete: bool, arguments: Headers
    ) -> None:
        super().__init__(
            name, durable=durable, messages_max=host.queue_messages_max, octets_max=host.queue_octets_max
        )
        self.auto_delete = auto_delete
        self.owner: object | None = None  # the connection of an exclusive queue
        self.exclusive_consumer = False
        self.arguments = arguments
        plain = {key: value.value for key, value in arguments}
        self.ttl_ms: int | None = plain.get("x-message-ttl")
        self.expires_ms: int | None = plain.get("x-expires")
        self.used = time.monotonic()
        self.bound: dict[Exchange, None] = {}

    def admitted(self, messages: list[Message]) -> list[Message]:
        """A queue with `x-message-ttl` shortens its messages' lives."""
        if self.ttl_ms is None:
            return messages
        return self._shortened(messages, time.time() + self.ttl_ms / 1000)

    def remove(self, consumer: Consumer) -> None:
        """A consumer leaves; an exclusive one leaves the queue free."""
        super().remove(consumer)
        self.exclusive_consumer = False
        self.used = time.monotonic()

    def _shortened(self, messages: list[Message], latest: float) -> list[Message]:
        """Copies, for other queues hold the same messages."""
        return [
            Message(
                m.address,
                m.body,
                m.property_set,
                m.assurance,
                m.durable,
                m.retain,
                min(m.expires, latest) if m.expires else latest,
                m.hops,
                m.sender,
            )
            for m in messages
        ]


class VirtualHost:
    """Exchanges, queues and bindings of one name. `changed` is called when routing may have changed."""

    def __init__(
        self,
        name: str,
        changed: Callable[[], None],
        *,
        queues_max: int = 50_000,
        queue_messages_max: int = 1_000_000,
        queue_octets_max: int = 1 << 30,
        exchanges_max: int = 1_000,
        bindings_max: int = 100_000,
        definitions: Definitions | None = None,
    ) -> None:
        """`definitions`: what survives a restart; None: nothing does."""
        self.name = name
        self.queues_max = queues_max
        self.queue_messages_max = queue_messages_max
        self.queue_octets_max = queue_octets_max
        self.exchanges_max = exchanges_max
        self.bindings_max = bindings_max
        self.queues: dict[str, AmqpQueue] = {}
        self._changed = changed
        self._names = 0
        self.exchanges: dict[str, Exchange] = {
            name: Exchange(name, kind, durable=True)
            for name, kind in (
                ("amq.direct", "direct"),
                ("amq.fanout", "fanout"),
                ("amq.topic", "topic"),
                ("amq.headers", "headers"),
                ("amq.match", "headers"),
            )
        }
        self._definitions = definitions
        self.written = False  # something durable was declared or deleted; who did it sets it back
        if definitions is not None:
            self._restore(definitions)

    def _restore(self, definitions: Definitions) -> None:
        """What an earlier process left."""
        for exchange in definitions.exchanges():
            self.exchanges[exchange.name] = exchange
        for name, auto_delete, arguments in definitions.queues():
            queue = AmqpQueue(name, self, durable=True, auto_delete=auto_delete, arguments=arguments)
            self.queues[name] = queue
            definitions.keep(queue)
        for source, kind, name, key, arguments in definitions.bindings():
            to = self.queues.get(name) if kind == QUEUE else self.exchanges.get(name)
            if to is not None and source in self.exchanges:
                self.exchanges[source].bind(to, key, arguments)
                if isinstance(to, AmqpQueue):
                    to.bound[self.exchanges[source]] = None

    # Routing: what the switch asks.

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """The queues that a message to this address goes to; None when only the message decides."""
        assert isinstance(address, AmqpAddress)
        exchange = self.exchanges.get(address.exchange)
        if exchange is not None and exchange.selective:
            return None
        return self._route(address, None)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The queues of one message, which a headers exchange looks into."""
        assert isinstance(message.address, AmqpAddress)
        return self._route(message.address, message)

    @property
    def retained(self) -> None:
        """AMQP retains nothing; the header that says so travels on."""

    def _route(self, address: AmqpAddress, message: Message | None) -> tuple[Sink, ...]:
        if not address.exchange:
            queue = self.queues.get(address.routing_key)
            return () if queue is None else (queue,)
        exchange = self.exchanges.get(address.exchange)
        if exchange is None:
            return ()
        found: dict[Queue, None] = {}
        exchange.route(address.routing_key, message, found, set())
        return tuple(found)

    # Exchanges.

    def exchange(self, name: str) -> Exchange:
        """The exchange of that name; Refused 404."""
        found = self.exchanges.get(name)
        if found is None:
            raise Refused(NOT_FOUND, f"NOT_FOUND - no exchange '{name}' in vhost '{self.name}'")
        return found

    def declare_exchange(
        self, name: str, kind: str, *, durable: bool, auto_delete: bool, internal: bool, arguments: Headers
    ) -> Exchange:
        """Create the exchange, or check that it is as declared."""
        if not name:
            raise Refused(ACCESS_REFUSED, "ACCESS_REFUSED - operation not permitted on the default exchange")
        if kind not in TYPES:
            raise Refused(COMMAND_INVALID, f"COMMAND_INVALID - unknown exchange type '{kind}'")
        found = self.exchanges.get(name)
        if found is None:
            if name.startswith("amq."):
                raise Refused(
                    ACCESS_REFUSED,
                    f"ACCESS_REFUSED - exchange name '{name}' contains reserved prefix 'amq.*'",
                )
            if arguments:
                text = f"argument '{arguments[0][0]}' of exchange '{name}' is not supported"
                raise Refused(PRECONDITION_FAILED, f"PRECONDITION_FAILED - {text}")
            self._check_room("exchanges_max", len(self.exchanges), self.exchanges_max)
            self._check_disk(durable)
            found = Exchange(name, kind, durable=durable, auto_delete=auto_delete, internal=internal)
            self.exchanges[name] = found
            if self._definitions is not None:
                self.written |= self._definitions.add_exchange(found)
            self._changed()
            return found
        for word, was, now in (
            ("type", found.kind, kind),
            ("durable", found.durable, durable),
            ("auto_delete", found.auto_delete, auto_delete),
            ("internal", found.internal, internal),
        ):
            if was != now:
                raise Refused(PRECONDITION_FAILED, self._inequivalent(word, "exchange", name, now, was))
        return found

    def delete_exchange(self, name: str, *, if_unused: bool) -> None:
        """Delete the exchange and its bindings; an unknown one is no error, as in RabbitMQ."""
        if not name or name.startswith("amq."):
            raise Refused(ACCESS_REFUSED, f"ACCESS_REFUSED - operation not permitted on exchange '{name}'")
        found = self.exchanges.get(name)
        if found is None:
            return
        if if_unused and found.bindings:
            raise Refused(
                PRECONDITION_FAILED, f"PRECONDITION_FAILED - exchange '{name}' in vhost '{self.name}' in use"
            )
        self._remove(found)
        self._changed()

    def _remove(self, exchange: Exchange) -> None:
        """Forget the exchange; those that were bound to it may be unused now."""
        del self.exchanges[exchange.name]
        for destination, key, arguments in exchange.bindings:
            if isinstance(destination, AmqpQueue):
                destination.bound.pop(exchange, None)
            self._forget(exchange, destination, key, arguments)
        for other in list(self.exchanges.values()):
            self._unbind_all(other, exchange)
        if self._definitions is not None:
            self.written |= self._definitions.remove_exchange(exchange)

    def _unbind_all(self, exchange: Exchange, destination: AmqpQueue | Exchange) -> None:
        """`destination` goes; the exchange may be unused now."""
        gone = exchange.unbind_all(destination)
        for key, arguments in gone:
            self._forget(exchange, destination, key, arguments)
        if gone:
            self._drop_if_unused(exchange)

    def _forget(self, source: Exchange, to: Queue | Exchange, key: str, arguments: Headers) -> None:
        if self._definitions is not None:
            self.written |= self._definitions.remove_binding(source, to, key, arguments)

    # Queues.

    def queue(self, name: str, owner: object) -> AmqpQueue:
        """The queue of that name, which `owner` (a connection) may use; Refused 404 or 405."""
        found = self.queues.get(name)
        if found is None:
            raise Refused(NOT_FOUND, f"NOT_FOUND - no queue '{name}' in vhost '{self.name}'")
        if found.owner is not None and found.owner is not owner:
            text = f"cannot obtain exclusive access to locked queue '{name}' in vhost '{self.name}'"
            raise Refused(RESOURCE_LOCKED, f"RESOURCE_LOCKED - {text}")
        found.used = time.monotonic()
        return found

    def declare_queue(
        self,
        name: str,
        owner: object,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Headers,
    ) -> AmqpQueue:
        """Create the queue (an empty name gets one), or check that it is as declared."""
        if name in self.queues:
            return self._redeclared(name, owner, durable, exclusive, auto_delete, arguments)
        if name.startswith("amq."):
            raise Refused(
                ACCESS_REFUSED, f"ACCESS_REFUSED - queue name '{name}' contains reserved prefix 'amq.*'"
            )
        self._check_room("queues_max", len(self.queues), self.queues_max)
        self._check_disk(durable and not exclusive)
        for key, value in arguments:
            self._check_argument(name, key, value.value, value.type)
        if not name:
            self._names += 1
            name = f"amq.gen-{time.time_ns():x}-{self._names}"
        queue = AmqpQueue(name, self, durable=durable, auto_delete=auto_delete, arguments=arguments)
        queue.owner = owner if exclusive else None
        self.queues[name] = queue
        if durable and not exclusive and self._definitions is not None:
            self.written |= self._definitions.add_queue(queue)
        self._changed()
        return queue

    def _redeclared(
        self, name: str, owner: object, durable: bool, exclusive: bool, auto_delete: bool, arguments: Headers
    ) -> AmqpQueue:
        queue = self.queue(name, owner)
        for word, was, now in (
            ("durable", queue.durable, durable),
            ("auto_delete", queue.auto_delete, auto_delete),
            ("exclusive", queue.owner is not None, exclusive),
        ):
            if was != now:
                raise Refused(PRECONDITION_FAILED, self._inequivalent(word, "queue", name, now, was))
        before, after = dict(queue.arguments), dict(arguments)
        for key in sorted({*before, *after}):
            was_value = before[key].value if key in before else None
            now_value = after[key].value if key in after else None
            if was_value != now_value:
                raise Refused(
                    PRECONDITION_FAILED, self._inequivalent(key, "queue", name, now_value, was_value)
                )
        return queue

    def _check_argument(self, name: str, key: str, value: Any, kind: ValueType) -> None:
        if key not in QUEUE_ARGUMENTS:
            raise Refused(
                PRECONDITION_FAILED,
                f"PRECONDITION_FAILED - argument '{key}' of queue '{name}' is not supported",
            )
        if key in ("x-message-ttl", "x-expires"):
            lowest = 0 if key == "x-message-ttl" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
                raise Refused(
                    PRECONDITION_FAILED,
                    f"PRECONDITION_FAILED - invalid arg '{key}' for queue '{name}': {value!r}",
                )

    def delete_queue(self, queue: AmqpQueue, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete the queue, its bindings and its messages; returns how many were ready."""
        if if_unused and queue.consumers:
            raise Refused(
                PRECONDITION_FAILED,
                f"PRECONDITION_FAILED - queue '{queue.name}' in vhost '{self.name}' in use",
            )
        if if_empty and len(queue):
            raise Refused(
                PRECONDITION_FAILED,
                f"PRECONDITION_FAILED - queue '{queue.name}' in vhost '{self.name}' is not empty",
            )
        self.queues.pop(queue.name, None)
        for exchange in list(queue.bound):
            self._unbind_all(exchange, queue)
        if queue.kept is not None and self._definitions is not None:
            self.written |= self._definitions.remove_queue(queue)
        self._changed()
        return queue.delete()

    def consumer_left(self, queue: AmqpQueue) -> None:
        """The last consumer of an auto-delete queue takes it along."""
        queue.used = time.monotonic()
        if queue.auto_delete and not queue.consumers and not queue.deleted:
            self.delete_queue(queue)

    def owner_gone(self, owner: object) -> None:
        """A connection closed: its exclusive queues go."""
        for queue in [queue for queue in self.queues.values() if queue.owner is owner]:
            self.delete_queue(queue)

    def expire(self, now: float) -> None:
        """Delete the queues that were unused for longer than their `x-expires` (monotonic `now`)."""
        for queue in list(self.queues.values()):
            if (
                queue.expires_ms is not None
                and not queue.consumers
                and now - queue.used > queue.expires_ms / 1000
            ):
                self.delete_queue(queue)

    # Bindings.

    def bind(self, source: str, destination: AmqpQueue | Exchange, key: str, arguments: Headers) -> None:
        """Bind a queue or exchange to the exchange `source`."""
        if not source:
            raise Refused(ACCESS_REFUSED, "ACCESS_REFUSED - operation not permitted on the default exchange")
        exchange = self.exchange(source)
        bindings = sum(len(one.bindings) for one in self.exchanges.values())
        self._check_room("bindings_max", bindings, self.bindings_max)
        if exchange.bind(destination, key, arguments):
            if isinstance(destination, AmqpQueue):
                destination.bound[exchange] = None
            if self._definitions is not None:
                self.written |= self._definitions.add_binding(exchange, destination, key, arguments)
            self._changed()

    def unbind(self, source: str, destination: AmqpQueue | Exchange, key: str, arguments: Headers) -> None:
        """Remove a binding; one that is not there is no error, as in RabbitMQ."""
        if not source:
            raise Refused(ACCESS_REFUSED, "ACCESS_REFUSED - operation not permitted on the default exchange")
        exchange = self.exchange(source)
        if exchange.unbind(destination, key, arguments):
            self._forget(exchange, destination, key, arguments)
            self._drop_if_unused(exchange)
            self._changed()

    def _drop_if_unused(self, exchange: Exchange) -> None:
        if exchange.auto_delete and not exchange.bindings and self.exchanges.get(exchange.name) is exchange:
            self._remove(exchange)

    def _check_disk(self, durable: bool) -> None:
        if durable and self._definitions is not None and (failure := self._definitions.failure):
            raise Refused(RESOURCE_ERROR, f"RESOURCE_ERROR - the store cannot be written: {failure}")

    @staticmethod
    def _check_room(limit: str, count: int, most: int) -> None:
        if count >= most:
            raise Refused(RESOURCE_ERROR, f"RESOURCE_ERROR - limits.{limit} ({most}) is reached")

    def _inequivalent(self, word: str, what: str, name: str, now: object, was: object) -> str:
        def say(value: object) -> str:
            return str(value).lower() if isinstance(value, bool) else "none" if value is None else f"{value}"

        return (
            f"PRECONDITION_FAILED - inequivalent arg '{word}' for {what} '{name}' in vhost '{self.name}': "
            f"received '{say(now)}' but current is '{say(was)}'"
        )
