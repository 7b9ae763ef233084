"""The pipeline's commands in order, as an operator types them: devices publish, and jobs read the journal."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
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
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.pipeline.jobs.conftest import until
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

READINGS: Final = 300
MAPPING: Final = """version: 1
routes:
  - name: telemetry
    from: {endpoint: mqtt, topic: "plant/{line}/{machine}/telemetry"}
    to: {endpoint: amqp091, queue: readings}
"""


def body(number: int) -> bytes:
    return b'{"n": %d, "temperature": %d}' % (number, number % 100)


def publish(access: ConnectionOptions, first: int, count: int) -> None:
    """Devices publish readings, and hear that each is accepted."""
    device = MqttClient(access)
    messages = [
        Message(topic_address(f"plant/l{number % 3}/press/telemetry"), body(number), assurance=1)
        for number in range(first, first + count)
    ]
    assert device.publish_many(messages) == {}
    device.close()


def rows(journal: str) -> int:
    return sum(not isinstance(row, Gap) for row in JournalReader(Path(journal)).rows("0"))


def measured(spark: SparkSession, journal: str, to: Path, then: Callable[[], None]) -> None:
    """`rates` as a stream, until it has seen everything that there is after `then`."""
    follow = partial(rates.follow, spark, journal, to=str(to), window="1 second", lateness="0 seconds")
    query = follow(every="0 seconds")
    then()
    until(lambda: rows(journal) == READINGS, "the journal does not fill")

    def seen() -> bool:
        nonlocal query
        if not query.isActive:  # Spark was too impatient; see tests/pipeline/streams.py
            query = follow(every="0 seconds")
        offsets = [one["sources"][0]["endOffset"] for one in query.recentProgress]
        return any(str(READINGS) in str(offset) for offset in offsets)

    until(seen, "no rates")
    query.stop()


@pytest.mark.usefixtures("streams")
def test_the_story(spark: SparkSession, run: Run, tmp_path: Path) -> None:
    mapping = tmp_path / "plant.yaml"
    mapping.write_text(MAPPING)
    options = {"enabled": True, "flush_interval_secs": 0.02}
    with GatewayProcess(tmp_path / "gateway", journal=options, mappings=[str(mapping)]) as gateway:
        journal = str(tmp_path / "gateway" / "data" / "journal")
        ports = {name: gateway.port(name) for name in ("mqtt", "amqp091")}
        mqtt = ConnectionOptions(parse_url(f"mqtt://{LOOPBACK}:{ports['mqtt']}"), 60.0)
        amqp = AmqpClient(
            ConnectionOptions(parse_url(f"amqp://guest:guest@{LOOPBACK}:{ports['amqp091']}"), 60.0)
        )
        for queue in ("readings", "again"):
            amqp.declare(queue, "amq.direct", [])
        # Devices publish and the journal fills, while a stream measures it.
        publish(mqtt, 0, READINGS // 2)
        until(lambda: rows(journal) == READINGS // 2, "the journal does not fill")
        measured(spark, journal, tmp_path / "rates", partial(publish, mqtt, READINGS // 2, READINGS // 2))
        # The archive has it all.
        archive = str(tmp_path / "archive")
        done = run("pipeline", "archive", "--journal", journal, "--to", archive)
        assert (done.code, done.out.split()[:3]) == (0, [str(READINGS), "rows", "archived"]), done.err
        # A changed mapping is tried on it; the difference is shown, and the exit code tells.
        changed = tmp_path / "changed.yaml"
        changed.write_text(MAPPING.replace("plant/{line}", "plant/l0"))
        tried = run("pipeline", "backtest", str(changed), "--archive", archive, "--json")
        found = {one["verdict"]: one["deliveries"] for one in json.loads(tried.out)["findings"]}
        assert (tried.code, found) == (1, {"dropped": READINGS * 2 // 3, "same": READINGS // 3}), tried.err
        # A range is sent again, into a queue.
        url = f"amqp://guest:guest@{LOOPBACK}:{ports['amqp091']}"
        hot = "get_json_object(cast(body as string), '$.temperature') >= 90"
        again = run("pipeline", "replay", url, "--queue", "again", "--archive", archive, "--where", hot)
        assert (again.code, again.out.split()[:3]) == (0, [str(READINGS // 10), "messages", "sent,"]), (
            again.err
        )
        # Spark empties the queue, and nothing that was accepted is missing.
        source = spark.readStream.format("gateway_amqp").option("queues", "readings")
        given = {"url": f"amqp://guest@{LOOPBACK}:{ports['amqp091']}", "password": "guest", "quietSecs": "1"}
        got = tmp_path / "got"
        into = source.options(**given).load().writeStream.format("parquet").trigger(availableNow=True)
        finished(lambda: into.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(got)))
        until(lambda: rows(journal) == READINGS * 11 // 10, "the replay is not in the journal")
        only = ("--where", "route = 'telemetry'")
        last = run("pipeline", "reconcile", "--journal", journal, "--received", str(got), *only)
        assert (last.code, "no message is lost" in last.out) == (0, True), last.out
        amqp.close()
