"""Export of the journal to one Arrow or Parquet file, without Spark.

Such a file is for DuckDB, Polars, pandas, or a notebook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gateway.pipeline.columns import COLUMNS, Arrow, arrow_schema
from gateway.pipeline.journal.arrow import batch_of, expand_runs, join_batches, matching
from gateway.store.journal.reader import Block, Gap, JournalReader

GROUP_ROWS: Final = 131_072  # Rows in each row group or record batch.
Form = Literal["parquet", "arrow"]
ROUTE: Final = "route"


@dataclass(frozen=True)
class ExportSelection:
    """Selection of rows by shard and route (None: all) and by time of receipt.

    Rows are selected if they were received from `from_us` up to, not including, `to_us` (microseconds UTC).
    """

    shards: Sequence[str] | None = None
    routes: frozenset[str] | None = None
    from_us: int | None = None
    to_us: int | None = None


def export(
    reader: JournalReader,
    to: Path,
    form: Form,
    *,
    columns: Sequence[str] | None = None,
    chosen: ExportSelection,
) -> tuple[int, int]:
    """Write the rows that `chosen` selects to the Arrow or Parquet file `to`, in the journal's order.

    The file appears when it is complete. `form` is its format, and `columns` are its columns (None: all).
    Return the number of rows written, and of rows missing in the journal. Raises OSError, JournalError, and
    PipelineError for an unknown column.
    """
    names = tuple(column.name for column in COLUMNS) if columns is None else tuple(columns)
    schema = arrow_schema(names)
    draft = to.with_name(f"{to.name}.tmp")
    reader.expand = expand_runs
    missing: list[int] = []
    rows = 0
    try:
        with _writer(draft, form, schema) as writer:
            for batch in _grouped(_batches(reader, names, chosen, missing)):
                writer.write_batch(batch)
                rows += batch.num_rows
        draft.replace(to)
    finally:
        draft.unlink(missing_ok=True)
    return rows, sum(missing)


def _writer(path: Path, form: Form, schema: Arrow) -> Any:
    if form == "arrow":
        return pa.ipc.new_file(path, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
    return pq.ParquetWriter(path, schema, compression="zstd")


def _grouped(batches: Iterator[Arrow]) -> Iterator[Arrow]:
    gathered: list[Arrow] = []
    for batch in batches:
        gathered.append(batch)
        if sum(one.num_rows for one in gathered) >= GROUP_ROWS:
            yield join_batches(gathered)
            gathered = []
    if gathered:
        yield join_batches(gathered)


def _batches(
    reader: JournalReader, names: Sequence[str], chosen: ExportSelection, missing: list[int]
) -> Iterator[Arrow]:
    only = None if chosen.routes is None else {ROUTE: chosen.routes}
    for shard in reader.shards() if chosen.shards is None else chosen.shards:
        times = {"from_us": chosen.from_us, "to_us": chosen.to_us}
        for block in reader.blocks(shard, only=only, **times):  # type: ignore[arg-type]
            if isinstance(block, Gap):
                missing.append(block.rows)
                continue
            first, count = block.begin - block.header.base, block.end - block.begin
            mask = _selected_rows(block, chosen)
            batch = batch_of(block, names).slice(first, count)
            if mask is not None:
                batch = batch.filter(mask.slice(first, count))
            if batch.num_rows:
                yield batch


def _selected_rows(block: Block, chosen: ExportSelection) -> Arrow | None:
    """Return a boolean array that is True for the rows of a block that `chosen` selects; None if all are."""
    found = None if chosen.routes is None else matching(block, ROUTE, chosen.routes)
    if chosen.from_us is None and chosen.to_us is None:
        return found
    times = batch_of(block, ("received",))["received"].cast(pa.int64())
    for limit, test in ((chosen.from_us, pc.greater_equal), (chosen.to_us, pc.less)):
        if limit is not None:
            within = test(times, limit)
            found = within if found is None else pc.and_(found, within)
    return found
