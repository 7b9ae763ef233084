"""Traffic in which every message differs: in its topic, a property, or what a route captures; large bodies.

Each row stands beside a peer, and, if there is such a thing, beside the same load of the gateway in which
they do not differ.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Final

from tests.benchmarks import wires
from tests.benchmarks.load import LoadError, Measured, run
from tests.benchmarks.report import Figure, target
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared, load_at
from tests.benchmarks.subjects import Gateway, Mosquitto, Rabbit, Subject
from tests.benchmarks.wires import MQTT_5

TOPICS: Final = 100_000
PUBLISHERS: Final = 20
DISTINCT: Final = TOPICS // PUBLISHERS
FEW: Final = 1_000
SUBSCRIBERS: Final = 1_000
CHANGES: Final = 10  # a second, and as many are taken back
PROPERTIES: Final = 4
LARGE_BYTES: Final = 262_144
ROUTES: Final = 200
AGAINST_RABBIT: Final = target(2.0, 4.0)
AGAINST_MOSQUITTO: Final = target(0.7, 1.5)
AGAINST_UNIFORM: Final = target(0.3, 0.5)
MAPPING: Final = """
version: 1
routes:
{others}  - name: devices
    from: {{endpoint: mqtt, topic: "bench/{{publisher}}/{{device}}"}}
    to: {{endpoint: amqp091, exchange: amq.topic, routing_key: "bench.{{publisher}}.{{device}}"}}
"""
OTHER: Final = """  - name: other{number}
    from: {{endpoint: mqtt, topic: "plant{number}/{{line}}/{{machine}}/state"}}
    to: {{endpoint: amqp091, exchange: amq.topic, routing_key: "other.{number}.{{line}}.{{machine}}"}}
"""


@dataclass(frozen=True)
class Row:
    """A load at the gateway and maybe at a peer; `uniform` is the same without what differs. `changes`: the
    protocol of a client that subscribes, or binds, and takes it back, CHANGES times a second meanwhile.
    """

    name: str
    load: Load
    ours: Subject
    peer: Subject | None
    target: float | None
    uniform: Load | None = None
    changes: str = ""


def _loads() -> dict[str, Load]:
    a = Load("mqtt", "amqp", 0, 0)
    headers = Load("amqp", "amqp", 0, 0, persistent=False, properties=PROPERTIES)
    five = Load("mqtt", "mqtt", 0, 0, level=MQTT_5, properties=PROPERTIES)
    large = Load(
        "amqp", "amqp", 0, 0, durable=True, body_bytes=LARGE_BYTES, window=10, ahead_max=200, connections=4
    )
    return {"a": a, "headers": headers, "five": five, "large": large}


def loads_that_differ() -> dict[str, Load]:
    """A load by what differs in its messages, without ports."""
    loads = _loads()
    return {
        "topics": _topics(loads["a"]),
        "headers": _property(loads["headers"]),
        "properties": _property(loads["five"]),
        "crossing": replace(_property(loads["five"]), consume="amqp"),
    }


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Two figures for each load, medians of `repeat` runs, turn and turn about."""
    mapping = folder / "devices.yaml"
    others = "".join(OTHER.format(number=number) for number in range(ROUTES))
    mapping.write_text(MAPPING.format(others=others))
    loads = _loads()
    few = replace(loads["a"], vary="topic", distinct=FEW // PUBLISHERS)
    with ExitStack() as stack:
        enter = stack.enter_context
        memory: Subject = enter(Gateway(folder / "memory"))
        routed: Subject = enter(Gateway(folder / "routed", mappings=[str(mapping)]))
        stored: Subject = enter(Gateway(folder / "stored", store={"path": str(folder / "stored" / "data")}))
        rabbit: Subject = enter(Rabbit(folder / "rabbitmq"))
        mosquitto: Subject = enter(Mosquitto(folder / "mosquitto"))
        rows = [
            Row("100 000 topics at random, MQTT QoS 1 -> AMQP", _topics(loads["a"]), memory, rabbit,
                AGAINST_RABBIT, loads["a"]),
            Row(f"the same through {ROUTES + 1} routes, captured", _topics(loads["a"]), routed, rabbit,
                AGAINST_RABBIT, replace(loads["a"], topics=10)),
            Row("AMQP, four headers and one that differs", _property(loads["headers"]), memory, rabbit,
                AGAINST_RABBIT, loads["headers"]),
            Row("MQTT 5, four user properties and one that differs", _property(loads["five"]), memory,
                mosquitto, AGAINST_MOSQUITTO, loads["five"]),
            Row("the same from MQTT 5 to AMQP", replace(_property(loads["five"]), consume="amqp"), memory,
                None, None, replace(loads["five"], consume="amqp")),
            Row(f"MQTT QoS 1, {SUBSCRIBERS} subscribers of {TOPICS // SUBSCRIBERS} filters each",
                replace(_topics(loads["a"]), consume="mqtt", subscribers=SUBSCRIBERS), memory, mosquitto,
                AGAINST_MOSQUITTO),
            Row("1 000 topics, and 20 times a second somebody subscribes", few, memory, rabbit,
                AGAINST_RABBIT, few, changes="mqtt"),
            Row("1 000 topics, and 20 times a second somebody binds", few, memory, rabbit,
                AGAINST_RABBIT, few, changes="amqp"),
            Row("256 KiB to a durable queue, AMQP", loads["large"], stored, rabbit, 1.0),
        ]  # fmt: skip
        return [figure for row in rows for figure in _figures(row, seconds, repeat)]


@contextmanager
def changing(protocol: str, subject: Subject) -> Iterator[None]:
    """Somebody subscribes, or binds, and takes it back, until the block ends; "": nobody does."""
    if not protocol:
        yield
        return
    change, port = (_subscribe, subject.mqtt_port) if protocol == "mqtt" else (_bind, subject.amqp_port)
    process = multiprocessing.Process(target=change, args=(port,))
    process.start()
    try:
        yield
        if not process.is_alive():
            raise LoadError("whoever changes subscriptions has ended")
    finally:
        process.kill()  # it has the signal handlers of this process
        process.join()


def _subscribe(port: int) -> None:
    with wires.mqtt_connect(port, "changing") as sock:
        for number in count():
            wires.mqtt_subscribe(sock, (f"change/{number}/#",), 1)
            time.sleep(0.5 / CHANGES)
            wires.mqtt_unsubscribe(sock, f"change/{number}/#")
            time.sleep(0.5 / CHANGES)


def _bind(port: int) -> None:
    with wires.amqp_connect(port) as sock:
        wires.amqp_queue(sock, "changing", "amq.topic", "change.first", durable=False)
        for number in count():
            wires.amqp_bind(sock, "changing", "amq.topic", f"change.{number}")
            time.sleep(0.5 / CHANGES)
            wires.amqp_unbind(sock, "changing", "amq.topic", f"change.{number}")
            time.sleep(0.5 / CHANGES)


def _topics(load: Load) -> Load:
    return replace(load, vary="topic", distinct=DISTINCT)


def _property(load: Load) -> Load:
    return replace(load, vary="property", distinct=DISTINCT)


def _figures(row: Row, seconds: float, repeat: int) -> list[Figure]:
    runs: list[tuple[Subject, Load, str]] = [(row.ours, row.load, row.changes)]
    runs += [] if row.peer is None else [(row.peer, row.load, row.changes)]
    runs += [] if row.uniform is None else [(row.ours, row.uniform, "")]
    found: list[list[Measured]] = [[] for _ in runs]
    for _ in range(repeat):
        for measured, (subject, load, changes) in zip(found, runs, strict=True):
            with changing(changes, subject):
                measured.append(run(load_at(subject, replace(load, seconds=seconds)), subject.cpu))
    figures = []
    if row.peer is not None:
        figures.append(compared(row.name, found[0], found[1], row.target))
    if row.uniform is not None:
        figures.append(compared(f"{row.name}, against the uniform", found[0], found[-1], AGAINST_UNIFORM))
    return figures
