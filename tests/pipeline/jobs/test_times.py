"""A gateway's own clock begins anywhere; what its journal says is UTC, also of what has left an outbox."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

pytest.importorskip("pyspark")

from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import ConnectionOptions
from gateway.model.message import Message
from gateway.pipeline.jobs import archive
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import parse_url
from gateway.store.journal.reader import Gap, JournalReader, Row
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.pipeline.jobs.conftest import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SENT: Final = 3
MAPPING: Final = """version: 1
routes:
  - {name: far, from: {endpoint: mqtt, topic: "far/+"}, to: {endpoint: erp, queue: far}, settle: stored}
  - {name: drop, from: {endpoint: mqtt, topic: "drop/+"}, to: {endpoint: erp, queue: far}, settle: stored,
     outbox: {messages_max: 1, policy: drop_oldest}}
  - {name: dead, from: {endpoint: mqtt, topic: "dead/+"}, to: {endpoint: erp, queue: far}, settle: stored,
     outbox: {messages_max: 1, policy: dead_letter}}
"""
WORDS: Final = {
    ("far", "stored"): SENT,
    ("far", "delivered"): SENT,
    ("drop", "stored"): SENT,
    ("drop", "dropped"): SENT - 1,
    ("dead", "stored"): SENT,
    ("dead", "dead letter"): SENT - 1,
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """Of a gateway whose broker goes away; and the seconds (UTC) between which it was written."""
    folder = tmp_path_factory.mktemp("times")
    mapping = folder / "mapping.yaml"
    mapping.write_text(MAPPING)
    began = time.time()
    with GatewayProcess(folder / "erp") as erp:
        near = GatewayProcess(
            folder / "near",
            journal={"enabled": True, "flush_interval_secs": 0.02},
            mappings=[str(mapping)],
            links={"erp": {"url": f"amqp://guest:guest@{LOOPBACK}:{erp.port('amqp091')}"}},
        )
        path = folder / "near" / "data" / "journal"
        with near:
            address = parse_url(f"mqtt://guest:guest@{LOOPBACK}:{near.port('mqtt')}")
            device = MqttClient(ConnectionOptions(address), client_id="device")
            _publish(device, "far")
            until(lambda: len(rows_of(path)) >= 2 * SENT, "they have not left the outbox")
            erp.kill()
            _publish(device, "drop")
            _publish(device, "dead")
            device.close()
            until(lambda: len(rows_of(path)) >= sum(WORDS.values()), f"{rows_of(path)}")
    return path, began, time.time()


def _publish(device: MqttClient, way: str) -> None:
    sent = [Message(topic_address(f"{way}/{n}"), b"%d" % n, assurance=1, durable=True) for n in range(SENT)]
    assert device.publish_many(sent) == {}


def rows_of(path: Path) -> list[Row]:
    if not path.is_dir():
        return []
    return [row for row in JournalReader(path).rows("0") if not isinstance(row, Gap)]


def test_all_times_are_of_the_minute(journal: tuple[Path, float, float]) -> None:
    path, began, ended = journal
    rows = rows_of(path)
    words: dict[tuple[str, str], int] = {}
    for row in rows:
        key = row["route"], row["reason_text"].partition(":")[0]
        words[key] = words.get(key, 0) + 1
        assert began - 1 <= row["received"] / 1e6 <= row["settled"] / 1e6 <= ended + 1, row
    assert words == WORDS


def test_an_archive_keeps_what_it_has_just_written(
    spark: SparkSession, journal: tuple[Path, float, float], tmp_path: Path
) -> None:
    done = archive.run(spark, str(journal[0]), str(tmp_path / "archive"), keep_days=1)
    assert (done.rows, done.dropped, done.total_rows) == (sum(WORDS.values()), 0, sum(WORDS.values()))


def test_nothing_is_lost_since_then(
    spark: SparkSession, journal: tuple[Path, float, float], run: Run
) -> None:
    since = datetime.fromtimestamp(journal[1] - 1, UTC).isoformat()
    done = run("pipeline", "reconcile", "--journal", str(journal[0]), "--since", since, "--json")
    said = json.loads(done.out)
    assert (done.code, said["totals"]) == (0, {"waiting": 2}), done.err
