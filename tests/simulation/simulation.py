"""One simulation: a gateway, its clients, an operator and faults, in an order that the seed chooses.

Each step does one thing: a client acts or reads, the network or the disk moves, time passes, the operator
acts, or something breaks. In between, all tasks of the gateway run until each waits. At the end everything is
repaired, and the simulation goes on until all is delivered. Then the ledger must have no faults, nothing may
be missing, and the gateway must be idle (tests/idle.py).
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import structlog
import trio
import trio.testing

from gateway import containment
from gateway.app import Gateway
from gateway.app.operations import pause, resume
from gateway.broker.dead_letters import Letter
from gateway.protocols.mqtt.spec import Version
from gateway.settings import Http, Limits, Settings, StoreSettings
from gateway.settings.access import Role
from gateway.store import database
from tests.configured import make_listener
from tests.simulation.amqp_client import AmqpClient
from tests.simulation.disk import virtual_disks
from tests.simulation.fast_client import JOBS, RESULTS, FastBrowser, FastClient, FastWorker
from tests.simulation.ledger import Destination, Ledger
from tests.simulation.mqtt_client import MqttClient, Wish
from tests.simulation.network import VirtualSocketLoop
from tests.simulation.plan import FAR_FAULTS, Plan
from tests.simulation.process import without_threads
from tests.simulation.queues import ArgumentQueues, are_dead_marked
from tests.simulation.remote import Remote, link_settings, links_of, routes_of
from tests.simulation.simulated_gateway import Client, Course, SimulatedGateway
from tests.simulation.virtual_clock import virtual_time
from tests.store.durability import watched

LOOPBACK: Final = "127.0.0.1"
MAPPING: Final = """version: 1
routes:
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: once, from: {endpoint: amqp091, exchange: in}, to: {endpoint: mqtt, topic: "once/{routing_key}"},
     deduplicate: {window: 10m}}
"""
FAST_ROUTE: Final = (
    '  - {name: to-fast, from: {endpoint: mqtt, topic: "f/#"},'
    " to: {endpoint: amqpfast, service: queue, destination: fast.q}}\n"
)
HUSH_ROUTE: Final = (
    "  - {name: hush, from: {endpoint: amqp091, exchange: hush},"
    ' to: {endpoint: mqtt, topic: "secret/{routing_key}"}}\n'
)
ALL: Final = {"configure": ".*", "write": ".*", "read": ".*"}
ALL_FAST: Final = {"write": "*", "read": "*", "create": "*", "browse": "*"}
RIGHTS: Final = Role.model_validate(
    {
        "mqtt": {"publish": "#", "subscribe": "#", "deny_publish": "closed/#", "deny_subscribe": "secret/#"},
        "amqp091": {"/": ALL},
        "amqpfast": {"/": {"queues": ALL_FAST, "topics": ALL_FAST}},
        "hold": True,
    }
)
RELOADED: Final = (
    '  - {name: more, from: {endpoint: mqtt, topic: "more/#"}, to: {endpoint: amqp091, queue: near}}\n'
)
TTL_SECS: Final = 2
LARGE_BYTES: Final = 2_000  # of a row that the feature "large" puts in the heap file
EXPIRY_SECS: Final = 3_600
LINKED_TURNS_MAX: Final = 100
SETTLE_TURNS_MAX: Final = 4_000
QUIET_TURNS: Final = 80  # turns without any event, after which nothing else will happen
TURN_SECS: Final = 0.1
PUMPED: Final = 3  # clients that read in one step
QUEUES: Final = ("near", "direct", "ttl", "dead", "jobs", "done")
QUEUES_BACK: Final = ("home", "fast-home")  # of messages that links bring
# Log events at level error that faults of a simulation cause.
EXPECTED_ERRORS: Final = frozenset({"store not writable, durable messages refused"})


@dataclass
class Result:
    """What became of a simulation. `faults` is empty if no promise was broken."""

    plan: Plan
    faults: list[str]
    trace: list[str]
    simulated_secs: float
    delivered: int

    @property
    def digest(self) -> str:
        """Return a hash of the trace, which is equal for equal runs."""
        return hashlib.sha256("\n".join(self.trace).encode()).hexdigest()[:16]


class Simulation:
    """A run of one plan."""

    def __init__(self, plan: Plan, course: Course, near: SimulatedGateway, mapping: Path) -> None:
        self.plan = plan
        self.near = near
        self.ledger = course.ledger
        self.random = course.random
        self.remote: Remote | None = None
        self.browser: FastBrowser | None = None
        self._course = course
        self._mapping = mapping
        fast = FAST_ROUTE if "fast" in plan.features else ""
        self._queues = ArgumentQueues(plan, self.ledger)
        self._routes = MAPPING + fast + self._queues.routes + routes_of(plan)
        if "rights" in plan.features:
            self._routes += HUSH_ROUTE
        self._addresses: dict[str, list[Destination]] = {}
        self._mortals: list[MqttClient] = []  # clients with a will
        mapping.write_text(self._routes)
        self._make_clients()

    def add_remote(self, remote: Remote) -> None:
        """Have the near gateway's links lead to a remote one."""
        self.remote = remote
        self._addresses |= remote.addresses
        for name in QUEUES_BACK:
            if (home := self.ledger.destinations.get(name)) is not None:
                self.reader.queues.append(home)

    @property
    def now(self) -> float:
        """Return the virtual time."""
        return self._course.clock.at

    def trace(self, *words: object) -> None:
        """Note an event."""
        self._course.trace(*words)

    @property
    def gateways(self) -> list[SimulatedGateway]:
        """Return the gateway, or both."""
        return [self.near] if self.remote is None else [self.near, self.remote.far]

    @property
    def _clients(self) -> list[Client]:
        return [one for gateway in self.gateways for one in gateway.clients]

    # The cast.

    def _make_clients(self) -> None:
        has, ledger = self.plan.features.__contains__, self.ledger
        queues = {
            name: ledger.destination(name, is_ordered=name not in ("dead", "ttl"), is_marked=True)
            for name in QUEUES
        }
        for one in queues.values():
            one.exists = True
        queues["ttl"].fallbacks = (queues["dead"],)
        queues["dead"].is_marked = are_dead_marked(self.plan)
        version = Version.V311 if has("mqtt311") else Version.V5
        self.near.devices.append(MqttClient(self.near, "writer", expiry_secs=EXPIRY_SECS, version=version))
        self.near.devices.append(MqttClient(self.near, "passer", expiry_secs=EXPIRY_SECS))
        if has("sessions"):
            for name, qos in (("exact", 2), ("ready", 1)):
                to = ledger.destination(f"session {name}", is_once=True)
                self._add_device(name, [Wish("t/#", qos, to)])
                self._addresses.setdefault("t/a", []).append(to)
                self._addresses.setdefault("t/b", []).append(to)
        if has("shared"):
            to = ledger.destination("$share group", is_ordered=False)
            for name in ("ann", "ben"):
                self._add_device(name, [Wish("$share/g/s/#", 1, to)])
            self._addresses["s/a"] = [to]
        if has("route"):
            self._addresses["near/a"] = self._addresses["near/b"] = [queues["near"]]
        if has("deduplicate"):
            to = ledger.destination("session single", is_once=True)
            self._add_device("single", [Wish("once/#", 2, to)])
            self._addresses["in/a"] = [to]
        if has("wills") or has("late-wills"):
            self._make_mortals()
        if has("rights"):
            self._make_spies()
        if has("fast"):
            self._make_fast_clients()
        if has("retained"):
            self._addresses["r/a"] = self._addresses["r/b"] = []
            if has("cleared"):
                to = ledger.destination("session watcher", is_once=True)
                self._add_device("watcher", [Wish("r/#", 2, to)])
                self._addresses["r/a"] = self._addresses["r/b"] = [to]
        self._make_programs(queues)

    def _make_spies(self) -> None:
        """Add clients that subscribe to what they may not read, and publish to what they may not write."""
        near, ledger = self.near, self.ledger
        spied = ledger.destination("spied", is_ordered=False)
        spied.forbidden = ("hush/",)
        for name, topic_filter in (("spy", "secret/#"), ("mole", "$share/spies/secret/#"), ("snoop", "#")):
            near.devices.append(
                MqttClient(near, name, expiry_secs=EXPIRY_SECS, wishes=[Wish(topic_filter, 2, spied)])
            )
        closed = ledger.destination("session closed")
        closed.forbidden = ("closed/",)
        self._add_device("closed", [Wish("closed/#", 2, closed)])
        self._addresses |= {"hush/a": [], "closed/a": []}

    def _make_mortals(self) -> None:
        near, faults = self.near, self.plan.faults
        to = self.ledger.destination("session heir")
        self._add_device("heir", [Wish("w/#", 1, to)])
        heirs = [] if faults & {"full-disk", "broken-disk"} else [to]
        if "wills" in self.plan.features:
            self._mortals.append(MqttClient(near, "mortal", heirs=heirs))
        if "late-wills" in self.plan.features:
            self._mortals.append(
                MqttClient(near, "patient", expiry_secs=EXPIRY_SECS, heirs=heirs, will_delay_secs=3)
            )
        near.devices += self._mortals

    def _make_programs(self, queues: dict[str, Destination]) -> None:
        has = self.plan.features.__contains__
        self.near.programs.append(AmqpClient(self.near, "program"))
        if has("queue") or has("get"):
            self._addresses["/direct"] = [queues["direct"]]
        if has("ttl"):
            self._addresses["/ttl"] = [queues["ttl"]]
        if has("transactions"):
            self._addresses["/jobs"] = [queues["jobs"]]
            self.near.programs.append(
                AmqpClient(self.near, "worker", jobs=queues["jobs"], results=queues["done"])
            )
        self._addresses |= self._queues.addresses
        consumed = [queues[name] for name in ("near", "dead", "done")]
        consumed += self._queues.destinations.values()
        if has("queue") and not has("get"):
            consumed.append(queues["direct"])
        self.reader = AmqpClient(self.near, "reader", queues=consumed)
        self.reader.consumes = self.random.random() < 0.7
        self.near.programs.append(self.reader)
        if (single := self._queues.destinations.get("single")) is not None:
            self.near.programs.append(AmqpClient(self.near, "second", queues=[single]))
        self.getter = AmqpClient(self.near, "getter", queues=[queues["direct"]]) if has("get") else None
        if self.getter is not None:
            self.getter.consumes = False
            self.near.programs.append(self.getter)
        if has("slow"):
            for one in self.near.clients:
                one.is_slow = self.random.random() < 0.5

    def _make_fast_clients(self) -> None:
        near = self.near
        queue = self.ledger.destination("fast queue")
        topic = self.ledger.destination("fast topic")
        queue.exists = True
        near.fast_clients.append(FastClient(near, "fast sender"))
        consumed = {"queue fast.q": queue, "topic fast.t": topic}
        if "fast-transactions" in self.plan.features:
            jobs, results = (self.ledger.destination(f"fast {name}") for name in ("jobs", "results"))
            jobs.exists = results.exists = True
            near.fast_clients.append(FastWorker(near, "fast worker", jobs, results))
            self._addresses[f"queue {JOBS}"] = [jobs]
            consumed[f"queue {RESULTS}"] = results
        reader = FastClient(near, "fast reader", consumed=consumed)
        near.fast_clients.append(reader)
        if "browse" in self.plan.features:
            self.browser = FastBrowser(near, "fast browser", queue)
            near.fast_clients.append(self.browser)
        self._addresses |= {"queue fast.q": [queue], "topic fast.t": [topic], "f/a": [queue]}

    def _add_device(self, name: str, wishes: list[Wish]) -> None:
        receive_max = self.random.choice((1, 3, 10, 100))
        self.near.devices.append(
            MqttClient(self.near, name, expiry_secs=EXPIRY_SECS, wishes=wishes, receive_max=receive_max)
        )

    def _settings(self) -> Settings:
        queues: list[dict[str, Any]] = [{"name": name} for name in (*QUEUES, *QUEUES_BACK) if name != "ttl"]
        arguments = {
            "x-message-ttl": TTL_SECS * 1_000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "dead",
        }
        queues += [{"name": "ttl", "arguments": arguments}, *self._queues.declared]
        limits: dict[str, Any] = {"memory_bytes_max": 1 << 40}
        if "tight" in self.plan.features:
            limits["queue_messages_max"] = 6
        if "paged" in self.plan.features:
            limits["queue_memory_messages_max"] = 2
        given: dict[str, Any] = {
            "listeners": {
                "mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
                "amqp091": make_listener(protocol="amqp091", host=LOOPBACK, port=0),
            },
            "http": Http(enabled=False),
            "limits": Limits(**limits),
            "drain_timeout_secs": 2.0,
            "store": StoreSettings(path=self.near.disk.folder),
            "mappings": (str(self._mapping),),
            "links": link_settings(self.plan),
            "declare": {
                "queues": tuple(queues),
                "exchanges": (
                    {"name": "in", "type": "fanout"},
                    {"name": "out", "type": "fanout"},
                    {"name": "hush", "type": "fanout"},
                    *self._queues.exchanges,
                ),
                "bindings": tuple(self._queues.bindings),
            },
        }
        if "rights" in self.plan.features:
            given["roles"] = {"all": RIGHTS}
            given["default_roles"] = {"anonymous": ("all",), "guest": ("all",)}
        if "fast" in self.plan.features:
            names = {"queues": ["fast.q", JOBS, RESULTS], "topics": ["fast.t"]}
            given["listeners"]["amqpfast"] = make_listener(
                protocol="amqpfast",
                host=LOOPBACK,
                port=0,
                virtual_hosts={"/": {"destinations": names}},
                commit_confirms="acked",  # others may be on their way to the worker
            )
        return Settings(**given)

    # Running.

    async def run(self) -> None:
        """Run all steps, and the end."""
        async with trio.open_nursery() as nursery:
            if self.remote is not None:
                await self.remote.far.start(self.remote.settings(), nursery)
            await self.near.start(self._settings(), nursery)
            for one in self._clients:
                one.connect()
            await self._fair_turns(12)
            for _ in range(LINKED_TURNS_MAX if self.remote is not None else 0):
                await self._fair_turn()
                if self.remote is None or self.remote.is_linked:
                    break
            for number in range(self.plan.steps):
                await self._step()
                if self.ledger.faults:
                    self.trace("fault at step", number)
                    break
            else:
                await self._end()
            nursery.cancel_scope.cancel()

    async def _let_run(self) -> None:
        await trio.testing.wait_all_tasks_blocked()

    async def _step(self) -> None:
        random = self.random
        for gateway in self.gateways:
            gateway.mend_what_is_over()
        action = random.choices(
            ("client", "pump", "serve", "store", "calls", "time", "fault"), (6, 6, 8, 4, 4, 3, 1)
        )[0]
        match action:
            case "client":
                self._client_acts()
            case "pump":
                clients = self._clients
                for one in random.sample(clients, min(PUMPED, len(clients))):
                    one.pump()
            case "serve":
                for gateway in self._some():
                    gateway.serve()
            case "store":
                for gateway in self._some():
                    gateway.step_disk()
            case "calls":
                for gateway in self._some():
                    gateway.run_calls()
            case "time":
                self._course.clock.pass_time(random.choice((0.01, 0.1, 0.5, 1.0)))
            case "fault":
                await self._break_something()
        await self._let_run()

    def _some(self) -> list[SimulatedGateway]:
        """Return one gateway or several, in any order."""
        gateways = self.gateways
        if len(gateways) == 1:
            return gateways
        return self.random.sample(gateways, self.random.randint(1, len(gateways)))

    async def _fair_turns(self, count: int) -> None:
        for _ in range(count):
            await self._fair_turn()

    async def _fair_turn(self) -> None:
        """Move everything once, and let time pass."""
        for gateway in self.gateways:
            gateway.serve()
        await self._let_run()
        for gateway in self.gateways:
            gateway.step_disk()
            gateway.run_calls()
        await self._let_run()
        for one in self._clients:
            one.pump()
        self._course.clock.pass_time(TURN_SECS)
        await self._let_run()

    # Clients.

    def _client_acts(self) -> None:
        random, addresses = self.random, self._addresses
        if self.browser is not None and random.random() < 0.1:
            self.browser.look()
            return
        if self._mortals and random.random() < 0.2:
            self._mortal_acts(random.choice(self._mortals))
            return
        kind = random.random()
        if kind < 0.75 and addresses:
            address = random.choice(sorted(addresses))
            self._publish(address, random.randint(1, 4))
        elif kind < 0.9:
            one = random.choice(self._clients)
            if one.wire is None:
                self._reconnect(one)
        elif self.getter is not None:
            queue = self.ledger.destinations["direct"]
            for _ in range(random.randint(1, 3)):
                self.getter.get(queue)
            if "purge" in self.plan.faults and random.random() < 0.3:
                self.getter.purge(queue)
        else:
            self.reader.start_consuming()

    def _mortal_acts(self, one: MqttClient) -> None:
        """Have a client with a will vanish, or return, often after the will's delay."""
        random = self.random
        if one.is_open:
            one.vanish(random.choice(("end", "reset", "disconnect")))
        elif one.wire is None and random.random() < 0.5:
            self._reconnect(one)

    def _publish(self, address: str, count: int) -> None:
        random, wanted = self.random, self._addresses[address]
        ttl = random.choice((1, 5, 60)) if "expiry" in self.plan.features and random.random() < 0.4 else 0
        for _ in range(count):
            if address.startswith("r/"):
                self._retain(address)
                continue
            client = self._publisher_of(address)
            if isinstance(client, AmqpClient | FastClient):
                client.publish(address, wanted, ttl_secs=ttl, **self._queues.more(address, random))
                continue
            if client is self.near.devices[0] and "mqtt311" in self.plan.features:
                ttl = 0
            client.publish(address, random.choice((0, 1, 2)), wanted, ttl_secs=ttl)

    def _retain(self, address: str) -> None:
        random, device = self.random, self._publisher_of(address)
        assert isinstance(device, MqttClient)
        if "cleared" not in self.plan.features:
            device.publish(address, 1, (), is_retained=True)
        elif random.random() < 0.2:
            device.publish(address, random.choice((1, 2)), (), is_retained=True, is_clearing=True)
        else:
            ttl, qos = random.choice((0, 0, 2, 60)), random.choice((0, 1, 2))
            device.publish(address, qos, self._addresses[address], ttl_secs=ttl, is_retained=True)

    def _publisher_of(self, address: str) -> Client:
        """Return a client that publishes to an address, connected or about to be."""
        remote, near = self.remote, self.near
        one: Client
        if remote is not None and address in remote.publishers:
            one = remote.publishers[address]
        elif " " in address:
            one = near.fast_clients[0]
        elif address.startswith(("/", "in/", "out/", "later/", "twice/", "hush/")):
            one = near.programs[0]
        else:
            one = near.devices[0 if self.random.random() < 0.7 else 1]
        if one.wire is None:
            one.connect()
        return near.devices[1] if address.startswith(("r/", "closed/")) else one

    def _reconnect(self, one: Client) -> None:
        if isinstance(one, MqttClient):
            clean = "delete-session" in self.plan.faults and self.random.random() < 0.15
            if clean and one.wishes:
                self._end_session(one)
            one.connect(clean=clean and bool(one.wishes))
        else:
            one.connect()

    def _end_session(self, one: MqttClient) -> None:
        """Note the end of a session; messages of a group go to the other member, if there is one."""
        one.end_session()
        for wish in one.wishes:
            if wish.destination.name == "$share group":
                others = [
                    other
                    for other in self.near.devices
                    if other is not one and other.is_subscribed and wish.destination in other.destinations
                ]
                if not others:
                    self.ledger.end(wish.destination)

    # Faults.

    async def _break_something(self) -> None:
        faults = sorted(self.plan.faults - {"split"})
        if not faults:
            return
        random = self.random
        fault = random.choice(faults)
        everybody = self._clients
        match fault:
            case "crash":
                await self._crash()
            case "stop":
                self._near_ends()
                await self.near.stop(self._fair_turn)
            case "cut":
                random.choice(everybody).vanish(random.choice(("end", "reset", "disconnect")))
            case "away":  # all who receive by sessions, for a while
                for gateway in self.gateways:
                    for device in gateway.devices:
                        if device.wishes:
                            device.vanish(random.choice(("end", "disconnect")))
            case "half-open":
                random.choice(everybody).vanish("half-open")
            case "stall":
                self.near.stall(random.choice(everybody).wire)
            case "full-disk" | "broken-disk" | "slow-disk":
                self.near.break_disk(fault)
            case "clock":
                clock = self._course.clock
                clock.wall_ahead += random.choice((-7_200.0, -30.0, 30.0, 7_200.0, 691_200.0))
                self.trace("the wall clock is set", clock.wall_ahead)
            case _ if self.remote is not None and fault in FAR_FAULTS:
                await self.remote.break_something(fault, self._fair_turn)
            case _:
                await self._operate(fault)

    async def _crash(self) -> None:
        if (heir := self.ledger.destinations.get("session heir")) is not None:
            self.ledger.excuse(heir)  # of a client that was lost in the moment of the crash
        self._near_ends()
        await self.near.crash()

    def _near_ends(self) -> None:
        if self.remote is not None:
            self.remote.near_ended()

    # The operator.

    async def _operate(self, what: str) -> None:
        gateway = self.near.gateway
        self.trace("operator:", what)
        with self.near.active():
            await self._operate_on(gateway, what)
            gateway.writes.flush()

    async def _operate_on(self, gateway: Gateway, what: str) -> None:
        match what:
            case "pause":
                names = ("near", "once", "unique") if self._queues.routes else ("near", "once")
                name, paused = self.random.choice(names), gateway.core.pauses.routes
                (resume if name in paused else pause)(gateway, "route", name)
                self.trace("paused:", sorted(paused))
            case "reload":
                more = self.random.random() < 0.5
                self._mapping.write_text(self._routes + (RELOADED if more else ""))
                assert await gateway.reload_mappings()
            case "purge":
                name = self.random.choice((*QUEUES, *self._queues.destinations))
                self.trace("purged:", name)
                self.ledger.excuse(self.ledger.destinations[name])
                if name == "jobs":
                    self.ledger.excuse(self.ledger.destinations["done"])
                next(one for one in gateway.hosts.queues() if one.name == name).purge()
            case "delete-session":
                device = self.random.choice(self.near.devices[2:] or self.near.devices)
                session = gateway.mqtt.sessions.get(device.name)
                if session is not None and session.outlet is None and device.wishes:
                    device.give_up()
                    self._end_session(device)
                    gateway.mqtt.discard(session)
            case "redrive":
                self._redrive()

    def _redrive(self) -> None:
        gateway = self.near.gateway

        def found(letters: list[Letter]) -> None:
            gateway.core.redriving.redrive(letters, lambda id, outcome: None)
            gateway.writes.flush()

        gateway.dead_letters.newest(50, found, route=None)

    # The end.

    async def _end(self) -> None:
        """Repair everything, wait until all is delivered, and check."""
        self._course.is_ending = True
        self.trace("repair")
        self.near.repair()
        if self.remote is not None:
            self.remote.repair()
        gateway = self.near.gateway
        with self.near.active():
            for name in sorted(gateway.core.pauses.routes):
                resume(gateway, "route", name)
            gateway.writes.flush()
        self.reader.start_consuming()
        if self.getter is not None:
            self.getter.start_consuming()
        await self._until_quiet()
        await self._look_at_retained()
        await self._check()

    async def _until_quiet(self) -> None:
        """Go on with all clients connected, until nothing has happened for a while."""
        quiet = byte_count = 0
        for _ in range(SETTLE_TURNS_MAX):
            count = len(self._course.lines)
            for one in self._clients:
                if one.wire is None:
                    one.connect()
            await self._fair_turn()
            before, byte_count = byte_count, sum(len(one.wire.written) for one in self._clients if one.wire)
            quiet = quiet + 1 if len(self._course.lines) == count and byte_count == before else 0
            if quiet >= QUIET_TURNS:
                break
        self.trace("quiet")

    async def _look_at_retained(self) -> None:
        """Check what a new subscriber is sent."""
        view = self.ledger.destination("view", is_ordered=False)
        viewer = MqttClient(self.near, "viewer", wishes=[Wish("r/#", 1, view)])
        self.near.devices.append(viewer)
        viewer.connect()
        asked_at = self.now
        await self._until_quiet()
        for address in ("r/a", "r/b"):
            self.ledger.check_retained(view, address, asked_at)

    async def _check(self) -> None:
        ledger = self.ledger
        dead: set[int] = set()

        def found(letters: list[Letter]) -> None:
            dead.update(int(bytes(one.message.body).partition(b":")[0]) for one in letters)

        for gateway in self.gateways:
            gateway.find_letters(found)
        await self._fair_turns(3)
        dropped = sum(gateway.counted_drops()["queue_full"] for gateway in self.gateways)
        ledger.check_missing(self.now, dead, dropped)
        for jobs, results in (("jobs", "done"), ("fast jobs", "fast results")):
            if jobs in ledger.destinations:
                ledger.check_jobs(ledger.destinations[jobs], ledger.destinations[results], self.now)
        for one in self._clients:
            if not one.is_quiet:
                ledger.faults.append(f"{one.name}: waits for the gateway: {one.waits_for()}")
        for gateway in self.gateways:
            ledger.faults += gateway.waiting()
            ledger.faults += await gateway.idle_report(self._fair_turn)


@contextmanager
def _folder() -> Iterator[Path]:
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def _errors_told() -> Iterator[list[str]]:
    """Yield what the gateway logs as an error, and errors that its guards have contained."""
    told: list[str] = []
    before = sum(containment.counted.values())
    with structlog.testing.capture_logs() as lines:
        yield told
    told += [
        f"logged: {line}"
        for line in lines
        if line["log_level"] in ("error", "critical") and line["event"] not in EXPECTED_ERRORS
    ]
    count = sum(containment.counted.values()) - before
    if count:
        told.append(f"{count} errors were contained")


def simulate(plan: Plan) -> Result:
    """Run a plan. Return what became of it."""
    with ExitStack() as stack:
        folder = stack.enter_context(_folder())
        faults = stack.enter_context(watched(ids_alone=False))
        clock = stack.enter_context(virtual_time(str(plan.seed)))
        disks = stack.enter_context(virtual_disks(folder / "data", folder / "far"))
        stack.enter_context(without_threads())
        if "large" in plan.features:  # rows in the file of large rows
            stack.enter_context(patch.object(database, "BYTES_MIN", LARGE_BYTES))
        ledger = Ledger(
            is_disk_sound=not plan.faults & {"full-disk", "broken-disk", "far-full-disk"},
            is_clock_steady="clock" not in plan.faults,
        )
        course = Course(ledger, Random(f"actions {plan.seed}"), clock)
        near, far = (
            SimulatedGateway(course, disk, _network(plan, name), name)
            for disk, name in zip(disks, ("", "far"), strict=True)
        )
        simulation = Simulation(plan, course, near, folder / "mapping.yaml")
        if links_of(plan):
            remote = Remote(plan, near, far, folder / "far.yaml")
            simulation.add_remote(remote)
            stack.enter_context(remote.reachable())
        began = clock.at
        with _errors_told() as errors:
            try:
                trio.run(simulation.run, clock=clock, restrict_keyboard_interrupt_to_checkpoints=True)
            except Exception:
                errors.append(traceback.format_exc())
        found = [*ledger.faults, *errors, *(f"order of durability: {one}" for one in faults)]
        delivered = sum(one.received.total() for one in ledger.destinations.values())
        return Result(plan, found, course.lines, clock.at - began, delivered)


def _network(plan: Plan, name: str) -> VirtualSocketLoop:
    return VirtualSocketLoop(Random(f"network {name}{plan.seed}"), splits="split" in plan.faults)
