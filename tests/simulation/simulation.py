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
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import structlog
import trio
import trio.testing

from gateway import containment
from gateway.app.operations import pause, resume
from gateway.broker.dead_letters import Letter
from gateway.protocols.mqtt.spec import Version
from gateway.settings import Http, Limits, Settings, StoreSettings
from tests.configured import make_listener
from tests.idle import idle_report
from tests.simulation.amqp_client import AmqpClient
from tests.simulation.disk import BROKEN, FULL, Disk, virtual_disk
from tests.simulation.ledger import Destination, Ledger
from tests.simulation.mqtt_client import MqttClient, Wish
from tests.simulation.network import VirtualSocketLoop, Wire
from tests.simulation.plan import Plan
from tests.simulation.process import VirtualProcess, without_threads
from tests.simulation.virtual_clock import VirtualClock, virtual_time
from tests.store.durability import watched

LOOPBACK: Final = "127.0.0.1"
MAPPING: Final = """version: 1
routes:
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: once, from: {endpoint: amqp091, exchange: in}, to: {endpoint: mqtt, topic: "once/{routing_key}"},
     deduplicate: {window: 10m}}
"""
RELOADED: Final = (
    '  - {name: more, from: {endpoint: mqtt, topic: "more/#"}, to: {endpoint: amqp091, queue: near}}\n'
)
TTL_SECS: Final = 2
EXPIRY_SECS: Final = 3_600
SETTLE_TURNS_MAX: Final = 4_000
QUIET_TURNS: Final = 80  # turns without any event, after which nothing else will happen
TURN_SECS: Final = 0.1
PUMPED: Final = 3  # clients that read in one step
QUEUES: Final = ("near", "direct", "ttl", "dead", "jobs", "done")
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

    def __init__(
        self, plan: Plan, clock: VirtualClock, disk: Disk, network: VirtualSocketLoop, mapping: Path
    ) -> None:
        self.plan = plan
        self.ledger = Ledger(is_disk_sound=not plan.faults & {"full-disk", "broken-disk"})
        self.random = Random(f"actions {plan.seed}")
        self.is_ending = False
        self.lines: list[str] = []
        self._clock = clock
        self._disk = disk
        self._network = network
        self._mapping = mapping
        self._stalled: list[tuple[float, Wire]] = []
        self._disk_fault_until = 0.0
        self._slow_disk_until = 0.0
        self._dropped: Counter[str] = Counter()  # by processes that have ended
        self.devices: list[MqttClient] = []
        self.programs: list[AmqpClient] = []
        self._addresses: dict[str, list[Destination]] = {}
        self._make_clients()

    # What clients use.

    @property
    def now(self) -> float:
        """Return the virtual time."""
        return self._clock.at

    def connect(self, listener: str) -> Wire:
        """Open a connection to the gateway, or one that ends at once."""
        if not self._process.running:
            wire = Wire(0, self.random, splits=False)
            wire.reset()
            return wire
        return self._network.connect(self._process.gateway.listeners[listener])

    def trace(self, *words: object) -> None:
        """Note an event."""
        self.lines.append(f"{self._clock.at:9.2f} " + " ".join(str(word) for word in words))

    @property
    def _clients(self) -> list[MqttClient | AmqpClient]:
        return [*self.devices, *self.programs]

    # The cast.

    def _make_clients(self) -> None:
        has, ledger = self.plan.features.__contains__, self.ledger
        queues = {name: ledger.destination(name, is_ordered=name not in ("dead", "ttl")) for name in QUEUES}
        for one in queues.values():
            one.exists = True
        version = Version.V311 if has("mqtt311") else Version.V5
        self.devices.append(MqttClient(self, "writer", expiry_secs=EXPIRY_SECS, version=version))
        self.devices.append(MqttClient(self, "passer", expiry_secs=EXPIRY_SECS))
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
        if has("wills"):
            to = ledger.destination("session heir")
            self._add_device("heir", [Wish("w/#", 1, to)])
            heirs = [] if self.plan.faults & {"full-disk", "broken-disk"} else [to]
            self.devices.append(MqttClient(self, "mortal", heirs=heirs))
        if has("retained"):
            self._addresses["r/a"] = self._addresses["r/b"] = []
        self._make_programs(queues)

    def _make_programs(self, queues: dict[str, Destination]) -> None:
        has = self.plan.features.__contains__
        self.programs.append(AmqpClient(self, "program"))
        if has("queue") or has("get"):
            self._addresses["/direct"] = [queues["direct"]]
        if has("ttl"):
            self._addresses["/ttl"] = [queues["dead"]]
        if has("transactions"):
            self._addresses["/jobs"] = [queues["jobs"]]
            self.programs.append(AmqpClient(self, "worker", jobs=queues["jobs"], results=queues["done"]))
        consumed = [queues[name] for name in ("near", "dead", "done")]
        if has("queue") and not has("get"):
            consumed.append(queues["direct"])
        self.reader = AmqpClient(self, "reader", queues=consumed)
        self.reader.consumes = self.random.random() < 0.7
        self.programs.append(self.reader)
        self.getter = AmqpClient(self, "getter", queues=[queues["direct"]]) if has("get") else None
        if self.getter is not None:
            self.getter.consumes = False
            self.programs.append(self.getter)
        if has("slow"):
            for one in self._clients:
                one.is_slow = self.random.random() < 0.5

    def _add_device(self, name: str, wishes: list[Wish]) -> None:
        receive_max = self.random.choice((1, 3, 10, 100))
        self.devices.append(
            MqttClient(self, name, expiry_secs=EXPIRY_SECS, wishes=wishes, receive_max=receive_max)
        )

    def _settings(self) -> Settings:
        queues: list[dict[str, Any]] = [{"name": name} for name in QUEUES if name != "ttl"]
        arguments = {
            "x-message-ttl": TTL_SECS * 1_000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": "dead",
        }
        queues.append({"name": "ttl", "arguments": arguments})
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
            "store": StoreSettings(path=self._disk.folder),
            "mappings": (str(self._mapping),),
            "declare": {
                "queues": tuple(queues),
                "exchanges": ({"name": "in", "type": "fanout"},),
            },
        }
        return Settings(**given)

    # Running.

    async def run(self) -> None:
        """Run all steps, and the end."""
        async with trio.open_nursery() as nursery:
            self._process = VirtualProcess(self._settings(), self._disk, self._network, self._clock, nursery)
            await self._process.start()
            for one in self._clients:
                one.connect()
            await self._fair_turns(12)
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
        self._mend_what_is_over()
        action = random.choices(
            ("client", "pump", "serve", "store", "calls", "time", "fault"), (6, 6, 8, 4, 4, 3, 1)
        )[0]
        match action:
            case "client":
                self._client_acts()
            case "pump":
                for one in random.sample(self._clients, min(PUMPED, len(self._clients))):
                    one.pump()
            case "serve":
                self._network.serve(self.now)
            case "store":
                if self.now >= self._slow_disk_until:
                    self._disk.step()
            case "calls":
                self._network.run_calls()
            case "time":
                self._clock.pass_time(random.choice((0.01, 0.1, 0.5, 1.0)))
            case "fault":
                await self._break_something()
        await self._let_run()

    async def _fair_turns(self, count: int) -> None:
        for _ in range(count):
            await self._fair_turn()

    async def _fair_turn(self) -> None:
        """Move everything once, and let time pass."""
        self._network.serve(self.now)
        await self._let_run()
        self._disk.step()
        self._network.run_calls()
        await self._let_run()
        for one in self._clients:
            one.pump()
        self._clock.pass_time(TURN_SECS)
        await self._let_run()

    # Clients.

    def _client_acts(self) -> None:
        random, addresses = self.random, self._addresses
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

    def _publish(self, address: str, count: int) -> None:
        random, wanted = self.random, self._addresses[address]
        ttl = random.choice((1, 5, 60)) if "expiry" in self.plan.features and random.random() < 0.4 else 0
        for _ in range(count):
            if address.startswith(("/", "in/")):
                program = self.programs[0]
                if program.wire is None:
                    program.connect()
                program.publish(address, wanted, ttl_secs=ttl)
                continue
            device = self.devices[0 if random.random() < 0.7 else 1]
            if device is self.devices[0] and "mqtt311" in self.plan.features:
                ttl = 0
            if device.wire is None:
                device.connect()
            if address.startswith("r/"):
                self.devices[1].publish(address, 1, wanted, retained=True)
                continue
            device.publish(address, random.choice((0, 1, 2)), wanted, ttl_secs=ttl)

    def _reconnect(self, one: MqttClient | AmqpClient) -> None:
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
                    for other in self.devices
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
                await self._stop()
            case "cut":
                random.choice(everybody).vanish(random.choice(("end", "reset", "disconnect")))
            case "away":  # all who receive by sessions, for a while
                for device in self.devices:
                    if device.wishes:
                        device.vanish(random.choice(("end", "disconnect")))
            case "half-open":
                random.choice(everybody).vanish("half-open")
            case "stall":
                wire = random.choice(everybody).wire
                if wire is not None:
                    wire.stalled = True
                    self._stalled.append((self.now + random.choice((0.2, 2.0)), wire))
            case "full-disk" | "broken-disk":
                self._disk.fault = FULL if fault == "full-disk" else BROKEN
                self._disk_fault_until = self.now + random.choice((0.1, 1.0, 4.0))
                self.trace("disk:", self._disk.fault)
            case "slow-disk":
                self._slow_disk_until = self.now + random.choice((0.2, 2.0))
                self.trace("the disk is slow")
            case "clock":
                self._clock.wall_ahead += random.choice((-7_200.0, -30.0, 30.0, 7_200.0, 691_200.0))
                self.trace("the wall clock is set", self._clock.wall_ahead)
            case _:
                await self._operate(fault)

    async def _crash(self) -> None:
        fault = self._disk.fault
        self.trace("kill -9")
        if (heir := self.ledger.destinations.get("session heir")) is not None:
            self.ledger.excuse(heir)  # of a client that was lost in the moment of the crash
        self._dropped = self._counted_drops()
        await self._process.crash()
        await self._restart(fault)

    async def _restart(self, fault: str) -> None:
        for one in self._clients:
            one.pump()
            one.give_up()
        self._clock.pass_time(self.random.choice((0.1, 1.0)))
        await self._process.start()
        self._disk.fault = fault
        self.trace("started")

    async def _stop(self) -> None:
        self.trace("SIGTERM")
        gateway = self._process.gateway
        await self._process.stop(self._fair_turn)
        self._dropped += Counter(gateway._dropped())
        await self._restart("")

    def _mend_what_is_over(self) -> None:
        if self._disk.fault and self.now >= self._disk_fault_until:
            self._disk.fault = ""
            self.trace("the disk works again")
        over = [wire for until, wire in self._stalled if until <= self.now]
        self._stalled = [(until, wire) for until, wire in self._stalled if until > self.now]
        for wire in over:
            wire.stalled = False

    # The operator.

    async def _operate(self, what: str) -> None:
        gateway = self._process.gateway
        self.trace("operator:", what)
        match what:
            case "pause":
                name, paused = self.random.choice(("near", "once")), gateway.core.pauses.routes
                (resume if name in paused else pause)(gateway, "route", name)
                self.trace("paused:", sorted(paused))
            case "reload":
                more = self.random.random() < 0.5
                self._mapping.write_text(MAPPING + (RELOADED if more else ""))
                assert await gateway.reload_mappings()
            case "purge":
                name = self.random.choice(QUEUES)
                self.trace("purged:", name)
                self.ledger.excuse(self.ledger.destinations[name])
                if name == "ttl":
                    self.ledger.excuse(self.ledger.destinations["dead"])
                if name == "jobs":
                    self.ledger.excuse(self.ledger.destinations["done"])
                next(one for one in gateway.hosts.queues() if one.name == name).purge()
            case "delete-session":
                device = self.random.choice(self.devices[2:] or self.devices)
                session = gateway.mqtt.sessions.get(device.name)
                if session is not None and session.outlet is None and device.wishes:
                    device.give_up()
                    self._end_session(device)
                    gateway.mqtt.discard(session)
            case "redrive":
                self._redrive()
        gateway.writes.flush()

    def _redrive(self) -> None:
        gateway = self._process.gateway

        def found(letters: list[Letter]) -> None:
            gateway.core.redriving.redrive(letters, lambda id, outcome: None)
            gateway.writes.flush()

        gateway.dead_letters.newest(50, found, route=None)

    # The end.

    async def _end(self) -> None:
        """Repair everything, wait until all is delivered, and check."""
        self.is_ending = True
        self.trace("repair")
        self._disk.fault = ""
        self._slow_disk_until = 0.0
        self._network.repair()
        for name in sorted(self._process.gateway.core.pauses.routes):
            resume(self._process.gateway, "route", name)
        self._process.gateway.writes.flush()
        for one in self._clients:
            one.is_slow = False
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
            count = len(self.lines)
            for one in self._clients:
                if one.wire is None:
                    one.connect()
            await self._fair_turn()
            before, byte_count = byte_count, sum(len(one.wire.written) for one in self._clients if one.wire)
            quiet = quiet + 1 if len(self.lines) == count and byte_count == before else 0
            if quiet >= QUIET_TURNS:
                break
        self.trace("quiet")

    async def _look_at_retained(self) -> None:
        """Check what a new subscriber is sent."""
        view = self.ledger.destination("view", is_ordered=False)
        viewer = MqttClient(self, "viewer", wishes=[Wish("r/#", 1, view)])
        self.devices.append(viewer)
        viewer.connect()
        await self._until_quiet()
        for address in ("r/a", "r/b"):
            self.ledger.check_retained(view, address)

    async def _check(self) -> None:
        ledger, gateway = self.ledger, self._process.gateway
        dead: set[int] = set()

        def found(letters: list[Letter]) -> None:
            dead.update(int(bytes(one.message.body).partition(b":")[0]) for one in letters)

        gateway.dead_letters.newest(100_000, found, route=None)
        gateway.writes.flush()
        await self._fair_turns(3)
        ledger.check_missing(self.now, dead, self._counted_drops()["queue_full"])
        ledger.check_jobs(ledger.destinations["jobs"], ledger.destinations["done"], self.now)
        for one in self._clients:
            if not one.is_quiet:
                ledger.faults.append(f"{one.name}: waits for the gateway: {one.waits_for()}")
        for name, count in self._queued().items():
            ledger.faults.append(f"{name}: {count} messages are queued, and its receiver waits for them")
        report = idle_report(gateway)
        for _ in range(50):
            if not report:
                break
            await self._fair_turn()
            report = idle_report(gateway)
        ledger.faults += [f"not idle: {line}" for line in report]

    def _counted_drops(self) -> Counter[str]:
        """Return what all processes have counted as dropped, by reason."""
        return self._dropped + Counter(self._process.gateway._dropped())

    def _queued(self) -> dict[str, int]:
        gateway = self._process.gateway
        queues = {f"queue {one.name}": len(one) for one in gateway.hosts.queues()}
        sessions = {f"session {one.client_id}": len(one) for one in gateway.mqtt.sessions.values()}
        return {name: count for name, count in (queues | sessions).items() if count}


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
        disk = stack.enter_context(virtual_disk(folder / "data"))
        stack.enter_context(without_threads())
        mapping = folder / "mapping.yaml"
        mapping.write_text(MAPPING)
        network = VirtualSocketLoop(Random(f"network {plan.seed}"), splits="split" in plan.faults)
        simulation = Simulation(plan, clock, disk, network, mapping)
        began = clock.at
        with _errors_told() as errors:
            try:
                trio.run(simulation.run, clock=clock, restrict_keyboard_interrupt_to_checkpoints=True)
            except Exception:
                errors.append(traceback.format_exc())
        found = [*simulation.ledger.faults, *errors, *(f"order of durability: {one}" for one in faults)]
        delivered = sum(one.received.total() for one in simulation.ledger.destinations.values())
        return Result(plan, found, simulation.lines, clock.at - began, delivered)
