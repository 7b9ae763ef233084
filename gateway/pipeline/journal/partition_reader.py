"""Reading of a journal partition in a task, as Arrow batches of a suitable number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from socket import gethostname
from typing import Final

from pyspark.sql.datasource import InputPartition

from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.journal.arrow import batch_of, coded_batch_of, join_batches
from gateway.pipeline.journal.filters import SelectedRows
from gateway.pipeline.journal.options import LoadOptions
from gateway.pipeline.journal.planner import JournalPartition, reader_of
from gateway.pipeline.workers import freeze_imports
from gateway.store.journal.reader import Block, Gap, NoFolderError

BATCH_ROWS: Final = 10_000  # Rows in a batch for Spark; one flush of the gateway may have few rows.
CODED_ROWS: Final = (
    65_536  # Rows in a batch for this package's own code: each column of each batch costs 5 µs.
)
BATCH_BYTES: Final = 16 * 1_048_576  # Bytes at which a batch is complete, since bodies may be large.


def read_part(
    options: LoadOptions,
    selection: SelectedRows,
    names: tuple[str, ...],
    part: InputPartition,
    batches: Callable[[LoadOptions, SelectedRows, tuple[str, ...], JournalPartition], Iterator[Arrow]]
    | None = None,
) -> Iterator[Arrow]:
    """Yield the rows of the partition `part` that `selection` selects, as Arrow batches.

    `options` are the load options, and `names` are the columns. `batches` builds the batches; None builds
    batches of about BATCH_ROWS rows. Raises JournalError if the journal is faulty, and PipelineError if this
    machine cannot read its files.
    """
    # Spark passes its own partition when there is nothing to read.
    if not isinstance(part, JournalPartition):
        return
    freeze_imports()
    try:
        yield from (batches or _gathered)(options, selection, names, part)
    except NoFolderError as error:
        raise PipelineError(
            f"{error} on {gethostname()}, though the driver has it: every executor needs the journal under"
            " the same path, or it is shipped to a store (gateway pipeline ship)"
        ) from error
    except OSError as error:
        raise PipelineError(
            f"shard {part.shard} of the journal in {options.folder.uri} cannot be read on {gethostname()}:"
            f" {error}"
        ) from error


def _gathered(
    options: LoadOptions, selection: SelectedRows, names: tuple[str, ...], part: JournalPartition
) -> Iterator[Arrow]:
    """Yield the selected rows of a partition, with the columns `names`, about BATCH_ROWS in a batch."""
    return _joined(_mapped(options, selection, names, part, batch_of), BATCH_ROWS)


def coded(
    options: LoadOptions, selection: SelectedRows, names: tuple[str, ...], part: JournalPartition
) -> Iterator[Arrow]:
    """Yield the selected rows of a partition, with the columns `names` and dictionary-encoded texts.

    A batch has about CODED_ROWS rows.
    """
    return _joined(_mapped(options, selection, names, part, coded_batch_of), CODED_ROWS)


def _joined(batches: Iterable[Arrow], most: int) -> Iterator[Arrow]:
    gathered: list[Arrow] = []
    rows = byte_count = 0
    for batch in batches:
        gathered.append(batch)
        rows, byte_count = rows + batch.num_rows, byte_count + batch.nbytes
        if rows >= most or byte_count >= BATCH_BYTES:
            yield join_batches(gathered)
            gathered, rows, byte_count = [], 0, 0
    if rows:
        yield join_batches(gathered)


def _mapped(
    options: LoadOptions,
    selection: SelectedRows,
    names: tuple[str, ...],
    part: JournalPartition,
    made: Callable[[Block, Sequence[str]], Arrow],
) -> Iterator[Arrow]:
    """Yield the selected rows of a partition, one batch for each block of the journal.

    `made` builds the batch of a block, with the columns `names`.
    """
    received = selection.received
    for block in reader_of(options).blocks(
        part.shard,
        part.first,
        end=part.next,
        near=part.place,
        from_us=received.first,
        to_us=received.end,
        only=selection.only,
    ):
        if isinstance(block, Gap):
            continue
        batch = made(block, names)
        chosen = selection.rows(block)
        first = max(part.first, block.begin) - block.header.base
        count = min(part.next, block.end) - block.header.base - first
        if count < batch.num_rows:
            batch = batch.slice(first, count)
            chosen = None if chosen is None else chosen.slice(first, count)
        yield batch if chosen is None else batch.filter(chosen)
