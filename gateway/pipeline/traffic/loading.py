"""The recorded traffic that a job is about: rows of a journal in a span of time, and what else is wanted of
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pyspark.sql import functions as F

from gateway.errors import PipelineError
from gateway.pipeline.columns import BY_NAME
from gateway.pipeline.jobs.archive import read_archive

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ALWAYS: Final = ("shard", "sequence", "received", "reason_text")
WORD: Final = re.compile(r"[a-z_]+")


class Span(NamedTuple):
    """Which rows: received from `begin` to before `end` (ISO 8601, UTC unless they say otherwise), and for
    which the SQL condition `where` is true. None: all."""

    begin: str | None = None
    end: str | None = None
    where: str | None = None

    @property
    def columns(self) -> list[str]:
        """The journal's columns that `where` may need."""
        return [word for word in WORD.findall(self.where or "") if word in BY_NAME]


def traffic(
    spark: SparkSession, folder: str, names: Iterable[str], span: Span, *, archive: str | None = None
) -> DataFrame:
    """These columns of a journal's rows, or of an archive's. Raises PipelineError for a time that is none."""
    columns = list(dict.fromkeys((*ALWAYS, *names, *span.columns)))
    if archive is not None:
        return within(read_archive(spark, archive).select(*columns), span)
    rows = spark.read.format("gateway_journal").option("columns", ",".join(columns)).load(folder)
    return within(rows, span)


def within(rows: DataFrame, span: Span) -> DataFrame:
    """The rows in a span. Raises PipelineError for a time that is none."""
    received = F.col("received")
    if span.begin is not None:
        rows = rows.where(received >= F.lit(moment(span.begin)))
    if span.end is not None:
        rows = rows.where(received < F.lit(moment(span.end)))
    return rows if span.where is None else rows.where(span.where)


def moment(text: str) -> datetime:
    """A time that a person wrote. Raises PipelineError."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise PipelineError(
            f"{text!r} is no time; write 2026-05-01T06:00 or 2026-05-01T06:00:00.5Z"
        ) from error
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def rows_at(rows: DataFrame, places: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """The rows with these shards and sequence numbers."""
    by_shard: dict[str, list[int]] = {}
    for shard, sequence in places:
        by_shard.setdefault(shard, []).append(sequence)
    found: list[dict[str, Any]] = []
    for shard, sequences in by_shard.items():
        chosen = rows.where((F.col("shard") == shard) & F.col("sequence").isin(sequences))
        found += (row.asDict() for row in chosen.orderBy("sequence").collect())
    return found
