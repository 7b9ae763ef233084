"""The load program: pre-encoded packets out, bytes counted in. Neutral: it knows only bytes and sizes.

Publishers and consumer are one process each. A publisher keeps `window` messages unacknowledged per
connection, and all together keep at most `ahead_max` that have not arrived. A run ends with a drain: nothing
more is published, and all that was sent must have arrived before DRAIN_SECS_MAX are over.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from multiprocessing.process import BaseProcess
from typing import Any, Final, NamedTuple

from tests.benchmarks import wires
from tests.benchmarks.roles import CONSUMERS, PUBLISHERS, Load, Publisher

CONNECT_SECS_MAX: Final = 120.0
DRAIN_SECS_MAX: Final = 30.0
LOOK_SECS: Final = 0.05
REST_SECS_MAX: Final = 15.0
REST_LOOK_SECS: Final = 0.3
REST_SHARE: Final = 0.1  # of one core
HELD_SECS: Final = 0.0005  # between two looks whether publishers that were held back may go on
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
COUNTED, SENT, READY = range(3)  # what a process tells, in its shared array
SIDES: Final = ("consume", "publish")
DELAYS_MS: Final = 10_000  # longer ones count as that


class Phase(IntEnum):
    """Of a run; shared by its processes."""

    CONNECT = 0
    RUN = 1
    DRAIN = 2
    DONE = 3


class LoadError(Exception):
    """A process of the load ended by itself; it has said why on standard error."""


@dataclass(frozen=True)
class Measured:
    """One run. Rates are messages/s at the consumer and acknowledgements/s at the publishers.

    `server_us` is CPU of the server per message that arrived; `busiest` the larger share of one core that a
    process of the load took; `lost` what had not arrived, or not been acknowledged, at the end of the drain;
    `delay_ms` the median of how long messages were on their way, as their publishers see it.
    """

    rate: float
    acknowledged: float
    server_us: float
    busiest: float
    lost: int
    delay_ms: float


class _Counts(NamedTuple):
    """What is known at one moment."""

    at: float
    consumed: int
    acknowledged: int
    server_secs: float
    own_secs: tuple[float, ...]
    delays: tuple[int, ...]


def cpu_secs(pid: int) -> float:
    """Processor time of a process with all its threads, in seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _consume(load: Load, told: Any, phase: Any) -> None:
    """The consumer's process, until Phase.DONE."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    role = CONSUMERS[load.consume](load)
    role.sock.setblocking(False)
    ready = select.poll()
    ready.register(role.sock, select.POLLIN)
    told[READY] = 1
    total = 0
    while phase.value != Phase.DONE:
        if ready.poll(LOOK_SECS * 1000):
            total += role.readable()
            told[COUNTED] = total


class _Publishing:
    """The publishers' process. `_held`: connections whose next messages must wait, and how many those are.

    `delays` becomes how often a message was so many milliseconds on its way: what was sent last in a turn is
    there when as many have arrived.
    """

    def __init__(self, load: Load, told: Any, arrived: Any, delays: Any) -> None:
        self._load = load
        self._told = told
        self._arrived = arrived
        self._epoll = select.epoll()
        self._roles: dict[int, Publisher] = {}
        for number in range(load.connections):
            role = PUBLISHERS[load.publish](load, number)
            role.sock.setblocking(False)
            self._epoll.register(role.sock, select.EPOLLIN)
            self._roles[role.sock.fileno()] = role
        self._held = {role: role.batch for role in self._roles.values()}
        self._sent = 0
        self._acknowledged = 0
        self._delays = delays
        self._under_way: deque[tuple[int, float]] = deque()  # all that were sent until then, and when

    def turn(self) -> None:
        """Serve every connection that is ready, and whoever was held back."""
        arrived = self._arrived[COUNTED] // self._load.fan_out
        self._time(arrived)
        room = self._load.ahead_max - self._sent + arrived
        held = self._held
        waiting, self._held = held, {}
        for role, count in waiting.items():
            room -= self._send(role, count, room)
        acknowledged = 0
        for descriptor, _ in self._epoll.poll(HELD_SECS if self._held else LOOK_SECS, 1024):
            role = self._roles[descriptor]
            count = role.readable()
            acknowledged += count
            if count:
                room -= self._send(role, count, room)
        if self._load.floods:
            acknowledged = arrived - self._acknowledged
        self._acknowledged += acknowledged
        self._told[COUNTED] = self._acknowledged
        self._under_way.append((self._sent, time.perf_counter()))

    def _time(self, arrived: int) -> None:
        now = time.perf_counter()
        while self._under_way and self._under_way[0][0] <= arrived:
            _, at = self._under_way.popleft()
            self._delays[min(int((now - at) * 1000), DELAYS_MS - 1)] += 1

    def _send(self, role: Publisher, count: int, room: int) -> int:
        """Publish what there is room for; returns how much that was."""
        now = max(0, min(count, role.batch, room))
        if now:
            role.send(now)
            self._sent += now
        if self._load.floods:
            self._held[role] = role.batch
        elif now < count:
            self._held[role] = self._held.get(role, 0) + count - now
        return now

    def drain(self) -> None:
        """Publish no more; only hear the acknowledgements that are still to come."""
        if self._load.ahead_max:
            self._load = replace(self._load, ahead_max=0)
            self._told[SENT] = self._sent
        self.turn()


def _publish(load: Load, told: Any, arrived: Any, delays: Any, phase: Any) -> None:
    """The publishers' process, until Phase.DONE."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    publishing = _Publishing(load, told, arrived, delays)
    told[READY] = 1
    while phase.value == Phase.CONNECT:
        time.sleep(HELD_SECS)
    while (now := phase.value) != Phase.DONE:
        if now == Phase.RUN:
            publishing.turn()
        else:
            publishing.drain()


class Run:
    """The processes of one load."""

    def __init__(self, load: Load) -> None:
        context = multiprocessing.get_context("fork")
        self._load = load
        self._phase = context.Value("i", Phase.CONNECT, lock=False)
        self._told = {side: context.Array("q", 3, lock=False) for side in SIDES}
        self._delays = context.Array("q", DELAYS_MS, lock=False)
        self._processes: dict[str, BaseProcess] = {}
        self._context = context

    def __enter__(self) -> Run:
        """Connect the consumer, then the publishers."""
        try:
            self._start("consume", _consume, self._told["consume"])
            self._start("publish", _publish, self._told["publish"], self._told["consume"], self._delays)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, side: str, play: Callable[..., None], *shared: Any) -> None:
        process = self._context.Process(target=play, args=(self._load, *shared, self._phase), daemon=True)
        self._processes[side] = process
        process.start()
        self._wait(lambda: bool(self._told[side][READY]), CONNECT_SECS_MAX)
        if not self._told[side][READY]:
            raise LoadError(f"the {side} side did not connect in time")

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._phase.value = Phase.DONE
        for process in self._processes.values():
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def _wait(self, until: Callable[[], bool], secs: float) -> None:
        """Until something holds or the time is over. Raises LoadError when a process has ended."""
        deadline = time.perf_counter() + secs
        while not until() and (left := deadline - time.perf_counter()) > 0:
            for side, process in self._processes.items():
                if not process.is_alive():
                    raise LoadError(f"the {side} side of the load failed")
            time.sleep(min(LOOK_SECS, left))

    def _counts(self, server: Callable[[], float]) -> _Counts:
        consumed, acknowledged = (self._told[side][COUNTED] for side in SIDES)
        own = tuple(cpu_secs(process.pid or 0) for process in self._processes.values())
        return _Counts(time.perf_counter(), consumed, acknowledged, server(), own, tuple(self._delays))

    def measure(self, server: Callable[[], float]) -> Measured:
        """Warm up, count, drain. `server` tells the processor seconds that the server has used."""
        load = self._load
        self._phase.value = Phase.RUN
        self._wait(lambda: False, load.warm_up_secs)
        before = self._counts(server)
        self._wait(lambda: False, load.seconds)
        after = self._counts(server)
        lost = self._drain()
        secs, consumed = after.at - before.at, after.consumed - before.consumed
        if not consumed:
            raise LoadError("no message arrived")
        return Measured(
            rate=consumed / secs,
            acknowledged=(after.acknowledged - before.acknowledged) / secs,
            server_us=(after.server_secs - before.server_secs) / consumed * 1e6,
            busiest=max((new - old) / secs for new, old in zip(after.own_secs, before.own_secs, strict=True)),
            lost=lost,
            delay_ms=_median([new - old for new, old in zip(after.delays, before.delays, strict=True)]),
        )

    def _drain(self) -> int:
        """Publish no more, and wait for the rest; returns how many messages are missing."""
        publish, consume, copies = self._told["publish"], self._told["consume"], self._load.fan_out
        self._phase.value = Phase.DRAIN
        self._wait(
            lambda: 0 < publish[SENT] * copies == publish[COUNTED] * copies == consume[COUNTED],
            DRAIN_SECS_MAX,
        )
        return int(publish[SENT] * copies - min(publish[COUNTED] * copies, consume[COUNTED]))


def _median(counts: Sequence[int]) -> float:
    """Milliseconds: the middle of so many delays of each."""
    left = sum(counts) / 2
    for place, count in enumerate(counts):
        left -= count
        if left <= 0:
            return place + 0.5
    return 0.0


def rest(server: Callable[[], float]) -> None:
    """Wait until a server has nothing left to do, so that it does not disturb the next run of another."""
    for _ in range(int(REST_SECS_MAX / REST_LOOK_SECS)):
        before = server()
        time.sleep(REST_LOOK_SECS)
        if server() - before <= REST_LOOK_SECS * REST_SHARE:
            return


def run(load: Load, server: Callable[[], float]) -> Measured:
    """One run of a load, with its queue removed afterwards. Raises LoadError, or OSError while connecting."""
    with Run(load) as running:
        measured = running.measure(server)
    if load.consume == "amqp":
        with wires.amqp_connect(load.consume_port) as sock:
            for queue in load.queues:
                wires.amqp_delete(sock, queue)
    rest(server)
    return measured
