"""What an idle MQTT connection costs in resident memory, ours and RabbitMQ's."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Final

from tests.benchmarks import wires
from tests.benchmarks.report import Figure
from tests.benchmarks.subjects import Gateway, Rabbit, Subject

COUNTS: Final = (1_000, 5_000)
AT_ONCE: Final = 250  # connections that are being made at the same time
SETTLE_SECS: Final = 2.0  # for what the server does after a CONNACK


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


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """One figure per number of connections, each measured once: memory does not vary as time does."""
    ours = _costs(Gateway(folder / "gateway"))
    peer = _costs(Rabbit(folder / "rabbitmq"))
    return [
        Figure(f"{count} idle MQTT connections", "KiB each", one, other, ratio=other / one)
        for count, one, other in zip(COUNTS, ours, peer, strict=True)
    ]
