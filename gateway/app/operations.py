"""Operations of a gateway for the HTTP interface.

`process_of` wraps a gateway in the `Process` of `gateway/admin`, with its state, its limits, and operations
such as pausing links and reloading mappings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Protocol

from gateway.access.authorization import Authorization
from gateway.admin import EndpointState, Limit, Process
from gateway.app.console import Console
from gateway.app.mappings import MappingFiles
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.bodies import SpooledBodies
from gateway.broker.core import BrokerCore
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.memory import Memory
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.operator_publish import Publishing
from gateway.broker.queue import Queue
from gateway.egress.link import Link
from gateway.ingress.listener import Listener
from gateway.model.dialect import Dialect
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.settings import AmqpListener, Settings
from gateway.store.store import Store
from gateway.telemetry.history import History
from gateway.telemetry.metrics import Metrics
from gateway.transport.stream import WriteSet


class OperatedGateway(Protocol):
    """Gateway, with the attributes that its HTTP operations use."""

    settings: Settings
    metrics: Metrics
    listeners: dict[str, Listener]
    links: dict[str, Link]
    dispatcher: Dispatcher
    core: BrokerCore
    authorization: Authorization
    mapping_files: MappingFiles
    writes: WriteSet
    mqtt: MqttNamespace
    hosts: AmqpHosts
    fast_hosts: FastHosts
    dead_letters: DeadLetters
    memory: Memory
    store: Store | None
    bodies: SpooledBodies
    console: Console
    history: History

    async def reload_mappings(self) -> bool:
        """Read the mapping files again.

        Return True if the new mappings are in force, and False if a file is invalid.
        """

    def stop(self) -> None:
        """Begin to drain. The process ends when draining is complete."""


def endpoint_of(settings: Settings, host: VirtualHost) -> str:
    """Return the endpoint whose routes apply to messages that HTTP publishes to a virtual host.

    The endpoint is the first listener with this virtual host. Return the listener's name if this is its first
    virtual host, otherwise `LISTENER/HOST`. Return "" if no listener has the virtual host.
    """
    for name, one in settings.listeners.items():
        if isinstance(one, AmqpListener) and host.name in one.virtual_hosts:
            return name if host.name == one.virtual_hosts[0] else f"{name}/{host.name}"
    return ""


async def _reload(gateway: OperatedGateway) -> str:
    """Reload the mappings of a gateway. Return "", or the reason if the files are refused."""
    return "" if await gateway.reload_mappings() else gateway.mapping_files.refused


def process_of(gateway: OperatedGateway) -> Process:
    """Return the object by which the HTTP interface reads and operates a gateway."""
    settings = gateway.settings
    return Process(
        stats=gateway.metrics.endpoints,
        states=lambda: states_of(gateway),
        router=lambda: gateway.dispatcher.router,
        outboxes=gateway.core.outbox_states,
        roles=lambda: gateway.authorization.roles,
        limits=lambda: limits_of(gateway),
        publishing=Publishing(gateway.dispatcher),
        protocols=settings.endpoints(),
        links=settings.links,
        journal=settings.journal_path() if settings.journal.enabled else None,
        store=gateway.store,
        history=gateway.history,
        latencies=lambda: gateway.dispatcher.latencies,
        mapping_files=gateway.mapping_files.names,
        candidate=gateway.mapping_files.read,
        reload=partial(_reload, gateway),
        pauses=gateway.core.pauses,
        pause=partial(pause, gateway),
        resume=partial(resume, gateway),
        drain=gateway.stop,
        flush=gateway.writes.flush,
    )


def pause(gateway: OperatedGateway, kind: str, name: str) -> None:
    """Pause a route or link until `resume` is called; `kind` is `route` or `link`.

    All connections of a link are paused.
    """
    gateway.core.pauses.pause(kind, name)
    pause_links(gateway)


def resume(gateway: OperatedGateway, kind: str, name: str) -> None:
    """Resume a route or link that was paused; `kind` is `route` or `link`."""
    gateway.core.pauses.resume(kind, name)
    pause_links(gateway)


def pause_links(gateway: OperatedGateway) -> None:
    """Pause the links that an operator has paused, and resume all others."""
    for link in gateway.links.values():
        if link.endpoint in gateway.core.pauses.links:
            link.pause()
        else:
            link.resume()


def states_of(gateway: OperatedGateway) -> dict[str, EndpointState]:
    """Return the state of each listener and link by name.

    A state has the address, whether the endpoint is up, the reason if it is not, and whether it is paused.
    """
    found = {name: EndpointState(listener.place, True) for name, listener in gateway.listeners.items()}
    for name, link in gateway.links.items():
        why = "" if link.is_up else link.down_reason or "not connected yet"
        found[name] = EndpointState(link.stats.address, link.is_up, why, link.is_paused)
    return found


def limits_of(gateway: OperatedGateway) -> Iterator[Limit]:
    """Yield each configured limit with its value and its present use."""
    limits, mqtt = gateway.settings.limits, gateway.mqtt
    for name, listener in gateway.listeners.items():
        most = gateway.settings.limits_of(name).connections_max
        yield Limit("connections_max", name, most, len(listener.connections))
    yield Limit("sessions_max", "", limits.sessions_max, len(mqtt.sessions))
    yield Limit("subscriptions_total_max", "", limits.subscriptions_total_max, mqtt.subscriptions)
    yield Limit("retained_messages_max", "", limits.retained_messages_max, len(mqtt.retained))
    for host in gateway.hosts.values():
        yield Limit("queues_max", _namespace_key(AMQP091, host.name), limits.queues_max, len(host.queues))
        exchanges = len(host.exchanges)
        yield Limit("exchanges_max", _namespace_key(AMQP091, host.name), limits.exchanges_max, exchanges)
        yield Limit("bindings_max", _namespace_key(AMQP091, host.name), limits.bindings_max, host.bindings)
    for fast in gateway.fast_hosts.values():
        yield Limit("queues_max", _namespace_key(AMQPFAST, fast.name), limits.queues_max, len(fast.queues))
        yield Limit("topics_max", _namespace_key(AMQPFAST, fast.name), limits.topics_max, len(fast.topics))
    queues: list[Queue] = [*gateway.hosts.queues(), *gateway.hosts.delays(), *gateway.fast_hosts.queues()]
    if queues:
        fullest = max(queues, key=len)
        yield Limit("queue_messages_max", f"queue {fullest.name}", fullest.messages_max, len(fullest))
        largest = max(queues, key=lambda queue: queue.byte_count)
        yield Limit("queue_bytes_max", f"queue {largest.name}", largest.bytes_max, largest.byte_count)
    for outbox in gateway.core.outbox_states():
        own, of = outbox.limits, f"route {outbox.route}"
        if outbox.waiting is not None:
            yield Limit("outbox.messages_max", of, own.messages_max, outbox.waiting)
        if outbox.waiting_bytes is not None:
            yield Limit("outbox.bytes_max", of, own.bytes_max, outbox.waiting_bytes)
        if own.age_secs_max is not None and outbox.oldest_secs is not None:
            yield Limit("outbox.age_secs_max", of, math.ceil(own.age_secs_max), int(outbox.oldest_secs))
    partials, spool = gateway.fast_hosts.partials, gateway.bodies.spool
    yield Limit("fast_partials_max", "", limits.fast_partials_max, len(partials))
    yield Limit("fast_partial_bytes_max", "", limits.fast_partial_bytes_max, partials.byte_count)
    yield Limit("spool_bytes_max", "", limits.spool_bytes_max, spool.used_bytes)
    yield Limit("fast_memory_total_bytes_max", "", limits.fast_memory_total_bytes_max, spool.reserved_bytes)
    if gateway.store is not None:
        pending = gateway.store.figures.pending_bytes
        yield Limit("store_pending_bytes_max", "", limits.store_pending_bytes_max, pending)
    yield Limit("retained_bytes_max", "", limits.retained_bytes_max, mqtt.retained.byte_count)
    yield Limit("dead_letters_bytes_max", "", limits.dead_letters_bytes_max, gateway.dead_letters.byte_count)
    http = gateway.settings.http
    yield Limit("http.connections_max", "", http.connections_max, gateway.metrics.http_connections())
    yield Limit("http.sessions_max", "", http.sessions_max, len(gateway.console.admission.sessions))
    yield Limit("dead_letters_max", "", limits.dead_letters_max, len(gateway.dead_letters))
    yield Limit("memory_bytes_max", "", int(gateway.memory.watermark), int(gateway.memory.used))


def _namespace_key(dialect: Dialect, host: str) -> str:
    return f"{dialect.name} {host}"
