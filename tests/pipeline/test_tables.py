"""The archive as a table of Delta Lake, or of Iceberg, whichever is for the Spark that runs: appended once,
merged by the table, with columns that are added. `make iceberg` has the Spark for the other.
"""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from gateway.errors import PipelineError
from gateway.pipeline.archive import tables as job
from gateway.pipeline.columns import LOW_WATER
from gateway.pipeline.jobs import rates
from gateway.pipeline.jobs.archive import read_archive
from gateway.pipeline.stores import place_of
from tests.cli.conftest import Run
from tests.pipeline.conftest import tables_of
from tests.pipeline.journals import written
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

YEARS_AGO = date(2023, 11, 14)


@pytest.fixture(params=[*job.FORMATS])
def form(request: pytest.FixtureRequest, tables: SparkSession) -> str:
    """A format of tables that there is for this Spark."""
    name = str(request.param)
    if name not in tables_of()[0]:
        pytest.skip(f"tables of {name} are tested by make {'iceberg' if name == 'iceberg' else 'test'}")
    return name


@pytest.fixture
def iceberg(tables: SparkSession) -> SparkSession:
    """The session, when it has Iceberg."""
    if "iceberg" not in tables_of()[0]:
        pytest.skip("tables of iceberg are tested by make iceberg")
    return tables


def name_of(tables: SparkSession, to: str, form: str) -> str:
    """What SQL calls the table in a folder."""
    return job.FORMATS[form].table(tables, place_of(to))


def test_a_run_appends_what_has_come_since(tables: SparkSession, form: str, run: Run, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", str(tmp_path / "table")
    archive = ("pipeline", "archive", "--journal", str(folder), "--to", to, "--format", form)
    for first in (0, 60):
        written(folder, 60, first=first)
        ran = run(*archive)
        assert (
            ran.out == f"60 rows archived as {form}, 0 rows of the journal missing; {first + 60} rows now\n"
        ), ran.err
    assert run(*archive).out.startswith("0 rows archived")
    found = read_archive(tables, to)
    journal = tables.read.format("gateway_journal").load(str(folder))
    assert found.columns == [*journal.columns, "date"]
    assert found.drop("date").orderBy("sequence").collect() == journal.orderBy("sequence").collect()
    assert {row.date for row in found.select("date").distinct().collect()} == {YEARS_AGO}
    measured = run("pipeline", "rates", "--archive", to, "--to", str(tmp_path / "rates"))
    assert measured.out == "120 messages in 2 rows\n", measured.err


@pytest.mark.parametrize("fresh", [True, False])
def test_two_runs_at_once(
    tables: SparkSession, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    """The second begins, and ends, when the first has chosen its rows: that one fails, and each row is there
    once."""
    folder, to = tmp_path / "j", str(tmp_path / "table")
    written(folder, 20)
    if not fresh:
        assert job.run(tables, str(folder), to, form).rows == 20
        written(folder, 20, first=20)
    kind = type(job.FORMATS[form])
    append, others = kind.append, []

    def beaten(self: job.TableFormat, *given: Any) -> int:
        monkeypatch.setattr(kind, "append", append)
        others.append(job.run(tables, str(folder), to, form).rows)
        return append(self, *given)

    monkeypatch.setattr(kind, "append", beaten)
    with pytest.raises(PipelineError, match="another run has appended"):
        job.run(tables, str(folder), to, form)
    assert others == [20]
    written(folder, 5, first=20 if fresh else 40)
    assert job.run(tables, str(folder), to, form).rows == 5
    found = read_archive(tables, to).select("sequence")
    assert found.count() == found.distinct().count() == (25 if fresh else 45)


def test_the_position_is_found_behind_other_commits(
    tables: SparkSession, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "LOOKED_AT", 2)
    folder, to = tmp_path / "j", str(tmp_path / "table")
    for first in (0, 20):
        written(folder, 20, first=first)
        assert job.run(tables, str(folder), to, form).rows == 20
        for number in range(3):
            tables.sql(f"DELETE FROM {name_of(tables, to, form)} WHERE sequence = {first + number}")
    assert job.run(tables, str(folder), to, form) == job.AppendResult(0, 0, 34)


def test_days_go_and_do_not_come_back(tables: SparkSession, form: str, tmp_path: Path) -> None:
    """And the table can still be read when it has been put in order."""
    folder, to = tmp_path / "j", str(tmp_path / "table")
    written(folder, 20)
    assert job.run(tables, str(folder), to, form).total_rows == 20
    gone = job.run(tables, str(folder), to, form, keep_days=1, today=date(2023, 11, 16))
    assert (gone.rows, gone.total_rows) == (0, 0)
    written(folder, 5, first=20)
    assert job.run(tables, str(folder), to, form).total_rows == 5
    table = name_of(tables, to, form)
    job.FORMATS[form].maintain(tables, table)
    assert tables.table(table).count() == 5


def test_an_older_table_is_gone_on_with(tables: SparkSession, form: str, tmp_path: Path) -> None:
    """Its rows say where it ends when no commit does, and it gets the columns that it lacks; a column of
    another type is an error."""
    folder, to = tmp_path / "j", str(tmp_path / "table")
    written(folder, 10)
    rows = tables.read.format("gateway_journal").load(str(folder)).withColumn("date", job.utc_date())
    older = rows.drop("headers", "hops").where("sequence < 4")
    older.writeTo(name_of(tables, to, form)).using(form).create()
    assert read_archive(tables, to).where("hops is null").count() == 4
    assert job.run(tables, str(folder), to, form) == job.AppendResult(6, 0, 10)
    assert read_archive(tables, to).where("hops is null").count() == 4
    with pytest.raises(PipelineError, match="the column hops of .* is (smallint|int), but should be string"):
        job.create_or_extend(tables, job.FORMATS[form], to, {"hops": "string"})


def test_rates_are_put_in_the_place_of_older_ones(tables: SparkSession, form: str, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", str(tmp_path / "rates")
    for first in (0, 60):
        written(folder, 60, first=first)
        rates.run(tables, str(folder), to=to, format_=form)
        found = job.read_table(tables, to, form)
        assert found.count() == 2
        assert sum(row.messages for row in found.collect()) == first + 60


@pytest.mark.usefixtures("streams")
def test_a_stream_of_windows_goes_into_a_table(tables: SparkSession, form: str, tmp_path: Path) -> None:
    """And one that is told again, for rows came late, stands in the place of the one before."""
    folder, to = tmp_path / "j", str(tmp_path / "rates")
    given: dict[str, Any] = {"format_": form, "window": "1 second", "lateness": "0 seconds"}
    for first, count, told in ((0, 1_500, 1_000), (1_500, 1_000, 2_000), (200, 100, 2_100)):
        written(folder, count, first=first)
        finished(lambda: rates.follow(tables, str(folder), to=to, available_now=True, **given))
        found = job.read_table(tables, to, form)
        assert sum(row.messages for row in found.collect()) == told
        assert found.select("begin", "route").distinct().count() == found.count()


def test_a_table_and_what_it_has_not_yet(tables: SparkSession, form: str, tmp_path: Path) -> None:
    """Each row once; a table whose commits do not say how far it is cannot be read so."""
    folder, to = tmp_path / "j", str(tmp_path / "table")
    written(folder, 20)
    job.run(tables, str(folder), to, form)
    written(folder, 30, first=20)
    both = read_archive(tables, to, str(folder))
    assert sorted(row.sequence for row in both.select("sequence").collect()) == [*range(50)]
    plain = f"default.plain_{form}"
    both.drop("date").withColumn("date", job.utc_date()).writeTo(plain).using("parquet").create()
    assert read_archive(tables, plain).count() == 50
    with pytest.raises(PipelineError, match=rf"{re.escape(plain)} has no position"):
        read_archive(tables, plain, str(folder))


def test_a_table_of_a_catalog(iceberg: SparkSession, tmp_path: Path) -> None:
    """Iceberg's own, by a name; it is put in order, and what a run needed is gone."""
    catalog = "spark.sql.catalog.lake"
    iceberg.conf.set(catalog, "org.apache.iceberg.spark.SparkCatalog")
    iceberg.conf.set(f"{catalog}.type", "hadoop")
    iceberg.conf.set(f"{catalog}.warehouse", str(tmp_path / "lake"))
    folder, to = tmp_path / "j", "lake.plant.messages"
    for first in (0, 20):
        written(folder, 20, first=first)
        assert job.run(iceberg, str(folder), to, "iceberg") == job.AppendResult(20, 0, first + 20)
    assert [row.name for row in iceberg.table(f"{to}.refs").collect()] == ["main"]
    job.FORMATS["iceberg"].maintain(iceberg, to)
    assert read_archive(iceberg, to, str(folder)).count() == 40
    assert job.run(iceberg, str(folder), to, "iceberg") == job.AppendResult(0, 0, 40)


def test_a_table_of_a_catalog_in_s3(iceberg: SparkSession, s3: str, tmp_path: Path) -> None:
    """A catalog that is a database makes commits safe there; this one is a file."""
    catalog = "spark.sql.catalog.bucket"
    iceberg.conf.set(catalog, "org.apache.iceberg.spark.SparkCatalog")
    iceberg.conf.set(f"{catalog}.type", "jdbc")
    iceberg.conf.set(f"{catalog}.uri", f"jdbc:sqlite:{tmp_path / 'catalog'}")
    iceberg.conf.set(f"{catalog}.warehouse", f"{s3}/lake")
    folder, to = tmp_path / "j", "bucket.plant.messages"
    iceberg.sql("CREATE NAMESPACE bucket.plant")
    for first in (0, 20):
        written(folder, 20, first=first)
        assert job.run(iceberg, str(folder), to, "iceberg") == job.AppendResult(20, 0, first + 20)
    job.FORMATS["iceberg"].maintain(iceberg, to)
    assert read_archive(iceberg, to, str(folder)).where("route = 'up'").count() == 20
    (file, *_) = iceberg.table(f"{to}.files").collect()
    assert file.file_path.startswith(s3)


def test_iceberg_itself_excludes_another_run(
    iceberg: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that ends between the last look at the table and the commit."""
    folder, to = tmp_path / "j", str(tmp_path / "table")
    written(folder, 20)
    forward, others = job.Iceberg._fast_forward, []

    def beaten(self: job.Iceberg, *given: Any) -> None:
        monkeypatch.setattr(job.Iceberg, "_fast_forward", forward)
        others.append(job.run(iceberg, str(folder), to, "iceberg").rows)
        forward(self, *given)

    monkeypatch.setattr(job.Iceberg, "_fast_forward", beaten)
    for rows in (20, 5):  # into a table that has nothing, and one that has
        with pytest.raises(PipelineError, match="another run has appended"):
            job.run(iceberg, str(folder), to, "iceberg")
        assert others.pop() == rows
        monkeypatch.setattr(job.Iceberg, "_fast_forward", beaten)
        written(folder, 5, first=20)
    assert read_archive(iceberg, to).count() == 25
    refs = iceberg.table(f"{name_of(iceberg, to, 'iceberg')}.refs")
    assert [row.name for row in refs.collect()] == ["main"]


@pytest.mark.parametrize("form", ["delta"], indirect=True)
def test_spark_reads_and_merges_the_table_of_journal_lake(
    tables: SparkSession, form: str, tmp_path: Path
) -> None:
    """Which delta-rs wrote; it goes on behind the files that Spark has merged."""
    lake = pytest.importorskip("gateway.pipeline.lake", reason="the lake needs deltalake")
    folder, to = tmp_path / "j", str(tmp_path / "lake")

    def appended(first: int) -> int:
        written(folder, 200, first=first, block_rows=20, segment_bytes=8_000)
        rows = sum(commit.rows for commit in lake.LakeTable(place_of(to)).append(folder))
        assert rows > 50
        return int(rows)

    behind = appended(0)
    journal = tables.read.format("gateway_journal").load(str(folder)).orderBy("sequence")
    for first in (200, 400):
        found = tables.read.format(form).load(to)
        assert [(one.name, one.dataType) for one in found.schema if one.name != LOW_WATER.name] == [
            (one.name, one.dataType) for one in journal.schema
        ]
        expected = journal.where(f"sequence < {behind}").collect()
        assert found.select(journal.columns).orderBy("sequence").collect() == expected
        tables.sql(f"OPTIMIZE {form}.`{to}`")
        behind += appended(first)
    assert tables.read.format(form).load(to).select("sequence").distinct().count() == behind


@pytest.mark.parametrize("form", ["delta"], indirect=True)
def test_a_table_in_s3(tables: SparkSession, form: str, s3: str, tmp_path: Path) -> None:
    folder, to = tmp_path / "j", f"{s3}/table"
    written(folder, 20)
    assert job.run(tables, str(folder), to, form).rows == 20
    assert read_archive(tables, to).where("route = 'up'").count() == 10


def test_a_session_without_it(spark: SparkSession, run: Run, tmp_path: Path) -> None:
    written(tmp_path / "j", 1)
    given = ("--journal", str(tmp_path / "j"), "--to", str(tmp_path / "t"))
    ran = run("pipeline", "archive", *given, "--format", "iceberg")
    if "iceberg" in tables_of()[0]:
        assert ran.out.startswith("1 rows archived as iceberg"), ran.err
        return
    assert ran.code == 1
    assert ran.err.splitlines()[-1].startswith("there is no Iceberg for Spark 4.")
