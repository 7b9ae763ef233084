"""How long a message takes from an MQTT QoS 1 publisher to an AMQP consumer, at a fixed rate.

The load is open: messages have a timetable, whatever the server does, and the body of each carries the time
at which it was *due*. So a server that stalls is charged for all the messages that it has kept waiting; the
generator's own lateness counts as well, and is the same for both servers.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.benchmarks import wires
from tests.benchmarks.load import LoadError, rest
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import ACK_HEAD, ACK_TAG, AmqpConsumer, Load
from tests.benchmarks.subjects import Gateway, Rabbit, Subject

RATES: Final = (1_000, 10_000)
CONNECTIONS: Final = 20
BODY_BYTES: Final = 128
WARM_UP_SECS: Final = 1.0
REST_SECS: Final = 15.0
READ: Final = 1 << 18
DUE: Final = struct.Struct(">Q")
NANOSECONDS: Final = 1_000_000_000
PR_SET_TIMERSLACK: Final = 29
QUEUE: Final = "latency"
PUBACK_BYTES: Final = 4


def _publish(port: int, rate: int, count: int, ready: Any, late: Any, sent: Any) -> None:
    """Publish `count` messages at `rate` per second, each in its turn over the connections.

    `late` becomes how many nanoseconds after its time the 99th of 100 messages was sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)  # sleep() may otherwise be 50 us late
    socks = [wires.mqtt_connect(port, f"late-{number}") for number in range(CONNECTIONS)]
    heads = [wires.text(f"bench/{number:05d}") for number in range(CONNECTIONS)]
    answers = select.epoll()
    by_descriptor = {sock.fileno(): sock for sock in socks}
    for descriptor in by_descriptor:
        answers.register(descriptor, select.EPOLLIN)
    filling = b"x" * (BODY_BYTES - DUE.size)
    ready.set()
    lateness = []
    begin = time.monotonic_ns() + NANOSECONDS // 10
    for number in range(count):
        due = begin + number * NANOSECONDS // rate
        while (left := due - time.monotonic_ns()) > 0:
            for descriptor, _ in answers.poll(0):
                by_descriptor[descriptor].recv(READ)
            if (left := due - time.monotonic_ns()) > 0:
                time.sleep(left / NANOSECONDS)
        turn, which = divmod(number, CONNECTIONS)
        identifier = (turn % 65_535 + 1).to_bytes(2, "big")
        socks[which].sendall(wires.packet(0x32, heads[which] + identifier + DUE.pack(due) + filling))
        lateness.append(time.monotonic_ns() - due)
    late.value = sorted(lateness)[count * 99 // 100]
    sent.set()
    time.sleep(REST_SECS)  # the connections stay open until the parent has what it needs


def _times(sock: Any, count: int) -> list[int]:
    """Nanoseconds from due to arrived, of `count` messages; each is acknowledged."""
    sock.settimeout(REST_SECS)
    times: list[int] = []
    data = b""
    while len(times) < count:
        data += sock.recv(READ)
        now = time.monotonic_ns()
        found = wires.delivery_parts(data) if data else None
        if found is None:
            continue
        size = found[0]
        whole = len(data) // size
        first = len(times) + 1
        body_at = size - 1 - BODY_BYTES
        times += [now - DUE.unpack_from(data, at + body_at)[0] for at in range(0, whole * size, size)]
        data = data[whole * size :]
        sock.sendall(b"".join([ACK_TAG.pack(ACK_HEAD, tag, 0xCE) for tag in range(first, first + whole)]))
    return times


def _run(subject: Subject, rate: int, seconds: float) -> tuple[float, float, float]:
    """p50 and p99 without the warm-up, and p99 of the generator's lateness, in milliseconds."""
    skipped = int(rate * WARM_UP_SECS)
    count = skipped + int(rate * seconds)
    with wires.amqp_connect(subject.amqp_port) as sock:
        wires.amqp_queue(sock, QUEUE, "amq.topic", "bench.#", durable=False)
        wires.amqp_consume(sock, QUEUE, acknowledge=True)
        context = multiprocessing.get_context("fork")
        ready, sent, late = context.Event(), context.Event(), context.Value("q", 0, lock=False)
        given = subject.mqtt_port, rate, count, ready, late, sent
        process = context.Process(target=_publish, args=given, daemon=True)
        process.start()
        try:
            if not ready.wait(wires.WAIT_SECS):
                raise LoadError("the publishers did not connect")
            times = sorted(_times(sock, count)[skipped:])
            if not sent.wait(REST_SECS):
                raise LoadError("the publisher did not end")
        finally:
            process.kill()
            process.join()
    with wires.amqp_connect(subject.amqp_port) as sock:
        wires.amqp_delete(sock, QUEUE)
    rest(subject.cpu)
    return times[len(times) // 2] / 1e6, times[len(times) * 99 // 100] / 1e6, late.value / 1e6


def _acknowledgements(subject: Subject, rate: int, seconds: float) -> tuple[float, float, float]:
    """As `_run`, from when a message was due to its PUBACK: it goes to a durable queue, whose consumer takes
    it. One process does it all, for there is little to do.
    """
    skipped = int(rate * WARM_UP_SECS)
    count = skipped + int(rate * seconds)
    load = Load("mqtt", "amqp", subject.mqtt_port, subject.amqp_port, queue=QUEUE, durable=True)
    consumer = AmqpConsumer(load)
    consumer.sock.setblocking(False)
    socks = [wires.mqtt_connect(load.publish_port, f"late-{number}") for number in range(CONNECTIONS)]
    heads = [wires.text(f"bench/{number:05d}") for number in range(CONNECTIONS)]
    ready = select.epoll()
    ready.register(consumer.sock, select.EPOLLIN)
    places = {sock.fileno(): place for place, sock in enumerate(socks)}
    for sock in socks:
        ready.register(sock, select.EPOLLIN)
    sent: list[deque[int]] = [deque() for _ in socks]  # when it was due; answers keep the order
    rests = [0] * CONNECTIONS
    times: list[int] = []
    lateness = []
    begin = time.monotonic_ns() + NANOSECONDS // 10
    end = begin + int((WARM_UP_SECS + seconds + REST_SECS) * NANOSECONDS)
    number = 0
    while len(times) < count:
        due = begin + number * NANOSECONDS // rate if number < count else end
        now = time.monotonic_ns()
        if now >= end:
            raise LoadError(f"{count - len(times)} messages were not acknowledged")
        if now >= due:
            turn, which = divmod(number, CONNECTIONS)
            identifier = (turn % 65_535 + 1).to_bytes(2, "big")
            socks[which].sendall(wires.packet(0x32, heads[which] + identifier + load.body))
            sent[which].append(due)
            lateness.append(time.monotonic_ns() - due)
            number += 1
            continue
        for descriptor, _ in ready.poll((due - now) / NANOSECONDS):
            place = places.get(descriptor)
            if place is None:
                consumer.readable()
                continue
            whole, rests[place] = divmod(rests[place] + len(socks[place].recv(READ)), PUBACK_BYTES)
            now = time.monotonic_ns()
            times += [now - sent[place].popleft() for _ in range(whole)]
    for sock in (*socks, consumer.sock):
        sock.close()
    with wires.amqp_connect(subject.amqp_port) as sock:
        wires.amqp_delete(sock, QUEUE)
    rest(subject.cpu)
    times = sorted(times[skipped:])
    late = sorted(lateness)[count * 99 // 100]
    return times[len(times) // 2] / 1e6, times[len(times) * 99 // 100] / 1e6, late / 1e6


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Two figures per rate, p50 and p99: medians of `repeat` runs. A ratio of 1 or more is no slower."""
    with ExitStack() as stack:
        rabbit: Subject = stack.enter_context(Rabbit(folder / "rabbitmq"))
        memory: Subject = stack.enter_context(Gateway(folder / "gateway"))
        stored: Subject = stack.enter_context(
            Gateway(folder / "stored", store={"path": str(folder / "stored" / "data")})
        )
        rows = [
            *((f"at {rate} messages/s", partial(_run, rate=rate, seconds=seconds), memory) for rate in RATES),
            (
                f"PUBACK for a durable queue, at {RATES[0]} messages/s",
                partial(_acknowledgements, rate=RATES[0], seconds=seconds),
                stored,
            ),
        ]
        return [figure for row in rows for figure in _figures(*row, rabbit, repeat)]


def _figures(
    what: str,
    play: Callable[[Subject], tuple[float, float, float]],
    ours: Subject,
    peer: Subject,
    repeat: int,
) -> Iterator[Figure]:
    found: list[list[tuple[float, float, float]]] = [[], []]
    for _ in range(repeat):
        for runs, subject in zip(found, (ours, peer), strict=True):
            runs.append(play(subject))
    for at, word in enumerate(("p50", "p99")):
        here, there = ([one[at] for one in runs] for runs in found)
        yield Figure(
            f"{word} {what}",
            "ms",
            median(here),
            median(there),
            ratio=median(there) / median(here),
            target=1.0,
            more={
                "ours": " ".join(f"{one:.2f}" for one in here),
                "theirs": " ".join(f"{one:.2f}" for one in there),
                "load late": " ".join(f"{median([one[2] for one in runs]):.2f}" for runs in found),
            },
        )
