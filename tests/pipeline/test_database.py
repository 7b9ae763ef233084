"""Rates in PostgreSQL, as Grafana asks for them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")

import psycopg

from gateway.errors import PipelineError
from gateway.pipeline.jobs import rates as job
from gateway.pipeline.report.database import put
from tests.cli.conftest import Run
from tests.interop.servers import PostgreSQL
from tests.pipeline.journals import START, written
from tests.pipeline.servers import free_port
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "pipeline.md"


@pytest.fixture
def database(postgresql: PostgreSQL) -> str:
    return postgresql.url


def query() -> str:
    """What the guide tells people to give to Grafana, with what Grafana puts in the place of its macro."""
    (text,) = [part for part in GUIDE.read_text().split("```\n") if part.startswith("SELECT")]
    begin = datetime.fromtimestamp(START, UTC) - timedelta(minutes=1)
    between = f"\"begin\" BETWEEN '{begin.isoformat()}' AND '{(begin + timedelta(minutes=2)).isoformat()}'"
    return text.replace('$__timeFilter("begin")', between)


def test_windows_are_there_once_for_grafana(
    spark: SparkSession, database: str, run: Run, tmp_path: Path
) -> None:
    """Of a batch, of a batch that is repeated, and of a stream, whose windows replace them."""
    folder = str(written(tmp_path / "j", 500))
    for _ in "ab":
        done = run("pipeline", "rates", "--journal", folder, "--to", database)
        assert done.out == "500 messages in 2 rows\n", done.err
    given = {
        "to": database,
        "checkpoint": str(tmp_path / "c"),
        "available_now": True,
        "lateness": "0 seconds",
    }
    written(tmp_path / "j", 500, first=100_000)
    finished(lambda: job.follow(spark, folder, **given))  # type: ignore[arg-type]
    with psycopg.connect(database) as connection:
        rows = connection.execute(query()).fetchall()
        clients = connection.execute("SELECT DISTINCT client FROM gateway_rates").fetchall()
    minute = datetime.fromtimestamp(START - START % 60, UTC)
    assert sorted((row[0], row[1], round(row[2] * 60)) for row in rows) == [
        (minute, "", 250),
        (minute, "up", 250),
    ]
    assert clients == [("",)]


def test_what_the_database_says(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="the database did not accept the rates: .*refused"):
        put(f"postgresql://127.0.0.1:{free_port()}/x", [])


def test_a_stream_needs_a_place_for_its_position(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="set --checkpoint"):
        job.follow(spark, str(tmp_path), to="postgresql://127.0.0.1/x")
    with pytest.raises(PipelineError, match="--report cannot be"):
        job.follow(
            spark, str(tmp_path), to="postgresql://127.0.0.1/x", checkpoint="c", report=tmp_path / "r.html"
        )
