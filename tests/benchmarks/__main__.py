"""`python -m tests.benchmarks`: all of docs/benchmarks.md, side by side with its peers, in one run.

Everything stays on the loopback interface, in temporary folders and processes that end with this one.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.benchmarks.load import LoadError
from tests.benchmarks.report import Figure, machine, table
from tests.benchmarks.roles import Wrong
from tests.benchmarks.sections import (
    amqp,
    bridge,
    codec,
    commands,
    durable,
    embedded,
    everyday,
    fast,
    journal,
    latency,
    memory,
    mqtt,
    reload,
    replicas,
    rules,
    saturated,
    secure,
    startup,
    state,
    topics,
    traces,
    varied,
)
from tests.benchmarks.subjects import SubjectError
from tests.interop.servers import BrokerError, PeerMissingError

Measure = Callable[[Path, float, int], list[Figure]]
SECTIONS: Final[dict[str, tuple[str, str, Measure]]] = {
    "codec": ("Codecs", "peer", lambda folder, seconds, repeat: codec.measure(seconds, repeat)),
    "topics": (
        "Topics, of 100 000",
        "of 1 000",
        lambda folder, seconds, repeat: topics.measure(seconds, repeat),
    ),
    "embedded": ("Through the embedded broker, 128 bytes", "RabbitMQ", embedded.measure),
    "mqtt": ("MQTT to MQTT through the embedded broker, 128 bytes", "Mosquitto", mqtt.measure),
    "secure": ("With TLS, 128 bytes", "peer", secure.measure),
    "amqp": ("AMQP 0-9-1 through the embedded broker, 128 bytes", "peer", amqp.measure),
    "varied": ("Messages that differ, 128 bytes", "peer", varied.measure),
    "saturated": ("As much as is acknowledged, 128 bytes", "peer", saturated.measure),
    "durable": ("To a durable queue, 128 bytes", "peer", durable.measure),
    "fast": ("AMQP/Fast through the embedded broker, 128 bytes and 64 MiB", "peer", fast.measure),
    "journal": ("With the journal, 128 bytes", "without", journal.measure),
    "rules": ("With a hundred rules, 128 bytes", "without", rules.measure),
    "traces": ("With tracing, 128 bytes", "without", traces.measure),
    "bridge": ("Through a link, 128 bytes, persistent", "direct", bridge.measure),
    "replicas": ("Through replicas over RabbitMQ, 128 bytes", "peer", replicas.measure),
    "state": ("State of replicas in PostgreSQL", "target", state.measure),
    "everyday": ("Everyday load, 128 bytes", "peer", everyday.measure),
    "latency": ("Latency, MQTT QoS 1 -> AMQP with acks, 128 bytes", "RabbitMQ", latency.measure),
    "memory": ("Memory", "RabbitMQ", memory.measure),
    "startup": ("Start-up", "limit", startup.measure),
    "reload": ("Reload", "limit", lambda folder, seconds, repeat: reload.measure(folder, repeat)),
    "commands": (
        "The command line, and the first message",
        "limit",
        lambda folder, seconds, repeat: commands.measure(folder, repeat),
    ),
}
FAULTS: Final = (LoadError, Wrong, SubjectError, BrokerError, PeerMissingError, OSError)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, of " + ", ".join(SECTIONS))
    parser.add_argument("--seconds", type=float, default=4.0, help="of one run (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="runs per median (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args(given)
    arguments.only = [name for name in SECTIONS if name in arguments.only.split(",")]
    if not arguments.only:
        parser.error("--only names no section")
    return arguments


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main(given: Sequence[str]) -> int:
    """0: all was measured, whether or not it is fast enough; 1: something could not be measured."""
    arguments = _arguments(given)
    signal.signal(signal.SIGTERM, _stop)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    told: dict[str, Any] = {"machine": machine(), "sections": {}}
    print(told["machine"], end="\n\n")
    code = 0
    for name in arguments.only:
        title, peer, measure = SECTIONS[name]
        begin = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder:
                figures = measure(Path(folder), arguments.seconds, arguments.repeat)
        except FAULTS as fault:
            print(f"{title}: not measured: {fault}\n", file=sys.stderr)
            code = 1
            continue
        print(table(f"{title} ({time.monotonic() - begin:.0f} s)", peer, figures), flush=True)
        told["sections"][name] = [asdict(figure) for figure in figures]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(told, indent=2) + "\n")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
