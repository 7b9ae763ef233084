"""The composition root: the only file that sees every room.

The nursery tree: HTTP; one task set per listener (accept, poll, tick); one supervised task set per link; one
that watches the mapping files and signals. SIGTERM drains: stop accepting, let what is in flight settle
within
`drain_timeout_secs`, say goodbye, leave. SIGHUP, or a changed file, reloads the mappings; a bad file leaves
the old ones in force.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import structlog
import trio
import watchfiles

from gateway import __version__
from gateway.admin import AdminState, Readiness, serve
from gateway.broker.access import Access
from gateway.broker.amqp091.definitions import Definitions
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.retained import Retained
from gateway.broker.mqtt.session import SessionLimits
from gateway.broker.switch import Namespace, Switch
from gateway.egress.amqp091 import AmqpConversation
from gateway.egress.link import Conversation, Link
from gateway.egress.mqtt import MqttConversation
from gateway.errors import ConfigurationError, GatewayError
from gateway.ingress.amqp091 import AmqpIngress
from gateway.ingress.amqp091_connection import AmqpConnection
from gateway.ingress.listener import Listener
from gateway.ingress.mqtt import MqttIngress
from gateway.mapping import load
from gateway.mapping.linter import unavailable_routes
from gateway.mapping.router import Router
from gateway.protocols.amqp091.translate import content_properties
from gateway.protocols.mqtt.spec import PacketType
from gateway.protocols.mqtt.translate import publish_properties
from gateway.settings import Settings, unavailable
from gateway.store.store import Store
from gateway.telemetry.metrics import Metrics
from gateway.transport.certificates import server_context
from gateway.transport.stream import WriteSet

log = structlog.get_logger()

DRAIN_POLL_SECS: Final = 0.05
WATCH_MILLISECONDS: Final = 500  # the watching thread looks up this often; stopping waits for it
DEAD_LETTERS_SHOWN: Final = 100
DEAD_LETTER_BODY_SHOWN: Final = 1_024  # octets
FAREWELL_SECS: Final = 1.0  # what was said to clients and brokers at the end has this long to be written
MQTT_FRAMES: Final = tuple(
    PacketType(number).name.lower() if number in PacketType.__members__.values() else ""
    for number in range(16)
)


class Gateway:
    """One gateway process. `run` serves until it is told to stop."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError (MappingError) when the configuration cannot be used."""
        if missing := unavailable(settings):
            raise ConfigurationError("\n".join(missing))
        self.settings = settings
        self.metrics = Metrics(__version__)
        self.readiness = Readiness()
        limits = settings.limits
        self.store = self._open_store()
        if self.store is not None:
            self.metrics.store = self.store.figures
        self.dead_letters = DeadLetters(messages_max=limits.dead_letters_max)
        self.switch = Switch(self._load_router(), self.dead_letters)
        self.mqtt = MqttNamespace(
            self.switch.changed,
            SessionLimits(limits.queue_messages_max, limits.queue_bytes_max, limits.inflight_max),
            sessions_max=limits.sessions_max,
            retained=Retained(
                messages_max=limits.retained_messages_max, octets_max=limits.retained_bytes_max
            ),
        )
        self.host = VirtualHost(
            "/",
            self.switch.changed,
            queues_max=limits.queues_max,
            exchanges_max=limits.exchanges_max,
            bindings_max=limits.bindings_max,
            queue_messages_max=limits.queue_messages_max,
            queue_octets_max=limits.queue_bytes_max,
            definitions=None
            if self.store is None
            else Definitions(
                self.store,
                "/",
                memory_messages_max=limits.queue_memory_messages_max,
                memory_octets_max=limits.queue_memory_bytes_max,
            ),
        )
        self.access = Access(
            {name: user.hash() for name, user in settings.users.items()}, guest=settings.guest
        )
        self.writes = WriteSet()
        if self.store is not None:
            self.writes.wake_up_ends = self.store.flush
        self.listeners: dict[str, Listener] = {}
        self.links: dict[str, Link] = {}
        self.http_port = 0
        self._stopping = trio.Event()
        self._gauges()

    async def run(
        self, *, task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED, signals: bool = True
    ) -> None:
        """Serve until `stop`, or SIGTERM or SIGINT; `started` when every listener is open."""
        try:
            self._start_store()
            await self._serve(task_status, signals)
        finally:
            if self.store is not None:
                self.store.close()

    async def _serve(self, task_status: trio.TaskStatus[Gateway], signals: bool) -> None:
        state = AdminState(self.metrics, self.readiness, self._dead_letters_shown)
        async with trio.open_nursery() as nursery:
            if self.settings.http.enabled:
                self.http_port = await nursery.start(serve, self.settings.http, state)
            for name in self.settings.links:
                self._add_link(name)
            for name in self.settings.listeners:
                self._add_listener(name, nursery)
            self._route_links()
            for listener in self.listeners.values():
                listener.bind()
                self.readiness.met(f"listener {listener.name}")
                nursery.start_soon(listener.run)
            for link in self.links.values():
                nursery.start_soon(link.run)
            nursery.start_soon(self._watch_mappings)
            nursery.start_soon(self._watch_links)
            if signals:
                nursery.start_soon(self._watch_signals)
            task_status.started(self)
            await self._stopping.wait()
            await self._drain()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """Drain and leave."""
        self._stopping.set()

    def reload_mappings(self) -> bool:
        """Read the mapping files again; a bad one leaves the old ones in force. True: the new ones are."""
        try:
            router = self._load_router()
        except ConfigurationError as error:
            self.metrics.mapping_reloads["refused"] += 1
            log.error("mappings not reloaded, the old ones stay in force", error=str(error))
            return False
        self.switch.use(router)
        self._route_links()
        self.metrics.mapping_reloads["taken"] += 1
        log.info("mappings reloaded", routes=len(router.routes))
        return True

    # The store.

    def _open_store(self) -> Store | None:
        given = self.settings.store
        if not given.enabled:
            return None
        return Store(
            given.path,
            make_set={"mqtt": publish_properties, "amqp091": content_properties},
            probe_secs=given.probe_secs,
            letters_max=self.settings.limits.dead_letters_max,
            letters_octets_max=self.settings.limits.dead_letters_bytes_max,
            on_health=self._disk_changed,
            on_damage=lambda text: log.error("the store is damaged", what=text),
        )

    def _start_store(self) -> None:
        if self.store is None:
            return
        soon = trio.lowlevel.current_trio_token().run_sync_soon

        def call(function: Callable[[], None]) -> None:
            function()
            self.writes.flush()

        def call_soon(function: Callable[[], None]) -> None:
            with suppress(trio.RunFinishedError):  # nobody is left to be told
                soon(call, function)

        self.store.start(call_soon)

    def _disk_changed(self, healthy: bool) -> None:
        assert self.store is not None
        if healthy:
            log.info("the store can be written again")
        else:
            log.error("the store cannot be written, durable messages are refused", why=self.store.failure)
        for listener in self.listeners.values():
            for connection in listener.connections:
                if isinstance(connection, AmqpConnection):
                    connection.blocked(self.store.failure)

    # Putting it together.

    def _load_router(self) -> Router:
        self._taken = self._fingerprint()  # before reading: what changes meanwhile is seen by the watcher
        endpoints = {name: listener.protocol for name, listener in self.settings.listeners.items()}
        endpoints |= {name: link.protocol for name, link in self.settings.links.items()}
        router = Router(
            load(self.settings.mapping_files()), endpoints, hops_max=self.settings.limits.hops_max
        )
        if missing := unavailable_routes(router.routes):
            raise ConfigurationError("\n".join(missing))
        self.metrics.routes = lambda: router.routes
        return router

    def _add_listener(self, name: str, nursery: trio.Nursery) -> None:
        given = self.settings.listeners[name]
        limits = self.settings.limits_of(name)
        names = MQTT_FRAMES if given.protocol == "mqtt" else ()
        stats = self.metrics.listener(name, given.protocol, names)
        ingress: MqttIngress | AmqpIngress
        namespace: Namespace
        if given.protocol == "mqtt":
            namespace = self.mqtt
            ingress = MqttIngress(
                name,
                namespace=self.mqtt,
                switch=self.switch,
                access=self.access,
                limits=limits,
                stats=stats,
                dead_letters=self.dead_letters,
                nursery=nursery,
                anonymous=given.anonymous,
                byte_order=given.byte_order,
            )
        elif given.protocol == "amqp091":
            namespace = self.host
            ingress = AmqpIngress(
                name,
                host=self.host,
                switch=self.switch,
                access=self.access,
                limits=limits,
                stats=stats,
                dead_letters=self.dead_letters,
                nursery=nursery,
                store=self.store,
            )
        else:
            raise AssertionError(f"{given.protocol} passed `unavailable`")
        tls = None
        if given.tls is not None:
            tls = server_context(name, given.tls.cert_file, given.tls.key_file, given.tls.client_ca_file)
        listener = Listener(
            name,
            given.host,
            given.port,
            ingress,
            self.writes,
            stats,
            connections_max=limits.connections_max,
            tls=tls,
        )
        ingress.listener = listener
        self.switch.namespaces[name] = namespace
        self.listeners[name] = listener
        self.readiness.require(f"listener {name}")

    def _add_link(self, name: str) -> None:
        given = self.settings.links[name]
        stats = self.metrics.link(name, given.protocol, MQTT_FRAMES if given.protocol == "mqtt" else ())
        conversation: Conversation
        if given.protocol == "mqtt":
            conversation = MqttConversation(
                name,
                given,
                self.switch,
                self.settings.limits,
                stats,
                client_id=self.settings.client_id_of(name),
            )
        elif given.protocol == "amqp091":
            conversation = AmqpConversation(
                name,
                given,
                self.switch,
                self.settings.limits,
                stats,
                client_id=self.settings.client_id_of(name),
            )
        else:
            raise AssertionError(f"{given.protocol} passed `unavailable`")
        link = Link(name, given, conversation, self.writes, stats)
        conversation.link = link
        self.switch.namespaces[name] = conversation
        self.links[name] = link
        if given.required:
            self.readiness.require(f"link {name}")

    def _route_links(self) -> None:
        """Tell the links what the mappings want of their brokers."""
        router = self.switch.router
        for name, link in self.links.items():
            link.conversation.route(router.subscriptions(name), router.targets(name))
        self.writes.flush()

    def _gauges(self) -> None:
        gauges: dict[str, Callable[[], float]] = {
            "gateway_sessions": lambda: len(self.mqtt.sessions),
            "gateway_subscriptions": lambda: self.mqtt.subscriptions,
            "gateway_retained_messages": lambda: len(self.mqtt.retained),
            "gateway_queues": lambda: len(self.host.queues),
            "gateway_queue_messages": lambda: sum(len(queue) for queue in self.host.queues.values()),
            "gateway_queue_bytes": lambda: sum(queue.octets for queue in self.host.queues.values()),
            "gateway_exchanges": lambda: len(self.host.exchanges),
            "gateway_bindings": lambda: sum(len(one.bindings) for one in self.host.exchanges.values()),
            "gateway_consumers": lambda: sum(len(queue.consumers) for queue in self.host.queues.values()),
            "gateway_dead_letters": lambda: len(self.dead_letters),
        }
        for name, read in gauges.items():
            self.metrics.broker_gauge(name, read)
        self.metrics.dropped = lambda: {
            **asdict(self.mqtt.tally),
            "retained_full": self.mqtt.retained.refused,
            "queue_refused": sum(queue.refused for queue in self.host.queues.values()),
        }
        self.metrics.dead_lettered = lambda: self.dead_letters.counted

    def _dead_letters_shown(self) -> list[dict[str, Any]]:
        """The newest dead letters, for people: bodies are cut."""
        return [
            {
                "utc": letter.utc,
                "route": letter.route,
                "reason": letter.outcome.reason.value,
                "text": letter.outcome.text,
                "address": repr(letter.message.address),
                "sender": letter.message.sender._asdict(),
                "body_bytes": len(letter.message.body),
                "body": letter.message.body[:DEAD_LETTER_BODY_SHOWN].decode(errors="replace"),
            }
            for letter in self.dead_letters.newest(DEAD_LETTERS_SHOWN)
        ]

    # Tasks.

    async def _watch_links(self) -> None:
        """Readiness follows the required links."""
        required = [link for link in self.links.values() if link.settings.required]
        while required:
            for link in required:
                if link.up:
                    self.readiness.met(f"link {link.name}")
                else:
                    self.readiness.lost(f"link {link.name}", link.why or "not connected yet")
            await trio.sleep(0.2)

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            async for number in received:
                if number == signal.SIGHUP:
                    self.reload_mappings()
                else:
                    log.info("stopping", signal=signal.Signals(number).name)
                    self.stop()
                    return

    async def _watch_mappings(self) -> None:
        """A change on disk counts as SIGHUP: Kubernetes swaps a ConfigMap's folder behind a symbolic link."""
        folders = {path.resolve().parent for path in self.settings.mapping_files()}
        folders |= {path.absolute().parent for path in self.settings.mapping_files()}
        present = [folder for folder in folders if folder.is_dir()]
        # Looking at every time-out too finds what changed before the watch stood, and what no event tells of.
        async for _ in watchfiles.awatch(
            *present, recursive=False, debounce=200, rust_timeout=WATCH_MILLISECONDS, yield_on_timeout=True
        ):
            if self._fingerprint() != self._taken:
                self.reload_mappings()

    def _fingerprint(self) -> dict[Path, tuple[int, int, int] | None]:
        found: dict[Path, tuple[int, int, int] | None] = {}
        for path in self.settings.mapping_files():
            try:
                status = path.stat()
                found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
            except OSError:
                found[path] = None
        return found

    async def _drain(self) -> None:
        self.readiness.drain()
        for listener in self.listeners.values():
            listener.close()
        with trio.move_on_after(self.settings.drain_timeout_secs) as waited:
            while not self._idle():
                await trio.sleep(DRAIN_POLL_SECS)
        if waited.cancelled_caught:
            log.warning("drain_timeout_secs is over, some messages are still in flight")
        for listener in self.listeners.values():
            for connection in list(listener.connections):
                connection.shut_down()
        for link in self.links.values():
            link.shut_down()
        self.writes.flush()
        with trio.move_on_after(FAREWELL_SECS):
            while any(listener.connections for listener in self.listeners.values()):
                await trio.sleep(DRAIN_POLL_SECS)
        log.info("stopped")

    def _idle(self) -> bool:
        return all(
            connection.idle for listener in self.listeners.values() for connection in listener.connections
        ) and all(link.conversation.idle for link in self.links.values())


def run(settings: Settings, started: Callable[[Gateway], None]) -> int:
    """Run a gateway until it is told to stop; `started` is called when it serves. Returns the exit code."""
    gateway = Gateway(settings)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            running: Gateway = await nursery.start(gateway.run)
            started(running)

    tune_collector()
    code = 0
    try:
        trio.run(main)
    except* GatewayError as group:
        for error in _leaves(group):
            print(f"error: {error}", file=sys.stderr)
        code = 1
    return code


def tune_collector() -> None:
    """Messages are freed by reference counting; the cycle collector only finds what protocols leave behind.

    With Python's defaults it walks every waiting message again and again: a third of all time in a full
    queue.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group and of the groups in it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
