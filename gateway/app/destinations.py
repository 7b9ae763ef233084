"""What is behind the destinations of AMQP/Fast: the embedded broker, or the cluster that replicas share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.broker.alarms import Alarms
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.bodies import Bodies
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.pressure import FullQueues
from gateway.broker.shares import UserQuotas
from gateway.egress.link import Link, LinkStatus
from gateway.engine.amqpfast.clients import SharedClients
from gateway.engine.amqpfast.session import FastEngineSession
from gateway.engine.amqpfast.virtual_host import EngineFastHost
from gateway.protocols import DIALECTS
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.settings import Settings
from gateway.settings.engine import ENGINE, RabbitEngine
from gateway.store.store import Store
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import WriteSet

DESTINATIONS: Final = f"{ENGINE} ({AMQPFAST.name})"  # no endpoint's name has blanks


def destinations_of(
    settings: Settings,
    dispatcher: Dispatcher,
    store: Store | None,
    bodies: Bodies,
    flush: Callable[[], None],
    full_queues: FullQueues,
    quotas: UserQuotas,
    alarms: Alarms,
) -> tuple[FastHosts, FastEngineSession | None]:
    """The virtual hosts, before the store starts; with an engine and listeners, what is said to it. `flush`
    writes what was encoded outside a wake-up. `full_queues` is what all queues share for when
    they are full, `quotas` has the shares of users, `alarms` ring for selectors
    that had no time."""
    given, limits = settings.broker, settings.limits
    stated = settings.virtual_hosts()
    spoken = any(one.protocol == AMQPFAST.name for one in settings.listeners.values())
    if not isinstance(given, RabbitEngine) or not spoken:
        return FastHosts(
            stated,
            dispatcher.changed,
            limits,
            store,
            bodies,
            full_queues=full_queues,
            quotas=quotas,
            alarms=alarms,
        ), None
    dialect = DIALECTS[given.protocol]
    stats = LinkStats(DESTINATIONS, dialect.name, dialect.frame_names, given.addresses)
    status = LinkStatus(DESTINATIONS, stats)
    engine = FastEngineSession(given, settings.replica, dispatcher, limits, status, flush)

    def gone(client: str) -> None:
        for host in hosts.values():
            assert isinstance(host, EngineFastHost)
            host.client_gone(client)

    def sweep(now: float) -> None:
        clients.sweep(now)
        for host in hosts.values():
            assert isinstance(host, EngineFastHost)
            host.sweep(now)

    clients = SharedClients(engine, gone)
    engine.serve(clients.hold, sweep)
    make = partial(EngineFastHost, engine=engine)
    hosts = FastHosts(
        stated,
        dispatcher.changed,
        limits,
        store,
        bodies,
        make=make,
        clients=clients,
        keeps=False,
        quotas=quotas,
        alarms=alarms,
    )
    return hosts, engine


def destinations_link(engine: FastEngineSession, writes: WriteSet, metrics: Metrics) -> Link:
    """What keeps them connected."""
    metrics.links[DESTINATIONS] = engine.stats
    return Link(engine.status, engine.settings, engine, writes)
