"""Candidates on traffic that a real gateway has recorded: what is found, and what it costs whoever asks."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

from gateway.mapping.cases import run_cases
from gateway.mapping.loader import load, parse
from gateway.pipeline.jobs import archive
from gateway.pipeline.jobs.backtest import Report, backtest
from gateway.pipeline.traffic import loader
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.pipeline.traffic.loader import Recording, RowSelection
from gateway.pipeline.traffic.verdicts import DeliveryVerdict
from tests.cli.conftest import Run
from tests.pipeline.jobs.conftest import HOT, MAPPING, READINGS, STORED, WAITING, Recorded
from tests.pipeline.journals import RETURNED, Journal, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MESSAGES = READINGS + 1 + STORED + WAITING


def candidate(text: str) -> CandidateMapping:
    return CandidateMapping([parse(text, "m.yaml")], {"m.yaml": text}, {})


def report(spark: SparkSession, recorded: Recorded, text: str, against: str | None = None) -> Report:
    tried = candidate(text)
    reference = None if against is None else candidate(against)
    return backtest(Recording(spark, recorded.journal), tried, reference)


def found(of: Report) -> dict[tuple[str, str, str], int]:
    return {(v.value, before, after): one.deliveries for (v, before, after), one in of.findings.items()}


def test_the_mapping_in_force_changes_nothing(spark: SparkSession, recorded: Recorded) -> None:
    """Rows of several recipients are one message; a condition looks into each; a refusal stays one."""
    made = report(spark, recorded, MAPPING)
    assert found(made) == {
        ("same", "up", "up"): READINGS,
        ("same", "hot", "hot"): len(HOT),
        ("same", "far", "far"): STORED + WAITING,
    }
    assert (made.messages, made.changed, made.unexpected()) == (MESSAGES, 0, [])


def test_an_archive_tells_what_its_journal_tells(
    spark: SparkSession, recorded: Recorded, tmp_path: Path
) -> None:
    """Also of a span of time that ends in the middle of it, and of rows that Spark is asked for."""
    to = str(tmp_path / "archive")
    archive.run(spark, recorded.journal, to)
    rows = spark.read.format("gateway_journal").load(recorded.journal)
    times = [
        row[0]
        for row in rows.where("source_address like 'far/%'").selectExpr("unix_micros(received)").collect()
    ]
    middle = datetime.fromtimestamp(max(times) / 1e6, UTC).isoformat()
    tried = candidate(MAPPING.replace("> 50", "> 55"))
    spans = (
        RowSelection(),
        RowSelection(begin=middle),
        RowSelection(end=middle),
        RowSelection(where="route = 'hot'"),
    )
    of_all, *others = [
        [
            found(backtest(Recording(spark, journal, span, filed), tried))
            for journal, filed in ((recorded.journal, None), (None, to))
        ]
        for span in spans
    ]
    assert of_all[0] == of_all[1]
    assert ("dropped", "hot", "") in of_all[0]
    for journal, archived in others:
        assert journal == archived
        assert 0 < sum(journal.values()) < sum(of_all[0].values())
    older = spark.read.parquet(f"{to}/date=*/*")
    assert older.schema["source_address"].dataType.simpleString() == "string", "for whoever else reads it"


def test_an_archive_and_what_it_has_not_yet(spark: SparkSession, tmp_path: Path) -> None:
    """Each row once, wherever it is; conditions are asked in both."""
    folder, to = str(tmp_path / "journal"), str(tmp_path / "archive")
    for first in (0, 60):
        written(Path(folder), 60, first=first)
        if not first:
            archive.run(spark, folder, to)
    tried = candidate(MAPPING.replace("body.temperature > 50", "body.n > 50"))
    for span in (RowSelection(), RowSelection(where="sequence between 30 and 89 and route <> ''")):
        both, alone, old = (
            backtest(Recording(spark, journal, span, filed), tried)
            for journal, filed in ((folder, to), (folder, None), (None, to))
        )
        assert found(both) == found(alone)
        assert both.messages == alone.messages > old.messages > 0


def test_what_nobody_took_is_new_under_a_mapping_that_takes_it(spark: SparkSession, tmp_path: Path) -> None:
    """What was refused never came in, whichever way the rows are read."""
    journal = Journal(tmp_path)
    journal.write_unrouted(0, 3)
    journal.write_unrouted(3, 2, RETURNED)
    journal.close()
    taking = """
version: 1
routes:
  - name: all
    from: {endpoint: mqtt, topic: "plant/#"}
    to: {endpoint: erp, queue: all}
"""
    tried = CandidateMapping(
        [parse(taking, "m.yaml")], {"m.yaml": taking}, {"mqtt": "mqtt", "erp": "amqp091"}
    )
    for where in (None, "reverse(client) <> 'x'"):
        made = backtest(Recording(spark, str(tmp_path), RowSelection(where=where)), tried)
        assert (made.messages, found(made)) == (3, {("new", "", "all"): 3})


def test_every_kind_of_change_is_counted_with_examples(spark: SparkSession, recorded: Recorded) -> None:
    changed = (
        MAPPING.replace('"{line}.{rest}"', '"site.{line}.{rest}"')
        .replace("> 50", "> 55")
        .replace("settle: stored\n", "settle: stored\n    delivery: {qos1: transient}\n")
        .replace('topic: "long/{rest...}"', 'topic: "{first}/+/t"')
        .replace('routing_key: "{rest}"', 'routing_key: "new.{first}"')
    )
    made = report(spark, recorded, changed)
    assert found(made) == {
        ("elsewhere", "up", "up"): READINGS,
        ("same", "hot", "hot"): 4,
        ("elsewhere", "hot", "long"): len(HOT) - 4,
        ("weaker", "far", "far"): STORED + WAITING,
        ("new", "", "long"): READINGS - len(HOT) + 4,
    }
    assert made.changed == READINGS + STORED + WAITING
    moved = made.findings[DeliveryVerdict.ELSEWHERE, "up", "up"].examples[0]
    assert moved.before is not None
    assert moved.after is not None
    assert moved.after.address == str(moved.before.address).replace("amq.topic:", "amq.topic:site.")
    assert made.as_json()["findings"][0]["verdict"] == "elsewhere", "the worst comes first"


def test_rows_that_pass_through_spark_are_the_same(spark: SparkSession, recorded: Recorded) -> None:
    """A condition in SQL is Spark's to answer; without one the tasks read the journal themselves."""
    tried = candidate(MAPPING.replace('"{line}.{rest}"', '"site.{line}.{rest}"'))
    times = [row["received"] / 1e6 for row in recorded.rows(0)]
    begin, end = (datetime.fromtimestamp(at, UTC).isoformat() for at in (times[len(times) // 3], times[-1]))
    asked = RowSelection(begin, end)
    straight = backtest(Recording(spark, recorded.journal, asked), tried)
    passed = backtest(Recording(spark, recorded.journal, asked._replace(where="true")), tried)
    assert straight.as_json() == passed.as_json()
    assert 0 < straight.messages < MESSAGES


def test_a_condition_is_asked_in_the_tasks(
    spark: SparkSession, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it can be; only what cannot passes through Spark."""
    tried = candidate(MAPPING)
    found_ = backtest(Recording(spark, recorded.journal, RowSelection(where="length(route) = 3")), tried)

    def passed(*_: object, **__: object) -> None:
        raise AssertionError("rows pass through Spark")

    monkeypatch.setattr(loader, "traffic", passed)
    asked = backtest(Recording(spark, recorded.journal, RowSelection(where="ROUTE in ('hot', 'far')")), tried)
    assert asked.messages == found_.messages > 0
    with pytest.raises(AssertionError, match="pass through Spark"):
        backtest(Recording(spark, recorded.journal, RowSelection(where="length(route) = 3")), tried)


def test_against_another_mapping(spark: SparkSession, recorded: Recorded) -> None:
    """What really happened is not asked then; the refusal, too, is the mappings'."""
    assert report(spark, recorded, MAPPING, MAPPING).changed == 0
    without = MAPPING.replace("plant/{line}/t", "nothing/{line}")
    made = report(spark, recorded, without, MAPPING)
    assert found(made)["dropped", "hot", ""] == len(HOT)
    assert made.messages == MESSAGES


def test_the_command_says_what_changes_and_its_exit_code_does(
    spark: SparkSession, recorded: Recorded, run: Run, tmp_path: Path
) -> None:
    asked = ("pipeline", "backtest", "--journal", recorded.journal)
    tests = tmp_path / "tested.yaml"
    done = run(*asked, str(recorded.mapping), "--tests", str(tests), "--tests-per-route", "2")
    assert done.code == 0, done.err
    assert f"{MESSAGES} messages, 0 with another result" in done.out
    results = run_cases(load([tests])[0])
    assert len(results) >= 4
    assert all(result.passed for result in results)
    assert run("test", str(tests)).code == 0
    changed = tmp_path / "changed.yaml"
    changed.write_text(tests.read_text().replace('"{line}.{rest}"', '"x.{line}.{rest}"'))
    assert run("test", str(changed)).code == 1, "the tests of recorded messages tell"
    done = run(*asked, str(changed), "--json", "--where", "client = 'device'")
    assert done.code == 1
    assert json.loads(done.out)["findings"][0]["verdict"] == "elsewhere"
    assert run(*asked, str(changed), "--allow", "elsewhere").code == 0
    assert run(*asked, str(changed), "--until", "2001-01-01").code == 0, "no traffic, no change"
