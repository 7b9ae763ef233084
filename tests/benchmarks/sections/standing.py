"""Many clients at once. Of those with clean sessions, what each takes of its replica's memory, and how many
queues they have. Of sessions that outlive their connections, how fast they are begun, what each of them takes
of RabbitMQ's memory and of PostgreSQL's disk, and how long it takes until all are back at another replica
when theirs is killed.

The same clients at RabbitMQ's own MQTT plugin are beside that; there they come back to the same node, for
their connections alone were cut.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.benchmarks import wires
from tests.benchmarks.report import Figure
from tests.benchmarks.subjects import Rabbit, Replica, StateServer, Subject

SESSIONS: Final = 10_000
AT_ONCE: Final = 250  # clients that connect at the same time
SETTLE_SECS: Final = 5.0
LIMITS: Final[dict[str, Any]] = {
    "connections_max": SESSIONS + 1_000,
    "connections_per_address_max": SESSIONS + 1_000,
    "sessions_per_user_max": SESSIONS + 1_000,
    "sessions_per_address_max": SESSIONS + 1_000,
}


class Stood(NamedTuple):
    """What was measured: seconds until all sessions were there, bytes of RabbitMQ's memory for each, and
    seconds until all were back. `stored`: bytes of the database for each."""

    begun_secs: float
    byte_count: float
    back_secs: float
    stored: float = 0.0


class Clean(NamedTuple):
    """Bytes of memory for each client, and further queues for all of them."""

    byte_count: float
    queues: int


def _clients(port: int, *, present: bool, clean: bool = False) -> list[socket.socket]:
    """All of them, connected; those whose sessions are new have subscribed."""
    socks: list[socket.socket] = []
    for first in range(0, SESSIONS, AT_ONCE):
        names = [f"standing-{at:05d}" for at in range(first, min(first + AT_ONCE, SESSIONS))]
        said = [wires.mqtt_say_connect(port, name, clean=clean) for name in names]
        socks += said
        for sock in said:
            answer = wires.mqtt_answer(sock, 0x20)
            if answer != bytes((present, 0)):
                raise ConnectionError(f"CONNACK {answer!r}")
        if not present:
            for sock, name in zip(said, names, strict=True):
                sock.sendall(wires.packet(0x82, b"\x00\x01" + wires.text(f"to/{name}") + b"\x01"))
            for sock in said:
                if wires.mqtt_answer(sock, 0x90) != b"\x00\x01\x01":
                    raise ConnectionError("no SUBACK")
    return socks


def _close(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()


def _at_replicas(folder: Path) -> Stood:
    with ExitStack() as stack:
        rabbit = stack.enter_context(Rabbit(folder / "rabbitmq"))
        state = stack.enter_context(StateServer())
        one, other = (
            stack.enter_context(
                Replica(folder / name, rabbit.amqp_port, state.url, limits=LIMITS, queue_type="classic")
            )
            for name in ("one", "other")
        )
        return _measured(
            rabbit,
            one.mqtt_port,
            other.mqtt_port,
            lambda: os.kill(one.pid, signal.SIGKILL),
            state.database_bytes,
        )


def _at_plugin(folder: Path) -> Stood:
    with Rabbit(folder / "plugin") as rabbit:
        return _measured(rabbit, rabbit.mqtt_port, rabbit.mqtt_port, lambda: None, lambda: 0)


def _clean(rabbit: Rabbit, subject: Subject) -> Clean:
    """Of clients of a subject, which is the RabbitMQ or a replica over it."""
    time.sleep(SETTLE_SECS)
    before, queues = subject.rss(), rabbit.queues()
    socks = _clients(subject.mqtt_port, present=False, clean=True)
    time.sleep(SETTLE_SECS)
    found = Clean((subject.rss() - before) / SESSIONS, rabbit.queues() - queues)
    _close(socks)
    return found


def _clean_at_replica(folder: Path) -> Clean:
    with ExitStack() as stack:
        rabbit = stack.enter_context(Rabbit(folder / "rabbitmq"))
        state = stack.enter_context(StateServer())
        replica = stack.enter_context(Replica(folder / "one", rabbit.amqp_port, state.url, limits=LIMITS))
        return _clean(rabbit, replica)


def _clean_at_plugin(folder: Path) -> Clean:
    with Rabbit(folder / "plugin") as rabbit:
        return _clean(rabbit, rabbit)


def _measured(
    rabbit: Rabbit,
    port: int,
    next_port: int,
    lose: Callable[[], None],
    database_bytes: Callable[[], int],
) -> Stood:
    time.sleep(SETTLE_SECS)
    before, empty, began = rabbit.rss(), database_bytes(), time.monotonic()
    first = _clients(port, present=False)
    begun_secs = time.monotonic() - began
    time.sleep(SETTLE_SECS)
    byte_count, stored = (rabbit.rss() - before) / SESSIONS, (database_bytes() - empty) / SESSIONS
    began = time.monotonic()
    lose()
    _close(first)
    again = _clients(next_port, present=True)
    back_secs = time.monotonic() - began
    with wires.mqtt_connect(next_port, "standing-sender") as sender:
        for at in range(0, SESSIONS, SESSIONS // 10):
            wires.mqtt_publish(sender, f"to/standing-{at:05d}", b"x")
            wires.mqtt_answer(again[at], 0x32)  # it has its subscription still
    _close(again)
    return Stood(begun_secs, byte_count, back_secs, stored)


def measure(folder: Path) -> list[Figure]:
    """Four figures, of one run each."""
    clean, peers = _clean_at_replica(folder / "clean"), _clean_at_plugin(folder / "clean-peer")
    ours, plugin = _at_replicas(folder / "ours"), _at_plugin(folder / "peer")
    return [
        Figure(
            f"each of {SESSIONS} clean subscribers at a replica, against the plugin's",
            "KiB",
            clean.byte_count / 1024,
            peers.byte_count / 1024,
            peers.byte_count / clean.byte_count,
            more={"queues for all of them": clean.queues, "at the plugin": peers.queues},
        ),
        Figure(
            f"{SESSIONS} persistent sessions begun, against RabbitMQ's MQTT plugin",
            "sessions/s",
            SESSIONS / ours.begun_secs,
            SESSIONS / plugin.begun_secs,
            plugin.begun_secs / ours.begun_secs,
        ),
        Figure(
            "RabbitMQ's memory for each, against the plugin's with its connection",
            "KiB",
            ours.byte_count / 1024,
            plugin.byte_count / 1024,
            plugin.byte_count / ours.byte_count,
            more={"in the database, KiB": round(ours.stored / 1024, 2)},
        ),
        Figure(
            "all back at another replica after theirs was killed, against the plugin after a cut",
            "s",
            ours.back_secs,
            plugin.back_secs,
            plugin.back_secs / ours.back_secs,
        ),
    ]
