"""Job `lake`: append the rows of complete segments to a Delta table on a disk or in S3, without Spark.

The columns are those of a segment in Parquet. The position is part of the table: each commit appends rows of
one shard, and contains a transaction with an identifier for the shard and, as version, the number of the next
row that is not in the table. Rows and position are stored both or not at all, so a run that was killed is
continued by the next one. A commit fails if another run has committed a transaction of the same shard since
this run read the position. Files of a commit that was not completed are in the folder, but not in the table;
`VACUUM` deletes them. The segment in use is not read: its rows follow when it is complete.

In S3, which has no exclusive creation of files, a commit is a conditional request (`If-None-Match`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow, arrow_schema
from gateway.pipeline.journal.arrow import batch_of, expand_runs
from gateway.pipeline.journal.parquet_writer import GROUP_ROWS, NAMES
from gateway.pipeline.stores import StoreFolder, s3_options
from gateway.store.journal.format import DamageError, JournalError
from gateway.store.journal.reader import Gap, JournalReader

TABLE_NAME: Final = "gateway journal"
"""Name, in the metadata of a table, by which a table of this job is recognised."""

POSITION: Final = "gateway.journal/"
"""Beginning of the identifier of a shard's transactions; the name of the shard follows."""

ARCHIVE: Final = "gateway.offsets"
"""Identifier of the transactions of `gateway pipeline archive`, which has its own position."""

COMMIT_ROWS: Final = 1_000_000
COMMIT_BYTES: Final = 64 * 1_048_576
"""Rows, and bytes in the journal, after which a commit ends. A killed run repeats it, and memory holds it."""

LOG: Final = "_delta_log"


S3: Final = ("s3a", "s3")
"""Schemes of stores to which the job writes; others are not tested."""


class LakeCommit(NamedTuple):
    """Result of one commit: the number of appended rows, and the gaps (missing rows) among them."""

    rows: int
    gaps: list[Gap]


class LakeTable:
    """Delta table in the folder `to`, on this machine or in S3, to which the rows of a journal are appended.

    With `skip_lost`, damaged rows become a gap; otherwise they raise DamageError.
    """

    def __init__(self, to: StoreFolder, *, skip_lost: bool = False) -> None:
        """Open the table in the folder `to`, or create it.

        Raises PipelineError if the folder has other files or another table, or cannot be written.
        """
        self._to = to.uri
        self._skip_lost = skip_lost
        options = storage_options(to)
        try:
            self._table = _open_or_create(to.check_reachable(), options)
        except (DeltaError, OSError) as error:
            raise PipelineError(f"{to.uri} cannot be opened as a Delta table: {error}") from error
        if self._table.metadata().name != TABLE_NAME:
            raise PipelineError(
                f"{to.uri} is a table that this command did not create, so its position is unknown; give"
                " another folder"
            )

    def append(self, journal: Path) -> Iterator[LakeCommit]:
        """Append the rows of complete journal segments that the table lacks. Yield the result of each commit.

        Raises PipelineError if another run appends at the same time, or if the table cannot be written, and
        JournalError if the journal cannot be read.
        """
        reader = JournalReader(journal, skip=True, expand=expand_runs)
        try:
            for shard in reader.shards():
                while (commit := self._append(reader, shard)) is not None:
                    yield commit
        except OSError as error:
            raise PipelineError(f"{journal} cannot be read, or {self._to} be written: {error}") from error

    def position(self, shard: str) -> int | None:
        """Return the number of a shard's next row that is not in the table.

        Return None if the table has no rows of the shard.
        """
        number: int | None = self._table.transaction_version(f"{POSITION}{shard}")
        return number

    def _append(self, reader: JournalReader, shard: str) -> LakeCommit | None:
        """Append the next rows of a shard in one commit. Return None if the table has all rows already.

        Only rows in complete segments are appended.
        """
        self._table.update_incremental()
        if self._table.transaction_version(ARCHIVE) is not None:
            raise PipelineError(
                f"gateway pipeline archive has appended to {self._to}, so its position is unknown; give"
                " another folder"
            )
        start, (first, behind) = self.position(shard), _complete(reader, shard)
        if start is not None and start > behind:
            if start > (end := reader.end(shard)):
                raise PipelineError(
                    f"shard {shard} of the journal in {reader.folder} ends before row {end}, and {self._to}"
                    f" has the rows before {start}: its end is lost, or it is another journal; give another"
                    " folder"
                )
            return None  # The newest segment is being merged or converted.
        gaps = []
        if start is not None and start < first:
            gaps.append(Gap(shard, start, first - start, "gone", "deleted by retention"))
        elif start is not None:
            first = start
        if first >= behind and not gaps:
            return None
        rows = _CommitRows(reader, shard, first, _end_of_commit(reader, shard, first, behind), gaps)
        self._write(rows)
        return LakeCommit(rows.count, rows.gaps)

    def _write(self, rows: _CommitRows) -> None:
        """Commit `rows`, and the journal position after them.

        Raises PipelineError if the table cannot be written, and JournalError if the journal cannot be read.
        """
        schema = arrow_schema(NAMES)
        position = Transaction(f"{POSITION}{rows.shard}", rows.end)
        try:
            write_deltalake(
                self._table,
                pa.RecordBatchReader.from_batches(schema, rows.batches(skip_lost=self._skip_lost)),
                mode="append",
                schema_mode="merge",  # A later gateway may have more columns.
                writer_properties=WriterProperties(compression="ZSTD", max_row_group_size=GROUP_ROWS),
                commit_properties=CommitProperties(app_transactions=[position]),
            )
        except Exception as error:  # Also Rust's own, which have no common class.
            if rows.error is not None:
                raise rows.error from None
            if isinstance(error, CommitFailedError):
                raise PipelineError(
                    f"another run has appended to {self._to}; restart this run, and run only one at a time"
                    f" ({error})"
                ) from error
            raise PipelineError(f"{self._to} cannot be written: {error}") from error


class _CommitRows:
    """Rows of a shard from `first` up to, not including, `end`, for one commit.

    `count` is the number of rows that were read, and `gaps` has the ranges of missing rows. `error` is the
    exception that ended the reading early; it is stored because the writer reports it as text only.
    """

    def __init__(self, reader: JournalReader, shard: str, first: int, end: int, gaps: list[Gap]) -> None:
        self._reader = reader
        self.shard = shard
        self._first = first
        self.end = end
        self.gaps = gaps
        self.count = 0
        self.error: Exception | None = None

    def batches(self, *, skip_lost: bool) -> Iterator[Arrow]:
        """Yield the rows as batches. Raises JournalError if a row is neither read nor in a gap."""
        try:
            yield from self._read(skip_lost=skip_lost)
        except Exception as error:
            self.error = error
            raise

    def _read(self, *, skip_lost: bool) -> Iterator[Arrow]:
        missing = 0
        for item in self._reader.blocks(self.shard, self._first, end=self.end):
            if isinstance(item, Gap):
                if item.reason == "damage" and not skip_lost:
                    raise DamageError(f"{item.text} ({item.where}); --skip-lost continues behind these rows")
                lost = item._replace(rows=min(item.rows, self.end - item.first))
                self.gaps.append(lost)
                missing += lost.rows
                continue
            rows = min(item.end, self.end) - item.begin
            self.count += rows
            yield batch_of(item, NAMES).slice(item.begin - item.header.base, rows)
        if self.count + missing != self.end - self._first:
            raise JournalError(
                f"shard {self.shard} of the journal: of rows {self._first} to {self.end - 1},"
                f" {self.count} were read and {missing} are missing"
            )


def storage_options(to: StoreFolder) -> dict[str, str]:
    """Return the options of delta-rs for the store of a folder, with its endpoint and credentials.

    For options that the folder does not have, delta-rs uses the environment, as AWS' programs do. Raises
    PipelineError for a store other than S3, and for a role to assume, which delta-rs would ignore.
    """
    if to.is_local:
        return {}
    if to.scheme not in S3:
        raise PipelineError(
            f"a lake is written to a folder or to s3a://, not to {to.uri}; for that store use"
            " gateway pipeline archive"
        )
    options = s3_options(to)
    if options.role is not None:
        raise PipelineError(
            "a lake does not assume fs.s3a.assumed.role.arn; put credentials of the role into the environment"
        )
    endpoint = options.endpoint
    found = {
        "AWS_ACCESS_KEY_ID": options.access_key,
        "AWS_SECRET_ACCESS_KEY": options.secret_key,
        "AWS_SESSION_TOKEN": options.session_token,
        "AWS_REGION": options.region,
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true" if endpoint is not None and endpoint.startswith("http:") else None,
        "AWS_SKIP_SIGNATURE": "true" if options.is_anonymous else None,
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false" if options.has_path_style else None,
        "aws_conditional_put": "etag",
    }
    return {name: value for name, value in found.items() if value is not None}


def _open_or_create(to: StoreFolder, options: dict[str, str]) -> DeltaTable:
    """Return the table in the folder `to`; create it if there is none. `options` are delta-rs' options.

    Raises PipelineError if the folder has other files or another table, and DeltaError.
    """
    if not DeltaTable.is_deltatable(to.uri, options):
        folder = to.path()
        others = sorted(path.name for path in folder.iterdir() if path.name != LOG) if folder.is_dir() else []
        if others:
            raise PipelineError(f"{to.uri} has {others[0]} in it, and is no Delta table; give another folder")
        alone = CommitProperties(max_commit_retries=0)  # Otherwise a second creation would follow the first.
        try:
            return DeltaTable.create(
                to.uri,
                arrow_schema(NAMES),
                name=TABLE_NAME,
                storage_options=options,
                commit_properties=alone,
            )
        except DeltaError:
            if not DeltaTable.is_deltatable(to.uri, options):
                raise
    return DeltaTable(to.uri, storage_options=options)


def _complete(reader: JournalReader, shard: str) -> tuple[int, int]:
    """Return the number of a shard's first row, and the number after its last row in a complete segment."""
    segments = reader.segments(shard)
    if not segments:
        return 0, 0
    summary = reader.summary(segments[-1])
    return segments[0].first, segments[-1].first if summary is None else summary.next


def _end_of_commit(reader: JournalReader, shard: str, first: int, behind: int) -> int:
    """Return the row number before which a commit that begins with row `first` ends.

    `behind` is the number after that of the last row that may be committed.
    """
    byte_count = 0
    for item in reader.block_ranges(shard, first):
        if isinstance(item, Gap):
            continue
        byte_count += item.byte_count
        if item.next - first >= COMMIT_ROWS or byte_count >= COMMIT_BYTES:
            return min(item.next, behind)
    return behind
