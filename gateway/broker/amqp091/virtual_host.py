"""Virtual host: exchanges and queues by name, and the rules of declaring, binding and deleting them.

Refusals have RabbitMQ's reply codes and texts, because its clients distinguish them. The virtual host is a
namespace of the dispatcher; it also enforces limits, in total and per user, and records what is durable
(definitions.py).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from mypy_extensions import mypyc_attr

from gateway import clock
from gateway.broker.amqp091.arguments import (
    ALTERNATE,
    DELAYED,
    EXCHANGE_TYPES,
    check_match,
    check_quorum,
    exchange_arguments,
    meaningful,
)
from gateway.broker.amqp091.consistent_hash import weight_of
from gateway.broker.amqp091.dead_letter_routing import DeadLettering, Lost
from gateway.broker.amqp091.definitions import EXCHANGE, QUEUE, Definitions
from gateway.broker.amqp091.delays import DelayedMessages
from gateway.broker.amqp091.exchange import Exchange
from gateway.broker.amqp091.policies import Policy, alternate_of
from gateway.broker.amqp091.queue import AmqpQueue, make_queue
from gateway.broker.amqp091.refusals import (
    COMMAND_INVALID,
    RESOURCE_ERROR,
    AmqpRefused,
    access_refused,
    differing,
    equivalent,
    inequivalent,
    locked,
    not_found,
    precondition_failed,
)
from gateway.broker.amqp091.replies import PREFIX, RequesterNames
from gateway.broker.matching_steps import MatchingSteps
from gateway.broker.pressure import FullQueues
from gateway.broker.queue import Queue
from gateway.broker.scheduler import CallScheduler
from gateway.broker.shares import (
    Shares,
    argument_bytes,
    argument_count,
    share_of,
    text_bytes,
)
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.model.properties import Headers, as_table
from gateway.model.shares import UserShares
from gateway.settings.limits import Limits
from gateway.store.recovery import contain_failure

DELETED_AT_ONCE: Final = 500  # exclusive queues of a closed connection: some 30 ms
SWEPT: Final = 2_000  # keys of deleted bindings at once: some milliseconds
BUILT_IN: Final = {
    "amq.direct": "direct",
    "amq.fanout": "fanout",
    "amq.topic": "topic",
    "amq.headers": "headers",
    "amq.match": "headers",
}
"""Exchanges that every virtual host has, and their types."""
DEFAULT: Final = "operation not permitted on the default exchange"


@mypyc_attr(allow_interpreted_subclasses=True)
class VirtualHost:
    """AMQP 0-9-1 virtual host: its exchanges, queues and bindings.

    `changed` is called when routing may have changed.
    """

    def __init__(
        self,
        name: str,
        changed: Callable[[], None],
        *,
        limits: Limits | None = None,
        definitions: Definitions | None = None,
        alarms: CallScheduler | None = None,
        lost: Lost | None = None,
        policies: Sequence[Policy] = (),
        full_queues: FullQueues | None = None,
        definition_shares: UserShares | None = None,
    ) -> None:
        """Create the virtual host, and restore what `definitions` has recorded; without it nothing is stored.

        `lost` is called with dead letters that a queue refused. `policies` add arguments to the declarations
        of queues. `full_queues` is shared by the queues of all hosts. `definition_shares` counts the bytes of
        what clients declare. A binding, and the comparisons that it needs for a message, count against the
        limits of the user who made it.
        """
        limits = Limits() if limits is None else limits
        self.steps = MatchingSteps(limits.matching_steps_per_user_max)
        self.shares = UserShares("definitions") if definition_shares is None else definition_shares
        self._arguments_max = limits.arguments_max
        self._exchanges_per_user = share_of(limits.exchanges_max, limits.exchanges_per_user_max)
        self._exchange_users = Shares()
        self._bindings_per_user = share_of(limits.bindings_max, limits.bindings_per_user_max)
        self._binding_users = Shares()
        self.full_queues = FullQueues() if full_queues is None else full_queues
        self.name = name
        self.policies = policies
        self.queues_max = limits.queues_max
        self._queues_per_user = share_of(limits.queues_max, limits.queues_per_user_max)
        self._users = Shares()  # of queues
        self.queue_messages_max = limits.queue_messages_max
        self.queue_bytes_max = limits.queue_bytes_max
        self.exchanges_max = limits.exchanges_max
        self.bindings_max = limits.bindings_max
        self.queues: dict[str, AmqpQueue] = {}
        self.alarms = CallScheduler() if alarms is None else alarms
        self.dead_lettering = DeadLettering(self, lost)
        self.replies = RequesterNames()
        self._changed = changed
        self.bindings = 0
        self.exchanges: dict[str, Exchange] = {}
        for built_in, kind in BUILT_IN.items():
            exchange = Exchange(built_in, kind, durable=True, steps=self.steps, find=self.exchanges.get)
            exchange.apply_policy(alternate_of(policies, built_in))
            self.exchanges[built_in] = exchange
        self._definitions = definitions
        self.has_durable_changes = False  # something durable was declared or deleted; reset by the caller
        if definitions is not None:
            self._restore(definitions)

    def _restore(self, definitions: Definitions) -> None:
        """Restore the exchanges, queues and bindings that an earlier process has recorded."""
        for exchange in definitions.exchanges(self.exchanges.get, self.steps):
            with contain_failure(EXCHANGE, exchange.name):
                self._delay(exchange)
                self._add_exchange(exchange)
        for name, auto_delete, arguments, user in definitions.queues():
            with contain_failure(QUEUE, name):
                queue = make_queue(
                    name, self, durable=True, auto_delete=auto_delete, arguments=arguments, user=user
                )
                definitions.persist(queue)
                self._add_queue(queue)
                queue.watch_use()
        for source, kind, name, key, arguments, record in definitions.bindings():
            to = self.queues.get(name) if kind == QUEUE else self.exchanges.get(name)
            if to is not None and source in self.exchanges:
                with contain_failure("binding", (source, name, key)):
                    self._restore_binding(
                        definitions, self.exchanges[source], to, key, arguments, record["user"]
                    )
        self.alarms.set(clock.utc(), self._wake)

    def _restore_binding(
        self,
        definitions: Definitions,
        source: Exchange,
        to: AmqpQueue | Exchange,
        key: str,
        stored: Headers,
        user: str | None,
    ) -> None:
        arguments = as_table(stored)
        if arguments != stored:  # an earlier process stored the order of a client
            definitions.remove_binding(source, to, key, stored)
            definitions.add_binding(source, to, key, arguments, user)
        if source.bind(to, key, arguments, user):
            self._count_binding(user, key, arguments)
            if isinstance(to, AmqpQueue):
                to.bound[source] = None

    def _wake(self) -> None:
        """Read the first messages of each queue from disk, so that expired messages are removed.

        Must be called after the store has started, because dead letters are added to other queues.
        """
        for queue in list(self.queues.values()):
            with contain_failure(QUEUE, queue.name):
                queue.wake()
        for delayed in list(self.delays()):
            with contain_failure(EXCHANGE, delayed.name):
                delayed.dispatch()

    def note_untouched(self) -> None:
        """Record at the end of the process which stored messages were never delivered."""
        if self._definitions is not None:
            self._definitions.note_untouched(self.queues.values())

    @property
    def disk_fails(self) -> bool:
        """True if durable queues refuse persistent messages, because the disk fails."""
        return self._definitions is not None and bool(self._definitions.failure)

    def delays(self) -> Iterator[DelayedMessages]:
        """Yield the delayed messages of each exchange of type `x-delayed-message`."""
        for exchange in self.exchanges.values():
            if exchange.delayed is not None:
                yield exchange.delayed

    def _delay(self, exchange: Exchange) -> None:
        """Create the queue of delayed messages of an exchange, if its type is `x-delayed-message`."""
        if exchange.kind != DELAYED:
            return

        def route(keys: Sequence[str], message: Message) -> list[AmqpQueue]:
            return [one for one in exchange.route(keys, message) if isinstance(one, AmqpQueue)]

        exchange.delayed = DelayedMessages(
            exchange.name, self, route, durable=exchange.durable, user=exchange.user
        )
        if exchange.durable and self._definitions is not None:
            self._definitions.attach_delayed(exchange.delayed)

    # Routing, for the dispatcher.

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """Return the queues that get messages with this address.

        Returns None if they depend on the message, or if the address is that of a requester of direct
        replies, which may disconnect at any time.
        """
        scope, key = address.scope, address.name
        if not scope:
            queue = self.queues.get(key)
            return None if key.startswith(PREFIX) else () if queue is None else (queue,)
        exchange = self.exchanges.get(scope)
        if exchange is None:
            return ()
        if exchange.selective:
            return None
        return tuple([one for one in exchange.route((key,), None) if isinstance(one, AmqpQueue)])

    def has_no_receivers(self, scope: str) -> bool:
        """Return True if an exchange exists and has neither bindings nor an alternate exchange."""
        exchange = self.exchanges.get(scope)
        if exchange is None or exchange.delayed is not None:
            return False  # the bindings at the end of a delay are not known yet
        return exchange.has_no_bindings and exchange.alternate is None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the requester of direct replies to which a message is addressed, or its queues."""
        if not message.address.scope and message.address.name.startswith(PREFIX):
            requester = self.replies.find(message.address.name)
            return () if requester is None else (requester,)
        return self._route(message.address, message)

    @property
    def retained(self) -> None:
        """Destination of retained messages: None, because AMQP 0-9-1 retains nothing.

        The header that marks retained messages is passed on.
        """

    def _route(self, address: Address, message: Message | None) -> tuple[Sink, ...]:
        return tuple(self.route_keys(address.scope, (address.name,), message))

    def route_keys(
        self, exchange: str, keys: Sequence[str], message: Message | None
    ) -> list[AmqpQueue | DelayedMessages]:
        """Return the queues for a message with several routing keys; each queue gets it once.

        `message` is None if only the keys are known.
        """
        if not exchange:
            return list({queue: None for key in keys if (queue := self.queues.get(key)) is not None})
        source = self.exchanges.get(exchange)
        found = {} if source is None else source.route(keys, message)
        return [queue for queue in found if isinstance(queue, (AmqpQueue, DelayedMessages))]

    # Exchanges.

    def exchange(self, name: str) -> Exchange:
        """Return the exchange of that name. Raises AmqpRefused (404)."""
        found = self.exchanges.get(name)
        if found is None:
            raise not_found(f"no exchange '{name}' in vhost '{self.name}'")
        return found

    def bindable(self, name: str) -> Exchange:
        """Return the exchange of that name for a binding. Raises AmqpRefused (403 or 404)."""
        if not name:
            raise access_refused(DEFAULT)
        return self.exchange(name)

    def declare_exchange(
        self,
        name: str,
        kind: str,
        *,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Headers,
        user: str | None = "",
    ) -> Exchange:
        """Create the exchange, or check that an existing one has these properties. Raises AmqpRefused.

        A new exchange belongs to `user` and counts against that user's limit. With None it belongs to the
        configuration, which has no per-user limit.
        """
        if not name:
            raise access_refused(DEFAULT)
        if kind not in EXCHANGE_TYPES:
            raise AmqpRefused(COMMAND_INVALID, f"COMMAND_INVALID - unknown exchange type '{kind}'")
        resource = f"exchange '{name}' in vhost '{self.name}'"
        found = self.exchanges.get(name)
        if found is not None:
            self._check_exchange(found, resource, kind, durable, auto_delete, internal, arguments)
            return found
        if name.startswith("amq."):
            raise access_refused(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        own = exchange_arguments(kind, arguments, resource)
        self._check_room("exchanges_max", len(self.exchanges), self.exchanges_max)
        if user is not None:
            self._check_room("exchanges_per_user_max", self._exchange_users[user], self._exchanges_per_user)
            self._check_definition(user, resource, arguments, text_bytes(name) + argument_bytes(own))
        self._check_disk(durable)
        found = Exchange(
            name,
            kind,
            durable=durable,
            auto_delete=auto_delete,
            internal=internal,
            arguments=own,
            find=self.exchanges.get,
            user=user,
            steps=self.steps,
        )
        self._delay(found)
        self._add_exchange(found)
        if self._definitions is not None:
            self.has_durable_changes |= self._definitions.add_exchange(found)
        self._changed()
        return found

    @staticmethod
    def _check_exchange(
        found: Exchange,
        resource: str,
        kind: str,
        durable: bool,
        auto_delete: bool,
        internal: bool,
        arguments: Headers,
    ) -> None:
        """Raise AmqpRefused if the existing exchange `found` differs from a declaration of the same name."""
        for word, was, now in (
            ("type", found.kind, kind),
            ("durable", found.durable, durable),
            ("auto_delete", found.auto_delete, auto_delete),
            ("internal", found.internal, internal),
        ):
            if was != now:
                raise inequivalent(word, resource, now, was)
        before, after = dict(found.arguments).get(ALTERNATE), dict(arguments).get(ALTERNATE)
        if not equivalent(before, after):
            raise differing(ALTERNATE, resource, after, before)

    def delete_exchange(self, name: str, *, if_unused: bool) -> None:
        """Delete the exchange and its bindings; an unknown one is no error, as in RabbitMQ.

        Raises AmqpRefused if it is a system exchange (403), or if it has bindings and `if_unused` is set
        (406).
        """
        if not name:
            raise access_refused(DEFAULT)
        if name.startswith("amq.") and name in self.exchanges:
            raise access_refused(f"deletion of system exchange '{name}' in vhost '{self.name}' not allowed")
        found = self.exchanges.get(name)
        if found is None:
            return
        if if_unused and not found.has_no_bindings:
            raise precondition_failed(f"exchange '{name}' in vhost '{self.name}' in use")
        self._drop_unused(self._remove(found))
        self._changed()

    def _add_exchange(self, exchange: Exchange) -> None:
        """Add the exchange, count it for its user, and apply the policy that matches its name."""
        exchange.apply_policy(alternate_of(self.policies, exchange.name))
        self.exchanges[exchange.name] = exchange
        if exchange.user is not None:
            self._exchange_users.add(exchange.user)
        self.shares.add(exchange.user, _exchange_bytes(exchange))

    def _remove(self, exchange: Exchange) -> list[Exchange]:
        """Remove the exchange with its bindings and delayed messages.

        Return the source exchanges to which it was bound; they may be unused now.
        """
        del self.exchanges[exchange.name]
        if exchange.user is not None:
            self._exchange_users.remove(exchange.user)
        self.shares.remove(exchange.user, _exchange_bytes(exchange))
        for destination in exchange.destinations:
            if isinstance(destination, AmqpQueue):
                destination.bound.pop(exchange, None)
            self._unbind_all(exchange, destination)
        exchange.release_steps()
        if exchange.delayed is not None:
            exchange.delayed.delete()
        sources = list(exchange.bound)
        for source in sources:
            self._unbind_all(source, exchange)
        if self._definitions is not None:
            self.has_durable_changes |= self._definitions.remove_exchange(exchange)
        return sources

    def _unbind_all(self, exchange: Exchange, destination: Queue | Exchange) -> None:
        """Remove all bindings from the exchange to the destination, because one of them is deleted."""
        keys = exchange.unbind_all(destination)
        for key, several in keys.items():
            for arguments, user in several.items():
                self._uncount_binding(user, key, arguments)
        if self._definitions is not None:
            self.has_durable_changes |= self._definitions.remove_bindings(exchange, destination, keys)
        self._sweep(exchange)

    def _sweep(self, exchange: Exchange) -> None:
        """Remove outdated bindings from the exchange's indexes, some now and the rest in later passes."""
        if self.exchanges.get(exchange.name) is exchange and exchange.sweep(SWEPT) and not exchange.sweeping:
            exchange.sweeping = True

            def continue_sweep() -> None:
                exchange.sweeping = False
                self._sweep(exchange)

            self.alarms.set(clock.utc(), continue_sweep)

    def _drop_unused(self, exchanges: list[Exchange]) -> None:
        """Delete the exchanges that have auto-delete and no bindings.

        Exchanges that were bound to a deleted exchange as their destination are checked, too.
        """
        candidates = list(exchanges)
        while candidates:
            exchange = candidates.pop()
            if (
                exchange.auto_delete
                and exchange.has_no_bindings
                and self.exchanges.get(exchange.name) is exchange
            ):
                candidates += self._remove(exchange)

    # Queues.

    def queue(self, name: str, owner: object) -> AmqpQueue:
        """Return the queue of that name, which the connection `owner` may use.

        Raises AmqpRefused (404 or 405).
        """
        found = self.queues.get(name)
        if found is None:
            raise not_found(f"no queue '{name}' in vhost '{self.name}'")
        if found.owner is not None and found.owner is not owner:
            raise locked(name, self.name)
        found.used = clock.monotonic()
        return found

    def _add_queue(self, queue: AmqpQueue) -> None:
        """Add the queue, and count it for its user."""
        self.queues[queue.name] = queue
        if queue.user is not None:
            self._users.add(queue.user)
        self.shares.add(queue.user, _queue_bytes(queue))

    def declare_queue(
        self,
        name: str,
        owner: object,
        *,
        user: str | None = "",
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Headers,
        generated: str = "",
    ) -> AmqpQueue:
        """Create the queue, or check that an existing one has these properties. Raises AmqpRefused.

        An empty name is replaced by `generated` or a new name. A new queue belongs to `user` and counts
        against that user's limit; with None it belongs to the configuration, which has no per-user limit.
        `owner` is the connection. An exclusive queue is deleted with its connection, and so is not durable.
        """
        requested_name, said_durable = name, durable
        durable = durable and not exclusive
        if name in self.queues:
            return self._redeclared(
                name, owner if exclusive else None, owner, durable, auto_delete, arguments
            )
        if name.startswith("amq."):
            raise access_refused(f"queue name '{name}' contains reserved prefix 'amq.*'")
        self._check_room("queues_max", len(self.queues), self.queues_max)
        if user is not None:
            self._check_room("queues_per_user_max", self._users[user], self._queues_per_user)
            resource = f"queue '{name}' in vhost '{self.name}'"
            self._check_definition(user, resource, arguments, text_bytes(name) + argument_bytes(arguments))
        self._check_disk(durable)
        if not name:
            name = generated or self.new_queue_name()
        queue = make_queue(
            name,
            self,
            durable=durable,
            auto_delete=auto_delete,
            arguments=arguments,
            owner=owner if exclusive else None,
            user=user,
        )
        if queue.options.quorum:
            if not requested_name:
                raise precondition_failed("Cannot declare a server-named queue for type rabbit_quorum_queue")
            resource = f"queue '{name}' in vhost '{self.name}'"
            check_quorum(resource, durable=said_durable, exclusive=exclusive, auto_delete=auto_delete)
        self._add_queue(queue)
        if durable and self._definitions is not None:
            self.has_durable_changes |= self._definitions.add_queue(queue)
        queue.watch_use()
        self._changed()
        return queue

    def _redeclared(
        self, name: str, owned: object, owner: object, durable: bool, auto_delete: bool, arguments: Headers
    ) -> AmqpQueue:
        """Return the existing queue, if it equals the declaration and the connection `owner` may use it.

        `owned` is the connection for an exclusive declaration, otherwise None. Raises AmqpRefused.
        """
        queue = self.queue(name, owner)
        if queue.owner is not owned:
            raise locked(name, self.name)
        resource = f"queue '{name}' in vhost '{self.name}'"
        for word, was, now in (
            ("durable", queue.durable, durable),
            ("auto_delete", queue.auto_delete, auto_delete),
        ):
            if was != now:
                raise inequivalent(word, resource, now, was)
        before, after = meaningful(queue.arguments), meaningful(arguments)
        for key in sorted({*before, *after}):
            if not equivalent(before.get(key), after.get(key)):
                raise differing(key, resource, after.get(key), before.get(key))
        return queue

    def new_queue_name(self) -> str:
        """Return a new, unguessable name for a queue that is declared without a name."""
        return f"amq.gen-{secrets.token_urlsafe(16)}"

    def delete_queue(self, queue: AmqpQueue, *, if_unused: bool = False, if_empty: bool = False) -> int:
        """Delete the queue, its bindings and its messages.

        Return the number of messages that were ready. Raises AmqpRefused (406) if `if_unused` or `if_empty`
        is set and not fulfilled.
        """
        queue.settle_head()
        if if_unused and queue.consumers:
            raise precondition_failed(f"queue '{queue.name}' in vhost '{self.name}' in use")
        if if_empty and len(queue):
            raise precondition_failed(f"queue '{queue.name}' in vhost '{self.name}' not empty")
        if self.queues.pop(queue.name, None) is not None:
            self.shares.remove(queue.user, _queue_bytes(queue))
            if queue.user is not None:
                self._users.remove(queue.user)
        exchanges, queue.bound = list(queue.bound), {}
        for exchange in exchanges:
            self._unbind_all(exchange, queue)
        self._drop_unused(exchanges)
        if queue.storage is not None and self._definitions is not None:
            self.has_durable_changes |= self._definitions.remove_queue(queue)
        self._changed()
        return queue.delete()

    def delete_if_unused(self, queue: AmqpQueue) -> None:
        """Delete the queue if it has auto-delete and its last consumer was removed."""
        if queue.auto_delete and not queue.consumers and not queue.deleted:
            self.delete_queue(queue)

    def delete_exclusive_queues(self, owner: object) -> None:
        """Delete the exclusive queues of the closed connection `owner`.

        If there are many, the rest is deleted in later passes of the event loop.
        """
        owned = [queue for queue in self.queues.values() if queue.owner is owner]
        for queue in owned[:DELETED_AT_ONCE]:
            self.delete_queue(queue)
        if len(owned) > DELETED_AT_ONCE:
            self.alarms.set(clock.utc(), partial(self.delete_exclusive_queues, owner))

    # Bindings.

    def bind(
        self,
        source: str,
        destination: AmqpQueue | Exchange,
        key: str,
        arguments: Headers,
        *,
        user: str | None = "",
    ) -> None:
        """Bind a queue or exchange to the exchange `source`, for `user`. Raises AmqpRefused.

        The binding counts against the limits of `user`. None is the configuration, which has no per-user
        limit.
        """
        exchange = self.bindable(source)
        arguments = as_table(arguments)
        if exchange.matches_headers:
            check_match(arguments)
        if exchange.is_weighted:
            weight_of(key)
        if exchange.has_binding(destination, key, arguments):
            return
        self._check_room("bindings_max", self.bindings, self.bindings_max)
        if user is not None:
            self._check_room("bindings_per_user_max", self._binding_users[user], self._bindings_per_user)
            resource = f"binding of '{destination.name}' to exchange '{source}' in vhost '{self.name}'"
            byte_count = text_bytes(key) + argument_bytes(arguments)
            self._check_definition(user, resource, arguments, byte_count)
        before = self.steps.of(user)
        exchange.bind(destination, key, arguments, user)
        if user is not None and before < self.steps.of(user) > self.steps.user_max:
            exchange.unbind(destination, key, arguments)
            limit = f"limits.matching_steps_per_user_max ({self.steps.user_max})"
            raise AmqpRefused(RESOURCE_ERROR, f"RESOURCE_ERROR - {limit} is reached")
        self._count_binding(user, key, arguments)
        if isinstance(destination, AmqpQueue):
            destination.bound[exchange] = None
        if self._definitions is not None:
            self.has_durable_changes |= self._definitions.add_binding(
                exchange, destination, key, arguments, user
            )
        self._changed()

    def unbind(
        self, source: str, destination: AmqpQueue | Exchange | None, key: str, arguments: Headers
    ) -> None:
        """Remove a binding. It is no error if the binding, exchange or queue is missing, as in RabbitMQ."""
        if not source:
            raise access_refused(DEFAULT)
        exchange = self.exchanges.get(source)
        arguments = as_table(arguments)
        if (
            exchange is not None
            and destination is not None
            and exchange.has_binding(destination, key, arguments)
        ):
            self._uncount_binding(exchange.binder(destination, key, arguments), key, arguments)
            exchange.unbind(destination, key, arguments)
            if self._definitions is not None:
                self.has_durable_changes |= self._definitions.remove_binding(
                    exchange, destination, key, arguments
                )
            if isinstance(destination, AmqpQueue) and not exchange.leads_to(destination):
                destination.bound.pop(exchange, None)
            self._drop_unused([exchange])
            self._changed()

    def _count_binding(self, user: str | None, key: str, arguments: Headers) -> None:
        self.bindings += 1
        if user is not None:
            self._binding_users.add(user)
        self.shares.add(user, text_bytes(key) + argument_bytes(arguments))

    def _uncount_binding(self, user: str | None, key: str, arguments: Headers) -> None:
        self.bindings -= 1
        if user is not None:
            self._binding_users.remove(user)
        self.shares.remove(user, text_bytes(key) + argument_bytes(arguments))

    def _check_definition(self, user: str | None, resource: str, arguments: Headers, byte_count: int) -> None:
        """Check the arguments and size of a new queue, exchange or binding before it is added.

        `resource` names it in errors; it needs `byte_count` bytes. Raises AmqpRefused if it has too many
        arguments or exceeds the user's limit.
        """
        if argument_count(arguments) > self._arguments_max:
            raise precondition_failed(
                f"{resource} has more than limits.arguments_max ({self._arguments_max}) arguments"
            )
        if limit := self.shares.refuse_if_full(user, byte_count):
            raise AmqpRefused(RESOURCE_ERROR, f"RESOURCE_ERROR - {limit} is reached")

    def _check_disk(self, durable: bool) -> None:
        if durable and self._definitions is not None and (failure := self._definitions.failure):
            raise AmqpRefused(RESOURCE_ERROR, f"RESOURCE_ERROR - the store cannot be written: {failure}")

    @staticmethod
    def _check_room(limit: str, count: int, most: int) -> None:
        if count >= most:
            raise AmqpRefused(RESOURCE_ERROR, f"RESOURCE_ERROR - limits.{limit} ({most}) is reached")


def _queue_bytes(queue: AmqpQueue) -> int:
    return text_bytes(queue.name) + argument_bytes(queue.arguments)


def _exchange_bytes(exchange: Exchange) -> int:
    return text_bytes(exchange.name) + argument_bytes(exchange.arguments)
