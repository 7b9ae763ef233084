"""All AMQP/Fast virtual hosts of the configuration and the store, and the sums of their statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from gateway.broker.amqpfast.definitions import FastDefinitions
from gateway.broker.amqpfast.destinations import FastQueue, TopicSubscription
from gateway.broker.amqpfast.partials import Partials
from gateway.broker.amqpfast.virtual_host import FastHost, FastRefused
from gateway.broker.bodies import SpooledBodies
from gateway.broker.pressure import FullQueues
from gateway.broker.scheduler import CallScheduler
from gateway.broker.selection_work import UNBOUNDED, SelectionWork
from gateway.broker.shares import UserQuotas
from gateway.errors import ConfigurationError
from gateway.settings.amqpfast import FastVirtualHost
from gateway.settings.limits import Limits
from gateway.store.store import Store


class NamedClient(Protocol):
    """Connection of a client that may have a client-name."""

    def handle_takeover(self) -> None:
        """Close this connection, because another one has taken over its client-name."""


class ActiveClients:
    """Active connections by client-name, or by the connection's name if it has no client-name.

    A client-name has at most one active connection in the whole gateway (3.2.6).
    """

    def __init__(self) -> None:
        self._clients: dict[str, NamedClient] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def is_active(self, name: str) -> bool:
        """Return True if a connection is active under that name."""
        return name in self._clients

    def enter(self, name: str, client: NamedClient) -> None:
        """Add the active connection `client` under its name, instead of an earlier one with this name."""
        self._clients[name] = client

    def remove(self, name: str, client: NamedClient) -> None:
        """Remove a connection, unless a newer connection has replaced it."""
        if self._clients.get(name) is client:
            del self._clients[name]


class FastHosts(dict[str, FastHost]):
    """AMQP/Fast virtual hosts by name."""

    def __init__(
        self,
        host_settings: Mapping[str, FastVirtualHost],
        changed: Callable[[], None],
        limits: Limits,
        store: Store | None,
        bodies: SpooledBodies,
        *,
        full_queues: FullQueues | None = None,
        quotas: UserQuotas | None = None,
        work: SelectionWork = UNBOUNDED,
        alarms: CallScheduler | None = None,
    ) -> None:
        """Create the virtual hosts and restore what is stored of them, before the store starts.

        `changed` is called when routing may have changed. `work` limits the time of selectors. `alarms` makes
        the calls that are due later.
        Raises ConfigurationError if a virtual host's destinations are refused.
        """
        super().__init__()
        quotas = UserQuotas(limits) if quotas is None else quotas
        self.clients = ActiveClients()
        # Identities (device, inode) of shared folders, each in use by a channel of any listener.
        self.folders: set[tuple[int, int]] = set()
        self.partials = Partials(
            bodies.spool,
            store,
            shares=quotas.transfers,
            age_secs=limits.fast_partial_age_secs,
        )
        for name, stated in host_settings.items():
            definitions = None if store is None else FastDefinitions(store, name, bodies, limits)
            try:
                self[name] = FastHost(
                    name,
                    changed,
                    queues=stated.destinations.queues,
                    topics=stated.destinations.topics,
                    peers=stated.peers,
                    auto_create=stated.creates_destinations,
                    limits=limits,
                    definitions=definitions,
                    full_queues=full_queues,
                    definition_shares=quotas.definitions,
                    work=work,
                    alarms=alarms,
                )
            except (
                FastRefused
            ) as error:  # by a limit or a rule for names, for declared or stored destinations
                raise ConfigurationError(f"virtual host {name!r}: destinations: {error}") from error

    def queues(self) -> Iterator[FastQueue | TopicSubscription]:
        """Iterate over all queues, including those of subscriptions."""
        for host in self.values():
            yield from host.queues.values()
            yield from host.subscriptions

    def note_untouched(self) -> None:
        """Record at the end of the process which stored messages were never delivered.

        The next process does not mark them as redelivered.
        """
        for host in self.values():
            host.note_untouched()

    def added_to(self, gauges: Mapping[str, Callable[[], float]]) -> dict[str, Callable[[], float]]:
        """Return `gauges` (functions by metric name) with the values of these virtual hosts added.

        Gauges of partial transfers are included.
        """
        own: dict[str, Callable[[], float]] = {
            "gateway_subscriptions": lambda: sum(len(host.subscriptions) for host in self.values()),
            "gateway_queues": lambda: sum(len(host.queues) for host in self.values()),
            "gateway_queue_messages": lambda: sum(len(queue) for queue in self.queues()),
            "gateway_queue_unconsumed_messages": lambda: sum(
                len(queue) for queue in self.queues() if not queue.consumers
            ),
            "gateway_queue_bytes": lambda: sum(queue.byte_count for queue in self.queues()),
            "gateway_consumers": lambda: sum(len(queue.consumers) for queue in self.queues()),
        }
        sums = {name: _sum(read, own[name]) if name in own else read for name, read in gauges.items()}
        return {
            **sums,
            "gateway_partial_transfers": lambda: len(self.partials),
            "gateway_partial_transfers_bytes": lambda: self.partials.byte_count,
        }


def _sum(one: Callable[[], float], other: Callable[[], float]) -> Callable[[], float]:
    return lambda: one() + other()
