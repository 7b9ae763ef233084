"""Traffic that a real gateway has written down, once for all tests of the jobs.

Devices publish readings of three lines; a route takes them to an exchange with two queues, another one the
hot ones to a queue, a third one has names that are too long, and a fourth stores for a broker that goes away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from gateway.clients.amqp import AmqpClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import ConnectionOptions
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, Value, ValueType, property_set
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import parse_url
from gateway.store.journal.reader import Gap, JournalReader, Row
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess

READINGS: Final = 60
HOT: Final = [n for n in range(READINGS) if n > 50]
STORED: Final = 5
WAITING: Final = 3
ROWS: Final = 2 * READINGS + len(HOT) + 1 + 2 * STORED + WAITING
PATIENCE_SECS: Final = 60.0
MAPPING: Final = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{line}/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "{line}.{rest}"}
  - name: hot
    from: {endpoint: mqtt, topic: "plant/{line}/t"}
    to: {endpoint: amqp091, queue: hot}
    when: "body.temperature > 50"
  - name: long
    from: {endpoint: mqtt, topic: "long/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "{rest}"}
  - name: far
    from: {endpoint: mqtt, topic: "far/{name}"}
    to: {endpoint: erp, queue: far}
    settle: stored
"""


class Recorded(NamedTuple):
    """The gateway, which still runs, its journal, and its mapping file."""

    gateway: GatewayProcess
    journal: str
    mapping: Path

    def access(self, protocol: str) -> ConnectionOptions:
        """How to reach a listener."""
        scheme = {"mqtt": "mqtt", "amqp091": "amqp"}[protocol]
        return ConnectionOptions(
            parse_url(f"{scheme}://guest:guest@{LOOPBACK}:{self.gateway.port(protocol)}")
        )

    def rows(self, count: int) -> list[Row]:
        """All rows, when there are so many."""
        reader = JournalReader(Path(self.journal))
        found: list[Row] = []

        def enough() -> bool:
            found[:] = [row for row in reader.rows("0") if not isinstance(row, Gap)]
            return len(found) >= count

        until(enough, f"there are {len(found)} rows, not {count}")
        return found


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def reading(number: int) -> Message:
    """Three lines take turns; the messages of a line with numbers 0 to 8 are alike but for their topic."""
    body = b'{"temperature": %d, "unit": "C"}' % (0 if number < 9 else number)
    said = Properties(content_type="application/json", headers=(("n", Value(ValueType.STRING, "1")),))
    address = topic_address(f"plant/l{number % 3}/t")
    return Message(address, body, property_set(said), 1, True, sender=Sender("mqtt"))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("recorded")
    mapping = folder / "mapping.yaml"
    mapping.write_text(MAPPING)
    with GatewayProcess(folder / "erp") as erp:
        near = GatewayProcess(
            folder / "near",
            journal={"enabled": True, "flush_interval_secs": 0.02},
            http={"enabled": True, "host": LOOPBACK, "port": 0},
            mappings=[str(mapping)],
            links={"erp": {"url": f"amqp://guest:guest@{LOOPBACK}:{erp.port('amqp091')}"}},
        )
        with near:
            made = Recorded(near, str(folder / "near" / "data" / "journal"), mapping)
            _publish(made, erp)
            yield made


def _publish(made: Recorded, erp: GatewayProcess) -> None:
    amqp = AmqpClient(made.access("amqp091"))
    for queue, keys in (("all", ["#"]), ("also", ["#"]), ("hot", [])):
        amqp.declare(queue, "amq.topic", keys)
    amqp.close()
    device = MqttClient(made.access("mqtt"), client_id="device")
    assert device.publish_many([reading(number) for number in range(READINGS)]) == {}
    assert device.publish_many([Message(topic_address("long/" + "x" * 300), b"", assurance=1)]).keys() == {0}
    far = [Message(topic_address(f"far/{n}"), b"%d" % n, assurance=1, durable=True) for n in range(8)]
    assert device.publish_many(far[:STORED]) == {}
    made.rows(ROWS - WAITING)
    erp.kill()
    assert device.publish_many(far[STORED:]) == {}
    device.close()
    made.rows(ROWS)
