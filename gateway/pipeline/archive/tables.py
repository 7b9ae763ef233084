"""Archives in tables of Delta Lake and Iceberg.

These formats have snapshots, merging, retention and schema evolution of their own.

A run appends the rows since the last run in a single commit, which also contains the position in the journal:
both are stored, or neither is. Of two concurrent runs one fails: each appends with a number that only one
commit may have, and that follows from the starting position. No other state exists, so a run takes effect
completely or not at all. If the table has dropped the commit (Delta keeps its log for a month), the position
is computed from the rows themselves.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol
from uuid import uuid4

from py4j.protocol import Py4JJavaError
from pyarrow import fs
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from gateway.errors import PipelineError
from gateway.pipeline.columns import spark_schema
from gateway.pipeline.exclusive import store_time
from gateway.pipeline.journal.options import Offsets, options_of
from gateway.pipeline.journal.planner import bounded, next_of, reader_of
from gateway.pipeline.journal.table import read_journal
from gateway.pipeline.progress import Tell, progress
from gateway.pipeline.stores import StoreFolder, hadoop_of, place_of, spark_reaches, spark_writes

POSITION: Final = "gateway.offsets"
RUN: Final = "gateway.run"
"""Keys, in a commit, of the position and of the run that made it."""

LOOKED_AT: Final = 20  # Recent commits that are searched before all are.
CATALOG: Final = "gateway_tables"
FRESH: Final = "gateway_fresh_rows"
OF_SPARK: Final = (
    *("org.apache.hadoop", "org.apache.parquet", "org.slf4j", "org.apache.logging.log4j", "org.scala-lang"),
    *("com.fasterxml.jackson.core", "com.fasterxml.jackson.datatype", "org.roaringbitmap", "io.airlift"),
)
"""Packages that Spark has in its own versions, and that are excluded from the dependencies of table
formats."""

DAY_US: Final = 86_400_000_000
PARTS: Final = ("date", "route")


class AppendResult(NamedTuple):
    """Result of a run: numbers of appended rows, of rows missing in the journal, and of the table's rows."""

    rows: int
    missing: int
    total_rows: int


class JournalPosition(NamedTuple):
    """Position in the journal up to which a table has the journal's rows.

    `offsets` has, for each shard, the number of the next row that is not in the table. `version` is the
    version of the table that contains this position, and `at_us` the time of its commit in microseconds UTC.
    """

    offsets: Offsets
    at_us: int
    version: int


def overtaken_error(table: str) -> PipelineError:
    """Return the error for a run during which another run has appended rows to the table."""
    return PipelineError(f"another run has appended to {table}; restart this run, and run only one at a time")


class TableFormat(Protocol):
    """Interface of a table format, such as Delta Lake; `name` is Spark's name of the format."""

    name: str
    mark: str
    """Folder inside a table by which the format is recognised."""

    options: Mapping[str, str]
    """Options of a Spark session that uses the format."""

    properties: Mapping[str, str]
    """Properties of a new table."""

    def packages(self, spark: str) -> str:
        """Return the Maven package of the format for the Spark version `spark`, such as "4.1.0".

        Raises PipelineError if the format has no package for this version.
        """

    def table(self, spark: SparkSession, place: StoreFolder) -> str:
        """Return the name, for SQL statements, of the table in the folder `place`."""

    def column_type(self, kind: str) -> str:
        """Return the column type by which a table of this format stores values of the Spark type `kind`."""

    def append(self, spark: SparkSession, table: str, rows: DataFrame, offsets: Offsets, begun: int) -> int:
        """Append rows and store the journal position `offsets` in one commit. Return the number of rows.

        `begun` is the version of the table in which the run has read the position where `rows` begin. Raises
        PipelineError if another run has appended rows since that version.
        """

    def newest(self, spark: SparkSession, table: str) -> int:
        """Return the newest version of the table."""

    def position(self, spark: SparkSession, table: str) -> JournalPosition | None:
        """Return the newest journal position in the table's commits, or None if no commit has one."""

    def maintain(self, spark: SparkSession, table: str) -> None:
        """Merge small files, and delete old versions as the table's properties require."""


class Delta:
    """Table format Delta Lake."""

    name = "delta"
    mark = "_delta_log"
    options: Mapping[str, str] = {
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        # VACUUM lists folders in this many tasks, however few folders there are; Spark's default is 10 000.
        "spark.sql.sources.parallelPartitionDiscovery.parallelism": "16",
    }
    properties: Mapping[str, str] = {}

    def packages(self, spark: str) -> str:
        """Return the Maven package of Delta Lake for Spark 4.1 or 4.2.

        Raises PipelineError for any other release.
        """
        release = ".".join(spark.split(".")[:2])
        if release not in ("4.1", "4.2"):
            raise PipelineError(f"Delta Lake does not support Spark {spark}; use pyspark 4.2")
        return f"io.delta:delta-spark_{release}_2.13:4.4.0"

    def table(self, spark: SparkSession, place: StoreFolder) -> str:
        """Return the SQL name of the table in the folder `place`. The name contains the folder's path."""
        return f"delta.`{spark_reaches(spark, place)}`"

    def column_type(self, kind: str) -> str:
        """Return the Spark type unchanged, because Delta Lake has all types of Spark."""
        return kind

    def append(self, spark: SparkSession, table: str, rows: DataFrame, offsets: Offsets, begun: int) -> int:
        """Append rows and store the journal position `offsets` in one commit. Return the number of rows.

        `begun` is the version of the table in which the run has read the position where `rows` begin. `begun`
        + 1 is the transaction number of the commit, and Delta Lake accepts each number once. Raises
        PipelineError if another run has appended rows since `begun`.
        """
        name = uuid4().hex
        text = json.dumps({POSITION: offsets, RUN: name})
        # Delta applies a version of an application once: it skips a later commit with the same version, and a
        # concurrent one fails.
        options = {"userMetadata": text, "txnAppId": POSITION, "txnVersion": str(begun + 1)}
        try:
            rows.writeTo(table).options(**options).append()
        except (PySparkException, Py4JJavaError) as error:
            if "ConcurrentTransactionException" in str(error) or "CONCURRENT_TRANSACTION" in str(error):
                raise overtaken_error(table) from error
            raise
        found = self._newest_commit(spark, table, name)
        if found is None:
            raise overtaken_error(table)
        return int(found["operationMetrics"]["numOutputRows"])

    def position(self, spark: SparkSession, table: str) -> JournalPosition | None:
        """Return the newest journal position that the metadata of the table's commits contain, or None."""
        row = self._newest_commit(spark, table, POSITION)
        if row is None:
            return None
        offsets = _offsets(json.loads(row["userMetadata"])[POSITION])
        return JournalPosition(offsets, row["at_us"], row["version"])

    def newest(self, spark: SparkSession, table: str) -> int:
        """Return the newest version in the table's history."""
        (row,) = spark.sql(f"DESCRIBE HISTORY {table} LIMIT 1").collect()
        return int(row["version"])

    @staticmethod
    def _newest_commit(spark: SparkSession, table: str, word: str) -> Row | None:
        """Return the newest commit whose metadata contain the text `word`, or None if there is none.

        Recent commits are searched first, because each commit is a file to read.
        """
        for most in (LOOKED_AT, None):
            limit = "" if most is None else f" LIMIT {most}"
            history = spark.sql(f"DESCRIBE HISTORY {table}{limit}").withColumn(
                "at_us", F.unix_micros("timestamp")
            )
            rows = history.select("version", "at_us", "userMetadata", "operationMetrics").collect()
            matching = [row for row in rows if word in (row["userMetadata"] or "")]
            if matching or most is None or len(rows) < most:
                return max(matching, key=lambda row: int(row["version"]), default=None)
        return None

    def maintain(self, spark: SparkSession, table: str) -> None:
        """Merge small files with OPTIMIZE, and delete files of expired versions with VACUUM."""
        spark.sql(f"OPTIMIZE {table}").collect()
        spark.sql(f"VACUUM {table}").collect()


class Iceberg:
    """Table format Apache Iceberg.

    Each folder is a table in a Hadoop catalog whose warehouse is the parent folder. Concurrent appends do not
    conflict in Iceberg. To detect another run, rows are appended to a branch, and the table is fast-forwarded
    to the branch: Iceberg permits this only if nothing was committed since the branch was created.
    """

    name = "iceberg"
    mark = "metadata"
    options: Mapping[str, str] = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
    }
    properties: Mapping[str, str] = {
        # Each commit rewrites the list of all snapshots and would keep the previous list.
        "write.metadata.delete-after-commit.enabled": "true",
        "history.expire.max-snapshot-age-ms": str(DAY_US // 1_000),
    }

    def packages(self, spark: str) -> str:
        """Return the Maven package of Iceberg for Spark 4.1.

        Raises PipelineError for any other release.
        """
        if not spark.startswith("4.1."):
            raise PipelineError(
                f"there is no Iceberg for Spark {spark}; for Spark 4.1, which has no streams, there is:"
                " pip install 'pyspark==4.1.*'; or take delta"
            )
        return "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"

    def table(self, spark: SparkSession, place: StoreFolder) -> str:
        """Return the name, for SQL statements, of the table in the folder `place`.

        The session gets a Hadoop catalog for the parent folder.
        """
        parent, _, name = spark_reaches(spark, place).rpartition("/")
        catalog = f"{CATALOG}_{zlib.crc32(parent.encode())}"
        spark.conf.set(f"spark.sql.catalog.{catalog}", "org.apache.iceberg.spark.SparkCatalog")
        spark.conf.set(f"spark.sql.catalog.{catalog}.type", "hadoop")
        spark.conf.set(f"spark.sql.catalog.{catalog}.warehouse", parent)
        return f"{catalog}.`{name}`"

    def column_type(self, kind: str) -> str:
        """Return the column type for the Spark type `kind`; integers below 32 bits become 32-bit integers."""
        return "int" if kind in ("tinyint", "smallint") else kind

    def append(self, spark: SparkSession, table: str, rows: DataFrame, offsets: Offsets, begun: int) -> int:
        """Append rows and store the journal position `offsets` in one commit. Return the number of rows.

        `begun` is the version of the table in which the run has read the position where `rows` begin. The
        rows are written to a branch, and the table is fast-forwarded to the branch. Raises PipelineError if
        another run has appended rows since `begun`.
        """
        branch = f"gateway_{uuid4().hex}"
        # A branch of an interrupted run expires with its snapshots.
        spark.sql(f"ALTER TABLE {table} CREATE BRANCH {branch} RETAIN 1 DAYS")
        try:
            now = self.position(spark, table)
            if begun != (self.newest(spark, table) if now is None else now.version):
                raise overtaken_error(table)
            options = {
                f"snapshot-property.{POSITION}": json.dumps(offsets),
                f"snapshot-property.{RUN}": branch,
            }
            rows.writeTo(f"{table}.branch_{branch}").options(**options).append()
            self._fast_forward(spark, table, branch)
        finally:
            spark.sql(f"ALTER TABLE {table} DROP BRANCH {branch}")
        return next(row["added"] or 0 for row in self._history(spark, table) if row["run"] == branch)

    def _fast_forward(self, spark: SparkSession, table: str, branch: str) -> None:
        """Fast-forward the table to `branch`, which contains the appended rows.

        Raises PipelineError if another run has appended rows since the branch was created.
        """
        catalog, name = self._named(spark, table)
        try:
            spark.sql(
                f"CALL {catalog}.system.fast_forward(table => '{name}', branch => 'main', to => '{branch}')"
            ).collect()
        except (PySparkException, Py4JJavaError) as error:
            if "fast-forward" in str(error) or "CommitFailedException" in str(error):
                raise overtaken_error(table) from error
            raise

    def newest(self, spark: SparkSession, table: str) -> int:
        """Return the id of the table's newest snapshot, or 0 if it has none."""
        row = next(self._history(spark, table), None)
        return 0 if row is None else int(row["snapshot_id"])

    def position(self, spark: SparkSession, table: str) -> JournalPosition | None:
        """Return the newest journal position in the properties of the table's snapshots, or None."""
        for row in self._history(spark, table):
            if row["offsets"] is not None:
                return JournalPosition(_offsets(json.loads(row["offsets"])), row["at_us"], row["snapshot_id"])
        return None

    def maintain(self, spark: SparkSession, table: str) -> None:
        """Merge small files, delete old snapshots, and delete files that no snapshot refers to."""
        catalog, name = self._named(spark, table)
        for procedure in ("rewrite_data_files", "expire_snapshots", "remove_orphan_files"):
            spark.sql(f"CALL {catalog}.system.{procedure}(table => '{name}')").collect()

    @staticmethod
    def _history(spark: SparkSession, table: str) -> Iterator[Row]:
        """Yield the table's current snapshot and its ancestors, newest first, but none of other branches."""
        spark.sql(f"REFRESH TABLE {table}")  # A catalog caches the table for half a minute.
        main = spark.table(f"{table}.refs").where("name = 'main'").first()
        summary = F.col("summary")
        snapshots = spark.table(f"{table}.snapshots").select(
            "snapshot_id",
            "parent_id",
            F.unix_micros("committed_at").alias("at_us"),
            summary[POSITION].alias("offsets"),
            summary[RUN].alias("run"),
            summary["added-records"].cast("long").alias("added"),
        )
        found = {row["snapshot_id"]: row for row in snapshots.collect()}
        row = None if main is None else found.get(main["snapshot_id"])
        while row is not None:
            yield row
            row = found.get(row["parent_id"])

    @staticmethod
    def _named(spark: SparkSession, table: str) -> tuple[str, str]:
        """Split a table's SQL name into the catalog's name and the table's name in the catalog."""
        catalog, _, name = table.partition(".")
        if spark.conf.get(f"spark.sql.catalog.{catalog}", None) is None:
            return spark.catalog.currentCatalog(), table
        return catalog, name


FORMATS: Final[Mapping[str, TableFormat]] = {one.name: one for one in (Delta(), Iceberg())}


def is_table_name(text: str) -> bool:
    """Return True if `text` is a table name in a catalog, and False if it is a folder."""
    return "/" not in text and "." in text.strip(".")


def format_at(place: StoreFolder) -> TableFormat | None:
    """Return the format of the table in the folder `place`, or None if it contains no table.

    Raises PipelineError if the store is unreachable.
    """
    system, path = place.check_reachable().arrow()
    for found in FORMATS.values():
        if system.get_file_info(f"{path}/{found.mark}").type == fs.FileType.Directory:
            return found
    return None


def session_options(
    formats: set[str], spark: str, user_options: Mapping[str, str], *, fetch: bool
) -> dict[str, str]:
    """Return the Spark session options that the table formats `formats` need.

    Options that are in `user_options` are left out. `spark` is the version of Spark. With `fetch`, Spark
    downloads the formats' packages unless `user_options` name jars. Raises PipelineError for an unsupported
    version of Spark.
    """
    found: dict[str, str] = {}
    packages = []
    for one in (FORMATS[name] for name in sorted(formats)):
        for key, value in one.options.items():
            if key == "spark.sql.extensions":
                value = ",".join(filter(None, (found.get(key), value)))
            found[key] = value
        package = one.packages(spark)
        if fetch and not {"spark.jars", "spark.jars.packages"} & set(user_options):
            packages.append(package)
    if packages:
        found["spark.jars.packages"] = ",".join(packages)
        found["spark.jars.excludes"] = ",".join(f"{group}:*" for group in OF_SPARK)
    return {key: value for key, value in found.items() if key not in user_options}


def run(
    spark: SparkSession,
    journal: str,
    to: str,
    format_: str,
    *,
    keep_days: int | None = None,
    fail: bool = True,
    today: date | None = None,
    tell: Tell = lambda _: None,
) -> AppendResult:
    """Append the journal's new rows to the table `to`, which is a folder, a URI or a name.

    `format_` is the table format. The rows of days more than `keep_days` days before `today` are deleted;
    `keep_days` None deletes none, and `today` None means the current day (UTC). If `fail` is False, rows that
    were deleted or damaged before they were appended are skipped. `tell` is called with lines of text that
    report the progress. Once a day the table's small files are merged, and its old versions expire. Raises
    PipelineError, and errors of the journal's reader.
    """
    form = FORMATS[format_]
    with progress(spark, "archive", tell):
        table = _archive_table(spark, form, to)
        newest, position = form.newest(spark, table), form.position(spark, table)
        before = position.offsets if position is not None else _position_of_rows(spark, table)
        starts, ends = rows_since(spark, journal, before, fail=fail)
        rows = missing = 0
        if any(ends[shard] > starts[shard] for shard in ends):
            options = range_options(starts, ends) | {"failOnDataLoss": str(fail).lower()}
            found = read_journal(spark, journal, options)
            dated = found.withColumn("date", utc_date())
            begun = newest if position is None else position.version
            rows = form.append(spark, table, dated, before | ends, begun)
            missing = sum(ends.values()) - sum(starts.values()) - rows
        if keep_days is not None:
            oldest = (today or _today(spark, to)) - timedelta(days=keep_days)
            spark.sql(f"DELETE FROM {table} WHERE date < DATE'{oldest.isoformat()}'").collect()
        if rows and position is not None and position.at_us // DAY_US < time.time() * 1e6 // DAY_US:
            form.maintain(spark, table)  # Once a day, since it takes longer than a run.
        return AppendResult(rows, missing, spark.table(table).count())


def _today(spark: SparkSession, to: str) -> date:
    """Return the current date (UTC) by the clock of the store that contains the table `to`.

    For a table in a catalog, the clock of this machine is used.
    """
    if is_table_name(to):
        return datetime.now(UTC).date()
    system, root = place_of(to, hadoop_of(spark)).arrow()
    return datetime.fromtimestamp(store_time(system, root), UTC).date()


def upsert(spark: SparkSession, to: str, format_: str, rows: DataFrame, keys: Sequence[str]) -> None:
    """Write rows into the table `to`, replacing the rows that have the same values in the columns `keys`.

    `format_` is the table format. Raises PipelineError if a column has another type, or if the session does
    not support the format.
    """
    table = prepare_table(spark, to, format_, rows)
    rows.createOrReplaceTempView(FRESH)
    alike = " AND ".join(f"there.`{key}` = fresh.`{key}`" for key in keys)
    spark.sql(
        f"MERGE INTO {table} there USING {FRESH} fresh ON {alike}"
        " WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
    ).collect()


def insert_new(spark: SparkSession, to: str, format_: str, rows: DataFrame, keys: Sequence[str]) -> None:
    """Insert those of `rows` that the existing table `to` does not have yet.

    A row is inserted if no row of the table has the same values in the columns `date` and `keys`.
    """
    session = rows.sparkSession  # The session of a stream is another one, with its own views.
    rows.createOrReplaceTempView(FRESH)
    dates = ", ".join(f"DATE'{row[0]}'" for row in rows.select("date").distinct().collect())
    alike = " AND ".join(f"there.`{key}` = fresh.`{key}`" for key in ("date", *keys))
    session.sql(
        f"MERGE INTO {_name_of(spark, to, format_)} there USING {FRESH} fresh"
        f" ON there.date IN ({dates}) AND {alike} WHEN NOT MATCHED THEN INSERT *"
    ).collect()


def add_columns(spark: SparkSession, to: str, format_: str, columns: Mapping[str, str]) -> None:
    """Add columns to the table `to`; `columns` maps their SQL names to types.

    The name `body.unit` stands for a field inside the column `body`.
    """
    if columns:
        added = ", ".join(f"{name} {kind}" for name, kind in columns.items())
        spark.sql(f"ALTER TABLE {_name_of(spark, to, format_)} ADD COLUMNS ({added})")


def prepare_table(spark: SparkSession, to: str, format_: str, rows: DataFrame) -> str:
    """Create the table `to` with the columns of `rows`, or add those that it lacks; return its SQL name.

    Raises PipelineError if a column has another type, or if the session does not support the format.
    """
    return create_or_extend(
        spark, FORMATS[format_], to, {one.name: one.dataType.simpleString() for one in rows.schema.fields}
    )


def read_table(spark: SparkSession, to: str, format_: str) -> DataFrame:
    """Return the rows of the table `to` as a DataFrame."""
    return spark.table(_name_of(spark, to, format_))


def _name_of(spark: SparkSession, to: str, format_: str) -> str:
    """Return the SQL name of the table `to`."""
    return to if is_table_name(to) else FORMATS[format_].table(spark, place_of(to, hadoop_of(spark)))


def utc_date() -> Column:
    """Return a column with the day (UTC) of the column `received`, independent of the session's time zone."""
    return F.date_from_unix_date(F.floor(F.unix_micros("received") / DAY_US).cast("int"))


def _archive_table(spark: SparkSession, form: TableFormat, to: str) -> str:
    """Create the archive table `to`, or add the journal's columns that it lacks. Return its SQL name.

    `form` is the table format.
    """
    schema = spark_schema().add("date", "date")
    return create_or_extend(
        spark, form, to, {one.name: one.dataType.simpleString() for one in schema.fields}, PARTS
    )


def create_or_extend(
    spark: SparkSession, form: TableFormat, to: str, columns: Mapping[str, str], parts: tuple[str, ...] = ()
) -> str:
    """Create the table `to`, or add the columns that it lacks, and return its SQL name.

    `form` is the table format, `columns` maps names to Spark types, and `parts` are the partition columns of
    a new table. Raises PipelineError if a column has another type, or if the session does not support the
    format.
    """
    if not is_table_name(to):
        spark_writes(spark, place_of(to, hadoop_of(spark)))
    table = _name_of(spark, to, form.name)
    columns = {name: form.column_type(kind) for name, kind in columns.items()}
    stated = ", ".join(f"`{name}` {kind}" for name, kind in columns.items())
    parted = f" PARTITIONED BY ({', '.join(parts)})" if parts else ""
    own = ", ".join(f"'{name}' = '{value}'" for name, value in form.properties.items())
    owned = f" TBLPROPERTIES ({own})" if own else ""
    try:
        spark.sql(f"CREATE TABLE IF NOT EXISTS {table} ({stated}) USING {form.name}{parted}{owned}")
        there = {one.name: one.dataType.simpleString() for one in spark.table(table).schema.fields}
        fresh = {name: kind for name, kind in columns.items() if name not in there}
        if fresh:
            added = ", ".join(f"`{name}` {kind}" for name, kind in fresh.items())
            spark.sql(f"ALTER TABLE {table} ADD COLUMNS ({added})")
    except (PySparkException, Py4JJavaError) as error:
        raise PipelineError(f"{to} cannot be created as a table of {form.name}: {_text_of(error)}") from error
    for name, kind in columns.items():
        if name in there and there[name] != kind:
            raise PipelineError(f"the column {name} of {to} is {there[name]}, but should be {kind}")
    return table


def _text_of(error: PySparkException | Py4JJavaError) -> str:
    """Return the first line of Spark's error text."""
    text = str(error.java_exception if isinstance(error, Py4JJavaError) else error)
    return text.strip().partition("\n")[0]


def _offsets(numbers: Any) -> Offsets:
    return {str(shard): int(number) for shard, number in numbers.items()}


class TableName(NamedTuple):
    """SQL name of a table, and its format (`form`): None if the pipeline does not support the format."""

    name: str
    form: TableFormat | None


def table_at(spark: SparkSession, path: str) -> TableName | None:
    """Return the table with the name `path`, or in the folder `path`. Return None if the folder has no table.

    Raises PipelineError if the store is unreachable.
    """
    if is_table_name(path):
        provider = spark.sql(f"DESCRIBE TABLE EXTENDED {path}").where("col_name = 'Provider'").first()
        return TableName(path, None if provider is None else FORMATS.get(provider["data_type"].lower()))
    place = place_of(path, hadoop_of(spark))
    form = format_at(place)
    return None if form is None else TableName(form.table(spark, place), form)


def snapshot(spark: SparkSession, table: TableName) -> tuple[DataFrame, Offsets]:
    """Return the rows of an archive table, and the journal position up to which it has the journal's rows.

    Raises PipelineError if the table has no position.
    """
    name, form = table
    if form is None:
        raise PipelineError(
            f"{name} has no position in the journal, which only these formats have: {', '.join(FORMATS)}"
        )
    while True:
        before = form.position(spark, name)
        rows = spark.table(name)
        if form.position(spark, name) == before:  # Otherwise a run has appended in between.
            return rows, _position_of_rows(spark, name) if before is None else before.offsets


def _position_of_rows(spark: SparkSession, table: str) -> Offsets:
    """Return the journal position of an archive table, computed from its rows.

    This is for a table whose commits have no position.
    """
    rows: list[Row] = spark.table(table).groupBy("shard").agg(F.max("sequence") + 1).collect()
    return {row[0]: row[1] for row in rows}


def range_options(starts: Offsets, ends: Offsets) -> dict[str, str]:
    """Return options of the journal source that select rows by their numbers.

    `starts` and `ends` have row numbers by shard: the first row, and the row before which reading ends.
    Shards that are not in `ends` are excluded.
    """
    return {
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "shards": json.dumps(sorted(ends)),
    }


def rows_since(
    spark: SparkSession, journal: str, before: Offsets, *, fail: bool = True
) -> tuple[Offsets, Offsets]:
    """Return the range of the journal's rows that follow the position `before`.

    The range is two dictionaries of row numbers by shard: first rows, and exclusive ends. Raises
    PipelineError if the journal ends before that position, unless `fail` is False.
    """
    load_options = {"path": journal, "failOnDataLoss": str(fail).lower()}
    options = options_of(load_options, stream=False, hadoop=hadoop_of(spark))
    reader = reader_of(options)
    with reader.cached_listing():
        shards = reader.shards()
        starts = bounded(reader, options.start, shards)
        starts |= {shard: number for shard, number in before.items() if shard in starts}
        ends = {shard: next_of(reader, shard) for shard in shards}
    for shard, number in starts.items():
        if ends[shard] < number and fail:
            raise PipelineError(
                f"shard {shard} of the journal in {journal} ends before row {ends[shard]}, and the archive"
                f" has the rows before {number}: its end is lost, or it is another journal; --skip-lost goes"
                " on"
            )
        ends[shard] = max(ends[shard], number)
    return starts, ends
