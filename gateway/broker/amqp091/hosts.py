"""All AMQP 0-9-1 virtual hosts of a gateway, and the sums of their statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gateway.broker.amqp091.dead_letter_routing import DeadMessagesClaim, Lost
from gateway.broker.amqp091.definitions import Definitions
from gateway.broker.amqp091.delays import DelayedMessages, DelayedMessagesClaim
from gateway.broker.amqp091.policies import Policy
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.bodies import SpooledBodies
from gateway.broker.pressure import FullQueues
from gateway.broker.scheduler import CallScheduler
from gateway.model.shares import UserShares
from gateway.settings.limits import Limits
from gateway.store.store import Store


class AmqpHosts(dict[str, VirtualHost]):
    """AMQP 0-9-1 virtual hosts by name."""

    def __init__(
        self,
        names: Iterable[str],
        changed: Callable[[], None],
        limits: Limits,
        store: Store | None,
        lost: Lost,
        bodies: SpooledBodies | None = None,
        *,
        policies: Mapping[str, Sequence[Policy]] | None = None,
        full_queues: FullQueues | None = None,
        definition_shares: UserShares | None = None,
    ) -> None:
        """Create the virtual hosts `names`. Must be called before the store starts.

        `changed` is called when routing may have changed, and `lost` with dead letters that a queue refused.
        `limits` are those of the configuration. `bodies` contains message bodies that are in files; it is
        required with a store. `policies` are by virtual host. `full_queues` decides if a full queue may pause
        publishers, and counts dropped and refused messages; all queues share it. `definition_shares` limits
        the bytes of the exchanges, queues and bindings that each user declares.
        """
        super().__init__()
        self.alarms = CallScheduler()
        for name in names:
            definitions = None
            if store is not None:
                assert bodies is not None
                definitions = Definitions(store, name, bodies, limits)
            self[name] = VirtualHost(
                name,
                changed,
                limits=limits,
                definitions=definitions,
                alarms=self.alarms,
                lost=lost,
                policies=(policies or {}).get(name, ()),
                full_queues=full_queues,
                definition_shares=definition_shares,
            )

    def queues(self) -> Iterator[AmqpQueue]:
        """Yield the queues of all virtual hosts."""
        for host in self.values():
            yield from host.queues.values()

    def delays(self) -> Iterator[DelayedMessages]:
        """Yield the delayed messages of each exchange of type `x-delayed-message`."""
        for host in self.values():
            yield from host.delays()

    def claims(self) -> Iterator[tuple[DelayedMessagesClaim | DeadMessagesClaim, int, str]]:
        """Yield (claim, bytes, user) for delayed messages and for dead messages that wait to be routed.

        A claim represents the memory that such messages of one user occupy. Its method `restrain` stops this
        memory from growing (memory_shares.py).
        """
        for delayed in list(self.delays()):
            yield from delayed.claims()
        for host in list(self.values()):
            yield from host.dead_lettering.claims()

    def note_untouched(self) -> None:
        """Record at the end of the process which stored messages were never delivered."""
        for host in self.values():
            host.note_untouched()

    def dropped(self) -> dict[str, int]:
        """Return how many dead messages of queues were dropped without a dead letter, by reason."""
        counts: Counter[str] = Counter()
        for host in self.values():
            counts.update(host.dead_lettering.dropped)
        return dict(counts)

    def gauges(self) -> dict[str, Callable[[], float]]:
        """Return functions that read the gauges of all virtual hosts, by metric name."""
        return {
            "gateway_queues": lambda: sum(len(host.queues) for host in self.values()),
            "gateway_queue_messages": lambda: sum(len(queue) for queue in self.queues()),
            "gateway_queue_unconsumed_messages": lambda: sum(
                len(queue) for queue in self.queues() if not queue.consumers
            ),
            "gateway_queue_bytes": lambda: sum(queue.byte_count for queue in self.queues()),
            "gateway_delayed_messages": lambda: sum(len(delayed) for delayed in self.delays()),
            "gateway_delayed_bytes": lambda: sum(delayed.byte_count for delayed in self.delays()),
            "gateway_dead_lettering_messages": lambda: sum(
                host.dead_lettering.waiting_deaths.shares.count for host in self.values()
            ),
            "gateway_dead_lettering_bytes": lambda: sum(
                host.dead_lettering.waiting_deaths.shares.total for host in self.values()
            ),
            "gateway_exchanges": lambda: sum(len(host.exchanges) for host in self.values()),
            "gateway_bindings": lambda: sum(host.bindings for host in self.values()),
            "gateway_consumers": lambda: sum(len(queue.consumers) for queue in self.queues()),
        }
