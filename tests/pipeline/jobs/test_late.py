"""`rates --follow` beside a broker that stops to answer: late rows are waited for, or told again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

import pytest

pytest.importorskip("pyspark")

from gateway.clients.amqp import AmqpClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import ConnectionOptions
from gateway.model.message import Message
from gateway.pipeline.jobs import rates
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import parse_url
from gateway.store.journal.reader import Gap, JournalReader
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.pipeline.jobs.conftest import until
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SENT: Final = 20
MAPPING: Final = """version: 1
routes:
  - {name: far, from: {endpoint: mqtt, topic: "far/+"}, to: {endpoint: erp, queue: far}}
  - {name: probe, from: {endpoint: mqtt, topic: "probe/+"}, to: {endpoint: erp, queue: far}}
  - {name: near, from: {endpoint: mqtt, topic: "near/+"}, to: {endpoint: amqp091, queue: near}}
"""


class Outage:
    """A gateway, and a broker that can be made to answer nothing."""

    def __init__(self, near: GatewayProcess, erp: GatewayProcess, journal: Path) -> None:
        self.near, self.erp, self.journal = near, erp, journal
        self.rows = 0

    def device(self, client: str) -> MqttClient:
        return MqttClient(self.access("mqtt", "mqtt"), client_id=client)

    def access(self, listener: str, scheme: str) -> ConnectionOptions:
        url = f"{scheme}://guest:guest@{LOOPBACK}:{self.near.port(listener)}"
        return ConnectionOptions(parse_url(url), timeout_secs=120.0)

    def link_is_up(self) -> bool:
        device = self.device("probe")
        refused = device.publish_many([Message(topic_address("probe/1"), b"", assurance=1)])
        device.close()
        self.rows += 1
        return refused == {}

    def publish(self, way: str, client: str) -> None:
        device = self.device(client)
        sent = [Message(topic_address(f"{way}/{n}"), b"%d" % n, assurance=1) for n in range(SENT)]
        assert device.publish_many(sent) == {}
        device.close()

    def settled(self, more: int) -> None:
        """Wait for so many more rows."""
        self.rows += more
        reader = JournalReader(self.journal)
        until(lambda: reader.end("0") >= self.rows, f"{reader.end('0')} of {self.rows} rows")

    def stop(self, word: signal.Signals) -> None:
        os.kill(self.erp.process.pid, word)


@pytest.fixture
def outage(tmp_path: Path) -> Iterator[Outage]:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(MAPPING)
    with GatewayProcess(tmp_path / "erp") as erp:
        near = GatewayProcess(
            tmp_path / "near",
            journal={"enabled": True, "flush_interval_secs": 0.02},
            mappings=[str(mapping)],
            links={"erp": {"url": f"amqp://guest:guest@{LOOPBACK}:{erp.port('amqp091')}"}},
        )
        with near:
            made = Outage(near, erp, tmp_path / "near" / "data" / "journal")
            try:
                consumer = AmqpClient(made.access("amqp091", "amqp"))
                consumer.declare("near", "amq.topic", [])
                consumer.close()
                until(made.link_is_up, "the link is down")
                yield made
            finally:
                made.stop(signal.SIGCONT)


@pytest.mark.parametrize("late, early", [("10 minutes", False), ("0 seconds", True)])
@pytest.mark.usefixtures("streams")
def test_an_outage(spark: SparkSession, outage: Outage, tmp_path: Path, late: str, early: bool) -> None:
    to, said = str(tmp_path / "rates"), list[str]()

    def follow() -> dict[str, int]:
        finished(
            lambda: rates.follow(
                spark,
                str(outage.journal),
                to=to,
                window="1 second",
                lateness=late,
                available_now=True,
                tell=said.append,
            )
        )
        if not list(Path(to).glob("batch=*")):
            return {}
        return {
            row.route: row["sum(messages)"]
            for row in rates.newest_rates(spark, to).groupBy("route").sum("messages").collect()
        }

    outage.publish("far", "first")
    outage.settled(SENT)
    outage.stop(signal.SIGSTOP)
    waiting = Thread(target=outage.publish, args=("far", "second"))
    waiting.start()
    for turn in range(3):
        outage.publish("near", f"{turn}")
        outage.settled(SENT)
        until(lambda: _seconds_apart(outage.journal), "the second is not over")
    mark = JournalReader(outage.journal).low_water("0")
    told = follow()
    assert told.get("near", 0) == (2 * SENT if early else 0), "what came behind the open ones is held back"
    outage.stop(signal.SIGCONT)
    waiting.join()
    outage.settled(SENT)
    outage.publish("near", "last")
    outage.settled(SENT)
    until(lambda: _newest(outage.journal) > (mark or 0) + 1_000_000, "the mark stays")
    assert outage.near.terminate() == 0
    told = follow()
    rows = [row for row in JournalReader(outage.journal).rows("0") if not isinstance(row, Gap)]
    horizon = _newest(outage.journal) if not early else max(row["received"] for row in rows)
    complete = horizon // 1_000_000 * 1_000_000
    expected = {
        route: sum(row["route"] == route and row["received"] < complete for row in rows)
        for route in ("far", "near")
    }
    assert {route: told.get(route, 0) for route in expected} == expected
    assert expected["far"] == 2 * SENT
    assert any("after their window was written" in line for line in said) == early


def _newest(journal: Path) -> int:
    return JournalReader(journal).low_water("0") or 0


def _seconds_apart(journal: Path) -> bool:
    """Whether the next message falls into another second than the last one."""
    import time

    rows = [row for row in JournalReader(journal).rows("0") if not isinstance(row, Gap)]
    return time.time() // 1 > rows[-1]["received"] // 1_000_000
