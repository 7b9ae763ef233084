"""MQTT QoS 1 through replicas over a RabbitMQ and a PostgreSQL, against what speaks to that RabbitMQ itself.

Everything happens at one node, in turn, and is persistent: through one replica to an AMQP consumer at the
cluster, against an AMQP publisher with confirms; from one replica to another, against an AMQP publisher and
consumer, and against the broker's own MQTT plugin. All publish over as many connections with the same
window. Workers share one port; the broker, the clients and they share the processors, so what a
second one adds there is less than it adds where it has a core of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure
from tests.benchmarks.roles import Load
from tests.benchmarks.sections import standing
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.subjects import Rabbit, Replica, StateServer, Workers

AGAINST_BARE: Final = 0.8
AGAINST_PLUGIN: Final = 2.0


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """Five figures of medians of `repeat` runs, and four of sessions that stand (standing.py)."""
    with ExitStack() as stack:
        rabbit = stack.enter_context(Rabbit(folder / "rabbitmq"))
        state = stack.enter_context(StateServer())
        port = rabbit.amqp_port
        one, two, three = (
            stack.enter_context(Replica(folder / name, port, state.url, queue_type=queue_type))
            for name, queue_type in (("one", "classic"), ("two", "classic"), ("three", "quorum"))
        )
        alone, both = (
            stack.enter_context(
                Workers(folder / f"workers{count}", port, state.url, count, queue_type="classic")
            )
            for count in (1, 2)
        )
        loads = (
            (Load("mqtt", "amqp", one.mqtt_port, port, durable=True, seconds=seconds), one),
            (Load("amqp", "amqp", port, port, durable=True, seconds=seconds), rabbit),
            (Load("mqtt", "mqtt", one.mqtt_port, two.mqtt_port, seconds=seconds), one),
            (Load("mqtt", "mqtt", one.mqtt_port, three.mqtt_port, seconds=seconds), one),
            (Load("mqtt", "mqtt", rabbit.mqtt_port, rabbit.mqtt_port, seconds=seconds), rabbit),
            (Load("mqtt", "mqtt", alone.mqtt_port, alone.mqtt_port, seconds=seconds), alone),
            (Load("mqtt", "mqtt", both.mqtt_port, both.mqtt_port, seconds=seconds), both),
        )
        found: list[list[Measured]] = [[] for _ in loads]
        for _ in range(repeat):
            for runs, (load, subject) in zip(found, loads, strict=True):
                runs.append(run(load, subject.cpu))
    inwards, bare, across, quorum, plugin, of_one, of_two = found
    return [
        compared("MQTT QoS 1 -> replica -> AMQP, against AMQP with confirms", inwards, bare, AGAINST_BARE),
        compared("MQTT -> two replicas -> MQTT, against AMQP -> AMQP", across, bare, AGAINST_BARE),
        compared("the same, of which the second has a quorum queue", quorum, bare, AGAINST_BARE),
        compared(
            "MQTT -> two replicas -> MQTT, against RabbitMQ's MQTT plugin", across, plugin, AGAINST_PLUGIN
        ),
        compared("MQTT -> two workers -> MQTT, against one", of_two, of_one, None),
        *standing.measure(folder / "standing"),
    ]
