"""What is behind the topics of MQTT: the embedded broker, or the engine that replicas share, with what stands
on that besides.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, cast

from gateway.admin import Readiness
from gateway.broker.core import BrokerCore
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.mqtt.namespace import MqttNamespace, SessionShares
from gateway.broker.mqtt.retained import Retained
from gateway.broker.mqtt.session import SessionLimits
from gateway.broker.pressure import MayHold
from gateway.broker.shares import UserQuotas
from gateway.egress.link import Link, LinkStatus
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.letters import SharedLetters
from gateway.engine.logs import LIFE_CHARS, Logs, SharedLog, stream_arguments
from gateway.engine.names import names_of
from gateway.engine.namespace import EngineNamespace
from gateway.engine.outboxes import Delivering, SharedOutboxes
from gateway.engine.session import EngineSession
from gateway.model.shares import UserShares
from gateway.protocols import DIALECTS
from gateway.settings import Settings
from gateway.settings.engine import ENGINE, RabbitEngine
from gateway.store.store import Store
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import WriteSet

LOGS: Final = f"{ENGINE} (logs)"


def topics_of(
    settings: Settings,
    dispatcher: Dispatcher,
    store: Store | None,
    let_go: Callable[[], None],
    may_hold: MayHold,
    quotas: UserQuotas,
    time: ClusterClock,
) -> tuple[MqttNamespace, EngineSession | None]:
    """The topics, before the store starts; with an engine, what is said to it.

    `let_go` ends the connections of all clients. `may_hold` returns True for users whose sessions may hold
    publishers, `quotas` has the shares of users, `time` is the
    cluster's clock, if there is one.
    """
    limits, given = settings.limits, settings.broker
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
    )
    shares = SessionShares(
        limits.sessions_per_user_max,
        limits.sessions_per_address_max,
        limits.subscriptions_total_max,
        limits.subscriptions_per_user_max,
        limits.sessions_policy == "expire_soonest",
        limits.matching_steps_per_user_max,
    )
    if isinstance(given, RabbitEngine):
        dialect = DIALECTS[given.protocol]
        stats = LinkStats(ENGINE, dialect.name, dialect.frame_names, given.addresses)
        status = LinkStatus(ENGINE, stats)
        engine = EngineSession(given, settings.replica, dispatcher, limits, status, store, let_go, time)
        topics = EngineNamespace(
            engine,
            of_sessions,
            shares=shares,
            sessions_max=limits.sessions_max,
            definition_shares=quotas.definitions,
        )
        return topics, engine
    retained = Retained(
        messages_max=limits.retained_messages_max,
        octets_max=limits.retained_bytes_max,
        store=store,
        shares=quotas.retained,
    )
    embedded = MqttNamespace(
        dispatcher.subscribed,
        of_sessions,
        shares=shares,
        sessions_max=limits.sessions_max,
        retained=retained,
        store=store,
        definition_shares=quotas.definitions,
    )
    return embedded, None


class Common(NamedTuple):
    """What replicas have in common besides topics, and the connection of its logs."""

    letters: SharedLetters
    session: Logs


def common_of(settings: Settings, time: ClusterClock, shares: UserShares) -> Common | None:
    """Return what replicas have in common, or None without a cluster. `shares` has the limits of letters."""
    given, limits = settings.broker, settings.limits
    if not isinstance(given, RabbitEngine):
        return None
    names, life = names_of(given.namespace, given.topic_exchange), secrets.token_hex(LIFE_CHARS // 2)
    bounds = stream_arguments(given, octets_max=given.letters_bytes_max)
    of_letters = SharedLog(names.letters, bounds, life, time)
    letters = SharedLetters(
        of_letters,
        messages_max=limits.dead_letters_max,
        octets_max=limits.dead_letters_bytes_max,
        stream_octets_max=given.letters_bytes_max,
        shares=shares,
    )
    of_letters.use(letters)
    dialect = DIALECTS[given.protocol]
    stats = LinkStats(LOGS, dialect.name, dialect.frame_names, given.addresses)
    session = Logs(given, settings.replica, limits, LinkStatus(LOGS, stats), (of_letters,))
    return Common(letters, session)


def watch_cluster(readiness: Readiness, engine: EngineSession | None, common: Common | None) -> None:
    """The process is ready when the cluster is there, and all logs have been read."""
    sessions = {ENGINE: engine, LOGS: None if common is None else common.session}
    for name, session in sessions.items():
        if session is not None:
            readiness.watch(name, partial(getattr, session, "why_not"))


def records_of(engine: EngineSession, common: Common | None) -> dict[str, int]:
    """Records of all logs, by what came of them."""
    found = dict(engine.records)
    if common is not None:
        found["passed_over"] += sum(one.passed_over for one in common.session.logs)
    return found


def discarded_of(engine: EngineSession, common: Common | None) -> dict[str, int]:
    """Times that a log was cut and read again, by its stream."""
    logs = () if common is None else common.session.logs
    return {engine.names.state: engine.discarded} | {one.stream: one.discarded for one in logs}


def logs_link(common: Common, writes: WriteSet, metrics: Metrics) -> Link:
    """What keeps their connection."""
    session = common.session
    metrics.links[LOGS] = session.stats
    return Link(session.status, session.settings, session, writes)


def engine_link(engine: EngineSession, writes: WriteSet, metrics: Metrics) -> Link:
    """What keeps the engine connected."""
    metrics.links[ENGINE] = engine.stats
    return Link(engine.status, engine.settings, engine, writes)


def outbox_links(
    settings: Settings,
    links: Mapping[str, Link],
    core: BrokerCore,
    engine: EngineSession | None,
    writes: WriteSet,
    metrics: Metrics,
) -> list[Link]:
    """The connections of outboxes that are on the cluster."""
    given, found = settings.broker, []
    for name in settings.shared_outboxes() if isinstance(given, RabbitEngine) else ():
        assert isinstance(given, RabbitEngine)
        called = f"{name} (outbox)"
        dialect = DIALECTS[given.protocol]
        stats = metrics.link(called, dialect.name, dialect.frame_names, given.addresses)
        outboxes = SharedOutboxes(
            name,
            settings.links[name],
            given,
            core.dispatcher,
            settings.limits,
            LinkStatus(called, stats),
            client_id=f"{settings.replica} outbox {name}",
            up=partial(getattr, links[name], "up"),
            delivers=cast(Delivering, links[name].session).publisher,
            paused=partial(getattr, core.pauses, "routes"),
            left=core.left,
        )
        if engine is not None:
            engine.hear_dropped.append(outboxes.dropped)
        core.share_outboxes(name, outboxes)
        found.append(Link(outboxes.status, outboxes.settings, outboxes, writes))
    return found
