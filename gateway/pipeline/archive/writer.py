"""Writer of archive files in Spark tasks: from Arrow batches to Parquet files by day and route.

The rows are Arrow batches all the way from the journal to Parquet. Spark distributes the work, but rows never
leave Python; as a DataFrame of all columns they would take about four times as long. Texts stay
dictionary-encoded, as they are in the journal and in Parquet. A file is written under a temporary name and
moved into its place when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.pipeline.archive.manifest import STAGING, Archive, ArchiveFile, folder_of
from gateway.pipeline.columns import COLUMNS, Arrow
from gateway.pipeline.journal.arrow import coded_schema

NAMES: Final = tuple(column.name for column in COLUMNS)
FILED: Final = tuple(name for name in NAMES if name != "route")  # The route is in the name of the folder.
DICTIONARIES: Final = [
    *(column.name for column in COLUMNS if column.arrow == pa.string()),
    *(f"headers.list.element.{name}" for name in ("name", "type", "value")),
]
"""Columns for which Parquet builds dictionaries, because their texts repeat. For bodies and numbers this
takes 10 % more time, and makes files twice as large (measured with JSON of 90 bytes)."""
ORDERED: Final = ["shard", "sequence", "received", "settled"]
"""Columns with minimum and maximum statistics, by which readers skip row groups. Statistics of all columns
would take 20 % of the writing time, and every group has all values of the others."""

GROUP_ROWS: Final = 131_072
GROUP_BYTES: Final = 32 * 1_048_576
# Buffer of all files of a task; with many routes each file has its own buffer.
BUFFERED_BYTES: Final = 128 * 1_048_576
DAY_US: Final = 86_400_000_000


class ArchiveWriter:
    """Writer for archive files of one day and route; a file is completed once it has `file_bytes` bytes.

    A file is named `name`-NUMBER-RUN-I.parquet: NUMBER is that of the next manifest, RUN the id of the run,
    and I counts from 0.
    """

    def __init__(self, archive: Archive, name: str, date: str, route: str, file_bytes: int) -> None:
        self._archive = archive
        self._date, self._route = date, route
        self._name = f"{folder_of(date, route)}/{name}"
        self._file_bytes = file_bytes
        self._batches: list[Arrow] = []
        self._buffered_rows = 0
        self.buffered = 0
        self._open: _UnfinishedFile | None = None
        self.files: list[ArchiveFile] = []

    def write(self, batch: Arrow) -> None:
        """Buffer the rows of `batch` for the current file, and write a row group when there are enough.

        The batch has the schema `coded_schema` without the column `route`.
        """
        self._batches.append(batch)
        self._buffered_rows += batch.num_rows
        self.buffered += batch.nbytes
        if self._buffered_rows >= GROUP_ROWS or self.buffered >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as a row group."""
        if not self._batches:
            return
        if self._open is None:
            self._open = _UnfinishedFile.create(self._archive)
        table = pa.Table.from_batches(self._batches).unify_dictionaries()
        self._open.writer.write_table(table, row_group_size=GROUP_ROWS)
        self._open.rows += self._buffered_rows
        self._batches, self._buffered_rows, self.buffered = [], 0, 0
        if self._open.sink.tell() >= self._file_bytes:
            self._finish(self._open)

    def close(self) -> list[ArchiveFile]:
        """Complete the last file, and return all files that this writer has written."""
        self.flush()
        if self._open is not None:
            self._finish(self._open)
        return self.files

    def _finish(self, file: _UnfinishedFile) -> None:
        file.writer.close()
        file.sink.close()
        system = self._archive.system
        path = f"{self._name}-{self._archive.next}-{self._archive.run}-{len(self.files)}.parquet"
        byte_count = system.get_file_info(file.path).size
        system.create_dir(self._archive.path(path.rpartition("/")[0]), recursive=True)
        system.move(file.path, self._archive.path(path))
        self.files.append(ArchiveFile(path, self._date, self._route, file.rows, byte_count))
        self._open = None


@dataclass
class _UnfinishedFile:
    """Archive file that is being written under a temporary name.

    The name is unique, because Spark may run the same task twice at a time.
    """

    path: str
    sink: Any
    writer: Any
    rows: int = 0

    @classmethod
    def create(cls, archive: Archive) -> _UnfinishedFile:
        archive.system.create_dir(archive.path(STAGING), recursive=True)
        path = archive.path(f"{STAGING}/{archive.next}-{uuid4().hex}.parquet")
        sink = archive.system.open_output_stream(path)
        writer = pq.ParquetWriter(
            sink,
            coded_schema(FILED),
            compression="zstd",
            use_dictionary=DICTIONARIES,
            write_statistics=ORDERED,
            store_schema=False,  # The stored schema would make readers decode texts as dictionaries.
        )
        return cls(path, sink, writer)


def write(archive: Archive, name: str, batches: Iterable[Arrow], file_bytes: int) -> list[ArchiveFile]:
    """Write the rows of Arrow batches into archive files, and return the files.

    The batches have all columns of the journal. At least one file is written for each day and route; file
    names begin with `name`, and a file is completed once it has `file_bytes` bytes.
    """
    writers: dict[tuple[str, str], ArchiveWriter] = {}
    for batch in batches:
        for date, route, rows in _split_by_day_and_route(batch):
            writer = writers.get((date, route))
            if writer is None:
                writer = writers[date, route] = ArchiveWriter(archive, name, date, route, file_bytes)
            writer.write(rows)
        if sum(writer.buffered for writer in writers.values()) > BUFFERED_BYTES:
            for writer in writers.values():
                writer.flush()
    return [file for writer in writers.values() for file in writer.close()]


def _split_by_day_and_route(batch: Arrow) -> Iterator[tuple[str, str, Arrow]]:
    """Yield (day, route, rows) for each day and route in a batch.

    Most batches have one day and few routes.
    """
    days = pc.divide(batch["received"].cast(pa.int64()), DAY_US)
    for day in pc.unique(days).to_pylist():
        of_day = batch if pc.all(pc.equal(days, day)).as_py() else batch.filter(pc.equal(days, day))
        routes = of_day["route"]
        date = datetime.fromtimestamp(day * DAY_US // 1_000_000, UTC).date().isoformat()
        filed = of_day.select(list(FILED))
        places = pc.unique(routes.indices)
        for place in places:
            rows = (
                filed
                if len(places) == 1
                else _compact_dictionaries(filed.filter(pc.equal(routes.indices, place)))
            )
            yield date, routes.dictionary[place.as_py()].as_py(), rows


def _compact_dictionaries(rows: Arrow) -> Arrow:
    """Return `rows` with smaller dictionaries, which contain only the texts that occur in these rows.

    Only dictionaries that are longer than the column are replaced. Such a dictionary comes from a whole block
    of the journal, and the rows may be a small part of the block.
    """
    return pa.RecordBatch.from_arrays(
        [
            column.dictionary_decode().dictionary_encode()
            if pa.types.is_dictionary(column.type) and len(column.dictionary) > len(column)
            else column
            for column in rows.columns
        ],
        schema=rows.schema,
    )
