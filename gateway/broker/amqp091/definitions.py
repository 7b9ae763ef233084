"""Records of durable exchanges, queues and bindings of a virtual host, which survive a restart.

Each is a record of its own in the store, so that one more binding costs one small write. A record's key and
value are JSON; arguments keep their types (gateway/store/properties.py).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from gateway.broker.amqp091.arguments import ALTERNATE
from gateway.broker.amqp091.deliveries import DELIVERIES
from gateway.broker.amqp091.exchange import Exchange, Keys
from gateway.broker.bodies import SpooledBodies, SpooledStorage
from gateway.broker.host_records import HostRecords
from gateway.broker.matching_steps import MatchingSteps
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits
from gateway.model.properties import Headers, Properties, string
from gateway.settings.limits import Limits
from gateway.store.properties import decode_properties, encode_properties
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

if TYPE_CHECKING:
    from gateway.broker.amqp091.delays import DelayedMessages
    from gateway.broker.amqp091.queue import AmqpQueue

EXCHANGE: Final = "exchange"
QUEUE: Final = "queue"
BINDING: Final = "binding"
DELAYED: Final = "delayed"  # the messages of an exchange
BINDINGS_FEW: Final = 100  # deleted one by one


class Definitions(HostRecords):
    """Records of one AMQP 0-9-1 virtual host in the store.

    Methods that add or remove a record return True if something was written.
    """

    untouched = "queue_untouched"

    def __init__(self, store: Store, host: str, bodies: SpooledBodies, limits: Limits) -> None:
        """Open the records of the virtual host `host`, and restore the return counts in quorum queues.

        A return count is how often a message was returned.
        """
        super().__init__(store, host, bodies, limits)
        self._deliveries: dict[str, dict[int, int]] = defaultdict(dict)
        for words, count in self._records(DELIVERIES):
            with contain_failure(DELIVERIES, words):
                name, position = words
                self._deliveries[name][int(position)] = int(count)

    @property
    def failure(self) -> str:
        """Reason why nothing can be recorded now; "" if records can be written."""
        return self._store.failure

    # Exchanges.

    def add_exchange(self, exchange: Exchange) -> bool:
        """Record an exchange if it is durable. Return True if something was written."""
        if exchange.durable:
            record = {
                "type": exchange.kind,
                "auto_delete": exchange.auto_delete,
                "internal": exchange.internal,
                "arguments": _encode_arguments(exchange.arguments),
                "user": exchange.user,
            }
            self._put(EXCHANGE, record, exchange.name)
        return exchange.durable

    def remove_exchange(self, exchange: Exchange) -> bool:
        """Delete the record of an exchange. Return True if something was written.

        The records of its bindings are deleted separately.
        """
        if exchange.durable:
            self._delete(EXCHANGE, exchange.name)
        return exchange.durable

    def exchanges(self, find: Callable[[str], Exchange | None], steps: MatchingSteps) -> list[Exchange]:
        """Return new exchanges from the records, without their bindings.

        `find` returns the exchange of a name, or None. Each exchange adds to `steps` how many comparisons its
        bindings need for a message.
        """
        found = []
        for words, record in self._records(EXCHANGE):
            with contain_failure(EXCHANGE, words):
                (name,) = words
                exchange = Exchange(
                    name,
                    record["type"],
                    durable=True,
                    auto_delete=record["auto_delete"],
                    internal=record["internal"],
                    arguments=_exchange_arguments(record),
                    find=find,
                    user=record["user"],
                    steps=steps,
                )
                found.append(exchange)
        return found

    def attach_delayed(self, delayed: DelayedMessages) -> None:
        """Restore the delayed messages of a durable exchange, and store new ones from now on.

        All of these messages are also in memory, because their order on disk is not the order in which they
        are due. They are read at once, so that they count for their senders before clients can publish.
        """
        log = self._store.log(DELAYED, self._key(delayed.name))
        storage = SpooledStorage(delayed, self._store, log, MemoryLimits(), self._bodies)
        storage.load_all()

    # Queues.

    def add_queue(self, queue: AmqpQueue) -> bool:
        """Record a durable queue, and store its messages from now on. Return True: a record was written."""
        record = {
            "auto_delete": queue.auto_delete,
            "arguments": _encode_arguments(queue.arguments),
            "user": queue.user,
        }
        self._put(QUEUE, record, queue.name)
        self.persist(queue)
        return True

    def persist(self, queue: AmqpQueue) -> None:
        """Restore the stored messages of a queue, and store new ones from now on."""
        storage = self._storage(queue, QUEUE, queue.name)
        self._untouched.restore_ranges(storage, queue.name)
        if queue.deliveries is not None:
            key = self._key(queue.name)[:-1] + ", "
            stored = range(0 if storage.first is None else storage.first, storage.recovered)
            queue.deliveries.persist(self._store, key, self._deliveries.pop(queue.name, {}), stored)

    def note_untouched(self, queues: Iterable[AmqpQueue]) -> None:
        """Record at the end of the process which messages of these queues were never delivered."""
        for queue in queues:
            self._untouched.record_ranges(queue.storage, queue.name)

    def remove_queue(self, queue: AmqpQueue) -> bool:
        """Delete the record of a queue. Return True: something was written.

        The queue deletes its messages itself.
        """
        self._delete(QUEUE, queue.name)
        return True

    def queues(self) -> list[tuple[str, bool, Headers, str | None]]:
        """Return name, auto-delete, arguments and user of each recorded queue.

        A user of None means that the configuration declared it.
        """
        found = []
        for words, record in self._records(QUEUE):
            with contain_failure(QUEUE, words):
                (name,) = words
                arguments = _read(record["arguments"])
                found.append((name, record["auto_delete"], arguments, record["user"]))
        return found

    # Bindings.

    def add_binding(
        self, source: Exchange, to: Queue | Exchange, key: str, arguments: Headers, user: str | None
    ) -> bool:
        """Record a binding made by `user`, if source and destination are durable.

        Return True if something was written.
        """
        lasting = _is_durable(source, to)
        if lasting:
            value = json.dumps({"user": user}).encode()
            self._store.put(BINDING, self._binding(source, to, key, arguments), value)
        return lasting

    def remove_binding(self, source: Exchange, to: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Delete the record of a binding. Return True if something was written."""
        lasting = _is_durable(source, to)
        if lasting:
            self._store.delete(BINDING, self._binding(source, to, key, arguments))
        return lasting

    def remove_bindings(self, source: Exchange, to: Queue | Exchange, keys: Keys) -> bool:
        """Delete the records of all bindings from `source` to the destination `to`; `keys` has their keys.

        Return True if something was written.
        """
        lasting = bool(keys) and _is_durable(source, to)
        if lasting and len(keys) > BINDINGS_FEW:
            kind = QUEUE if isinstance(to, Queue) else EXCHANGE
            self._store.delete_all(BINDING, self._key(source.name, kind, to.name)[:-1] + ", ")
        elif lasting:
            for key, several in keys.items():
                for arguments in several:
                    self.remove_binding(source, to, key, arguments)
        return lasting

    def bindings(self) -> list[tuple[str, str, str, str, Headers, dict[str, Any]]]:
        """Return the stored bindings as tuples of source, kind, destination, key, arguments and record.

        The kind is QUEUE or EXCHANGE, the type of the destination. The record holds `user`; None means
        that the configuration made the binding.
        """
        found = []
        for words, record in self._records(BINDING):
            with contain_failure(BINDING, words):
                source, kind, name, key, arguments = words
                found.append((source, kind, name, key, _read(arguments), record))
        return found

    def _binding(self, source: Exchange, to: Queue | Exchange, key: str, arguments: Headers) -> str:
        kind = QUEUE if isinstance(to, Queue) else EXCHANGE
        return self._key(source.name, kind, to.name, key, _encode_arguments(arguments))


def _is_durable(source: Exchange, to: Queue | Exchange) -> bool:
    return source.durable and (to.durable if isinstance(to, Exchange) else to.storage is not None)


def _exchange_arguments(record: dict[str, Any]) -> Headers:
    """Return the arguments of a recorded exchange.

    Earlier versions recorded only the alternate exchange.
    """
    if "arguments" in record:
        return _read(record["arguments"])
    return () if record["alternate"] is None else ((ALTERNATE, string(record["alternate"])),)


def _encode_arguments(arguments: Headers) -> str:
    return encode_properties(Properties(headers=arguments)).decode()


def _read(text: str) -> Headers:
    return decode_properties(text.encode()).headers if text else ()
