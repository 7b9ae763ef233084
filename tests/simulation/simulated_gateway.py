"""One gateway of a simulation: its processes, disk, network and clients, and the faults that these have.

A simulation with links has two. Each is killed, stopped and repaired by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random

import trio

from gateway.app import Gateway
from gateway.broker.dead_letters import Letter
from gateway.settings import Settings
from tests.idle import idle_report
from tests.simulation.amqp_client import AmqpClient
from tests.simulation.disk import BROKEN, FULL, Disk
from tests.simulation.fast_client import FastClient
from tests.simulation.ledger import Ledger
from tests.simulation.mqtt_client import MqttClient
from tests.simulation.network import VirtualSocketLoop, Wire
from tests.simulation.process import VirtualProcess
from tests.simulation.virtual_clock import VirtualClock

Client = MqttClient | AmqpClient | FastClient
Turn = Callable[[], Awaitable[None]]


@dataclass
class Course:
    """What all parts of a simulation share: the ledger, time, chance and the trace."""

    ledger: Ledger
    random: Random
    clock: VirtualClock
    is_ending: bool = False
    lines: list[str] = field(default_factory=list)

    def trace(self, *words: object) -> None:
        """Note an event."""
        self.lines.append(f"{self.clock.at:9.2f} " + " ".join(str(word) for word in words))


class SimulatedGateway:
    """A gateway, and the site of its clients."""

    def __init__(self, course: Course, disk: Disk, network: VirtualSocketLoop, name: str = "") -> None:
        """`name` is for the trace."""
        self.course = course
        self.ledger = course.ledger
        self.random = course.random
        self.disk = disk
        self.network = network
        self.devices: list[MqttClient] = []
        self.programs: list[AmqpClient] = []
        self.fast_clients: list[FastClient] = []
        self._words = [f"{name}:"] if name else []
        self._stalled: list[tuple[float, Wire]] = []
        self._disk_fault_until = 0.0
        self._slow_disk_until = 0.0
        self._dropped: Counter[str] = Counter()  # by processes that have ended

    # What clients use.

    @property
    def is_ending(self) -> bool:
        """True when the simulation waits until all is delivered."""
        return self.course.is_ending

    @property
    def now(self) -> float:
        """Return the virtual time."""
        return self.course.clock.at

    def connect(self, listener: str) -> Wire:
        """Open a connection to the gateway, or one that ends at once."""
        if not self.is_running:
            wire = Wire(0, self.random, splits=False)
            wire.reset()
            return wire
        with self.active():
            return self.network.connect(self.gateway.listeners[listener])

    def trace(self, *words: object) -> None:
        """Note an event."""
        self.course.trace(*self._words, *words)

    # What the simulation uses.

    @property
    def clients(self) -> list[Client]:
        """Return all clients, connected or not."""
        return [*self.devices, *self.programs, *self.fast_clients]

    @property
    def gateway(self) -> Gateway:
        """Return the gateway of the present process."""
        return self._process.gateway

    @property
    def is_running(self) -> bool:
        """True unless the process has ended."""
        return self._process.running

    def active(self) -> AbstractContextManager[None]:
        """Have what runs within the block belong to the present process."""
        return self._process.active()

    async def start(self, settings: Settings, nursery: trio.Nursery) -> None:
        """Start the first process."""
        self._process = VirtualProcess(settings, self.disk, self.network, self.course.clock, nursery)
        await self._process.start()

    def serve(self) -> None:
        """Give each poller one turn."""
        with self.active():
            self.network.serve(self.now)

    def run_calls(self) -> None:
        """Run what the store's thread has handed over."""
        with self.active():
            self.network.run_calls()

    def step_disk(self) -> None:
        """Do one turn of the store's thread, unless the disk is slow now."""
        if self.now >= self._slow_disk_until:
            with self.active():
                self.disk.step()

    # Faults.

    async def crash(self) -> None:
        """Kill the process and start the next."""
        fault = self.disk.fault
        self.trace("kill -9")
        self._dropped = self.counted_drops()
        await self._process.crash()
        await self._restart(fault)

    async def stop(self, turn: Turn) -> None:
        """Send SIGTERM, await `turn` until the process has ended, and start the next."""
        self.trace("SIGTERM")
        gateway = self.gateway
        await self._process.stop(turn)
        self._dropped += Counter(gateway._dropped())
        await self._restart("")

    async def _restart(self, fault: str) -> None:
        for one in self.clients:
            one.pump()
            one.give_up()
        self.course.clock.pass_time(self.random.choice((0.1, 1.0)))
        await self._process.start()
        self.disk.fault = fault
        self.trace("started")

    def stall(self, wire: Wire | None) -> None:
        """Deliver nothing on a wire for a while."""
        if wire is not None:
            wire.stalled = True
            self._stalled.append((self.now + self.random.choice((0.2, 2.0)), wire))

    def break_disk(self, fault: str) -> None:
        """Have the disk fail, or be slow, for a while: "full-disk", "broken-disk" or "slow-disk"."""
        if fault == "slow-disk":
            self._slow_disk_until = self.now + self.random.choice((0.2, 2.0))
            self.trace("the disk is slow")
            return
        self.disk.fault = FULL if fault == "full-disk" else BROKEN
        self._disk_fault_until = self.now + self.random.choice((0.1, 1.0, 4.0))
        self.trace("disk:", self.disk.fault)

    def mend_what_is_over(self) -> None:
        """End faults whose time is over."""
        if self.disk.fault and self.now >= self._disk_fault_until:
            self.disk.fault = ""
            self.trace("the disk works again")
        over = [wire for until, wire in self._stalled if until <= self.now]
        self._stalled = [(until, wire) for until, wire in self._stalled if until > self.now]
        for wire in over:
            wire.stalled = False

    def repair(self) -> None:
        """End all faults."""
        self.disk.fault = ""
        self._slow_disk_until = 0.0
        self.network.repair()
        for one in self.clients:
            one.is_slow = False

    # The end.

    def counted_drops(self) -> Counter[str]:
        """Return what all processes have counted as dropped, by reason."""
        return self._dropped + Counter(self.gateway._dropped())

    def find_letters(self, found: Callable[[list[Letter]], None], most: int = 100_000) -> None:
        """Have `found` called with the newest dead letters."""
        with self.active():
            self.gateway.dead_letters.newest(most, found, route=None)
            self.gateway.writes.flush()

    def waiting(self) -> list[str]:
        """Return a line for each queue, session, outbox and link that still has messages."""
        gateway = self.gateway
        with self.active():
            outboxes = gateway.core.outbox_states()
        counts = {f"queue {one.name}": len(one) for one in gateway.hosts.queues()}
        counts |= {f"AMQP/Fast {one.name}": len(one) for one in gateway.fast_hosts.queues()}
        counts |= {f"session {one.client_id}": len(one) for one in gateway.mqtt.sessions.values()}
        counts |= {f"link {name}": one.session.unconfirmed for name, one in gateway.links.items()}
        counts |= {f"outbox {one.route}": one.messages or 0 for one in outboxes}
        lines = [
            f"{name}: {count} messages are queued, and its receiver waits for them"
            for name, count in counts.items()
            if count
        ]
        return [" ".join([*self._words, line]) for line in lines]

    async def idle_report(self, turn: Turn) -> list[str]:
        """Return what still waits in the gateway after some turns."""
        with self.active():
            report = idle_report(self.gateway)
            for _ in range(50):
                if not report:
                    break
                await turn()
                report = idle_report(self.gateway)
        return [" ".join(["not idle:", *self._words, line]) for line in report]
