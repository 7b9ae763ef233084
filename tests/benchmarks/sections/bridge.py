"""MQTT QoS 1 through a link with confirms into a real RabbitMQ, against publishing to that RabbitMQ directly.

Both publish persistent messages to a durable queue, over as many connections, with the same window; the
consumer stands at RabbitMQ. `direct` is what the same clients would get if they spoke AMQP themselves.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import compared
from tests.benchmarks.sections.varied import DISTINCT
from tests.benchmarks.subjects import Gateway, Rabbit
from tests.benchmarks.wires import MQTT_5
from tests.interop.servers import LOOPBACK

TARGET: Final = 0.8
TARGET_VARIED: Final = 0.85
UNIFORM: Final = Load("mqtt", "amqp", 0, 0, durable=True)
TOPICS: Final = replace(UNIFORM, vary="topic", distinct=DISTINCT)
PROPERTIES: Final = replace(UNIFORM, level=MQTT_5, properties=4, vary="property", distinct=DISTINCT)
ROWS: Final = {
    "MQTT QoS 1 -> link, confirms -> RabbitMQ": (UNIFORM, TARGET),
    "the same over 100 000 topics at random": (TOPICS, TARGET_VARIED),
    "the same, MQTT 5, four user properties and one that differs": (PROPERTIES, TARGET_VARIED),
}
ROUTES: Final[dict[str, Any]] = {
    "version": 1,
    "routes": [
        {
            "name": "bridge",
            "from": {"endpoint": "mqtt", "topic": "{levels...}"},
            "to": {"endpoint": "rabbit", "exchange": "amq.topic", "routing_key": "{levels...}"},
            "delivery": {"qos1": "persistent"},
            "settle": "confirmed",
        }
    ],
}


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """A figure for each load: medians of `repeat` runs."""
    mappings = folder / "mappings.yaml"
    mappings.write_text(yaml.safe_dump(ROUTES))
    with Rabbit(folder / "rabbitmq") as rabbit:
        link = {"url": f"amqp://guest:guest@{LOOPBACK}:{rabbit.amqp_port}/", "declare": "none"}
        with Gateway(folder / "gateway", mappings=[str(mappings)], links={"rabbit": link}) as gateway:
            return [
                _figure(row, replace(load, seconds=seconds), target, repeat, gateway, rabbit)
                for row, (load, target) in ROWS.items()
            ]


def _figure(row: str, load: Load, target: float, repeat: int, gateway: Gateway, rabbit: Rabbit) -> Figure:
    ours: list[Measured] = []
    direct: list[Measured] = []
    load = replace(load, consume_port=rabbit.amqp_port)
    for _ in range(repeat):
        ours.append(run(replace(load, publish_port=gateway.mqtt_port), gateway.cpu))
        direct.append(run(replace(load, publish="amqp", publish_port=rabbit.amqp_port), rabbit.cpu))
    return compared(row, ours, direct, target)
