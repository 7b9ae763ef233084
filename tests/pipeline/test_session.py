"""A session has the gateway's formats and its options."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException

from gateway.cli.pipeline import common
from gateway.errors import PipelineError
from gateway.pipeline import session
from gateway.pipeline.jobs import rates
from gateway.pipeline.progress import progress
from gateway.pipeline.workers import freeze_imports
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
            "the pipeline needs Spark 4.1 or newer, but this is ",
        ),
        (
            "sys.modules['pyspark.sql.streaming.datasource'] = None; import gateway.pipeline.session",
            "gateway.pipeline.journal.stream",
            "streams need Spark 4.2 or newer, but this is ",
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
    late = rates.run(elsewhere, str(tmp_path), window="1 second", start="2023-11-14T22:13:21")
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
    freeze_imports()
    assert gc.get_freeze_count() == before

    def frozen(_: Iterator[Any]) -> Iterator[Any]:
        freeze_imports()
        yield pa.RecordBatch.from_pydict({"count": [gc.get_freeze_count()]})

    (found,) = spark.range(1).coalesce(1).mapInArrow(frozen, "count long").collect()
    assert found["count"] > 10_000


def test_a_notebook_has_the_sentence_above_the_traceback(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    class Shell:
        """As much of IPython's as is asked."""

        def set_custom_exc(self, kinds: Any, show: Any) -> None:
            self.kinds, self.show = kinds, show

        def showtraceback(self, given: Any, tb_offset: Any = None) -> None:
            shown.append(capsys.readouterr().err)

    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    session.register(spark)
    with pytest.raises(shell.kinds) as raised:
        spark.read.format("gateway_journal").load(str(tmp_path / "none")).collect()
    shell.show(shell, raised.type, raised.value, raised.tb)
    (before,) = shown
    assert before.endswith("none: no such folder\n"), before
    assert len(before.splitlines()) == 1


def test_ctrl_c_leaves_no_traceback_of_py4j(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which logs one where a command was interrupted while it waited for Java; other errors stay."""
    monkeypatch.setattr(session, "session", lambda *_, **__: None)
    common.start_session("rates", None, None)
    root = logging.getLogger()
    try:
        for error in (KeyboardInterrupt, ValueError):
            try:
                raise error
            except BaseException:
                root.exception("%s while sending command", error.__name__)
    finally:
        root.removeFilter(common._is_no_interrupt)
    assert [record.message for record in caplog.records] == ["ValueError while sending command"]


def test_a_job_says_in_one_line_what_it_took(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.progress.INTERVAL_SECS", 0.02)
    lines: list[str] = []
    with progress(spark, "job", lines.append):
        spark.range(0, 4, 1, 4).rdd.map(lambda n: time.sleep(0.5) or n).count()
    (line,) = lines
    assert re.fullmatch(r"job: \d+ tasks in \d+ stages, \d+ s", line)
