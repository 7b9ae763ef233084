"""Names that hold what separates an address: they survive journal, backtest and its tests, replay and sink.

MassTransit names exchanges `Namespace:Type`, and such a name is legal in every AMQP broker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from gateway.mapping import load
from gateway.mapping.cases import run_cases
from gateway.model.address import Address
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.times import Monotonic
from gateway.protocols import show
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.store.journal.column_buffers import RowLabels
from gateway.store.journal.writer import JournalOptions, JournalWriter
from tests.cli.conftest import Run
from tests.pipeline.jobs.test_replay import Broker, Clock, replay, rows_of
from tests.pipeline.journals import LATENCY, START, Journal
from tests.pipeline.live.test_messages import messages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CAME = amqp_address("Shop.Contracts:OrderCreated", "k:1")
WENT = amqp_address("Billing%3A:Order", "k:1")
MAPPING = """
version: 1
routes:
  - name: orders
    from: {endpoint: shop, exchange: "Shop.Contracts:OrderCreated"}
    to: {endpoint: billing, exchange: "Billing%3A:Order", routing_key: "{routing_key}"}
"""


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """One message that crossed by MAPPING."""
    folder = tmp_path / "journal"
    (file := tmp_path / "orders.yaml").write_text(MAPPING)
    version = load([file])[0].version
    clock = Journal(tmp_path / "unused").clock
    clock.now = START + LATENCY
    writer = JournalWriter(folder, 0, JournalOptions(), clock=clock, utc=clock)
    sender = Sender("shop", "app", "app", "10.0.0.1:4")
    came, went = (Message(one, b"{}", sender=sender, assurance=1, durable=True) for one in (CAME, WENT))
    writer.record(
        RowLabels("orders", version, "billing", "amqp091"), [went], ACCEPTED, Monotonic(START), [came]
    )
    writer.close()
    return folder


def test_replay_sends_to_where_it_came_and_to_where_it_went(spark: SparkSession, journal: Path) -> None:
    for at_target, address in ((False, CAME), (True, WENT)):
        broker = Broker(Clock())
        replay(broker, rows_of(spark, journal), at_target=at_target)
        assert [message.address for _, message in broker.got] == [address]


@pytest.mark.usefixtures("spark")
def test_backtest_finds_nothing_changed_and_its_tests_pass(journal: Path, run: Run, tmp_path: Path) -> None:
    tests = tmp_path / "tested.yaml"
    asked = ("pipeline", "backtest", "--journal", str(journal), str(tmp_path / "orders.yaml"))
    done = run(*asked, "--tests", str(tests), "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["changed"] == 0
    (result,) = run_cases(load([tests])[0])
    assert result.passed, result.differences
    text = tests.read_text()
    assert "Shop.Contracts:OrderCreated" in text
    assert "Billing%3A:Order" in text


@pytest.mark.parametrize("address", [CAME, WENT, amqp_address("", "a:b"), amqp_address("e", "")])
def test_the_sink_reads_the_journals_text(address: Address) -> None:
    (made,) = messages("amqp091", [{"body": b"1", "address": show(address)}])
    assert made.address == address
