"""The remote gateway of a simulation with links, its clients, and what the links between the two carry.

The near gateway has a link to it for each of the features `link-mqtt`, `link-amqp` and `link-fast`. Messages
of near clients cross to far ones, and with `link-back` the other way round. With `outbox` the routes to the
links have `settle: stored`. The network between the gateways breaks by itself, as the far gateway does.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import trio

from gateway.app.operations import pause, resume
from gateway.egress import link as link_module
from gateway.egress.amqpfast import publisher as fast_publisher_module
from gateway.egress.mqtt import publisher as publisher_module
from gateway.errors import LinkError
from gateway.settings import Http, Limits, LinkSettings, Settings, StoreSettings
from gateway.settings.endpoints import LinkUrl
from tests.configured import make_link, make_listener
from tests.simulation.amqp_client import AmqpClient
from tests.simulation.fast_client import FastClient
from tests.simulation.ledger import Destination
from tests.simulation.mqtt_client import MqttClient, Wish
from tests.simulation.plan import Plan
from tests.simulation.simulated_gateway import Client, SimulatedGateway, Turn

LOOPBACK: Final = "127.0.0.1"
EXPIRY_SECS: Final = 3_600
CONNECT_SECS_MAX: Final = 3.0
DIAL_SECS: Final = 0.01
PACKET_IDS: Final = 300  # of a link: a new process releases all of them, which takes a second
FAR_MAPPING: Final = """version: 1
routes:
  - {name: once, from: {endpoint: amqp091, exchange: in}, to: {endpoint: mqtt, topic: "single/{routing_key}"},
     delivery: {persistent: 2}, deduplicate: {window: 10m}}
"""
ROUTES: Final = {
    "link-mqtt": (
        '  - {name: over-mqtt, from: {endpoint: mqtt, topic: "m/{name}"},'
        ' to: {endpoint: site, topic: "m/{name}"}%s}\n'
    ),
    "link-amqp": (
        '  - {name: over-amqp, from: {endpoint: mqtt, topic: "q/#"}, to: {endpoint: erp, queue: arrived}%s}\n'
        "  - {name: to-single, from: {endpoint: amqp091, exchange: out},"
        ' to: {endpoint: erp, exchange: in, routing_key: "{routing_key}"}%s}\n'
    ),
    "link-fast": (
        '  - {name: over-fast, from: {endpoint: mqtt, topic: "p/#"},'
        " to: {endpoint: yard, service: queue, destination: depot}%s}\n"
    ),
}
ROUTES_BACK: Final = {
    "link-mqtt": (
        '  - {name: home-m, from: {endpoint: site, topic: "h/{name}"},'
        ' to: {endpoint: mqtt, topic: "h/{name}"}}\n'
    ),
    "link-amqp": (
        "  - {name: home-q, from: {endpoint: erp, queue: export}, to: {endpoint: amqp091, queue: home}}\n"
    ),
    "link-fast": (
        "  - {name: home-f, from: {endpoint: yard, service: queue, destination: supply},"
        " to: {endpoint: amqp091, queue: fast-home}}\n"
    ),
}
LINKS: Final = {
    "link-mqtt": ("site", "mqtt"),
    "link-amqp": ("erp", "amqp"),
    "link-fast": ("yard", "amqpfast"),
}
MORE: Final[dict[str, dict[str, Any]]] = {"mqtt": {"qos": 2}, "amqp": {"survey_secs": 2.0}, "amqpfast": {}}
LARGE_BYTES: Final = 2_000  # some bodies of a simulation are sent in fragments, and go on after a cut


def links_of(plan: Plan) -> list[str]:
    """Return the features of a plan that are links."""
    return [one for one in LINKS if one in plan.features]


def routes_of(plan: Plan) -> str:
    """Return the routes of the near gateway that begin or end at a link."""
    stored = ", settle: stored" if "outbox" in plan.features else ""
    found = [ROUTES[one].replace("%s", stored) for one in links_of(plan)]
    if "link-back" in plan.features:
        found += [ROUTES_BACK[one] for one in links_of(plan)]
    return "".join(found)


def link_settings(plan: Plan) -> dict[str, LinkSettings]:
    """Return the links of the near gateway."""
    found = {}
    for feature in links_of(plan):
        name, scheme = LINKS[feature]
        found[name] = make_link(
            url=f"{scheme}://{LOOPBACK}",
            heartbeat_secs=4,
            connect_timeout_secs=CONNECT_SECS_MAX,
            reconnect_max_secs=2.0,
            **MORE[scheme],
        )
    return found


class Remote:
    """The far gateway with its clients, and the network between it and the near one."""

    def __init__(self, plan: Plan, near: SimulatedGateway, far: SimulatedGateway, mapping: Path) -> None:
        self.far = far
        self.addresses: dict[str, list[Destination]] = {}
        self.publishers: dict[str, Client] = {}  # of addresses at the far gateway
        self.once: list[Destination] = []  # destinations that get QoS 2 messages by a link
        self._plan = plan
        self._near = near
        self._mapping = mapping
        self._unreachable_until = 0.0
        mapping.write_text(FAR_MAPPING)
        self._make_clients()

    def _make_clients(self) -> None:
        far, ledger, features = self.far, self.far.ledger, self._plan.features
        writer = MqttClient(far, "far writer", expiry_secs=EXPIRY_SECS)
        far.devices.append(writer)
        program = AmqpClient(far, "far program")
        far.programs.append(program)
        if "link-mqtt" in features:
            self._add_device("far exact", "m/#", "m/a", is_once=True)
        if "link-amqp" in features:
            arrived = ledger.destination("arrived", is_copied=True)
            arrived.exists = True
            self.addresses["q/a"] = [arrived]
            far.programs.append(AmqpClient(far, "far reader", queues=[arrived]))
            self._add_device("far single", "single/#", "out/a", is_once=True)
        if "link-fast" in features:
            self._make_fast_clients()
        if "link-back" in features:
            self._make_way_back(writer, program)
        if "slow" in features:
            for one in far.clients:
                one.is_slow = far.random.random() < 0.5

    def _make_fast_clients(self) -> None:
        far, depot = self.far, self.far.ledger.destination("depot", is_copied=True)
        depot.exists = True
        self.addresses["p/a"] = [depot]
        far.fast_clients.append(FastClient(far, "far fast reader", consumed={"queue depot": depot}))
        if "link-back" in self._plan.features:
            home = far.ledger.destination("fast-home", is_copied=True)
            home.exists = True
            sender = FastClient(far, "far fast sender")
            far.fast_clients.append(sender)
            self.addresses["queue supply"] = [home]
            self.publishers["queue supply"] = sender

    def _add_device(self, name: str, topic_filter: str, address: str, *, is_once: bool) -> None:
        far = self.far
        to = far.ledger.destination(f"session {name}", is_once=is_once, is_copied=True)
        device = MqttClient(far, name, expiry_secs=EXPIRY_SECS, wishes=[Wish(topic_filter, 2, to)])
        far.devices.append(device)
        self.addresses[address] = [to]
        if address.startswith("m/"):
            self.once.append(to)

    def _make_way_back(self, writer: MqttClient, program: AmqpClient) -> None:
        near, ledger = self._near, self.far.ledger
        if "link-mqtt" in self._plan.features:
            to = ledger.destination("session home", is_once=True, is_copied=True)
            # The link keeps QoS 2 messages over connections; those of QoS 1 come again, behind them.
            to.is_ordered_by_qos = True
            near.devices.append(
                MqttClient(near, "home", expiry_secs=EXPIRY_SECS, wishes=[Wish("h/#", 2, to)])
            )
            self.addresses["h/a"] = [to]
            self.publishers["h/a"] = writer
            self.once.append(to)
        if "link-amqp" in self._plan.features:
            to = ledger.destination("home", is_copied=True)
            to.exists = True
            self.addresses["/export"] = [to]
            self.publishers["/export"] = program

    def settings(self) -> Settings:
        """Return the configuration of the far gateway."""
        names = {"queues": ["depot", "supply"]}
        more: dict[str, dict[str, Any]] = {
            "mqtt": {},
            "amqp091": {},
            "amqpfast": {"virtual_hosts": {"/": {"destinations": names}}},
        }
        given: dict[str, Any] = {
            "listeners": {
                protocol: make_listener(protocol=protocol, host=LOOPBACK, port=0, **options)
                for protocol, options in more.items()
            },
            "http": Http(enabled=False),
            "limits": Limits(memory_bytes_max=1 << 40),
            "drain_timeout_secs": 2.0,
            "store": StoreSettings(path=self.far.disk.folder),
            "mappings": (str(self._mapping),),
            "declare": {
                "queues": ({"name": "arrived"}, {"name": "export"}),
                "exchanges": ({"name": "in", "type": "fanout"},),
            },
        }
        return Settings(**given)

    # The network between the gateways.

    async def dial(self, target: LinkUrl, timeout_secs: float) -> socket.socket:
        """Return the near gateway's socket of a connection. Raises LinkError like `open_socket`."""
        self._near.trace("link dials", target.protocol)
        await trio.sleep(DIAL_SECS)
        if self._near.now < self._unreachable_until:
            await trio.sleep(timeout_secs)
            raise LinkError("no answer")
        if not self.far.is_running:
            raise LinkError("connection refused")
        return self._near.network.link(self.far.connect(target.protocol))

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Have links connect to the far gateway within the block."""
        with (
            patch.object(link_module, "open_socket", self.dial),
            patch.object(publisher_module, "PACKET_IDS", PACKET_IDS),
            patch.object(fast_publisher_module, "LARGE_BYTES", LARGE_BYTES),
        ):
            yield

    @property
    def is_linked(self) -> bool:
        """True if all links are up and have subscribed and declared what they need."""
        gateway = self._near.gateway
        sessions = self.far.gateway.mqtt.sessions.values()
        needs_filters = {"link-back", "link-mqtt"} <= self._plan.features
        has_filters = any(one.client_id.startswith("gateway-") and one.subscriptions for one in sessions)
        return all(one.is_up for one in gateway.links.values()) and (has_filters or not needs_filters)

    # Faults.

    async def break_something(self, fault: str, turn: Turn) -> None:
        """Do one of FAR_FAULTS."""
        far, near = self.far, self._near
        wires = near.network.links
        wire = near.random.choice(wires) if wires else None
        match fault:
            case "far-crash":
                await far.crash()
            case "far-stop":
                await far.stop(turn)
            case "far-full-disk" | "far-slow-disk":
                far.break_disk(fault.removeprefix("far-"))
            case "link-cut" if wire is not None:
                near.trace("a link is cut")
                wire.reset()
            case "link-half-open" if wire is not None:
                near.trace("a link is half-open")
                wire.is_half_open = True
            case "link-stall":
                near.trace("a link stalls")
                near.stall(wire)
            case "unreachable":
                near.trace("the far gateway is unreachable")
                self._unreachable_until = near.now + near.random.choice((1.0, 5.0))
                for each in wires:
                    each.is_half_open = True
            case "link-pause":
                self._pause()

    def _pause(self) -> None:
        gateway = self._near.gateway
        name = self._near.random.choice(sorted(gateway.links))
        with self._near.active():
            (resume if name in gateway.core.pauses.links else pause)(gateway, "link", name)
            gateway.writes.flush()
        self._near.trace("paused links:", sorted(gateway.core.pauses.links))

    def repair(self) -> None:
        """End all faults of the far gateway and of the network."""
        self._unreachable_until = 0.0
        self.far.repair()
        gateway = self._near.gateway
        with self._near.active():
            for name in sorted(gateway.core.pauses.links):
                resume(gateway, "link", name)

    def near_ended(self) -> None:
        """Note that a process of the near gateway ends: the packet ids that its links used are forgotten."""
        for one in self.once:
            one.doubtful.update(publication.id for publication in one.sent)
