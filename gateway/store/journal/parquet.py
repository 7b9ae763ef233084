"""Complete segments in Parquet: reading their rows and their metadata.

`gateway/pipeline/journal/parquet_writer.py` writes these files, in a process of its own. A file never
changes: only retention deletes it. Its name has the numbers of its rows, so that a gateway without pyarrow
continues the numbering. Its metadata has under METADATA_KEY a JSON object: the keys of `Summary`, in which a
span is a row group (its offset is the row group's number), `marks`, the low-water mark of each row group, and
`lost`, the gaps: first number, rows, reason and text. A row group has consecutive rows, so a gap is never
within one.

pyarrow is imported when the first such file is read: a gateway that only writes its journal does not need it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from gateway.store.journal.columns import COLUMNS
from gateway.store.journal.format import ColumnKind, DamageError, Header, JournalError
from gateway.store.journal.segments import BlockLocation, Segment
from gateway.store.journal.summary import Summary, decode_summary

METADATA_KEY: Final = b"gateway.journal"
TEXTS: Final = ("shard", *(column.name for column in COLUMNS if column.kind is ColumnKind.CODED))
"""Columns that are read as indexes into a dictionary."""
Arrow = Any
"""An Arrow table, array or file; pyarrow has no type stubs."""


@dataclass(frozen=True, slots=True)
class LostRows:
    """Gap in a Parquet file's metadata: `rows` rows from number `first` on that the gateway did not write."""

    first: int
    rows: int
    reason: str
    text: str


class ParquetSegment:
    """Open segment of the journal in Parquet. It is closed when the object and all its blocks are freed.

    The constructor raises FileNotFoundError, DamageError if the file is incomplete or damaged, and
    JournalError if pyarrow is not installed.
    """

    def __init__(self, segment: Segment) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            raise JournalError(
                f"{segment.path} is Parquet, which is read with pyarrow: pip install 'gateway[parquet]'"
            ) from error
        self._segment = segment
        self._errors = (pa.ArrowException, OSError, ValueError)
        opened = getattr(segment.path, "arrow_file", None)
        source = pa.OSFile(str(segment.path), "rb") if opened is None else opened()
        try:
            metadata = pq.read_metadata(source)
            # An older file has fewer columns, and a name that it does not have is an error.
            texts = [name for name in metadata.schema.names if name in TEXTS]
            self._file = pq.ParquetFile(
                source, metadata=metadata, read_dictionary=texts, page_checksum_verification=True
            )
            document = json.loads(metadata.metadata[METADATA_KEY])
            self.summary: Summary = decode_summary(document)
            self._marks: Sequence[int] = document["marks"]
            self._lost = [LostRows(*one) for one in document["lost"]]
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
            spans = [*zip(self.summary.spans, groups, self._marks, strict=True)]
            if any(span.next - span.first != group.num_rows for span, group, _ in spans):
                raise ValueError("its row groups do not have the length that its metadata states")
        except (*self._errors, TypeError, KeyError) as error:
            raise DamageError(f"{segment.path} cannot be read: {error}") from error
        self.summary.spans = [span._replace(byte_count=group.total_byte_size) for span, group, _ in spans]
        self.names = frozenset(self._file.schema_arrow.names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the file open, because blocks of it read their columns later."""

    def items(self, expected: int) -> Iterator[BlockLocation | LostRows]:
        """Yield the row groups with rows from number `expected` on, and the recorded gaps, in order.

        The offset in a `BlockLocation` is the index of the row group.
        """
        lost = iter([one for one in self._lost if one.first + one.rows > expected])
        gap = next(lost, None)
        for span, low_us in zip(self.summary.spans, self._marks, strict=True):
            while gap is not None and gap.first < span.first:
                yield gap
                gap = next(lost, None)
            if span.next > expected:
                rows, times = span.next - span.first, (span.first_us, span.last_us)
                header = Header(0, 0, span.byte_count, span.first, rows, *times, 0, 0, 0, 0, low_us)
                yield BlockLocation(self._segment.path, span.offset, header)
        while gap is not None:
            yield gap
            gap = next(lost, None)

    def low_water(self, before: int) -> int:
        """Return the highest low-water mark of the row groups before row number `before`.

        It is in microseconds UTC, 0 if unknown.
        """
        marks = zip(self.summary.spans, self._marks, strict=True)
        return max((low_us for span, low_us in marks if span.next <= before), default=0)

    def table(self, group: int, names: Sequence[str] | None = None) -> Arrow:
        """Return the columns `names` (None: all) of a row group, as an Arrow table.

        `group` is the row group's index. Columns in TEXTS are dictionary-encoded. Names that the file lacks
        are ignored. Raises DamageError if the file is damaged.
        """
        try:
            column_names = None if names is None else [name for name in names if name in self.names]
            found = self._file.read_row_group(group, columns=column_names, use_threads=False)
            return found.unify_dictionaries().combine_chunks()
        except self._errors as error:
            raise DamageError(f"{self._segment.path}: row group {group} cannot be read: {error}") from error

    def bounds(self, group: int, name: str) -> tuple[str, str] | None:
        """Return the least and the greatest text of a column in the row group `group`; None if unknown."""
        metadata = self._file.metadata.row_group(group)
        for number in range(metadata.num_columns):
            column = metadata.column(number)
            if column.path_in_schema == name:
                found = column.statistics if column.is_stats_set else None
                return (found.min, found.max) if found is not None and found.has_min_max else None
        return None
