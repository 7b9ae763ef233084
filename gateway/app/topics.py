"""Factory of the MQTT namespace: of the embedded broker, or of the engine that replicas share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from gateway.app.state import SharedState
from gateway.broker.core import BrokerCore
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.mqtt.namespace import MqttNamespace, SessionShares
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.mqtt.session import SessionLimits
from gateway.broker.pressure import MayHold
from gateway.broker.shares import UserQuotas
from gateway.egress.link import Link, LinkStatus
from gateway.engine.namespace import EngineNamespace
from gateway.engine.outboxes import OutboxDeliverer, SharedOutboxes
from gateway.engine.session import EngineSession
from gateway.protocols import DIALECTS
from gateway.settings import MqttListener, Settings
from gateway.settings.engine import ENGINE, RabbitEngine
from gateway.store.store import Store
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import WriteSet


def topics_of(
    settings: Settings,
    dispatcher: Dispatcher,
    store: Store | None,
    disconnect_clients: Callable[[], None],
    may_hold: MayHold,
    quotas: UserQuotas,
    state: SharedState | None,
) -> tuple[MqttNamespace, EngineSession | None]:
    """Return the MQTT namespace, and the session with the RabbitMQ cluster or None without a cluster.

    Call this before the store starts. `disconnect_clients` disconnects all clients. `may_hold` returns True
    for a user if a full session of that user may hold publishers, instead of dropping messages. `quotas` has
    the limits per user. `state` must not be None with a cluster.
    """
    limits, options = settings.limits, settings.broker
    of_sessions = SessionLimits(
        limits.queue_messages_max,
        limits.queue_bytes_max,
        limits.inflight_max,
        limits.queue_memory_messages_max,
        limits.queue_memory_bytes_max,
        limits.session_full == "hold",
        may_hold,
        limits.stall_secs,
        limits.session_delay_secs,
        frozenset(name for name, one in settings.listeners.items() if isinstance(one, MqttListener)),
    )
    shares = SessionShares(
        limits.sessions_per_user_max,
        limits.sessions_per_address_max,
        limits.subscriptions_total_max,
        limits.subscriptions_per_user_max,
        limits.sessions_policy == "expire_soonest",
        limits.matching_steps_per_user_max,
    )
    if isinstance(options, RabbitEngine):
        dialect = DIALECTS[options.protocol]
        stats = LinkStats(ENGINE, dialect.name, dialect.frame_names, options.addresses)
        status = LinkStatus(ENGINE, stats)
        assert state is not None
        engine = EngineSession(
            options,
            settings.replica,
            dispatcher,
            limits,
            status,
            disconnect_clients,
            state.time,
            state.retained,
            state.store,
            state.membership,
        )
        state.retain_queue = engine.publisher.retain_queue
        state.sessions = engine.sessions
        topics = EngineNamespace(
            engine,
            state.store,
            of_sessions,
            state.retained,
            shares=shares,
            sessions_max=limits.sessions_max,
            definition_shares=quotas.definitions,
        )
        topics.will_shares = quotas.wills
        return topics, engine
    retained = RetainedTopics(
        messages_max=limits.retained_messages_max,
        bytes_max=limits.retained_bytes_max,
        store=store,
        shares=quotas.retained,
    )
    embedded = MqttNamespace(
        dispatcher.invalidate_filter,
        of_sessions,
        shares=shares,
        sessions_max=limits.sessions_max,
        retained=retained,
        store=store,
        definition_shares=quotas.definitions,
        ended_shares=quotas.ended,
    )
    embedded.will_shares = quotas.wills
    return embedded, None


def engine_link(engine: EngineSession, writes: WriteSet, metrics: Metrics) -> Link:
    """Return the link that connects `engine` to the RabbitMQ cluster, and register its metrics."""
    metrics.links[ENGINE] = engine.stats
    return Link(engine.status, engine.settings, engine, writes)


def outbox_links(
    settings: Settings,
    links: Mapping[str, Link],
    core: BrokerCore,
    engine: EngineSession | None,
    writes: WriteSet,
    metrics: Metrics,
    quotas: UserQuotas,
) -> list[Link]:
    """Return an additional link to the RabbitMQ cluster for each configured link with shared outboxes.

    The additional link publishes messages to the outboxes, which are queues of the cluster, and consumes them
    for the configured link. Return an empty list with the embedded broker.
    """
    options, found = settings.broker, []
    for name in settings.shared_outboxes() if isinstance(options, RabbitEngine) else ():
        assert isinstance(options, RabbitEngine)
        assert engine is not None
        called = f"{name} (outbox)"
        dialect = DIALECTS[options.protocol]
        stats = metrics.link(called, dialect.name, dialect.frame_names, options.addresses)
        outboxes = SharedOutboxes(
            name,
            settings.links[name],
            options,
            core.dispatcher,
            settings.limits,
            LinkStatus(called, stats),
            client_id=f"{settings.replica} outbox {name}",
            time=engine.time,
            up=partial(getattr, links[name], "is_up"),
            delivers=cast(OutboxDeliverer, links[name].session).publisher,
            paused=partial(getattr, core.pauses, "routes"),
            on_departure=core.on_departure,
            quotas=quotas,
        )
        engine.on_dropped.append(outboxes.dropped)
        core.share_outboxes(name, outboxes)
        found.append(Link(outboxes.status, outboxes.settings, outboxes, writes))
    return found
