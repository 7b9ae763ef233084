"""Every message of a long story is accounted for: its publishers' own counts against what each job finds.

Devices publish readings whose bodies drift, orders for a broker that is killed twice, orders that expire
meanwhile, messages that nobody takes, and messages that are refused. `make story` has half a million
messages; a test run has STORY_MESSAGES of its environment, or a few thousand.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("deltalake")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import functions as F

from gateway.clients.amqp import AmqpClient
from gateway.clients.mqtt import MqttClient
from gateway.clients.wire import ConnectionOptions
from gateway.model.message import Message
from gateway.model.properties import Properties, property_set
from gateway.pipeline.jobs.archive import read_archive
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.lake import _complete
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import parse_url
from gateway.store.journal.reader import JournalReader
from tests.cli.conftest import Run
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MESSAGES: Final = int(os.environ.get("STORY_MESSAGES", "2400"))
PHASES: Final = 4  # the broker is killed in the second and in the last
CHUNK: Final = 2_000
PATIENCE_SECS: Final = 120.0 + MESSAGES / 500
EXPIRY_SECS: Final = 1.0
SEGMENT_BYTES: Final = max(65_536, MESSAGES * 20)
MAPPING: Final = """version: 1
routes:
  - name: telemetry
    from: {endpoint: mqtt, topic: "plant/{line}/t"}
    to: {endpoint: amqp091, queue: readings}
    body_schema: reading.json
  - name: long
    from: {endpoint: mqtt, topic: "long/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "{rest}"}
  - name: orders
    from: {endpoint: mqtt, topic: "orders/{name}"}
    to: {endpoint: erp, queue: orders}
    settle: stored
"""
SCHEMA: Final = {
    "type": "object",
    "required": ["n", "t"],
    "properties": {"n": {"type": "integer"}, "t": {"type": "number"}},
}
SHARES: Final = {
    **dict.fromkeys(range(10), "fit"),
    **dict.fromkeys((10, 11), "drifted"),  # a field that the schema does not name
    12: "misfit",  # a number became text
    **dict.fromkeys((13, 14), "order"),
    15: "expiring",
    **dict.fromkeys((16, 17), "lost"),
    18: "long",
    19: "returned",
}
"""Kinds of messages, by their number modulo 20."""

READINGS: Final = ("fit", "drifted", "misfit")


def body(kind: str, number: int) -> bytes:
    """Return a reading, as the schema names it, as later firmware sends it, or as it should not be."""
    value: dict[str, Any] = {"n": number, "t": number % 100 / 2}
    if kind == "drifted":
        value |= {"firmware": "4.12"}
    if kind == "misfit":
        value |= {"t": "hot"}
    return json.dumps(value).encode()


def address(kind: str, number: int) -> Any:
    """Return where a message of this kind is published."""
    if kind == "returned":
        return amqp_address("", f"nowhere-{number % 7}")
    return topic_address(
        {
            "order": f"orders/{number % 5}",
            "expiring": f"orders/{number % 5}",
            "lost": f"lost/{number % 3}",
            "long": f"long/{'x' * 300}",
        }.get(kind, f"plant/l{number % 3}/t")
    )


@dataclass
class Truth:
    """Counts of the publishers: messages by kind, and those of them that were refused."""

    sent: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    expired: int = 0
    """Number of messages that expire while the broker is down."""

    def of(self, *kinds: str) -> int:
        """Return the number of published messages of these kinds."""
        return sum(self.sent[kind] for kind in kinds)

    def publish(self, mqtt: MqttClient, amqp: AmqpClient, numbers: range, *, is_down: bool) -> None:
        """Publish the messages with these numbers, each with an id, and count the answers.

        `is_down` says that orders cannot be delivered now.
        """
        for first in range(numbers.start, numbers.stop, CHUNK):
            chunk = [(SHARES[n % len(SHARES)], n) for n in range(first, min(first + CHUNK, numbers.stop))]
            for client, is_amqp in ((mqtt, False), (amqp, True)):
                own = [(kind, number) for kind, number in chunk if (kind == "returned") == is_amqp]
                expires = time.time() + EXPIRY_SECS
                messages = [
                    Message(
                        address(kind, number),
                        body(kind, number),
                        property_set(Properties(message_id=f"{kind}-{number}")),
                        1,
                        True,
                        expires=expires if kind == "expiring" else 0.0,
                    )
                    for kind, number in own
                ]
                refused = client.publish_many(messages)
                self.sent.update(kind for kind, _ in own)
                self.refused.update(own[at][0] for at in refused)
                self.expired += is_down and sum(kind == "expiring" for kind, _ in own)


class Consumer:
    """Consumer of a queue, in a thread, which collects the ids of messages.

    Messages that expire are not counted, because they may expire in this queue, too.
    """

    def __init__(self, access: ConnectionOptions, queue: str) -> None:
        self.ids: Counter[str] = Counter()
        self._end = Event()
        self._client = AmqpClient(access)
        self._client.consume(queue, None, "#")
        self._thread = Thread(target=self._consume)
        self._thread.start()

    def _consume(self) -> None:
        while not self._end.is_set():
            arrivals = self._client.arrivals(0.1)
            ids = (str(one.message.properties.message_id) for one in arrivals)
            self.ids.update(one for one in ids if not one.startswith("expiring-"))
            self._client.acknowledge(arrivals)

    def await_messages(self, count: int) -> None:
        """Wait until so many different messages have arrived."""
        until(
            lambda: len(self.ids) >= count or not self._thread.is_alive(),
            lambda: f"{len(self.ids)} of {count} messages have arrived",
        )
        assert len(self.ids) == count

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._client.close()


class Story(NamedTuple):
    """What happened: the journal's folder, the publishers' counts, and the ids that consumers received."""

    journal: str
    mapping: str
    truth: Truth
    readings: Counter[str]
    orders: Counter[str]


def until(condition: Callable[[], bool], text: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE_SECS
    while not condition():
        assert time.monotonic() < end, text()
        time.sleep(0.05)


def access(gateway: GatewayProcess, scheme: str, listener: str) -> ConnectionOptions:
    url = f"{scheme}://guest:guest@{LOOPBACK}:{gateway.port(listener)}"
    return ConnectionOptions(parse_url(url), PATIENCE_SECS)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Everything is published, settled and consumed, and the gateway has stopped."""
    folder = tmp_path_factory.mktemp("story")
    (folder / "reading.json").write_text(json.dumps(SCHEMA))
    mapping = folder / "plant.yaml"
    mapping.write_text(MAPPING)
    journal = folder / "near" / "data" / "journal"
    with GatewayProcess(folder / "erp") as erp:
        near = GatewayProcess(
            folder / "near",
            journal={"enabled": True, "flush_interval_secs": 0.05, "segment_bytes": SEGMENT_BYTES},
            mappings=[str(mapping)],
            links={"erp": {"url": f"amqp://guest:guest@{LOOPBACK}:{erp.port('amqp091')}"}},
            limits={"dead_letters_max": MESSAGES, "dead_letters_bytes_max": MESSAGES * 1_024},
        )
        with near:
            made = Story(str(journal), str(mapping), *tell(near, erp, JournalReader(journal)))
            assert near.terminate() == 0
    return made


def tell(
    near: GatewayProcess, erp: GatewayProcess, reader: JournalReader
) -> tuple[Truth, Counter[str], Counter[str]]:
    """Publish everything, and return the publishers' counts, and the ids of received readings and orders."""
    truth = Truth()
    amqp = AmqpClient(access(near, "amqp", "amqp091"))
    amqp.declare("readings", "amq.direct", [])
    mqtt = MqttClient(access(near, "mqtt", "mqtt"), client_id="devices")
    consumer = Consumer(access(near, "amqp", "amqp091"), "readings")
    try:
        for phase in range(PHASES):
            first, end = (MESSAGES * part // PHASES for part in (phase, phase + 1))
            is_down = phase % 2 == 1
            if is_down:
                erp.kill()
            truth.publish(mqtt, amqp, range(first, end), is_down=is_down)
            if is_down:
                expired = time.time() + EXPIRY_SECS
                until(lambda expired=expired: time.time() > expired, lambda: "time stands still")  # type: ignore[misc]
                erp.start()
        for client in (mqtt, amqp):
            client.close()
        rows = truth.sent.total() + truth.of("order", "expiring")  # These leave the outbox, too.
        until(lambda: reader.end("0") >= rows, lambda: f"{reader.end('0')} of {rows} rows")
        consumer.await_messages(truth.of(*READINGS))
        until(lambda: any(one.next for one in reader.segments("0")), lambda: "no file becomes Parquet")
    finally:
        consumer.close()
    at_erp = Consumer(access(erp, "amqp", "amqp091"), "orders")
    try:
        at_erp.await_messages(truth.of("order"))
    finally:
        at_erp.close()
    return truth, consumer.ids, at_erp.ids


def expected_rows(truth: Truth, dead: int) -> dict[tuple[str, ...], int]:
    """Return the number of messages of each kind, by route, outcome, reason and what became of it."""
    sent = truth.sent
    readings = {(kind, "telemetry", "accepted", "none", "answered"): sent[kind] for kind in READINGS}
    orders = {(kind, "orders", "accepted", "none", "stored"): sent[kind] for kind in ("order", "expiring")}
    return {
        **readings,
        **orders,
        ("order", "orders", "accepted", "none", "delivered"): sent["order"],
        ("expiring", "orders", "accepted", "none", "delivered"): sent["expiring"] - dead,
        ("expiring", "orders", "rejected", "expired", "dead"): dead,
        ("lost", "", "accepted", "no_taker", "answered"): sent["lost"],
        ("long", "long", "rejected", "name_invalid", "answered"): truth.refused["long"],
        ("returned", "", "rejected", "no_route", "answered"): truth.refused["returned"],
    }


def counted(rows: DataFrame) -> dict[tuple[str, ...], int]:
    """Count the rows likewise; each message must have one row of each sort."""
    found = rows.selectExpr(
        "substring_index(message_id, '-', 1) kind",
        "coalesce(route, '') route",
        "outcome",
        "reason",
        "case when reason_text in ('stored', 'delivered') then reason_text"
        " when reason_text like 'dead letter%' then 'dead' else 'answered' end became",
        "message_id",
    ).groupBy("kind", "route", "outcome", "reason", "became")
    counts = found.agg(F.count("*"), F.countDistinct("message_id")).collect()
    assert all(row[5] == row[6] for row in counts)
    return {tuple(row)[:5]: row[5] for row in counts}


@pytest.mark.timeout(PATIENCE_SECS * 8)
def test_every_job_counts_what_the_publishers_counted(
    streams: SparkSession, story: Story, run: Run, tmp_path: Path
) -> None:
    spark, truth = streams, story.truth
    refused = {kind: truth.sent[kind] for kind in ("long", "returned")}
    assert truth.refused == refused
    journal = ("--journal", story.journal)
    rows = counted(read_journal(spark, story.journal))
    dead = rows["expiring", "orders", "rejected", "expired", "dead"]
    assert dead >= truth.expired > 0
    assert rows == expected_rows(truth, dead)
    total = sum(rows.values())
    # Consumers have every message that they should have; readings once, orders at least once.
    assert story.readings.total() == len(story.readings) == truth.of(*READINGS)
    assert len(story.orders) == truth.of("order")
    # The archive has the same rows, and the lake those of complete files.
    archive, lake = str(tmp_path / "archive"), str(tmp_path / "lake")
    ran = run("pipeline", "archive", *journal, "--to", archive)
    assert (ran.code, ran.out.split()[:3]) == (0, [f"{total}", "rows", "archived"]), ran.err
    assert counted(read_archive(spark, archive)) == rows
    ran = run("journal", "lake", *journal, "--to", lake)
    _, complete = _complete(JournalReader(Path(story.journal)), "0")
    assert (ran.code, ran.out) == (0, f"{complete} rows appended to {lake}, 0 rows of the journal missing\n")
    assert DeltaTable(lake).to_pyarrow_table(columns=["sequence"]).num_rows == complete
    # Rates have each message once on each of its ways; deliveries from the outbox are not counted again.
    measured = str(tmp_path / "rates")
    ran = run("pipeline", "rates", *journal, "--to", measured)
    assert ran.code == 0, ran.err
    sums = spark.read.parquet(measured).groupBy("route").agg(F.sum("messages"), F.sum("rejected")).collect()
    assert {row[0] or "": (row[1], row[2]) for row in sums} == {
        "telemetry": (truth.of(*READINGS), 0),
        "orders": (truth.of("order", "expiring"), 0),
        "long": (truth.of("long"), truth.of("long")),
        "": (truth.of("lost", "returned"), truth.of("returned")),
    }
    # Nothing is lost on the way to the consumer; without two of its messages two are.
    received = tmp_path / "received"
    received.mkdir()
    ids = sorted(story.readings)
    for name, some, totals in (("all", ids, {}), ("less", ids[:-2], {"lost": 2})):
        pq.write_table(pa.table({"message_id": some}), received / f"{name}.parquet")
        given = ("--received", str(received / f"{name}.parquet"), "--where", "route = 'telemetry'", "--json")
        ran = run("pipeline", "reconcile", *journal, *given)
        assert (ran.code, json.loads(ran.out)["totals"]) == (bool(totals), totals), ran.err
    ran = run("pipeline", "reconcile", *journal, "--json")
    assert (ran.code, json.loads(ran.out)["totals"]) == (0, {}), ran.err
    # The table has each reading that fits, and beside it each one that does not.
    to = str(tmp_path / "telemetry")
    given = ("--mapping", story.mapping, "--tolerance", f"{truth.of('misfit')}")
    ran = run("pipeline", "table", "telemetry", *journal, "--to", to, *given)
    fitting = truth.of("fit", "drifted")
    line = f"{fitting} messages in the table, {truth.of('drifted')} of them with rescued values;"
    assert (ran.code, ran.out) == (0, f"{line} {truth.of('misfit')} do not fit\n"), ran.err
    table = spark.read.parquet(to)
    assert table.select("message_id").distinct().count() == table.count() == fitting
    assert table.where("rescued is not null and message_id not like 'drifted-%'").count() == 0
    assert spark.read.parquet(f"{to}_rejected").where("message_id like 'misfit-%'").count() == truth.of(
        "misfit"
    )
