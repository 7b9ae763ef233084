"""Job `table`: write the messages of a route to a table with the columns of their JSON Schema.

Messages that do not fit the schema are written to a second table. The job is a stream over the journal, which
ends at the journal's end or continues. A message has a row in the journal for each of its targets, and is
inserted once: a Delta Lake table accepts it only if it does not have it, so a micro-batch that Spark repeats
after a kill changes nothing. Parquet has a folder for each micro-batch, which is overwritten. A schema with
more fields than before adds columns, also inside others; one with fewer leaves them null.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pyspark.errors import AnalysisException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StringType, StructField, StructType

from gateway.errors import PipelineError
from gateway.pipeline.archive.tables import (
    FORMATS,
    add_columns,
    create_or_extend,
    insert_new,
    is_table_name,
    read_table,
    utc_date,
)
from gateway.pipeline.exclusive import FolderLease
from gateway.pipeline.jobs.archive import PARQUET
from gateway.pipeline.jobs.batches import check_checkpoint
from gateway.pipeline.jobs.bodies import (
    ADDED,
    CORRUPT,
    BodySchema,
    BodyValidation,
    EventTime,
    additions,
    captured_as,
    merge_types,
    parsed,
)
from gateway.pipeline.jobs.encodings import BodyEncoding
from gateway.pipeline.jobs.registry import Registry
from gateway.pipeline.jobs.schema import column_of, route_of
from gateway.pipeline.progress import Tell
from gateway.pipeline.stores import hadoop_of, place_of, spark_writes
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.pipeline.traffic.rows import ASIDE

MESSAGE: Final = ("shard", "source_endpoint", "received", "slot")
"""Columns that identify a message; all its rows have the same values."""

NEEDED: Final = (
    *(*MESSAGE, "sequence", "source_protocol", "source_address", "source_scope", "source_name"),
    *("client", "message_id", "mapping_version", "reason_text", "body"),
)
FEEDS: Final = ("source_protocol", "source_scope", "source_name")
KEPT: Final = (*MESSAGE, "sequence", "address", "client", "message_id", "mapping_version")
BATCH_ROWS: Final = 500_000  # Rows of a micro-batch, which is cached: about 200 MiB of memory and disk.
BODY: Final = "body"
FAULTS: Final = ("registry_id", "fault", "place")
OTHERS: Final = ("date", "event_time", "schema_version", BODY, *KEPT, *ADDED)  # columns besides captures
NO_TIME: Final = "no valid time at this place"
NO_PLACE: Final = "a value does not fit its column"


class BatchCounts(NamedTuple):
    """Numbers of messages in a micro-batch, by their result.

    `fitting` messages are in the table, and `rejected` messages in the table of rejected messages. `rescued`
    is the number of fitting messages with values that their columns cannot store exactly.
    """

    fitting: int
    rejected: int
    rescued: int = 0


def follow(
    spark: SparkSession,
    journal: str,
    candidate: CandidateMapping,
    name: str,
    schema: BodySchema,
    *,
    to: str,
    rejected: str,
    format_: str = PARQUET,
    event_time: EventTime | None = None,
    checkpoint: str | None = None,
    encoding: Registry | BodyEncoding | None = None,
    available_now: bool = True,
    every: str = "10 seconds",
    count: Callable[[BatchCounts], None] = lambda _: None,
    tell: Tell = lambda _: None,
) -> StreamingQuery:
    """Start a stream that writes the messages of route `name` to the tables `to` and `rejected`.

    Bodies that do not fit `schema` go to `rejected`. Tables are folders, URIs or names. The stream continues
    at its stored position; `checkpoint` is the folder of the position (default: below `to`). `event_time` is
    the field of a body with the time for the column `event_time`. `encoding` has the schemas of bodies in
    Avro or Protobuf. With `available_now` the stream ends at the present end of the journal; otherwise it
    reads new rows at the interval `every`. `count` is called with the numbers of each micro-batch, `tell`
    with lines of text. Raises PipelineError if there is no such route, or if the table has other columns.
    """
    if is_table_name(to) and checkpoint is None:
        raise PipelineError(f"{to} is the name of a table: set --checkpoint to a folder for the position")
    if format_ not in (PARQUET, *FORMATS):
        raise PipelineError(f"a route's table is parquet or {' or '.join(FORMATS)}, not {format_}")
    targets = [one if is_table_name(one) else _writable_folder(spark, one) for one in (to, rejected)]
    good, bad = _Target(spark, targets[0], format_), _Target(spark, targets[1], format_)
    checkpoint_folder = targets[0] if checkpoint is None else _writable_folder(spark, checkpoint)
    if format_ == PARQUET:
        for one in targets:
            check_checkpoint(place_of(one, hadoop_of(spark)), place_of(checkpoint_folder, hadoop_of(spark)))
    captures = route_of(candidate, name).pattern.names
    kind = schema.kind
    there = good.existing_schema()
    if there is not None and BODY in there.fieldNames():
        kind = _struct(merge_types(there[BODY].dataType, kind, BODY))
    rows = spark.readStream.format("gateway_journal").options(
        columns=",".join(NEEDED),
        routes=name,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=str(BATCH_ROWS),
    )
    conversion = _TableConversion(candidate, name, tuple(captures), schema, kind, event_time, encoding)
    sample = spark.createDataFrame([], _source_schema(spark, journal))
    conversion.kind = good.prepare_table(conversion.table_rows(conversion(sample)), kind)
    bad.prepare_table(conversion.faulty(conversion(sample)), kind)

    def write(batch: DataFrame, number: int) -> None:
        lease.check()
        whole = conversion(batch).persist()
        try:
            rescued = F.count(F.when(F.col("fault").isNull(), F.col("rescued")))
            found = whole.agg(F.count("*"), F.count("fault"), rescued).first()
            assert found is not None
            done = BatchCounts(found[0] - found[1], found[1], found[2])
            if done.fitting:
                good.write(conversion.table_rows(whole), number)
            if done.rejected:
                bad.write(conversion.faulty(whole), number)
        finally:
            whole.unpersist()
        count(done)
        if any(done):
            tell(
                f"table: {done.fitting} messages more in {to}, {done.rescued} of them with rescued values;"
                f" {done.rejected} that do not fit in {rejected}"
            )

    writer = rows.load(journal).writeStream.foreachBatch(write).queryName(f"table {name}")
    writer = writer.option("checkpointLocation", f"{checkpoint_folder}/_checkpoint")
    ready = writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime=every)
    folders = [checkpoint_folder, *targets] if format_ == PARQUET else [checkpoint_folder]
    lease = FolderLease(place_of(folder, hadoop_of(spark)) for folder in folders)
    return lease.start_stream(ready.start)


def _writable_folder(spark: SparkSession, to: str) -> str:
    """Return the name of the folder `to` for Spark's writers. Raises PipelineError if it is unreachable."""
    return spark_writes(spark, place_of(to, hadoop_of(spark)))


def _source_schema(spark: SparkSession, journal: str) -> StructType:
    return spark.read.format("gateway_journal").option("columns", ",".join(NEEDED)).load(journal).schema


def _struct(found: object) -> StructType:
    assert isinstance(found, StructType)
    return found


class _TableConversion:
    """Conversion of journal rows to rows for the table and for the table of rejected messages.

    `kind` is the type of a message body in both tables.
    """

    def __init__(
        self,
        candidate: CandidateMapping,
        name: str,
        captures: tuple[str, ...],
        schema: BodySchema,
        kind: StructType,
        event_time: EventTime | None,
        encoding: Registry | BodyEncoding | None,
    ) -> None:
        self._candidate = candidate
        self._route = name
        self._captures = captures
        self._schema = schema.text
        self._version = schema.version
        self._event_time = event_time
        self._encoding = encoding
        self.kind = kind

    def __call__(self, batch: DataFrame) -> DataFrame:
        """Return each message of a micro-batch once, with its parsed body, or the error and its location.

        The error is in the column `fault`, its location in the body in `place`.
        """
        once = batch.where(~F.coalesce(F.expr(ASIDE), F.lit(False))).dropDuplicates(list(MESSAGE))
        rows = once.select(
            *(*MESSAGE, "sequence", F.col("source_address").alias("address")),
            *("client", "message_id", "mapping_version", BODY),
            *(F.col(one).alias(one.removeprefix("source_")) for one in FEEDS),
        )
        plain = StructType(
            [
                *(StructField(one.name, one.dataType) for one in rows.schema.fields),
                StructField(ADDED[0], LongType()),
                *(StructField(one, StringType()) for one in ADDED[1:]),
                *(StructField(captured_as(one), StringType()) for one in self._captures),
            ]
        )
        validation = BodyValidation(
            self._candidate, self._route, self._captures, self._schema, self.kind, self._encoding
        )
        found = rows.mapInArrow(validation, plain).withColumn("parsed", parsed(self.kind))
        misplaced = F.col("parsed").isNull() | F.col(f"parsed.{CORRUPT}").isNotNull()
        fault = F.when(F.col("fault").isNull() & misplaced, NO_PLACE).otherwise(F.col("fault"))
        found = found.withColumn("fault", fault).withColumn("schema_version", F.lit(self._version))
        found = found.withColumn("date", utc_date())
        if self._event_time is None:
            return found
        value, time = self._event_time.column(F.col("parsed"), self.kind)
        none = F.col("fault").isNull() & value.isNotNull() & time.isNull()
        return found.withColumns(
            {
                "event_time": time,
                "place": F.when(none, "/".join(self._event_time.path)).otherwise(F.col("place")),
                "fault": F.when(none, NO_TIME).otherwise(F.col("fault")),
            }
        )

    def table_rows(self, found: DataFrame) -> DataFrame:
        """Return the rows for the table: the messages that fit the schema."""
        times = [] if self._event_time is None else ["event_time"]
        body: Column = F.col("parsed").dropFields(CORRUPT).alias(BODY)
        captures = [F.col(captured_as(one)).alias(column_of(one, OTHERS)) for one in self._captures]
        rows = found.where(F.col("fault").isNull())
        return rows.select("date", *KEPT, *times, "schema_version", "registry_id", "rescued", *captures, body)

    def faulty(self, found: DataFrame) -> DataFrame:
        """Return the rows for the table of rejected messages, which do not fit the schema."""
        rows = found.where(F.col("fault").isNotNull()).withColumn("route", F.lit(self._route))
        return rows.select("date", "route", *KEPT, "schema_version", *FAULTS, BODY)


def _compared(to: str, there: StructType, fields: Mapping[str, str]) -> None:
    for one in there.fields:
        expected_type = fields.get(one.name, one.dataType.simpleString())
        if one.name != BODY and one.dataType.simpleString() != expected_type:
            raise PipelineError(
                f"the column {one.name} of {to} is {one.dataType.simpleString()}, not {expected_type}"
            )


class _Target:
    """Table or folder of Parquet files that the job writes to."""

    def __init__(self, spark: SparkSession, to: str, format_: str) -> None:
        self._spark = spark
        self._to = to
        self._format = format_

    def existing_schema(self) -> StructType | None:
        """Return the columns of the table, or None if it does not exist."""
        try:
            if self._format in FORMATS:
                return read_table(self._spark, self._to, self._format).schema
            return self._spark.read.option("mergeSchema", "true").parquet(self._to).schema
        except AnalysisException:
            return None

    def prepare_table(self, rows: DataFrame, kind: StructType) -> StructType:
        """Create the table, or add missing columns. Return the type of bodies in it.

        `kind` is the type of the bodies in `rows`. Raises PipelineError if a column of the table has another
        type.
        """
        there = self.existing_schema()
        fields = {one.name: one.dataType.simpleString() for one in rows.schema.fields}
        if self._format not in FORMATS:
            if there is not None:
                _compared(self._to, there, fields)
            return kind
        if there is not None and BODY in there.fieldNames():
            before = there[BODY].dataType
            if isinstance(before, StructType):
                add_columns(self._spark, self._to, self._format, dict(additions(before, kind, BODY)))
        create_or_extend(self._spark, FORMATS[self._format], self._to, fields, ("date",))
        found = read_table(self._spark, self._to, self._format).schema[BODY].dataType
        return found if isinstance(found, StructType) else kind

    def write(self, rows: DataFrame, number: int) -> None:
        """Write the rows of micro-batch `number`; writing the same micro-batch again changes nothing."""
        if self._format in FORMATS:
            insert_new(self._spark, self._to, self._format, rows, MESSAGE)
        else:
            rows.write.mode("overwrite").parquet(f"{self._to}/batch={number}")
