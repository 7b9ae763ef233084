"""What Spark calls: the journal as a table, and as a stream.

Spark runs the planning in a Python process of its own beside the driver, and `read` in as many as there are
tasks; what the planner remembers lives in `self`, `read` depends on its partition alone. Offsets are the
journal's sequence numbers by shard, and Spark's checkpoint is the only place where a position is kept: so a
batch that is read again has exactly the same rows, whatever was killed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from socket import gethostname
from typing import ClassVar, Final

from pyspark import __version__
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from gateway.errors import PipelineError
from gateway.pipeline.columns import BY_NAME, Arrow, spark_schema
from gateway.pipeline.journal.arrow import batch_of, coded_batch_of, joined
from gateway.pipeline.journal.filters import Wanted, narrowed, wanted_of
from gateway.pipeline.journal.options import Offsets, Options, columns_of, options_of
from gateway.pipeline.journal.planning import (
    JournalPartition,
    Shard,
    bounded,
    first_of,
    know,
    next_of,
    parts_of,
    reader_of,
    shared_out,
)
from gateway.pipeline.stores import Hadoop
from gateway.pipeline.workers import spare_imports
from gateway.store.journal.reader import Block, Gap, JournalReader, NoFolderError

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError as error:
    raise PipelineError(f"the pipeline needs Spark 4.2 or newer, and this is {__version__}") from error

BATCH_ROWS: Final = 10_000  # that go to Spark at a time; a flush of the gateway may be few
CODED_ROWS: Final = (
    65_536  # that our own code in a task takes at a time: each column of each batch costs 5 us
)
BATCH_OCTETS: Final = 16 * 1_048_576  # from which on no more are joined, for bodies may be large


class JournalSource(DataSource):
    """`format("gateway_journal")`; options.py has its options, and a given schema chooses columns, too."""

    hadoop: ClassVar[Hadoop] = {}
    """By which stores are reached; a session gets a class of its own with its options (`of`)."""

    @classmethod
    def of(cls, hadoop: Hadoop) -> type[JournalSource]:
        """The source for a session with these options; where it is planned there is no session to ask."""
        return type(cls.__name__, (cls,), {"hadoop": hadoop, "__doc__": cls.__doc__})

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "gateway_journal"

    def schema(self) -> StructType:
        """The columns that the options name."""
        return spark_schema(columns_of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A table."""
        spare_imports()
        options = options_of(self.options, stream=False, hadoop=self.hadoop)
        made = FilteredTable if options.push else JournalTable
        return made(options, _names(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """A stream."""
        return JournalStream(options_of(self.options, stream=True, hadoop=self.hadoop), _names(schema))


def _names(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema. Raises PipelineError: the journal has them otherwise."""
    for field in schema.fields:
        if spark_schema((field.name,))[0].dataType != field.dataType:
            raise PipelineError(
                f"column {field.name} of the journal is {BY_NAME[field.name].spark},"
                f" not {field.dataType.simpleString()}"
            )
    return tuple(schema.names)


def _read(
    options: Options,
    wanted: Wanted,
    names: tuple[str, ...],
    part: InputPartition,
    batches: Callable[[Options, Wanted, tuple[str, ...], JournalPartition], Iterator[Arrow]] | None = None,
) -> Iterator[Arrow]:
    """The rows of a part, as `batches` makes them (None: about BATCH_ROWS in a batch). Raises JournalError;
    PipelineError for what only this machine has against it."""
    if not isinstance(part, JournalPartition):  # Spark's own, when there is nothing to read
        return
    spare_imports()
    try:
        yield from (batches or _gathered)(options, wanted, names, part)
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
    options: Options, wanted: Wanted, names: tuple[str, ...], part: JournalPartition
) -> Iterator[Arrow]:
    return _joined(_mapped(options, wanted, names, part, batch_of), BATCH_ROWS)


def _coded(
    options: Options, wanted: Wanted, names: tuple[str, ...], part: JournalPartition
) -> Iterator[Arrow]:
    return _joined(_mapped(options, wanted, names, part, coded_batch_of), CODED_ROWS)


def _joined(batches: Iterable[Arrow], most: int) -> Iterator[Arrow]:
    gathered: list[Arrow] = []
    rows = octets = 0
    for batch in batches:
        gathered.append(batch)
        rows, octets = rows + batch.num_rows, octets + batch.nbytes
        if rows >= most or octets >= BATCH_OCTETS:
            yield joined(gathered)
            gathered, rows, octets = [], 0, 0
    if rows:
        yield joined(gathered)


def _mapped(
    options: Options,
    wanted: Wanted,
    names: tuple[str, ...],
    part: JournalPartition,
    made: Callable[[Block, Sequence[str]], Arrow],
) -> Iterator[Arrow]:
    """A batch for each block."""
    received = wanted.received
    for block in reader_of(options).blocks(
        part.shard,
        part.first,
        end=part.next,
        near=part.place,
        from_us=received.first,
        to_us=received.until,
        only=wanted.only,
    ):
        if isinstance(block, Gap):
            continue
        batch = made(block, names)
        chosen = wanted.rows(block)
        first = max(part.first, block.begin) - block.header.base
        count = min(part.next, block.end) - block.header.base - first
        if count < batch.num_rows:
            batch = batch.slice(first, count)
            chosen = None if chosen is None else chosen.slice(first, count)
        yield batch if chosen is None else batch.filter(chosen)


class JournalTable(DataSourceReader):
    """Rows from one bound to another, as they were when the query was planned."""

    def __init__(self, options: Options, names: tuple[str, ...]) -> None:
        self._options = options
        self._names = names
        self._wanted = wanted_of(options)

    def partitions(self) -> list[InputPartition]:
        """Parts of all shards. Raises GoneError, DamageError, PipelineError."""
        reader = reader_of(self._options)
        with reader.at_a_glance():
            return self._planned(reader)

    def _planned(self, reader: JournalReader) -> list[InputPartition]:
        options, wanted = self._options, self._wanted
        shards = reader.shards()
        start = bounded(reader, options.start, shards)
        know(reader, start)
        end = bounded(reader, options.end, shards)
        found: dict[str, Shard] = {}
        ranges: dict[str, tuple[int, int]] = {}
        for name in shards:
            if wanted.shards is not None and name not in wanted.shards:
                continue
            first = max(start[name], wanted.sequence.first or 0)
            until = end[name] if wanted.sequence.until is None else min(end[name], wanted.sequence.until)
            if first < until:
                found[name] = Shard(reader, name, first, wanted.received, wanted.only.get("route"))
                ranges[name] = (first, min(until, found[name].look()))
        return [*parts_of(found, ranges, options)]

    def read(self, partition: InputPartition) -> Iterator[Arrow]:
        """The rows of a part."""
        return _read(self._options, self._wanted, self._names, partition)

    def read_coded(self, partition: InputPartition) -> Iterator[Arrow]:
        """The same, with texts as places in dictionaries, which Spark does not take."""
        return _read(self._options, self._wanted, self._names, partition, _coded)


class FilteredTable(JournalTable):
    """The same, where conditions pass over blocks. Spark gives all uses of one table of a Python source in a
    query the conditions of the last, so whoever asks for this uses it once."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what helps to pass over blocks; Spark applies all of them again."""
        self._wanted = narrowed(self._wanted, filters)
        return filters


class JournalStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Rows as they are written. A shard that appears later is read from its first row."""

    def __init__(self, options: Options, names: tuple[str, ...]) -> None:
        self._options = options
        self._names = names
        self._wanted = wanted_of(options)
        self._reader = reader_of(options)
        self._shards: dict[str, Shard] = {}
        self._target: Offsets | None = None

    def initialOffset(self) -> Offsets:
        """Where a new query begins."""
        with self._reader.at_a_glance():
            return bounded(self._reader, self._options.start, self._there())

    def getDefaultReadLimit(self) -> ReadLimit:
        """`maxOffsetsPerTrigger`."""
        most = self._options.rows_max
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        """The end of the query is the end of the journal now."""
        with self._reader.at_a_glance():
            self._target = {name: next_of(self._reader, name) for name in self._there()}

    def _there(self) -> list[str]:
        """The shards that there are, and are wanted."""
        only = self._wanted.shards
        return [name for name in self._reader.shards() if only is None or name in only]

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """The end of the next micro-batch. A shard whose files have all gone ends where it was read to."""
        with self._reader.at_a_glance():
            return self._ends(start, limit)

    def _ends(self, start: Offsets, limit: ReadLimit) -> Offsets:
        ends = dict(start)
        begins = {name: self._begin(start, name) for name in self._there()}
        know(self._reader, {name: max(self._known_to(name), first) for name, first in begins.items()})
        for name in self._shards.keys() - begins.keys():
            known = self._shards.pop(name).next
            if known > start.get(name, 0) and self._options.fail:
                raise self._lost(name, start.get(name, 0), known)
        for name, first in begins.items():
            if self._target is not None and name not in self._target:
                continue
            shard = self._shard(name, first)
            shard.forget(first)
            until = shard.look()
            if self._target is not None:
                until = min(until, self._target[name])
            if until > first:
                ends[name] = until
        if isinstance(limit, ReadMaxRows):
            waiting = {name: until - self._begin(start, name) for name, until in ends.items()}
            shares = shared_out(waiting, limit.max_rows)
            ends = {name: self._begin(start, name) + rows for name, rows in shares.items()}
        return ends

    def reportLatestOffset(self) -> Offsets:
        """The newest rows that the planner has seen, for the query's progress."""
        return {name: shard.next for name, shard in self._shards.items()}

    def partitions(self, start: Offsets, end: Offsets) -> list[InputPartition]:
        """Parts of a micro-batch; the first of a query may be one that a killed query had planned."""
        ranges: dict[str, tuple[int, int]] = {}
        with self._reader.at_a_glance():
            for name, until in end.items():
                first = self._begin(start, name)
                if first >= until:  # nothing is asked of it; it may be gone
                    continue
                shard = self._shard(name, first)
                if shard.next < until and shard.look() < until and self._options.fail:
                    raise self._lost(name, shard.next, until)
                ranges[name] = first, until
        return [*parts_of(self._shards, ranges, self._options)]

    def read(self, partition: InputPartition) -> Iterator[Arrow]:
        """The rows of a part."""
        return _read(self._options, self._wanted, self._names, partition)

    def _begin(self, start: Offsets, name: str) -> int:
        found = start.get(name)
        return first_of(self._reader, name) if found is None else found

    def _known_to(self, name: str) -> int:
        return self._shards[name].next if name in self._shards else 0

    def _lost(self, name: str, end: int, wanted: int) -> PipelineError:
        return PipelineError(
            f"shard {name} of the journal in {self._options.folder.uri} ends before row {end}, and row"
            f" {wanted} is wanted next: its end is lost, or it is another journal; with a new checkpoint, or"
            " failOnDataLoss=false, the query goes on"
        )

    def _shard(self, name: str, first: int) -> Shard:
        """What is known of a shard; looked at from row `first` on when it is new.

        Raises PipelineError when the journal ends before that row: it is another one, or has lost its end.
        """
        shard = self._shards.get(name)
        if shard is None:
            end = next_of(self._reader, name)
            if end < first and self._options.fail:
                raise self._lost(name, end, first)
            shard = self._shards[name] = Shard(
                self._reader, name, first, routes=self._wanted.only.get("route")
            )
        return shard
