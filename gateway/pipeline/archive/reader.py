"""Reader of archive files in Python: from Parquet to Arrow batches inside Spark tasks.

Spark's own reader would convert to its rows, and these to Arrow for a Python worker, which is as expensive as
a whole backtest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.pipeline.archive.manifest import Archive, ArchiveFile
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.arrow import DICTIONARIES, coded_schema

BATCH_ROWS: Final = 32_768
TIME: Final = "received"
PIECES_PER_TASK: Final = 2  # Pieces per core, so that a core that finishes early gets another one.


@dataclass(frozen=True)
class Piece:
    """Part of an archive file that one Spark task reads: the row groups `first`, `first + step` and so on."""

    file: ArchiveFile
    first: int
    step: int


class ArchiveRows:
    """Rows of archive files that were received within a range of time, with selected columns.

    `begin_us` is the start and `until_us` the exclusive end of the range, in microseconds UTC; None means no
    bound. `names` are the columns.
    """

    def __init__(
        self,
        archive: Archive,
        files: Sequence[ArchiveFile],
        names: Sequence[str],
        begin_us: int | None,
        until_us: int | None,
    ) -> None:
        self._archive = archive
        self._files = files
        self._names = tuple(names)
        self._texts = sorted(DICTIONARIES & {*names} - {"route"})
        self._begin_us = begin_us
        self._until_us = until_us

    def pieces(self, tasks: int) -> list[Piece]:
        """Divide the files into pieces for about `tasks` Spark tasks.

        A file is divided by its row groups. A piece has no rows if the file has fewer row groups than pieces.
        """
        files = [file for file in self._files if self._may_have(file)]
        step = max(1, -(-PIECES_PER_TASK * tasks // max(1, len(files))))
        return [Piece(file, first, step) for file in files for first in range(step)]

    def read(self, piece: Piece) -> Iterator[Arrow]:
        """Yield the rows of a piece as Arrow batches with dictionary-encoded texts."""
        column_names = [name for name in dict.fromkeys((*self._names, TIME)) if name != "route"]
        with self._archive.system.open_input_file(self._archive.path(piece.file.path)) as source:
            file = pq.ParquetFile(source, read_dictionary=self._texts)
            there = [name for name in column_names if name in file.schema_arrow.names]
            for group in range(piece.first, file.num_row_groups, piece.step):
                for batch in file.iter_batches(
                    BATCH_ROWS, row_groups=[group], columns=there, use_threads=False
                ):
                    yield self._with_all_columns(self._filter_times(batch), piece.file.route)

    def _may_have(self, file: ArchiveFile) -> bool:
        """Return True if a file's day overlaps the requested range of time."""
        if self._begin_us is not None and file.date < _day(self._begin_us):
            return False
        return self._until_us is None or file.date <= _day(self._until_us)

    def _filter_times(self, batch: Arrow) -> Arrow:
        times = batch[TIME].cast(pa.int64())
        if self._begin_us is not None:
            batch = batch.filter(pc.greater_equal(times, self._begin_us))
        if self._until_us is not None:
            batch = batch.filter(pc.less(batch[TIME].cast(pa.int64()), self._until_us))
        return batch

    def _with_all_columns(self, batch: Arrow, route: str) -> Arrow:
        """Return the batch with all requested columns in the requested order.

        `route` is the route of the file's folder, and becomes a column. Columns that an older archive file
        does not have are null.
        """
        schema = coded_schema(self._names)
        there = set(batch.schema.names)
        columns = []
        for one in schema:
            if one.name == "route":
                places = pa.array(np.zeros(batch.num_rows, np.int32))
                columns.append(pa.DictionaryArray.from_arrays(places, [route]))
            else:
                columns.append(batch[one.name] if one.name in there else pa.nulls(batch.num_rows, one.type))
        return pa.RecordBatch.from_arrays(columns, schema=schema)


def _day(us: int) -> str:
    return datetime.fromtimestamp(us // 1_000_000, UTC).date().isoformat()
