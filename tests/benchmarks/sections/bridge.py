"""MQTT QoS 1 through a link with confirms into a real RabbitMQ, against publishing to that RabbitMQ directly.

Both publish persistent messages to a durable queue, over as many connections, with the same window; the
consumer stands at RabbitMQ. `direct` is what the same clients would get if they spoke AMQP themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from tests.benchmarks.load import Measured, run
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.subjects import Gateway, Rabbit
from tests.interop.servers import LOOPBACK

TARGET: Final = 0.8
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
    """One figure: medians of `repeat` runs."""
    mappings = folder / "mappings.yaml"
    mappings.write_text(yaml.safe_dump(ROUTES))
    with Rabbit(folder / "rabbitmq") as rabbit:
        link = {"url": f"amqp://guest:guest@{LOOPBACK}:{rabbit.amqp_port}/", "declare": "none"}
        with Gateway(folder / "gateway", mappings=[str(mappings)], links={"rabbit": link}) as gateway:
            ours: list[Measured] = []
            direct: list[Measured] = []
            for _ in range(repeat):
                load = Load(
                    "mqtt", "amqp", gateway.mqtt_port, rabbit.amqp_port, durable=True, seconds=seconds
                )
                ours.append(run(load, gateway.cpu))
                load = Load("amqp", "amqp", rabbit.amqp_port, rabbit.amqp_port, durable=True, seconds=seconds)
                direct.append(run(load, rabbit.cpu))
    rates = median([one.rate for one in ours]), median([one.rate for one in direct])
    return [
        Figure(
            "MQTT QoS 1 -> link, confirms -> RabbitMQ",
            "messages/s",
            *rates,
            ratio=rates[0] / rates[1],
            target=TARGET,
            more={
                "CPU us/message": f"{median([one.server_us for one in ours]):.1f}",
                "lost": sum(one.lost for one in (*ours, *direct)),
                "ours": " ".join(f"{one.rate / 1000:.1f}k" for one in ours),
                "theirs": " ".join(f"{one.rate / 1000:.1f}k" for one in direct),
            },
        )
    ]
