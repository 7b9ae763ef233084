"""`gateway journal lake`: each row of a complete segment is in the Delta table once, whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, Final
from uuid import uuid4

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake", reason="the lake needs deltalake: pip install 'gateway[lake]'")

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from gateway.cli import journal as journal_commands
from gateway.cli.exits import Exit
from gateway.errors import PipelineError
from gateway.pipeline import lake
from gateway.pipeline.lake import LakeTable
from gateway.pipeline.stores import StoreFolder, place_of
from gateway.store.journal.format import DamageError
from gateway.store.journal.reader import Gap, JournalReader
from gateway.store.journal.writer import JournalOptions
from tests.cli.conftest import Run
from tests.needs import needed
from tests.pipeline.journals import Journal, convert, written
from tests.pipeline.servers import S3
from tests.store.journal.samples import until

ROOT: Final = Path(__file__).resolve().parents[2]
COUNT: Final = 1_000
SEGMENT_BYTES: Final = 16_000
ORDER: Final = [("shard", "ascending"), ("sequence", "ascending")]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return more(tmp_path / "journal", 0)


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture(scope="module")
@needed("an S3 server")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with S3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["disk", "S3"])
def place(request: pytest.FixtureRequest, to: Path) -> StoreFolder:
    """A folder on a disk, and one in S3."""
    if request.param == "disk":
        return place_of(str(to))
    server = request.getfixturevalue("s3")
    return place_of(f"{server.uri}/{uuid4().hex}/lake", server.options)


def more(folder: Path, first: int, count: int = COUNT) -> Path:
    """Write messages into several small segments, all but the newest of them complete."""
    return written(folder, count, first=first, block_rows=20, segment_bytes=SEGMENT_BYTES)


def table_at(to: Path | StoreFolder) -> Any:
    """Return the rows of the Delta table, in order."""
    folder = located(to)
    table = DeltaTable(folder.uri, storage_options=lake.storage_options(folder))
    return table.to_pyarrow_table().sort_by(ORDER)


def located(to: Path | StoreFolder) -> StoreFolder:
    """Return the folder by its name for the pipeline."""
    return to if isinstance(to, StoreFolder) else place_of(str(to))


def numbers(to: Path | StoreFolder, shard: str = "0") -> list[int]:
    """Return the sequence numbers of a shard's rows in the table."""
    found = table_at(to).select(["shard", "sequence"]).to_pylist()
    return [row["sequence"] for row in found if row["shard"] == shard]


def complete(journal: Path, shard: str = "0") -> int:
    """Return the number behind the last row of a shard in a complete segment."""
    behind: int = JournalReader(journal).segments(shard)[-1].first
    return behind


def append(journal: Path, to: Path | StoreFolder, **options: Any) -> int:
    """Append what is complete, and return the number of rows."""
    return sum(commit.rows for commit in LakeTable(located(to), **options).append(journal))


def test_rows_and_columns_are_those_of_a_closed_segment(journal: Path, to: Path, tmp_path: Path) -> None:
    """Whether the journal's files are blocks or Parquet, or some of each."""
    behind = complete(journal)
    assert append(journal, to) == behind > 500
    plain = table_at(to)
    convert(journal, 0, 5)
    convert(journal, 1, len(JournalReader(journal).segments("0")) - 1)
    files = [one.path for one in JournalReader(journal).segments("0") if one.next is not None]
    assert len(files) == 2
    closed = pa.concat_tables([pq.read_table(path) for path in files])
    assert plain.schema.equals(closed.schema)
    assert plain.equals(closed)
    assert append(journal, tmp_path / "another") == behind
    assert table_at(tmp_path / "another").equals(plain)


def test_a_run_continues_where_the_one_before_ended(
    journal: Path, to: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In commits of limited size, and for shards that appear later; the segment in use follows."""
    monkeypatch.setattr(lake, "COMMIT_ROWS", 100)
    given = ("journal", "lake", "--journal", str(journal), "--to", str(to))
    first = complete(journal)
    done = f"rows appended to {to}, 0 rows of the journal missing\n"
    assert run(*given) == (0, f"{first} {done}", "")
    assert DeltaTable(str(to)).version() >= first // 200
    assert run(*given) == (0, f"0 {done}", "")
    more(journal, COUNT)
    written(journal, 300, shard=1, block_rows=20, segment_bytes=SEGMENT_BYTES)
    second, other = complete(journal), complete(journal, "1")
    assert second > COUNT
    assert other > 100
    assert run(*given) == (0, f"{second - first + other} {done}", "")
    assert numbers(to) == [*range(second)]
    assert numbers(to, "1") == [*range(other)]


def test_of_two_overlapping_runs_one_fails(
    journal: Path, place: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has read its rows and not committed them when the second one appends the same."""
    read, appended = lake._CommitRows._read, list[int]()

    def overtaken(rows: Any, **options: Any) -> Iterator[Any]:
        monkeypatch.setattr(lake._CommitRows, "_read", read)
        yield from read(rows, **options)
        second = Thread(target=lambda: appended.append(append(journal, place)))
        second.start()
        second.join()

    monkeypatch.setattr(lake._CommitRows, "_read", overtaken)
    with pytest.raises(PipelineError, match="another run has appended"):
        append(journal, place)
    assert appended == [complete(journal)]
    assert numbers(place) == [*range(complete(journal))]
    assert append(journal, place) == 0


def test_maintenance_keeps_rows_and_position(
    journal: Path, to: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged files, also while a run appends; a checkpoint of the log, and the log without what is older."""
    read = lake._CommitRows._read
    monkeypatch.setattr(lake, "COMMIT_ROWS", 100)
    append(journal, to)
    more(journal, COUNT)

    def overtaken(rows: Any, **options: Any) -> Iterator[Any]:
        monkeypatch.setattr(lake._CommitRows, "_read", read)
        yield from read(rows, **options)
        merge = Thread(target=lambda: DeltaTable(str(to)).optimize.compact())
        merge.start()
        merge.join()

    monkeypatch.setattr(lake._CommitRows, "_read", overtaken)
    append(journal, to)
    table = DeltaTable(str(to))
    assert "OPTIMIZE" in [commit["operation"] for commit in table.history()]
    table.create_checkpoint()
    for path in sorted(to.glob("_delta_log/*.json"))[:-1]:
        path.unlink()
    more(journal, 2 * COUNT)
    append(journal, to)
    assert numbers(to) == [*range(complete(journal))]
    assert complete(journal) > 2 * COUNT


def test_two_runs_create_one_table(
    journal: Path, place: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has created it and appended when the first creates it."""
    create = DeltaTable.create

    def overtaken(*given: Any, **options: Any) -> DeltaTable:
        monkeypatch.setattr(lake.DeltaTable, "create", create)
        append(journal, place)
        return create(*given, **options)

    monkeypatch.setattr(lake.DeltaTable, "create", overtaken)
    assert append(journal, place) == 0
    assert numbers(place) == [*range(complete(journal))]


KILLED: Final = """
import os, signal, sys
from pathlib import Path
from gateway.pipeline import lake
from gateway.pipeline.stores import place_of

lake.COMMIT_ROWS = 100
moment, number, journal, to = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
read, write, left = lake._CommitRows._read, lake.write_deltalake, [number]

def kill():
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

def reading(rows, **options):
    yield from read(rows, **options)
    if moment == "before the commit":
        kill()

def writing(*given, **options):
    write(*given, **options)
    if moment == "after the commit":
        kill()

lake._CommitRows._read, lake.write_deltalake = reading, writing
for commit in lake.LakeTable(place_of(to)).append(journal):
    print(commit.rows, flush=True)
"""


@needed("processes")
@pytest.mark.parametrize("moment, count", [("before the commit", 3), ("after the commit", 4)])
def test_a_killed_run_is_continued(journal: Path, to: Path, moment: str, count: int) -> None:
    command = (sys.executable, "-c", KILLED, moment, "4", str(journal), str(to))
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert len(ended.stdout.split()) == 3
    there = numbers(to)
    assert there == [*range(len(there))]
    assert DeltaTable(str(to)).version() == count
    assert append(journal, to) == complete(journal) - len(there) > 0
    assert numbers(to) == [*range(complete(journal))]


@needed("processes")
@pytest.mark.parametrize("pattern", ["*.parquet", "_delta_log/*2.json"])
def test_a_run_that_is_killed_while_it_writes_is_continued(journal: Path, to: Path, pattern: str) -> None:
    """As soon as the run has written a file of rows, or of the log; its next commit may be done or not."""
    command = (sys.executable, "-c", KILLED, "never", "1", str(journal), str(to))
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        until(lambda: run.poll() is not None or any(to.glob(pattern)), 120.0)
    finally:
        run.kill()
        run.wait()
    there = numbers(to)
    assert there == [*range(len(there))]
    append(journal, to)
    assert numbers(to) == [*range(complete(journal))]


@pytest.mark.parametrize("all_but_one", [True, False], ids=["empty segment left", "rows left"])
def test_rows_that_retention_deleted_are_reported(
    journal: Path, to: Path, run: Run, tmp_path: Path, all_but_one: bool
) -> None:
    """And the rows behind them follow; the exit code says so once."""
    first = complete(journal)
    assert append(journal, to) == first
    more(journal, COUNT)
    segments = JournalReader(journal).segments("0")
    left = segments[-1:] if all_but_one else segments[-5:]
    for one in segments[: -len(left)]:
        one.path.unlink()
    if all_but_one:
        left[0].path.write_bytes(b"")
    behind, lost = left[-1].first, left[0].first - first
    summary = tmp_path / "summary.json"
    given = ("journal", "lake", "--journal", str(journal), "--to", str(to), "--summary", str(summary))
    ran = run(*given)
    assert (ran.code, ran.err) == (
        Exit.FAILED,
        f"0 {lost} rows from {first} on are missing: gone deleted by retention\n",
    )
    assert ran.out.endswith(f"rows appended to {to}, {lost} rows of the journal missing\n")
    assert '"ok": false' in summary.read_text()
    assert f'"rows_missing": {lost}.0' in summary.read_text()
    assert numbers(to) == [*range(first), *range(left[0].first, behind)]
    assert run(*given).code == Exit.OK


def test_damage_stops_a_run_unless_it_is_to_go_on(journal: Path, to: Path, run: Run) -> None:
    damaged = JournalReader(journal).segments("0")[3]
    data = bytearray(damaged.path.read_bytes())
    data[1_000] ^= 255
    damaged.path.write_bytes(data)
    with pytest.raises(DamageError, match="--skip-lost continues"):
        append(journal, to)
    assert numbers(to) == []
    given = ("journal", "lake", "--journal", str(journal), "--to", str(to))
    ran = run(*given)
    assert (ran.code, ran.out) == (Exit.FAILED, "")
    assert "--skip-lost continues" in ran.err
    ran = run(*given, "--skip-lost")
    gaps = [one for one in JournalReader(journal, skip=True).blocks("0") if isinstance(one, Gap)]
    assert (ran.code, len(gaps)) == (Exit.FAILED, 1)
    assert f"0 {gaps[0].rows} rows from {gaps[0].first} on are missing: damage" in ran.err
    assert len(numbers(to)) == complete(journal) - gaps[0].rows
    assert run(*given).code == Exit.OK


def test_rows_that_the_gateway_did_not_write_are_reported_and_no_fault(
    journal: Path, to: Path, run: Run
) -> None:
    made = Journal(journal, options=JournalOptions(flush_interval_secs=60.0, segment_bytes=SEGMENT_BYTES))
    made.write(COUNT, 100)
    made.writer.dropped += 7
    made.write(COUNT + 100, 500)
    made.close()
    more(journal, COUNT + 600, 500)
    ran = run("journal", "lake", "--journal", str(journal), "--to", str(to))
    (gap,) = [one for one in JournalReader(journal).blocks("0") if isinstance(one, Gap)]
    behind = gap.first + gap.rows
    assert (ran.code, gap.rows, gap.reason) == (Exit.OK, 7, "backlog")
    assert ran.err == f"0 7 rows from {gap.first} on are missing: backlog\n"
    assert numbers(to) == [*range(gap.first), *range(behind, complete(journal))]
    assert complete(journal) > behind


def test_follow_goes_on(journal: Path, to: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows that are complete later, until it is interrupted."""
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        assert numbers(to) == [*range(complete(journal))]
        if len(waits) == 3:
            raise KeyboardInterrupt
        more(journal, len(waits) * COUNT)

    monkeypatch.setattr(journal_commands, "time", SimpleNamespace(sleep=sleep))
    ran = run("journal", "lake", "--journal", str(journal), "--to", str(to), "--follow", "--every", "7")
    behind = complete(journal)
    assert (ran.code, ran.err, waits) == (0, "", [7.0] * 3)
    counts = [int(line.split(" rows appended to ")[0]) for line in ran.out.splitlines()]
    assert (len(counts), sum(counts)) == (3, behind)
    assert behind > 2 * COUNT


def test_a_journal_that_ends_before_the_position_is_another_one(
    journal: Path, to: Path, tmp_path: Path
) -> None:
    append(journal, to)
    another = more(tmp_path / "another", 0, 200)
    with pytest.raises(PipelineError, match="its end is lost, or it is another journal"):
        append(another, to)
    assert numbers(to) == [*range(complete(journal))]


def test_no_other_table_is_appended_to(journal: Path, to: Path, run: Run, tmp_path: Path) -> None:
    rows = pa.table({"shard": ["0"], "sequence": [0]})
    write_deltalake(str(tmp_path / "foreign"), rows)
    with pytest.raises(PipelineError, match="did not create"):
        append(journal, tmp_path / "foreign")
    with pytest.raises(PipelineError, match="has 0-.* in it"):
        append(journal, journal)
    append(journal, to)
    archived = CommitProperties(app_transactions=[Transaction("gateway.offsets", 1)])
    write_deltalake(str(to), rows, mode="append", schema_mode="merge", commit_properties=archived)
    with pytest.raises(PipelineError, match="archive has appended"):
        append(journal, to)
    ran = run("journal", "lake", "--journal", str(journal), "--to", "gs://plant/lake")
    assert ran.code == Exit.FAILED
    assert ran.err.startswith("a lake is written to a folder or to s3a://, not to gs://plant/lake")


def test_a_role_to_assume_is_not_ignored() -> None:
    place = place_of("s3a://plant/lake", {"fs.s3a.assumed.role.arn": "arn:aws:iam::1:role/lake"})
    with pytest.raises(PipelineError, match=r"does not assume fs\.s3a\.assumed\.role\.arn"):
        LakeTable(place)


def test_a_table_in_s3(journal: Path, s3: S3, run: Run) -> None:
    """By the command; a run continues where the one before it ended, and no other file is overwritten."""
    to = f"{s3.uri}/one/lake"
    conf = [word for name, value in s3.options.items() for word in ("--conf", f"spark.hadoop.{name}={value}")]
    given = ("journal", "lake", "--journal", str(journal), *conf)
    ran = run(*given, "--to", to)
    first = complete(journal)
    assert ran == (0, f"{first} rows appended to {to}, 0 rows of the journal missing\n", "")
    more(journal, COUNT)
    ran = run(*given, "--to", to)
    second = complete(journal)
    assert ran.out == f"{second - first} rows appended to {to}, 0 rows of the journal missing\n"
    assert numbers(place_of(to, s3.options)) == [*range(second)]
    ran = run(*given, "--to", f"{s3.uri}/one")
    assert ran.code == Exit.FAILED
    assert ran.err == f"{s3.uri}/one has lake in it, and is no Delta table; give another folder\n"
    ran = run(*given, "--to", to, "--conf", "spark.hadoop.fs.s3a.endpoint=http://127.0.0.1:9")
    assert ran.code == Exit.FAILED
    assert ran.err.startswith(f"{to} is unreachable: ")
