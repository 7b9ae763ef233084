"""What things cost in resident memory: an idle MQTT connection, beside RabbitMQ; what an MQTT broker keeps,
beside Mosquitto.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.benchmarks import wires
from tests.benchmarks.report import Figure
from tests.benchmarks.subjects import Gateway, Mosquitto, Rabbit, Subject

COUNTS: Final = (1_000, 5_000)
AT_ONCE: Final = 250  # connections that are being made at the same time
SETTLE_SECS: Final = 2.0  # for what the server does after a CONNACK
SUBSCRIBERS: Final = 1_000
FILTERS: Final = 100  # of each
SESSIONS: Final = 20_000
MESSAGES: Final = 20_000
BODY: Final = bytes(128)


def _connect(port: int, first: int, last: int) -> list[socket.socket]:
    """Clients number `first` to `last`, all accepted."""
    socks: list[socket.socket] = []
    for begin in range(first, last, AT_ONCE):
        said = [
            wires.mqtt_say_connect(port, f"idle-{at:05d}") for at in range(begin, min(last, begin + AT_ONCE))
        ]
        for sock in said:
            wires.mqtt_expect_connack(sock)
        socks += said
    return socks


def _costs(subject: Subject) -> list[float]:
    """KiB per connection at each of COUNTS."""
    with subject:
        time.sleep(SETTLE_SECS)
        before = subject.rss()
        socks: list[socket.socket] = []
        costs = []
        try:
            for count in COUNTS:
                socks += _connect(subject.mqtt_port, len(socks), count)
                time.sleep(SETTLE_SECS)
                costs.append((subject.rss() - before) / count / 1024)
        finally:
            for sock in socks:
                sock.close()
    return costs


def _subscriptions(port: int) -> int:
    for number in range(SUBSCRIBERS):
        with wires.mqtt_connection(port, f"keeps-{number:05d}") as sock:
            wires.mqtt_subscribe(sock, [f"plant/{number:05d}/{at:03d}/+" for at in range(FILTERS)], 1)
    return SUBSCRIBERS * FILTERS


def _sessions(port: int) -> int:
    for number in range(SESSIONS):
        with wires.mqtt_connection(port, f"session-{number:05d}"):
            pass
    return SESSIONS


def _retained(port: int) -> int:
    with wires.mqtt_connect(port, "retains") as sock:
        for number in range(MESSAGES):
            wires.mqtt_publish(sock, f"retained/{number:06d}/state", BODY, retain=True)
    return MESSAGES


def _queued(port: int) -> int:
    with wires.mqtt_connection(port, "is-away") as sock:
        wires.mqtt_subscribe(sock, ("queued/#",), 1)
    with wires.mqtt_connect(port, "publishes") as sock:
        for number in range(MESSAGES):
            wires.mqtt_publish(sock, f"queued/{number % 100}", BODY)
    return MESSAGES


KEPT: Final[dict[str, Callable[[int], int]]] = {
    "a subscription of an MQTT session": _subscriptions,
    "an MQTT session that is away": _sessions,
    "a retained message of 128 bytes": _retained,
    "a message of 128 bytes for a session that is away": _queued,
}
"""Who makes so many of a thing, at a port."""


def _kept(subject: Subject, make: Callable[[int], int]) -> float:
    """Bytes each."""
    with subject:
        with wires.mqtt_connect(subject.mqtt_port, "first"):
            time.sleep(SETTLE_SECS)
        before = subject.rss()
        count = make(subject.mqtt_port)
        time.sleep(SETTLE_SECS)
        return (subject.rss() - before) / count


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure per number of connections and thing, each measured once: memory varies less than time."""
    ours = _costs(Gateway(folder / "gateway"))
    peer = _costs(Rabbit(folder / "rabbitmq"))
    figures = [
        Figure(f"{count} idle MQTT connections", "KiB each", one, other, ratio=other / one)
        for count, one, other in zip(COUNTS, ours, peer, strict=True)
    ]
    for number, (name, make) in enumerate(KEPT.items()):
        mine = _kept(Gateway(folder / f"keeps-{number}"), make)
        theirs = _kept(Mosquitto(folder / f"mosquitto-{number}"), make)
        figures.append(Figure(f"{name}, beside Mosquitto", "bytes each", mine, theirs, ratio=theirs / mine))
    return figures
