"""Everyday load: CPU per message and delay at rates that a server easily carries.

The load is open: messages have a timetable, over 20 connections in turn. One process publishes, consumes and
acknowledges, and measures from the time at which a message was due. A busy machine makes servers batch what
has waited, which costs less CPU per message: `waits/message` tells how often a server's first thread slept,
so rows are comparable whose waits are.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.benchmarks import wires
from tests.benchmarks.load import LoadError, rest
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import CONSUMERS, PUBLISHERS, Load, Publisher
from tests.benchmarks.sections.comparing import load_at
from tests.benchmarks.subjects import Gateway, Mosquitto, Rabbit, Subject

RATES: Final = (100, 1_000, 10_000)
CONNECTIONS: Final = 20
IDLE: Final = 10_000  # connections beside
IDLE_SECS: Final = 5.0
IDLE_CORE_MAX: Final = 0.01  # share of one core
WARM_UP_SECS: Final = 1.0
REST_SECS: Final = 10.0
QUEUE: Final = "everyday"
PERCENTILES: Final = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}


@dataclass(frozen=True)
class Row:
    """One kind of traffic. `targets` are the largest shares of the peer's CPU per message, by rate."""

    name: str
    load: Load
    peer: str
    targets: dict[int, float]


ROWS: Final = (
    Row(
        "MQTT QoS 1 -> MQTT QoS 1",
        Load("mqtt", "mqtt", 0, 0, connections=CONNECTIONS),
        Mosquitto.name,
        {1_000: 1.5},
    ),
    Row(
        "MQTT QoS 1 -> durable AMQP queue",
        Load("mqtt", "amqp", 0, 0, connections=CONNECTIONS, queue=QUEUE, durable=True),
        Rabbit.name,
        {1_000: 0.6},
    ),
    Row(
        "AMQP confirms -> MQTT QoS 1",
        Load("amqp", "mqtt", 0, 0, connections=CONNECTIONS, persistent=False),
        Rabbit.name,
        {},
    ),
)


@dataclass(frozen=True)
class Paced:
    """One run. `cpu_us` and `waits` are those of the server per message; delays are in milliseconds, from
    due to delivered and to acknowledged.
    """

    cpu_us: float
    waits: float
    delivered: dict[str, float]
    acknowledged: dict[str, float]


def _cpu_secs(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, with the scheduler's resolution."""
    times = [file.read_text().split()[0] for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, times)) / 1e9


def _waits(pid: int) -> int:
    """Return how often the first thread of a process went to sleep."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    raise LoadError("the system does not count context switches")


def _percentiles(seconds: list[float]) -> dict[str, float]:
    found = sorted(seconds)
    return {name: found[int(len(found) * share)] * 1000 for name, share in PERCENTILES.items()}


def paced(subject: Subject, load: Load, rate: int, seconds: float) -> Paced:
    """Send `rate` messages per second for `seconds`, after a warm-up. Raises LoadError if some are lost."""
    consumer = CONSUMERS[load.consume](load)
    consumer.sock.setblocking(False)
    publishers: list[Publisher] = [PUBLISHERS[load.publish](load, number) for number in range(CONNECTIONS)]
    ready = select.epoll()
    ready.register(consumer.sock, select.EPOLLIN)
    by_descriptor = {}
    for publisher in publishers:
        publisher.sock.setblocking(False)
        ready.register(publisher.sock, select.EPOLLIN)
        by_descriptor[publisher.sock.fileno()] = publisher
    due_of: dict[Publisher, deque[float]] = {publisher: deque() for publisher in publishers}
    due_in_order: deque[float] = deque()
    delivered: list[float] = []
    acknowledged: list[float] = []
    skipped, count = int(rate * WARM_UP_SECS), int(rate * (WARM_UP_SECS + seconds))
    number, cpu, waits = 0, 0.0, 0
    begin = time.monotonic() + 0.1
    end = begin + WARM_UP_SECS + seconds + REST_SECS
    while len(delivered) < count or len(acknowledged) < count:
        due = begin + number / rate if number < count else end
        now = time.monotonic()
        if now >= end:
            raise LoadError(f"{count - len(delivered)} messages did not arrive")
        if now >= due:
            if number == skipped:
                cpu, waits = _cpu_secs(subject.pid), _waits(subject.pid)
            publisher = publishers[number % CONNECTIONS]
            publisher.send(1)
            due_of[publisher].append(due)
            due_in_order.append(due)
            number += 1
            continue
        for descriptor, _ in ready.poll(due - now):
            found = by_descriptor.get(descriptor)
            role, times, since = (
                (consumer, delivered, due_in_order) if found is None else (found, acknowledged, due_of[found])
            )
            arrived = role.readable()
            now = time.monotonic()
            times += [now - since.popleft() for _ in range(arrived)]
    measured = count - skipped
    result = Paced(
        (_cpu_secs(subject.pid) - cpu) / measured * 1e6,
        (_waits(subject.pid) - waits) / measured,
        _percentiles(delivered[skipped:]),
        _percentiles(acknowledged[skipped:]),
    )
    for role in (*publishers, consumer):
        role.sock.close()  # type: ignore[union-attr]
    if load.consume == "amqp":
        with wires.amqp_connect(load.consume_port) as sock:
            wires.amqp_delete(sock, QUEUE)
    rest(subject.cpu)
    return result


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """CPU per message, and the delays, of each row at each rate: medians of `repeat` runs, in turn."""
    figures: list[Figure] = []
    with ExitStack() as stack:
        ours: Subject = stack.enter_context(Gateway(folder / "gateway", store={"path": str(folder / "data")}))
        peers: dict[str, Subject] = {
            Mosquitto.name: stack.enter_context(Mosquitto(folder / "mosquitto")),
            Rabbit.name: stack.enter_context(Rabbit(folder / "rabbitmq")),
        }
        for row in ROWS:
            for rate in RATES:
                runs: list[list[Paced]] = [[], []]
                for _ in range(repeat):
                    for found, subject in zip(runs, (ours, peers[row.peer]), strict=True):
                        found.append(paced(subject, load_at(subject, row.load), rate, seconds))
                figures += _figures(row, rate, *runs)
        figures.append(_idle(ours))
    return figures


def _figures(row: Row, rate: int, ours: list[Paced], peer: list[Paced]) -> Iterator[Figure]:
    name = f"{row.name}, {rate}/s, beside {row.peer}"
    cpu = median([one.cpu_us for one in ours]), median([one.cpu_us for one in peer])
    largest = row.targets.get(rate)
    yield Figure(
        f"{name}: CPU",
        "us/message",
        cpu[0],
        cpu[1],
        ratio=cpu[1] / cpu[0],
        target=None if largest is None else round(1 / largest, 2),
        more={
            "waits/message": f"{median([one.waits for one in ours]):.2f}",
            "peer's": f"{median([one.waits for one in peer]):.2f}",
        },
    )
    for word in PERCENTILES:
        delays = [median([one.acknowledged[word] for one in runs]) for runs in (ours, peer)]
        arrivals = [median([one.delivered[word] for one in runs]) for runs in (ours, peer)]
        yield Figure(
            f"{name}: acknowledged, {word}",
            "ms",
            delays[0],
            delays[1],
            ratio=delays[1] / delays[0],
            target=1.0 if largest is not None and word != "p99.9" else None,
            more={"delivered": f"{arrivals[0]:.2f}", "by the peer": f"{arrivals[1]:.2f}"},
        )


def _idle(subject: Subject) -> Figure:
    """The gateway with IDLE connections that say nothing; the peer's column is the limit."""
    socks = [wires.mqtt_connect(subject.mqtt_port, f"idle-{number:05d}") for number in range(IDLE)]
    rest(subject.cpu)
    before, began = _cpu_secs(subject.pid), time.monotonic()
    time.sleep(IDLE_SECS)
    share = (_cpu_secs(subject.pid) - before) / (time.monotonic() - began)
    for sock in socks:
        sock.close()
    rest(subject.cpu)
    return Figure(
        f"{IDLE} idle MQTT connections: CPU",
        "% of a core",
        share * 100,
        IDLE_CORE_MAX * 100,
        ratio=IDLE_CORE_MAX / share if share else None,
        target=1.0,
    )
