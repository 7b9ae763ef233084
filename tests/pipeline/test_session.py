"""A session has the gateway's formats and its options."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException

from gateway.errors import PipelineError
from gateway.pipeline import session
from gateway.pipeline.jobs import rates
from gateway.pipeline.workers import spare_imports
from tests.pipeline.journals import START, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_it_is_ours(spark: SparkSession) -> None:
    assert {key: spark.conf.get(key) for key in session.OPTIONS} == session.OPTIONS


@pytest.mark.parametrize(
    "lacking, module, said",
    [
        (
            "del sys.modules['pyspark.sql.datasource'].EqualTo",
            "gateway.pipeline.session",
            "the pipeline needs Spark 4.1 or newer, and this is ",
        ),
        (
            "sys.modules['pyspark.sql.streaming.datasource'] = None; import gateway.pipeline.session",
            "gateway.pipeline.journal.stream",
            "streams need Spark 4.2 or newer, and this is ",
        ),
    ],
)
def test_an_older_spark_is_refused_with_a_sentence(lacking: str, module: str, said: str) -> None:
    """It has no filters; the one before ours has them, which is enough for batches, and no limits."""
    done = subprocess.run(
        (sys.executable, "-c", f"import sys, pyspark.sql.datasource; {lacking}; import {module}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert f"PipelineError: {said}" in done.stderr.splitlines()[-1]


ZONE: Final = "spark.sql.session.timeZone"


@pytest.fixture
def elsewhere(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, with another time zone."""
    spark.conf.set(ZONE, "America/New_York")
    yield spark
    spark.conf.set(ZONE, "UTC")


def test_a_session_of_somebody_else_stays_as_it_is(elsewhere: SparkSession, tmp_path: Path) -> None:
    """And times are right in its zone."""
    written(tmp_path, 2_500)
    assert session.register(elsewhere).conf.get(ZONE) == "America/New_York"
    for options in ({}, {"receivedFrom": "2023-11-14T22:13:20"}):
        found = elsewhere.read.format("gateway_journal").options(**options).load(str(tmp_path))
        assert found.where("received < timestamp'2023-11-14 17:13:21'").count() == 1_000
        first = found.where("sequence = 0").selectExpr("cast(received as string)", "unix_micros(received)")
        assert [tuple(row) for row in first.collect()] == [("2023-11-14 17:13:20", int(START * 1e6))]
    late = rates.run(elsewhere, str(tmp_path), window="1 second", since="2023-11-14T22:13:21")
    assert late.messages == 1_500


def test_another_session_of_the_same_spark_is_registered_for_itself(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Spark keeps sources by session: a new one has none of ours until it gets them."""
    written(tmp_path, 10)
    fresh = spark.newSession()
    with pytest.raises((AnalysisException, Py4JJavaError), match="gateway_journal"):
        fresh.read.format("gateway_journal").load(str(tmp_path)).count()
    found = session.register(fresh).read.format("gateway_journal").load(str(tmp_path))
    assert (found.sparkSession is fresh, found.count()) == (True, 10)
    assert fresh.conf.get(ZONE) == spark.conf.get(ZONE)


def test_a_python_without_the_gateway_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'gateway'\" >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(program))
    with pytest.raises(PipelineError, match="No module named 'gateway'.*PYSPARK_PYTHON") as raised:
        session.register(spark)
    assert "\n" not in str(raised.value)


MASTERS = [(None, True), ("local[2]", True), ("local", True), ("spark://h:7077", False), ("yarn", False)]


@pytest.mark.parametrize("master, here", MASTERS)
def test_who_is_told_to_call_this_machine_alone(master: str | None, here: bool) -> None:
    assert session.is_local(master) is here


def test_only_workers_spare_their_imports(spark: SparkSession) -> None:
    """The process of whoever started Spark collects its garbage as it did."""
    before = gc.get_freeze_count()
    spare_imports()
    assert gc.get_freeze_count() == before

    def frozen(_: Iterator[Any]) -> Iterator[Any]:
        spare_imports()
        yield pa.RecordBatch.from_pydict({"count": [gc.get_freeze_count()]})

    (found,) = spark.range(1).coalesce(1).mapInArrow(frozen, "count long").collect()
    assert found["count"] > 10_000
