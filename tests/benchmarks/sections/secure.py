"""Scenario C of `embedded` with TLS between the publishers and the server: each record is a message."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.access.servers import certificate
from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, target
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.subjects import Gateway, Rabbit, Subject
from tests.interop.servers import LOOPBACK, free_ports

TARGET: Final = target(2.0, 4.0)


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """With TLS against RabbitMQ with TLS, and against itself without."""
    folder.mkdir(exist_ok=True)
    cert, key = certificate(folder, "bench")
    ours_at, peers_at, *plain = free_ports(5)
    told = {"host": LOOPBACK, "port": ours_at, "tls": {"cert_file": str(cert), "key_file": str(key)}}
    listeners = {
        "mqtts": {"protocol": "mqtt"} | told,
        "mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": plain[0]},
        "amqp091": {"protocol": "amqp091", "host": LOOPBACK, "port": plain[1]},
    }
    lines = (
        f"mqtt.listeners.ssl.1 = {LOOPBACK}:{peers_at}",
        f"ssl_options.certfile = {cert}",
        f"ssl_options.keyfile = {key}",
        "ssl_options.verify = verify_none",
    )
    load = Load("mqtt", "amqp", 0, 0, connections=1_000, window=1, seconds=seconds)
    with ExitStack() as stack:
        gateway = Gateway(folder / "gateway", listeners=listeners)
        gateway.mqtt_port, gateway.amqp_port = plain[0], plain[1]
        stack.enter_context(gateway)
        rabbit = stack.enter_context(Rabbit(folder / "rabbitmq", lines))
        runs: tuple[tuple[Subject, int, bool], ...] = (
            (gateway, ours_at, True),
            (rabbit, peers_at, True),
            (gateway, plain[0], False),
        )
        found: list[list[Measured]] = [[], [], []]
        for _ in range(repeat):
            for measured, (subject, port, tls) in zip(found, runs, strict=True):
                at = replace(load, publish_port=port, consume_port=subject.amqp_port, tls=tls)
                measured.append(run(at, subject.cpu))
    name = "C over TLS: MQTT QoS 1, 1 000 connections, window 1 -> AMQP, acks"
    return [
        compared(name, found[0], found[1], TARGET),
        compared("the same, against C without TLS", found[0], found[2], None),
    ]
