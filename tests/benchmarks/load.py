"""The load program: pre-encoded packets out, octets counted in. Neutral: it knows only bytes and sizes.

Publishers and consumer are one process each, with an epoll loop. A publisher keeps `window` messages
unacknowledged per connection (QoS 0: what TCP takes). A run that loses nothing ends with a drain: publishing
stops, and all that was sent must have been acknowledged and must have arrived before DRAIN_SECS_MAX are over.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.process import BaseProcess
from typing import Any, Final

from tests.benchmarks import wires
from tests.benchmarks.roles import ROLES, Load, MqttPublisher

CONNECT_SECS_MAX: Final = 120.0
DRAIN_SECS_MAX: Final = 30.0
LOOK_SECS: Final = 0.05
IDLE_SECS: Final = 0.0005  # between two tries when no socket takes octets
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
COUNTED, SENT, READY = range(3)  # what a process tells, in its shared array
SIDES: Final = ("consume", "publish")


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
    process of the load took; `lost` what had not arrived at the end of the drain, None without a drain.
    """

    rate: float
    acknowledged: float
    server_us: float
    busiest: float
    lost: int | None


def cpu_secs(pid: int) -> float:
    """Processor time of a process with all its threads, in seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _play(load: Load, side: str, count: int, told: Any, phase: Any) -> None:
    """One process: `count` connections of one role, until Phase.DONE."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it is over
    kind = ROLES[side, load.publish if side == "publish" else load.consume]
    roles = [kind(load, number) for number in range(count)]
    flooders = [role for role in roles if isinstance(role, MqttPublisher)] if load.floods else []
    epoll = select.epoll()
    readers: dict[int, Callable[[], int]] = {}
    for role in roles:
        role.sock.setblocking(False)
        epoll.register(role.sock, select.EPOLLIN)
        readers[role.sock.fileno()] = role.readable
    told[READY] = 1
    while phase.value == Phase.CONNECT:
        time.sleep(0.001)
    for role in roles if not flooders else ():
        role.start()
    total = 0
    stopped = False
    while (now := phase.value) != Phase.DONE:
        if now == Phase.DRAIN and not stopped:
            stopped = True
            for role in roles:
                role.draining = True
            told[SENT] = sum(role.sent for role in roles)
        if flooders:
            wrote = sum([role.burst() for role in flooders])
            total += wrote
            if not wrote:
                time.sleep(IDLE_SECS)
        else:
            for descriptor, _ in epoll.poll(LOOK_SECS, 1024):
                total += readers[descriptor]()
        told[COUNTED] = total


class Run:
    """The processes of one load."""

    def __init__(self, load: Load) -> None:
        context = multiprocessing.get_context("fork")
        self._load = load
        self._phase = context.Value("i", Phase.CONNECT, lock=False)
        self._told = {side: context.Array("q", 3, lock=False) for side in SIDES}
        self._processes: dict[str, BaseProcess] = {}
        self._context = context

    def __enter__(self) -> Run:
        """Connect the consumer, then the publishers."""
        try:
            for side, count in (("consume", 1), ("publish", self._load.connections)):
                process = self._context.Process(
                    target=_play, args=(self._load, side, count, self._told[side], self._phase), daemon=True
                )
                self._processes[side] = process
                process.start()
                self._wait(lambda side=side: bool(self._told[side][READY]), CONNECT_SECS_MAX)
                if not self._told[side][READY]:
                    raise LoadError(f"the {side} side did not connect in time")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End them, and take their queue away."""
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

    def _counts(self, server: Callable[[], float]) -> tuple[float, int, int, float, list[float]]:
        consumed, acknowledged = (self._told[side][COUNTED] for side in SIDES)
        own = [cpu_secs(process.pid or 0) for process in self._processes.values()]
        return time.perf_counter(), consumed, acknowledged, server(), own

    def measure(self, server: Callable[[], float]) -> Measured:
        """Warm up, count, drain. `server` tells the processor seconds that the server has used."""
        load = self._load
        self._phase.value = Phase.RUN
        self._wait(lambda: False, load.warm_up_secs)
        before = self._counts(server)
        self._wait(lambda: False, load.seconds)
        after = self._counts(server)
        lost = self._drain() if load.lossless else None
        secs, consumed, acknowledged = (after[at] - before[at] for at in range(3))
        if not consumed:
            raise LoadError("no message arrived")
        return Measured(
            rate=consumed / secs,
            acknowledged=acknowledged / secs,
            server_us=(after[3] - before[3]) / consumed * 1e6,
            busiest=max((new - old) / secs for new, old in zip(after[4], before[4], strict=True)),
            lost=lost,
        )

    def _drain(self) -> int:
        """Publish no more, and wait for the rest; returns how many messages are missing."""
        publish, consume = self._told["publish"], self._told["consume"]
        self._phase.value = Phase.DRAIN
        self._wait(
            lambda: 0 < publish[SENT] == publish[COUNTED] == consume[COUNTED],
            DRAIN_SECS_MAX,
        )
        return int(publish[SENT] - min(publish[COUNTED], consume[COUNTED]))


def run(load: Load, server: Callable[[], float]) -> Measured:
    """One run of a load, with its queue removed afterwards. Raises LoadError, or OSError while connecting."""
    with Run(load) as running:
        measured = running.measure(server)
    if load.consume == "amqp":
        with wires.amqp_connect(load.consume_port) as sock:
            wires.amqp_delete(sock, load.queue)
    return measured
