"""One gateway process: construction of its parts, its tasks, and its shutdown.

The nursery runs HTTP; for each listener a task set (accept, poll, tick); for each link a supervised task set;
and tasks that watch the mapping files and signals. SIGTERM drains: listeners stop accepting, messages in
flight settle within `drain_timeout_secs`, wills of MQTT clients are published, clients are disconnected, and
the process ends. SIGHUP, or a changed file, reloads mappings, users and roles; if a file is invalid the
previous mappings, users and roles stay in force.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Final

import structlog
import trio

from gateway import __version__, clock
from gateway.access.authentication import Access
from gateway.access.authorization import Authorization
from gateway.access.places import place_of
from gateway.admin import (
    AdminState,
    BrokerAccess,
    ClientsApi,
    DetailedMetrics,
    LettersApi,
    MappingsApi,
    NamespacesApi,
    ProcessApi,
    QueuesApi,
    RabbitApi,
    RatesApi,
    Readiness,
    RetainedApi,
    SessionsApi,
    serve,
)
from gateway.app.access import Identities, authorizer_of, roles_of, with_imported_hosts
from gateway.app.clients import announced_version, connected, consuming, dismiss, listener_addresses
from gateway.app.console import Console
from gateway.app.declarations import declare_all
from gateway.app.descriptors import divided_descriptors
from gateway.app.endpoints import links_of, listener_of
from gateway.app.exposure import log_exposures
from gateway.app.mappings import MappingFiles
from gateway.app.memory import definition_bytes_max, watched_memory
from gateway.app.operations import endpoint_of, limits_of, pause_links, process_of
from gateway.app.retained import retained_messages
from gateway.app.rules import Rules
from gateway.app.shortages import CertificateEnds, disk_space, limit_ratios
from gateway.app.state import open_state, watch_stores
from gateway.app.storage import open_store, return_key, start_store
from gateway.app.topics import engine_link, outbox_links, topics_of
from gateway.app.tracing import close as close_tracing
from gateway.app.tracing import tracing_of
from gateway.broker.amqp091.declarations import policies_of
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.bodies import SpooledBodies
from gateway.broker.core import BrokerCore
from gateway.broker.journal import JournalRecorder, open_journal
from gateway.broker.memory import BEGUN_BYTES_MAX
from gateway.broker.memory_shares import CachedEntries, Claim, IncompleteMessages, MemoryShares
from gateway.broker.pressure import FullQueues
from gateway.broker.redaction import PrivateFields
from gateway.broker.shares import UserQuotas
from gateway.containment import contained
from gateway.egress.link import CLOSING_SECS, Link
from gateway.engine.elections import ELSEWHERE
from gateway.engine.session import EngineSession
from gateway.errors import ConfigurationError
from gateway.ingress.client import CloseReason, IngressClient
from gateway.ingress.front.shared_port import shared_listeners
from gateway.ingress.listener import Listener
from gateway.ingress.services import Services
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.settings import Settings, SharedListener
from gateway.settings.engine import ENGINE
from gateway.telemetry.alarms import Alarms
from gateway.telemetry.audit import audit, configure_audit, trail
from gateway.telemetry.history import History
from gateway.telemetry.logs import log_omitted_lines
from gateway.telemetry.metrics import Metrics, Sources
from gateway.telemetry.stats import RouteCounts
from gateway.telemetry.watchdog import Watchdog, watch_wall_clock
from gateway.transport.computation import computed
from gateway.transport.socket_loop import SocketLoop, attach_socket_loop, detach_socket_loop
from gateway.transport.stream import WriteSet
from gateway.transport.tasks import Tasks, run_forever

log = structlog.get_logger()

DRAIN_POLL_SECS: Final = 0.05
LIMITED_SECS: Final = 5.0
HAND_OVER_SECS: Final = 5.0  # Longest wait for the release of sessions; afterwards their next owners wait.
FINAL_PACKETS_SECS: Final = 1.0  # Longest wait for final packets to be written to clients and brokers.


class Gateway:
    """One gateway process: its listeners, links, broker and HTTP interface.

    `run` serves clients until the gateway is stopped.
    """

    _users: Access | None = None  # None until the users have been read.

    def __init__(self, settings: Settings) -> None:
        """Build all components except listeners and links, and open the store and the journal.

        Raises ConfigurationError (or MappingError) for unusable settings, and StoreError for an unusable
        store.
        """
        self.settings = settings = with_imported_hosts(settings)
        self.listeners: dict[str, Listener] = {}
        self.links: dict[str, Link] = {}
        start_audit(settings, self._has_several_users)
        self.readiness = Readiness()
        limits = settings.limits
        self.memory = watched_memory(limits.memory_bytes_max, self._memory_changed, self._connections)
        self.quotas = UserQuotas(
            limits,
            definition_bytes_max=definition_bytes_max(limits, self.memory),
            console_sessions_max=settings.http.sessions_max,
            several=self._has_several_users,
        )
        self.store = open_store(settings, self._disk_changed, self.quotas.letters)
        self.state = open_state(settings, self.quotas)
        with ExitStack() as undo:  # A failure closes what was opened before it.
            if self.store is not None:
                undo.callback(self.store.close)
            self.mapping_files = MappingFiles(settings, return_key(self.store))
            router = self.mapping_files.load()
            self.journaling: JournalRecorder | None = None
            if settings.journal.enabled:
                self.journaling = open_journal(settings.journal, settings.journal_path(), router)
                undo.callback(self.journaling.close)
            self.tracing = tracing_of(
                settings,
                latency_of_route=lambda name: self.dispatcher.latencies.get(name),
                latency_of_endpoint=lambda name: self.metrics.latency_of(name),
            )
            self.core = BrokerCore(
                self.store,
                router,
                limits,
                links=settings.links,
                memory=self.memory,
                forward=settings.dead_letters.forward,
                common_letters=None if self.state is None else self.state.letters,
                deduplication=None if self.state is None else self.state.ids,
                journaling=self.journaling,
                tracing=self.tracing,
                quotas=self.quotas,
            )
            self.dead_letters, self.dispatcher = self.core.dead_letters, self.core.dispatcher
            self.full_queues = FullQueues(self._may_hold, self.quotas.waiting_death_shares)
            self.mqtt, self.engine = topics_of(
                settings,
                self.dispatcher,
                self.store,
                self._disconnect_clients,
                self._may_hold,
                self.quotas,
                self.state,
            )
            self.bodies = SpooledBodies(limits, self.store, self.quotas.spool)
            self.hosts = AmqpHosts(
                settings.amqp_hosts(),
                self.dispatcher.invalidate,
                limits,
                self.store,
                self._dead_letter,
                self.bodies,
                policies=policies_of(settings),
                full_queues=self.full_queues,
                definition_shares=self.quotas.definitions,
            )
            self.host = next(iter(self.hosts.values()))
            self.fast_hosts = FastHosts(
                settings.virtual_hosts(),
                self.dispatcher.invalidate,
                limits,
                self.store,
                self.bodies,
                full_queues=self.full_queues,
                quotas=self.quotas,
                work=self.dispatcher.limit_selectors(self.hosts.alarms),
                alarms=self.hosts.alarms,
            )
            watch_stores(self.readiness, self.store, self.state)
            if self.engine is not None:
                self.readiness.watch(ENGINE, partial(getattr, self.engine, "unavailable_reason"))
            self.bodies.spool.sweep()
            declare_all(settings, self.hosts)  # Before any link consumes and any listener accepts.
            self.identities = Identities(settings)
            self.access = self._users = self.identities.access
            self.authorizer = authorizer_of(settings)
            self.authorization = Authorization(roles_of(settings, self.identities.users), self.authorizer)
            self.rules = Rules(self)
            self.watchdog = Watchdog(settings.log.slow_turn_secs)
            self.memory_shares = MemoryShares(
                self.memory,
                self._claims,
                per_user=limits.memory_per_user_share,
                per_address=limits.memory_per_address_share,
            )
            self.writes = WriteSet(self._wake_up_ends(), self.watchdog.suspect)
            self.http_port = self.health_port = 0
            self.console = Console(settings, self.access, self.authorization, self.quotas)
            self._stopping = trio.Event()
            self._reloading = trio.Lock()
            self.metrics: Metrics = Metrics(__version__, self._sources())
            self.history = History(self.metrics)
            self.alarms = Alarms(self.metrics)
            undo.pop_all()

    async def run(
        self, *, task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED, signals: bool = True
    ) -> None:
        """Serve until `stop` is called, or SIGTERM or SIGINT arrives; then drain.

        `task_status.started` is called with the gateway when all listeners are open. If `signals` is False,
        no signals are handled.
        """
        loop = attach_socket_loop(self.watchdog)
        try:
            start_store(self.store, self.writes)
            if self.state is not None:
                self.state.start(self.writes)
            await self._serve(task_status, signals)
        finally:
            try:
                await self._close(loop)
            finally:
                if loop is not None:
                    detach_socket_loop(loop)

    async def _close(self, loop: SocketLoop | None) -> None:
        """Close the connections to servers, the shared state, the store and the journal, after draining."""
        self.watchdog.detach()
        self.console.close()
        if self.authorizer is not None:
            with trio.CancelScope(shield=True):
                await self.authorizer.close()
        await self.identities.close()
        await close_tracing(self.tracing)
        if self.state is not None:
            await self.state.stop()
        self.dead_letters.stop()
        if self.store is not None:
            self.hosts.note_untouched()
            self.fast_hosts.note_untouched()
            self.store.close()
            if loop is not None:
                loop.run_calls()  # outcomes of the last commit, which are in the journal
        self.bodies.spool.close()
        if self.journaling is not None:
            self.journaling.close()

    async def _serve(self, task_status: trio.TaskStatus[Gateway], signals: bool) -> None:
        """Open listeners, links and HTTP, run all tasks until `stop` is called, and drain.

        `task_status.started` is called with the gateway when all listeners are open.
        """
        admission = self.console.admission
        flush, store = self.writes.flush, self.store
        clients = partial(connected, self.listeners)
        process = process_of(self)
        hash_key = self.settings.journal.hash_key
        key = b"" if hash_key is None else hash_key.get_secret_value().encode()
        hide = PrivateFields(lambda: self.dispatcher.router, key).hide
        queues = QueuesApi(self.hosts, self.fast_hosts, store, flush, hide=hide, consuming=consuming)
        clients_api = ClientsApi(clients, flush)
        apis = (
            ProcessApi(process),
            MappingsApi(process),
            LettersApi(self.dead_letters, self.core.redriving, flush, hide=hide),
            clients_api,
            SessionsApi(self.mqtt, dismiss, flush),
            queues,
            RetainedApi(retained_messages(self.mqtt.retained, self.state, store, flush)),
            NamespacesApi(self.hosts, self.fast_hosts),
            RatesApi(self.history),
        )
        state = AdminState(
            self.metrics,
            self.readiness,
            admission,
            apis,
            self.core.outbox_states,
            self.alarms.present,
            self.settings.http.scrape_token_file,
            RabbitApi(
                self.hosts,
                clients,
                self.metrics,
                self.history,
                lambda: self.authorization.roles,
                why_not=self.readiness.reasons,
                store=store,
                flush=flush,
                node=self.settings.replica,
                version=announced_version(self.settings, self.metrics.version),
                listeners=partial(listener_addresses, self.listeners),
                consuming=consuming,
                broker=BrokerAccess(
                    self.authorization,
                    process.publishing,
                    partial(endpoint_of, self.settings),
                    self.settings.limits.message_bytes_max,
                    hide,
                ),
            ),
            self.dispatcher.taps,
            self.quotas,
            hide,
            DetailedMetrics(queues.all, lambda: list(self.mqtt.sessions.values())),
        )
        async with trio.open_nursery() as nursery:
            if signals:  # Before anything reports that the gateway runs.
                await nursery.start(self._watch_signals)
            if self.settings.http.enabled:
                self.http_port = await nursery.start(serve, self.settings.http, state)
                self.health_port = state.health_port
                self.console.open(self.http_port)
                for history in (self.history, queues.history, clients_api.history):
                    nursery.start_soon(run_forever, "timer", history.run)
                nursery.start_soon(run_forever, "timer", self.alarms.run)
            self._add_endpoints(Tasks(nursery))
            self._route_links()
            for listener in self.listeners.values():
                listener.bind(shared=self.settings.workers > 1)
                self.readiness.mark_met(f"listener {listener.name}")
                nursery.start_soon(listener.run)
            for link in self.links.values():
                nursery.start_soon(run_forever, "link", link.run)
            watch = partial(self.mapping_files.watch, self.reload_mappings)
            nursery.start_soon(run_forever, "reload", watch)
            nursery.start_soon(run_forever, "reload", self.rules.watch)
            if self.rules.absent is not None:
                nursery.start_soon(run_forever, "reload", self.rules.absent.run)
            nursery.start_soon(run_forever, "timer", self._watch_links)
            nursery.start_soon(run_forever, "timer", self.identities.run)
            nursery.start_soon(run_forever, "timer", self._log_omitted_lines)
            nursery.start_soon(run_forever, "timer", watch_wall_clock)
            nursery.start_soon(run_forever, "timer", partial(self.hosts.alarms.run, self.writes.flush))
            timer = partial(self.core.run, self.writes.flush, self.bodies.spool.tick)
            nursery.start_soon(run_forever, "timer", timer)
            nursery.start_soon(run_forever, "timer", partial(self.memory.run, self.writes.flush))
            nursery.start_soon(run_forever, "timer", partial(self.memory_shares.run, self.writes.flush))
            if self.state is not None:
                nursery.start_soon(run_forever, "timer", partial(self.state.run, self.writes.flush))
            log_exposures(self.settings, self.identities.hashes)
            log.info(
                "started",
                version=__version__,
                replica=self.settings.replica,
                listeners={name: listener.place for name, listener in self.listeners.items()},
                links=sorted(self.settings.links),
                routes=len(self.dispatcher.router.routes),
                http=self.http_port or None,
            )
            self.watchdog.attach()
            task_status.started(self)
            await self._stopping.wait()
            await self._drain()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Begin to drain. `run` returns when draining is complete."""
        self._stopping.set()

    async def reload_mappings(self) -> bool:
        """Read the mapping files again. Return True if the new mappings are in force.

        If a file is invalid, the previous mappings stay in force. The files are compiled in a thread, because
        thousands of routes take seconds.
        """
        async with self._reloading:
            return await self._reload_mappings()

    async def _reload_mappings(self) -> bool:
        try:
            router = await computed(self.mapping_files.load)
        except ConfigurationError as error:
            self.metrics.mapping_reloads["refused"] += 1
            log.error("mappings not reloaded, previous ones in force", error=str(error))
            return False
        except Exception as error:
            self.metrics.mapping_reloads["refused"] += 1
            contained("reload", error)
            return False
        self.dispatcher.use(router)
        self._route_links()
        self.metrics.mapping_reloads["taken"] += 1
        log.info("mappings reloaded", routes=len(router.routes))
        audit("mapping_changed", routes=len(router.routes), files=self.mapping_files.names())
        return True

    def _disconnect_clients(self) -> None:
        """Disconnect all clients, because the RabbitMQ cluster cannot serve them.

        This is called if the cluster has been unavailable for too long, or if other replicas have declared
        this replica dead.
        """
        self._shut_down_connections(self._connections(), CloseReason.UNSERVED)

    def _connections(self) -> list[IngressClient]:
        return [one for listener in self.listeners.values() for one in list(listener.connections)]

    # Store and memory.

    def _flush(self) -> None:
        """Write the bytes that were encoded for connections since the last flush."""
        self.writes.flush()

    def _wake_up_ends(self) -> list[Callable[[], None]]:
        """Return the functions to call at the end of each pass of the event loop."""
        return [self.memory.count_turn] if self.store is None else [self.memory.count_turn, self.store.flush]

    def _claims(self) -> Iterator[Claim]:
        """Yield each object that holds messages in memory, as (object, bytes, user, network address).

        The object is None if its memory cannot be reduced. User and address are "" if there is none. Objects
        may be added and removed during the iteration.
        """
        for queue in list(self.hosts.queues()):
            yield queue, queue.in_memory, queue.user or "", ""
        for claim, byte_count, user in self.hosts.claims():
            yield claim, byte_count, user, ""
        for fast in list(self.fast_hosts.queues()):
            yield fast, fast.in_memory, fast.owning_user or "", ""
        for session in list(self.mqtt.sessions.values()):
            yield session, session.in_memory, session.user, session.place
        for listener in self.listeners.values():
            for connection in list(listener.connections):
                if byte_count := connection.outstanding_bytes:
                    yield None, byte_count, connection.sender.user, place_of(connection.sender.address)
                user, place = connection.sender.user, place_of(connection.sender.address)
                for transaction, byte_count in connection.transactions:
                    yield transaction, byte_count, user, place
                if byte_count := connection.cached_bytes:
                    yield CachedEntries(connection), byte_count, user, place
                if byte_count := connection.incomplete:
                    holder = IncompleteMessages(connection) if byte_count > BEGUN_BYTES_MAX else None
                    yield holder, byte_count, user, place
                waiting = connection.waiting_publishes
                if waiting is not None and waiting.on:
                    yield waiting, waiting.byte_count, user, place

    def _memory_changed(self, short: bool) -> None:
        """Log that memory is `short` or is available again, and set the readiness condition `memory`.

        If memory is short, also drop cached routing entries.
        """
        figures = {"used_bytes": self.memory.used, "limit_bytes": self.memory.watermark}
        if short:
            log.warning("memory short, publishers paused", **figures)
            self.readiness.mark_unmet("memory", "short, publishers paused")
            for listener in self.listeners.values():
                listener.forget_entries()
            for link in self.links.values():
                link.session.forget_entries()
        else:
            log.info("memory available again, publishers resumed", **figures)
            self.readiness.mark_met("memory")

    def _disk_changed(self, healthy: bool) -> None:
        """Log whether the store can be written, and notify connected clients.

        `healthy` is True if the store can be written again, and False if it cannot be written any more.
        """
        assert self.store is not None
        if healthy:
            log.info("store writable again")
        else:
            log.error("store not writable, durable messages refused", why=self.store.failure)
        for listener in self.listeners.values():
            for connection in listener.connections:
                try:
                    connection.blocked(self.store.failure)
                except Exception as error:
                    connection.stream.fail(error)

    # Construction of endpoints.

    def _add_endpoints(self, tasks: Tasks) -> None:
        """Build all links and listeners, and open none of them yet.

        Register the listeners and the required links as conditions of readiness.
        """
        settings, writes, metrics = self.settings, self.writes, self.metrics
        for name, stated in settings.links.items():
            for link in links_of(name, settings, self.core, writes, metrics):
                self.links[link.name] = link
                link.stats.required = stated.required
                if stated.required:
                    self.readiness.require(f"link {link.name}")
        for link in outbox_links(settings, self.links, self.core, self.engine, writes, metrics, self.quotas):
            link.stats.required = True  # messages of shared outboxes have no other place
            self.links[link.name] = link
        if self.state is not None and self.engine is not None:
            engine = self.engine
            self.state.elect(settings, self.links.values(), lambda: not engine.unavailable_reason)
        if self.engine is not None:
            self.links[ENGINE] = engine_link(self.engine, writes, metrics)
            self.links[ENGINE].stats.required = True
        pause_links(self)
        services = Services(
            settings=settings,
            dispatcher=self.dispatcher,
            access=self.access,
            users=self.identities.users,
            authorization=self.authorization,
            dead_letters=self.dead_letters,
            tasks=tasks,
            store=self.store,
            mqtt=self.mqtt,
            hosts=self.hosts,
            fast_hosts=self.fast_hosts,
            bodies=self.bodies,
            opened=self.quotas.opened,
        )
        most = divided_descriptors(settings)
        for name, options in settings.listeners.items():
            if not isinstance(options, SharedListener):
                self.listeners[name] = listener_of(name, services, writes, metrics, most)
        for listener in shared_listeners(settings, self.listeners, writes, metrics, most):
            self.listeners[listener.name] = listener
        for name in self.listeners:
            self.readiness.require(f"listener {name}")

    def _route_links(self) -> None:
        """Set the subscriptions and targets of each link according to the mappings in force."""
        router = self.dispatcher.router
        for link in self.links.values():
            try:
                targets = self.core.targets(link.endpoint, router.targets(link.endpoint))
                link.route(router.subscriptions(link.endpoint), targets)
            except Exception as error:  # The other links get their routes nevertheless.
                contained("reload", error, link=link.name)
        self.core.use(router.routes)
        self.writes.flush()

    def _sources(self) -> Sources:
        """Return the functions from which the metrics read their values."""
        core, access, identities, authorizer = self.core, self.access, self.identities, self.authorizer
        engine, tracing = self.engine, self.tracing
        return Sources(
            routes=self._routes,
            dropped=self._dropped,
            evicted_sessions=lambda: self.mqtt.evicted,
            share_refused=self.quotas.refusal_counts,
            share_evicted=self.quotas.evicted_counts,
            engine_moved=int if engine is None else lambda: engine.sessions.moved,
            engine_shortened=int
            if engine is None
            else lambda: engine.stats.degraded.counts.get("expiration", 0),
            dropped_letters=lambda: self.dead_letters.evicted_count,
            delayed_bodies=lambda: self.bodies.spool.unread_count,
            refused_letters=lambda: self.dead_letters.refused,
            dead_lettered=lambda: self.dead_letters.counted,
            forwarded=core.forwarded_counts,
            forgotten_ids=core.forgotten_ids,
            outboxes=core.outbox_states,
            authorizer_failures=int if authorizer is None else lambda: authorizer.failures,
            authentications=lambda: access.counts,
            authentication_failures=identities.failures,
            store=None if self.store is None else self.store.figures,
            journal=None if self.journaling is None else self.journaling.writer,
            redaction=self.journaling,
            turns=self.watchdog.turns,
            route_latencies=lambda: self.dispatcher.latencies,
            paused_routes=core.pauses.waiting_by_route,
            paused_links=lambda: sorted(core.pauses.links),
            certificates=CertificateEnds(self.settings).expiries,
            disk_space=lambda: disk_space(self.settings),
            limit_ratios=lambda: limit_ratios(limits_of(self)),
            traces=dict if tracing is None else lambda: tracing.counts,
            spans=dict if tracing is None else tracing.spans,
            rates_left_out=lambda: self.history.left_out,
            gauges=self._gauges(),
        )

    def _routes(self) -> tuple[RouteCounts, ...]:
        router = self.dispatcher.router
        return *router.routes, *router.answers

    def _gauges(self) -> dict[str, Callable[[], float]]:
        """Return the gauges of all components: for each metric name a function that returns the value."""
        gauges: dict[str, Callable[[], float]] = {
            "gateway_ended_sessions": lambda: self.quotas.ended.count,
            "gateway_ended_sessions_bytes": lambda: self.quotas.ended.total,
            "gateway_waiting_wills": lambda: self.quotas.wills.count,
            "gateway_sessions": lambda: len(self.mqtt.sessions),
            "gateway_subscriptions": lambda: self.mqtt.subscriptions,
            "gateway_clock_jump_seconds": clock.wall_ahead,
            "gateway_retained_messages": lambda: len(self.mqtt.retained),
            **self.hosts.gauges(),
            **self.core.gauges(),
            **self.memory.gauges(),
            **self.memory_shares.gauges(),
            **({} if self.rules.absent is None else self.rules.absent.gauges()),
            **self.bodies.gauges(),
            **({} if self.engine is None else self.engine.gauges()),
            **({} if self.state is None else self.state.gauges()),
        }
        return self.fast_hosts.added_to(gauges)

    def _has_several_users(self) -> bool:
        return self._users is not None and self._users.has_several_users

    def _may_hold(self, user: str | None) -> bool:
        return self.authorization.may_hold(user)

    def _dropped(self) -> dict[str, int]:
        return {
            **asdict(self.mqtt.tally),
            "retained_full": self.mqtt.retained.refused,
            "queue_refused": self.full_queues.refused,
            "queue_overflow": self.full_queues.dropped,
            **self.hosts.dropped(),
            "memory": self.memory.refused,
        }

    def _dead_letter(self, messages: list[Message], outcome: Outcome) -> None:
        self.dead_letters.add(messages, "", outcome, was_accepted=True)

    # Tasks.

    async def _watch_links(self) -> None:
        """Update the readiness conditions of required links five times per second, until cancelled."""
        stated = self.settings.links
        required = [
            link for link in self.links.values() if link.endpoint in stated and stated[link.endpoint].required
        ]
        while required:
            for link in required:
                missing = next(iter(link.stats.missing_objects.items()), None)
                if link.is_up and missing is not None:
                    self.readiness.mark_unmet(
                        f"link {link.name}", f"missing at the broker: {missing[0]}: {missing[1]}"
                    )
                elif link.is_up or link.down_reason == ELSEWHERE:
                    self.readiness.mark_met(f"link {link.name}")
                else:
                    self.readiness.mark_unmet(f"link {link.name}", link.down_reason or "not connected yet")
            await trio.sleep(0.2)

    async def _log_omitted_lines(self) -> None:
        """Log every LIMITED_SECS how many log lines were omitted because of rate limits, until cancelled."""
        while True:
            await trio.sleep(LIMITED_SECS)
            _try_log_omitted_lines()

    async def _watch_signals(self, task_status: trio.TaskStatus[None]) -> None:
        """Reload mappings, users, roles and token keys on SIGHUP; begin to drain on SIGTERM or SIGINT."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    await self.reload_mappings()
                    await self.rules.reload()
                    self.identities.reload_keys()
                else:
                    log.info("stopping", signal=signal.Signals(number).name)
                    self.stop()
                    return

    async def _drain(self) -> None:
        """Stop accepting, wait for messages in flight, publish wills, and disconnect clients and links."""
        self.readiness.drain()
        self.core.stop()
        for listener in self.listeners.values():
            listener.close()
        deadline = clock.now() + self.settings.drain_timeout_secs
        await self._settle(deadline)
        if self.engine is not None:
            await self._release_sessions(self.engine)
        if self._publish_wills():
            await self._settle(max(deadline, clock.now() + FINAL_PACKETS_SECS))
        self._shut_down_connections(self._connections())
        self.mqtt.finish_sharing()
        self.writes.flush()
        # Confirms messages that clients have sent until then; others are redelivered.
        with trio.move_on_after(FINAL_PACKETS_SECS):
            while not self._are_links_idle():
                await trio.sleep(DRAIN_POLL_SECS)
        for link in self.links.values():
            try:
                link.shut_down()
            except Exception as error:
                contained("link", error, link=link.name)
        self.writes.flush()
        with trio.move_on_after(FINAL_PACKETS_SECS):
            while any(listener.is_busy for listener in self.listeners.values()):
                await trio.sleep(DRAIN_POLL_SECS)
        with trio.move_on_after(CLOSING_SECS):
            while any(link.connected for link in self.links.values()):
                await trio.sleep(DRAIN_POLL_SECS)
        _try_log_omitted_lines(now=True)
        log.info("stopped")

    async def _settle(self, deadline: float) -> None:
        """Wait until no messages are in flight, or until `deadline` in loop-clock seconds."""
        with trio.move_on_at(deadline) as waited:
            while not self._idle():
                await trio.sleep(DRAIN_POLL_SECS)
        if waited.cancelled_caught:
            log.warning("drain timed out, messages still in flight")
        held_count = sum(self.core.pauses.waiting_by_sender().values())
        if held_count:
            log.warning("messages of paused routes unacknowledged at stop", messages=held_count)

    async def _release_sessions(self, engine: EngineSession) -> None:
        """Release the clients' sessions, so that other replicas can take them over without waiting.

        Call this before the clients are disconnected. Returns after HAND_OVER_SECS at most.
        """
        free = trio.Event()
        engine.release_sessions(lambda outcome: free.set())
        self.writes.flush()
        with trio.move_on_after(HAND_OVER_SECS) as waited:
            await free.wait()
        if waited.cancelled_caught:
            log.warning("sessions not released to other replicas before stop", waited_secs=HAND_OVER_SECS)

    def _publish_wills(self) -> bool:
        """Disconnect clients that have a will, and publish their wills and all delayed wills.

        Call this while links and subscribers can still receive the wills. Return False if there was no will.
        """
        leaving = [connection for connection in self._connections() if connection.has_will]
        self._shut_down_connections(leaving)
        published = self.mqtt.end_delays()
        self.writes.flush()
        return bool(leaving) or published

    def _shut_down_connections(
        self, connections: Iterable[IngressClient], close_reason: CloseReason = CloseReason.STOPPING
    ) -> None:
        for connection in connections:
            try:
                connection.shut_down(close_reason)
            except Exception as error:
                connection.stream.fail(error)

    def _idle(self) -> bool:
        """Return True if no client connection and no link has unsettled messages.

        Messages that paused routes hold do not count: they are unacknowledged, so that their senders can
        repeat them.
        """
        held_counts = self.core.pauses.waiting_by_sender()
        return (
            all(
                connection.idle or connection.in_flight().unsettled <= held_counts[connection.sender]
                for connection in self._connections()
            )
            and self._are_links_idle()
        )

    def _are_links_idle(self) -> bool:
        held_counts = self.core.pauses.waiting_by_sender()
        return all(self._is_link_idle(link, held_counts) for link in self.links.values())

    def _is_link_idle(self, link: Link, held_counts: Mapping[Sender, int]) -> bool:
        """Return True if a link has no unsettled messages except those that paused routes hold.

        `held_counts` has the number of held messages by sender. A disconnected link also counts as idle if
        all messages that wait for it are stored in its outboxes.
        """
        session = link.session
        of_link = sum(count for sender, count in held_counts.items() if sender.endpoint == link.endpoint)
        if link.is_up or session.idle_but(of_link):
            return session.idle_but(of_link)
        return session.unconfirmed == self.core.in_flight_count(link.name)


def start_audit(settings: Settings, several: Callable[[], bool]) -> None:
    """Configure the audit log and open its file.

    `several` returns True if the gateway may have more than one user; only then the share of each user
    (`limits.user_share`) is limited. Raises ConfigurationError if the file cannot be written.
    """
    options = settings.audit
    try:
        configure_audit(
            enabled=options.enabled,
            path=options.path,
            bytes_max=options.file_bytes_max,
            files=options.files,
            per_second_max=options.per_second_max,
            user_share=settings.limits.user_share,
            several=several,
        )
    except OSError as error:
        raise ConfigurationError(f"audit.path: {error}") from error


def _try_log_omitted_lines(*, now: bool = False) -> None:
    try:
        log_omitted_lines(now=now)
        trail().write_omitted()
    except Exception as error:  # A full disk, for example, does not concern clients.
        contained("timer", error)
