"""What a task holds does not grow with what it reads or writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from gateway.pipeline.archive import reader as filed
from gateway.pipeline.archive import writer
from gateway.pipeline.archive.manifest import Archive
from gateway.pipeline.archive.reader import ArchiveRows
from gateway.pipeline.journal import partition_reader
from gateway.pipeline.journal.options import options_of
from gateway.pipeline.journal.source import JournalTable
from gateway.pipeline.stores import place_of
from gateway.pipeline.traffic import fate_counts
from tests.pipeline.journals import written

SLACK = 1.3  # of what the allocator leaves or rounds up


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One, and one of four times as many rows."""
    folder = tmp_path_factory.mktemp("journals")
    return written(folder / "one", 12_000), written(folder / "four", 48_000)


def table_of(journal: Path) -> JournalTable:
    return JournalTable(options_of({"path": str(journal)}, stream=False), writer.NAMES)


def most(batches: Iterator[Any]) -> int:
    """Bytes of Arrow's that are held at most while batches pass by."""
    before = peak = pa.total_allocated_bytes()
    for _ in batches:
        peak = max(peak, pa.total_allocated_bytes())
    return peak - before


@pytest.mark.needs("time")
def test_a_task_that_reads(journals: tuple[Path, Path]) -> None:
    held = []
    for journal in journals:
        table = table_of(journal)
        (part,) = table.partitions()
        held.append(most(table.read(part)))
    assert 0 < held[1] < SLACK * held[0]


def test_what_is_counted_is_sorted_in_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message is in one of them with all of its rows, whatever its key is."""
    monkeypatch.setattr(fate_counts, "LOT_ROWS", 64)
    keys = [(number - 500) * 7_919 for number in range(1_000)]
    columns = [keys * 2, [1] * 2_000, [2] * 1_000 + [3] * 1_000, [4] * 2_000, [*range(2_000)]]
    arrays = [*(pa.array(column, pa.int64()) for column in columns), pa.nulls(2_000, pa.string())]
    found = list(fate_counts.second_pass([pa.RecordBatch.from_arrays(arrays, schema=fate_counts.FIRST)]))
    groups = [group for batch in found for group in batch.to_pylist()]
    assert len(found) == 32
    assert sum(group["messages"] for group in groups) == 1_000
    assert {(group["fate"], *group["recipients"]) for group in groups} == {(1, 2, 3)}


def test_large_bodies_are_not_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows a batch may have, bytes end it."""
    monkeypatch.setattr(partition_reader, "BATCH_BYTES", 50_000)
    table = table_of(written(tmp_path / "j", 2_000, block_rows=10))
    for read in (table.read, table.read_coded):
        batches = [batch for part in table.partitions() for batch in read(part)]
        assert sum(batch.num_rows for batch in batches) == 2_000
        assert 1 < len(batches) < 100
        assert max(batch.nbytes for batch in batches) < 100_000


@pytest.mark.needs("time")
def test_a_task_that_archives_and_one_that_reads_an_archive(
    journals: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups are written when they are full, and read in batches."""
    monkeypatch.setattr(partition_reader, "CODED_ROWS", 1_024)
    monkeypatch.setattr(filed, "BATCH_ROWS", 1_024)
    monkeypatch.setattr(writer, "GROUP_ROWS", 4_096)
    written_, read = [], []
    for place, journal in enumerate(journals):
        table = table_of(journal)
        (part,) = table.partitions()
        archive = Archive(place_of(str(tmp_path / str(place))))
        before, peak = pa.total_allocated_bytes(), [0]

        def watched(batches: Iterator[Any], before: int = before, peak: list[int] = peak) -> Iterator[Any]:
            for batch in batches:
                peak[0] = max(peak[0], pa.total_allocated_bytes() - before)
                yield batch

        files = writer.write(archive, "0", watched(table.read_coded(part)), 1 << 30)
        written_.append(peak[0])
        archive.save(archive.manifest().next_version(gained=files))
        rows = ArchiveRows(archive, archive.manifest().files, ("source_address", "body"), None, None)
        read.append(max(most(rows.read(piece)) for piece in rows.pieces(1)))
    assert 0 < written_[1] < SLACK * written_[0]
    assert 0 < read[1] < SLACK * read[0]
