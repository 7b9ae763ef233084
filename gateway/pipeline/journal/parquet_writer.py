"""Writing of complete segments as one Parquet file, in a process that the journal's writer starts.

`python -m gateway.pipeline.journal.parquet_writer FOLDER SHARD FIRST NEXT DRAFT` writes rows FIRST to before
NEXT to the new file DRAFT, and syncs it; the writer renames it (`gateway/store/journal/conversion.py`). The
process ends early when its standard input is closed, because then the writer has ended.
`gateway/store/journal/parquet.py` describes the file. Texts are written from the blocks' dictionaries,
without a loop over rows.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.errors import GatewayError
from gateway.pipeline.columns import COLUMNS, LOW_WATER, Arrow
from gateway.pipeline.journal.arrow import DICTIONARIES, coded_batch_of, coded_schema, expand_runs
from gateway.store.journal.format import JournalError
from gateway.store.journal.parquet import METADATA_KEY
from gateway.store.journal.reader import Block, Gap, JournalReader
from gateway.store.journal.summary import ROUTES_MAX, Summary, SummarySpan, encode_summary, wider

GROUP_ROWS: Final = 131_072
GROUP_BYTES: Final = 16 * 1_048_576  # Bytes of a row group before they are encoded.
NAMES: Final = (*(column.name for column in COLUMNS), LOW_WATER.name)
UNORDERED: Final = frozenset(("headers", "properties", "body"))
"""Columns that nobody filters by range, so that their minimum and maximum are not stored."""
NICENESS: Final = 19


class _RowGroup:
    """Rows for the next row group of a Parquet file; `first` is the number of the first row."""

    def __init__(self, first: int) -> None:
        self.first = self.next = first
        self.batches: list[Arrow] = []
        self.byte_count = 0
        self.low_us = 0

    def add(self, block: Block) -> None:
        """Append the rows of a block from `block.begin` up to, not including, `block.end`."""
        rows = slice(block.begin - block.header.base, block.end - block.header.base)
        batch = coded_batch_of(block, NAMES).slice(rows.start, rows.stop - rows.start)
        self.batches.append(batch)
        self.next = block.end
        self.byte_count += block.header.byte_count
        self.low_us = max(self.low_us, block.header.low_us)


class _ParquetFile:
    """Parquet file of the journal that is being written, with the summary that is stored at its end."""

    def __init__(self, sink: BinaryIO, first: int) -> None:
        self._writer = pq.ParquetWriter(
            sink,
            coded_schema(NAMES),
            compression="zstd",
            use_dictionary=sorted(DICTIONARIES),
            write_statistics=sorted({*NAMES} - UNORDERED),
            write_page_checksum=True,
            store_schema=False,  # The stored schema would make readers decode texts as dictionaries.
        )
        self._summary = Summary(first, first)
        self._marks: list[int] = []
        self._lost: list[tuple[int, int, str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def add(self, group: _RowGroup) -> None:
        """Write the rows of `group` as one row group, and add them to the summary."""
        if not group.batches:
            return
        table = pa.Table.from_batches(group.batches).unify_dictionaries()
        self._writer.write_table(table, row_group_size=table.num_rows)
        summary = self._summary
        received, settled = (_min_and_max(table[name]) for name in ("received", "settled"))
        number = len(summary.spans)
        summary.spans.append(SummarySpan(number, group.first, group.next, 0, *received))
        summary.received, summary.settled = (
            wider(summary.received, *received),
            wider(summary.settled, *settled),
        )
        summary.rows += table.num_rows
        summary.next = group.next
        summary.blocks += 1
        if summary.routes is not None:
            summary.routes |= {*table["route"].unique().to_pylist()}
            if len(summary.routes) > ROUTES_MAX:
                summary.routes = None
        self._marks.append(group.low_us)

    def record_gap(self, gap: Gap) -> None:
        """Record in the summary that the gateway did not write a range of rows."""
        self._lost.append((gap.first, gap.rows, gap.reason, gap.text))
        self._summary.missing += gap.rows
        self._summary.gaps += 1
        self._summary.next = gap.first + gap.rows

    def finish(self, next_: int, low_us: int, replaced: int) -> None:
        """Store the summary in the file, after all row groups. Raises JournalError if a row is missing.

        `next_` is the number after that of the last row, `low_us` the low-water mark in microseconds UTC, and
        `replaced` the number of journal blocks that the file replaces.
        """
        summary = self._summary
        if summary.next != next_ or summary.rows + summary.missing != next_ - summary.first:
            raise JournalError(
                f"{summary.rows} rows and {summary.missing} missing ones end at {summary.next}"
            )
        summary.low_us, summary.replaced = low_us, replaced
        document = encode_summary(summary) | {"marks": self._marks, "lost": self._lost}
        self._writer.add_key_value_metadata({METADATA_KEY: json.dumps(document, separators=(",", ":"))})


def close_segments(
    folder: Path, shard: int, first: int, next_: int, draft: Path, pause: Callable[[], None] = lambda: None
) -> None:
    """Convert the rows of a shard from `first` up to, not including, `next_` to the new Parquet file `draft`.

    `pause` is called after each block. Raises OSError and JournalError; then the file is incomplete.
    """
    reader = JournalReader(folder, expand=expand_runs)
    name = str(shard)
    sources = [one for one in reader.segments(name) if first <= one.first < next_]
    newest = max(one.path.stat().st_mtime for one in sources)
    low_us = reader.low_water(name, next_) or 0
    with draft.open("xb") as sink:
        os.fchmod(sink.fileno(), 0o600)
        with _ParquetFile(sink, first) as file:
            blocks = 0
            group = _RowGroup(first)
            for item in reader.blocks(name, first, end=next_):
                if isinstance(item, Gap):
                    file.add(group)
                    file.record_gap(item)
                    group = _RowGroup(item.first + item.rows)
                    continue
                group.add(item)
                blocks += 1
                if group.next - group.first >= GROUP_ROWS or group.byte_count >= GROUP_BYTES:
                    file.add(group)
                    group = _RowGroup(group.next)
                pause()
            file.add(group)
            file.finish(next_, low_us, blocks)
        sink.flush()
        os.fsync(sink.fileno())
        os.utime(sink.fileno(), (newest, newest))  # Retention goes by it.


def _min_and_max(times: Arrow) -> tuple[int, int]:
    found = pc.min_max(times.cast(pa.int64())).as_py()
    return found["min"], found["max"]


class _OrphanError(Exception):
    """Error that ends this conversion process, because the process that started it has ended."""


def _check_writer() -> None:
    if select.select([0], [], [], 0)[0]:
        raise _OrphanError("the writer has ended")


def main(arguments: Sequence[str]) -> int:
    """Convert journal segments to a Parquet file with low priority, and return the process's exit code.

    If this fails, the last line on stderr is the reason.
    """
    folder, shard, first, next_, draft = arguments
    os.nice(NICENESS)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    try:
        close_segments(Path(folder), int(shard), int(first), int(next_), Path(draft), _check_writer)
    except (GatewayError, OSError, pa.ArrowException, _OrphanError) as error:
        with suppress(OSError):
            Path(draft).unlink(missing_ok=True)
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
