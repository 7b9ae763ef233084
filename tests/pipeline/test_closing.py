"""Complete segments become Parquet, with the same rows for whoever reads, plans, ships or kills meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from gateway import clock
from gateway.broker.journal import CONVERTER
from gateway.pipeline.columns import BY_NAME
from gateway.pipeline.journal.arrow import batch_of, coded_batch_of, expand_runs
from gateway.pipeline.journal.parquet_writer import close_segments
from gateway.pipeline.shipment import ship
from gateway.pipeline.stores import place_of
from gateway.store.journal import appender
from gateway.store.journal.appender import CONVERT_AGAIN_SECS
from gateway.store.journal.format import DamageError, JournalError
from gateway.store.journal.parquet import METADATA_KEY
from gateway.store.journal.reader import Block, Gap, JournalReader, Row
from gateway.store.journal.segments import Hole, parquet_name, segments_in
from gateway.store.journal.writer import JournalOptions
from tests.store.journal import samples
from tests.store.journal.test_merging import START, Quiet, leave_unmerged, rows_of, segments

ROOT: Final = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.needs("processes")  # conversions, which the journal starts
QUICK: Final[dict[str, Any]] = {"flush_interval_secs": 0.01, "body_bytes_max": 20}
CONVERTING: Final = JournalOptions(**QUICK, segment_secs=100.0, converter=CONVERTER)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several complete segments, a gap, and a segment in use."""
    folder = tmp_path_factory.mktemp("quiet")
    with pytest.MonkeyPatch.context() as patch:
        leave_unmerged(patch)
        made = Quiet(
            folder, JournalOptions(flush_interval_secs=60.0, body_bytes_max=20, segment_bytes=30_000)
        )
        made.write(40)
        made.writer.dropped += 7
        made.write(60)
        made.writer.close()
    assert len(segments(folder)) > 4
    return folder


@pytest.fixture
def quiet(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "journal")


def converted(folder: Path, count: int | None = None) -> Path:
    """Put the first `count` complete segments (None: all) into one file, as the writer does."""
    some = segments(folder)
    complete = some[:-1] if count is None else some[:count]
    first, behind = complete[0].first, some[len(complete)].first
    draft = folder / "draft.tmp"
    close_segments(folder, 0, first, behind, draft)
    final = folder / parquet_name(0, first, behind)
    draft.replace(final)
    for segment in complete:
        segment.path.unlink()
    return final


def until(condition: Callable[[], bool]) -> None:
    """Wait for a conversion, which has the lowest priority on a machine that may be busy."""
    samples.until(condition, 120.0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def everything(folder: Path) -> list[Row | Gap]:
    """Rows and gaps; where a gap is, depends on the file."""
    found = JournalReader(folder).rows("0")
    return [item._replace(where="") if isinstance(item, Gap) else item for item in found]


def columns_of(folder: Path, *, coded: bool) -> list[dict[str, Any]]:
    """All columns of all rows, as Spark's tasks and the archive read them."""
    make = coded_batch_of if coded else batch_of
    blocks = JournalReader(folder, expand=expand_runs).blocks("0")
    return [row for one in blocks if isinstance(one, Block) for row in make(one, tuple(BY_NAME)).to_pylist()]


def test_a_file_of_before_a_column_existed_is_read(quiet: Path) -> None:
    path = converted(quiet)
    newer = ["correlation_id", "content_type"]
    behind = segments(quiet)[-1].first
    before = [
        {**row, **dict.fromkeys(newer if row["sequence"] < behind else ())}
        for row in columns_of(quiet, coded=True)
    ]
    file = pq.ParquetFile(path)
    metadata = {METADATA_KEY: file.metadata.metadata[METADATA_KEY]}
    groups = [file.read_row_group(at).drop_columns(newer) for at in range(file.num_row_groups)]
    with pq.ParquetWriter(path, groups[0].schema.with_metadata(metadata)) as writer:
        for group in groups:
            writer.write_table(group)
    assert columns_of(quiet, coded=True) == before
    assert columns_of(quiet, coded=False) == before


def test_rows_gaps_and_columns_are_the_same(quiet: Path) -> None:
    reader = JournalReader(quiet)
    before, extent, low = everything(quiet), reader.extent("0"), reader.low_water("0", 100)
    plain, coded = columns_of(quiet, coded=False), columns_of(quiet, coded=True)
    missing = [reader.missing_count("0", int(START * 1e6), to) for to in (None, int((START + 30) * 1e6))]
    path = converted(quiet)
    assert everything(quiet) == before
    assert columns_of(quiet, coded=False) == plain
    assert columns_of(quiet, coded=True) == coded
    reader = JournalReader(quiet)
    after = reader.extent("0")
    for name in ("first", "next", "rows", "missing", "first_us", "last_us", "low_us"):
        assert getattr(after, name) == getattr(extent, name), name
    assert after.byte_count < extent.byte_count
    assert [
        reader.missing_count("0", int(START * 1e6), to) for to in (None, int((START + 30) * 1e6))
    ] == missing
    assert (reader.low_water("0", 100) or 0) <= (low or 0)
    assert list(reader.verify("0")) == [one for one in reader.rows("0") if isinstance(one, Gap)]
    assert pq.read_metadata(path).num_rows + 7 == reader.summary(segments(quiet)[0]).next  # type: ignore[union-attr]


def test_conditions_skip_row_groups_and_no_rows(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.journal.parquet_writer.GROUP_ROWS", 30)
    given: tuple[dict[str, Any], ...] = (
        {"only": {"route": ["up1"]}},
        {"only": {"client": ["c3", "c4"]}, "from_us": int((START + 20) * 1e6)},
        {"start": 77, "to_us": int((START + 70) * 1e6)},
        {"only": {"message_id": ["id 55"]}},
        {"only": {"route": ["none of them"]}},
    )
    before = [list(JournalReader(quiet).rows("0", **one)) for one in given]
    path = converted(quiet)
    assert pq.read_metadata(path).num_row_groups > 5
    for one, rows in zip(given, before, strict=True):
        found = [row for row in JournalReader(quiet).rows("0", **one) if not isinstance(row, Gap)]
        assert found == [row for row in rows if not isinstance(row, Gap)]
    blocks = JournalReader(quiet).blocks("0", only={"message_id": ["id 55"]}, end=190)
    assert len([one for one in blocks if isinstance(one, Block)]) < 5


@pytest.mark.parametrize("seen", [0, 1, 7, 55, 99, 150, 180])
def test_a_reader_that_has_begun_sees_each_row_once(quiet: Path, seen: int) -> None:
    before = everything(quiet)
    reader = JournalReader(quiet).rows("0")
    found = [next(reader) for _ in range(seen)]
    converted(quiet, 3)
    found += [next(reader) for _ in range(10)]
    converted_later = segments(quiet)[1:]
    if len(converted_later) > 2:
        draft = quiet / "later.tmp"
        close_segments(quiet, 0, converted_later[0].first, converted_later[-1].first, draft)
        draft.replace(quiet / parquet_name(0, converted_later[0].first, converted_later[-1].first))
        for one in converted_later[:-1]:
            one.path.unlink()
    found += reader
    assert [one._replace(where="") if isinstance(one, Gap) else one for one in found] == before
    assert len(files(quiet)) == 2


@pytest.mark.parametrize("begin", [0, 1, 63, 120])
def test_what_was_planned_before_is_found(quiet: Path, begin: int) -> None:
    reader = JournalReader(quiet)
    block_ranges = [one for one in reader.block_ranges("0", begin) if not isinstance(one, Gap)]
    expected = [row["sequence"] for row in rows_of(quiet) if row["sequence"] >= begin]
    converted(quiet)
    found: list[int] = []
    for one in block_ranges:
        for block in reader.blocks("0", one.first, end=one.next, near=one.place):
            if isinstance(block, Block):
                found += range(max(block.begin, one.first), min(block.end, one.next))
    assert found == expected
    again = [one for one in JournalReader(quiet).block_ranges("0", begin) if not isinstance(one, Gap)]
    assert sum(one.next - one.first for one in again) == len(expected)


@pytest.mark.parametrize("step", ["list", "stat"])
def test_a_conversion_while_the_folder_is_listed(
    quiet: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Neither the file, which is new, nor the segments, which are gone, are in such a listing."""
    before = everything(quiet)
    function = getattr(Path, "iterdir" if step == "list" else step)
    left = [1]

    def listed(folder: Path) -> Iterator[Path]:
        found = list(function(folder))
        if left:
            left.pop()
            converted(quiet, 3)
        yield from (one for one in found if one.exists())

    def looked(path: Path, **also: Any) -> os.stat_result:
        if left and path.name.endswith(".gwj"):
            left.pop()
            converted(quiet, 3)
        return function(path, **also)  # type: ignore[no-any-return]

    reader = JournalReader(quiet)
    patched = ("iterdir", listed) if step == "list" else ("stat", looked)
    with monkeypatch.context() as patch:
        patch.setattr(Path, *patched)
        found = reader.segments("0")
    assert not left
    assert found[0].first == 0
    assert found[0].next == found[1].first
    assert everything(quiet) == before


KILLED: Final = """
import os, signal, sys
from pathlib import Path
from gateway.broker.journal import CONVERTER
from gateway.store.journal import conversion
from gateway.store.journal.conversion import Conversion
from gateway.store.journal.segments import segments_in
folder, place, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
def die(*_, **also):
    os.kill(os.getpid(), signal.SIGKILL)
def later(function):
    def made(*given, **also):
        global count
        count -= 1
        return die() if count < 0 else function(*given, **also)
    return made
*some, last = [one for one in segments_in(folder) if one.next is None]
made = Conversion(CONVERTER, 0, some, last.first)
if place == "start":
    die()
made._process.wait()
if place == "sync":
    conversion.sync_path = die
else:
    setattr(Path, place, later(getattr(Path, place)))
made.commit()
"""


@pytest.mark.parametrize(
    ("place", "count"), [("start", 0), ("replace", 0), ("sync", 0), ("unlink", 0), ("unlink", 2)]
)
def test_killed_at_each_step(quiet: Path, place: str, count: int) -> None:
    """The writer; its process ends by itself, or what it leaves is removed."""
    before = everything(quiet)
    done = subprocess.run(
        (sys.executable, "-c", KILLED, str(quiet), place, str(count)), cwd=ROOT, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert bool(files(quiet)) == (place in ("sync", "unlink"))
    assert everything(quiet) == before
    assert JournalReader(quiet).extent("0").rows == sum(not isinstance(one, Gap) for one in before)
    made = Quiet(quiet)
    assert made.writer.next == JournalReader(quiet).end("0")
    made.writer.close()
    assert everything(quiet) == before
    reached = 0
    for one in segments_in(quiet):
        assert one.first == reached, "no two files have the same rows"
        reached = one.next or next((two.first for two in segments_in(quiet) if two.first > one.first), 0)
    until(lambda: not list(quiet.glob("*.tmp")))


@pytest.mark.needs("time")
def test_killed_again_and_again(tmp_path: Path) -> None:
    """A gateway that writes, converts and is killed; each time a reader beside it sees each row once."""
    script = """
import sys, time
from pathlib import Path
from gateway.broker.journal import CONVERTER
from gateway.model.outcome import ACCEPTED
from gateway.store.journal.writer import JournalOptions
from tests.store.journal.samples import HOME, message, writer
options = JournalOptions(flush_interval_secs=0.01, segment_bytes=20_000, converter=CONVERTER)
made = writer(Path(sys.argv[1]), options=options)
print("ready", flush=True)
while True:
    made.record(HOME, [message(made.next + place) for place in range(20)], ACCEPTED, time.monotonic())
    time.sleep(0.1)
"""
    seed = int.from_bytes(os.urandom(4), "big")
    print("seed", seed)
    chance = random.Random(seed)
    there = 0
    for _ in range(3):
        process = subprocess.Popen(
            (sys.executable, "-c", script, str(tmp_path)), stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        count, rest = len(files(tmp_path)) + 1, chance.randrange(1, 3)
        while rest > 0:
            rest -= len(files(tmp_path)) >= count
            numbers = [row["sequence"] for row in rows_of(tmp_path)]
            assert numbers == [*range(len(numbers))]
            assert len(numbers) >= there
            there = len(numbers)
        process.kill()
        process.stdout.close()
        process.wait()
    assert len(files(tmp_path)) >= 3
    tables = [pq.read_table(path, columns=["sequence"]) for path in files(tmp_path)]
    closed = [number for one in tables for number in one["sequence"].to_pylist()]
    assert closed == [*range(len(closed))], "the folder's glob has each row once"
    assert list(JournalReader(tmp_path).verify("0")) in ([], [*_torn(tmp_path)])


def _torn(folder: Path) -> Iterator[Hole]:
    last = segments(folder)[-1].path
    yield from (
        one for one in JournalReader(folder).verify("0") if isinstance(one, Hole) and one.path == last
    )


def test_the_writer_converts_what_is_complete_and_goes_on(tmp_path: Path) -> None:
    made = Quiet(tmp_path, CONVERTING)
    made.write(250)
    until(lambda: len(files(tmp_path)) >= 1)
    until(lambda: made.writer._appender._conversion is None)
    assert [row["sequence"] for row in rows_of(tmp_path)] == [*range(500)]
    assert made.writer.segments == len(segments(tmp_path))
    made.writer.close()
    again = Quiet(tmp_path, CONVERTING)
    again.now, again.number = made.now, made.number
    assert again.writer.next == 500
    again.write(10)
    again.writer.close()
    rows = rows_of(tmp_path)
    assert [row["sequence"] for row in rows] == [*range(520)]
    assert {path.stat().st_mode & 0o777 for path in files(tmp_path)} == {0o600}


def test_numbers_go_on_behind_a_file_without_pyarrow(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a reader says what is missing."""
    path = converted(quiet)
    behind = segments(quiet)[-1].first
    segments(quiet)[-1].path.unlink()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(JournalError, match=r"gateway\[parquet\]"):
        list(JournalReader(quiet).rows("0"))
    made = Quiet(quiet)
    assert made.writer.next == behind == int(path.stem.rpartition("-")[2])
    made.write(1)
    made.writer.close()
    assert len(list(JournalReader(quiet).rows("0", behind))) == 2


def test_retention_deletes_files(tmp_path: Path) -> None:
    made = Quiet(
        tmp_path, JournalOptions(**QUICK, segment_secs=100.0, retention_secs=400.0, converter=CONVERTER)
    )
    made.write(250)
    until(lambda: len(files(tmp_path)) == 1)
    made.now += 1_000.0
    made.write(1)
    until(lambda: not files(tmp_path))
    made.writer.close()
    first = segments(tmp_path)[0].first
    assert first > 0
    assert [row["sequence"] for row in JournalReader(tmp_path).rows("0", first)] == [*range(first, 502)]


def test_what_retention_deletes_during_a_conversion_stays_deleted(quiet: Path) -> None:
    *some, last = segments(quiet)
    one = appender.Conversion(CONVERTER, 0, some, last.first)
    until(lambda: one.has_ended)
    some[0].path.unlink()
    one.commit()
    assert not files(quiet)
    assert not list(quiet.glob("*.tmp"))
    assert segments(quiet) == [*some[1:], last]


def test_a_conversion_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    """Meanwhile segments are merged, and no row is lost."""
    with capture_logs() as told:
        failing = (sys.executable, "-c", "import sys; sys.exit('no space left')")
        made = Quiet(tmp_path, JournalOptions(**QUICK, segment_secs=100.0, converter=failing))
        made.write(250)
        until(lambda: bool(told))
        assert told[0]["event"] == "journal segment not converted to Parquet"
        assert told[0]["error"] == "no space left"
        made.write(120)
        assert len(told) < 6
        assert [row["sequence"] for row in rows_of(tmp_path)] == [*range(740)]
        made.writer._appender._converter = CONVERTER
        made.now += CONVERT_AGAIN_SECS
        made.write(120)
        until(lambda: bool(files(tmp_path)))
        assert [row["sequence"] for row in rows_of(tmp_path)] == [*range(980)]
        made.writer.close()


def test_a_conversion_may_write_more_than_a_pipe_holds(quiet: Path) -> None:
    program = "import sys; sys.stderr.write('warning\\n' * 100_000); sys.exit('no space left')"
    *some, last = segments(quiet)
    one = appender.Conversion((sys.executable, "-c", program), 0, some, last.first)
    until(lambda: one.has_ended)
    with pytest.raises(appender.ConversionError, match=r"^no space left$"):
        one.commit()


def test_a_conversion_that_hangs_is_killed(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *some, last = segments(quiet)
    one = appender.Conversion((sys.executable, "-c", "import sys; sys.stdin.read()"), 0, some, last.first)
    assert not one.has_ended
    monkeypatch.setattr(clock, "monotonic", lambda: one._end)
    assert one.has_ended
    with pytest.raises(appender.ConversionError, match="exit code -9"):
        one.commit()
    assert segments(quiet) == [*some, last]


def test_a_killed_conversion_leaves_the_segments(quiet: Path) -> None:
    before = everything(quiet)
    *some, last = segments(quiet)
    one = appender.Conversion(CONVERTER, 0, some, last.first)
    one._process.kill()
    until(lambda: one.has_ended)
    with pytest.raises(appender.ConversionError):
        one.commit()
    assert everything(quiet) == before
    assert not files(quiet)


def test_a_conversion_needs_neither_spark_nor_pandas(quiet: Path) -> None:
    """An image has only the extra `parquet`."""
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "pandas", "jsonschema_rs", "trio"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from gateway.pipeline.journal.parquet_writer import main
sys.exit(main(sys.argv[1:]))
"""
    behind = segments(quiet)[-1].first
    draft = quiet / "draft.tmp"
    given = (str(quiet), "0", "0", str(behind), str(draft))
    with subprocess.Popen((sys.executable, "-c", script, *given), stdin=subprocess.PIPE, cwd=ROOT) as process:
        until(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert pq.read_metadata(draft).num_rows + 7 == behind


def test_a_conversion_ends_with_its_writer(quiet: Path) -> None:
    *some, last = segments(quiet)
    one = appender.Conversion(CONVERTER, 0, some, last.first)
    assert one._process.stdin is not None
    one._process.stdin.close()
    one._process.stdin = None
    until(lambda: one.has_ended)
    with pytest.raises(appender.ConversionError, match="the writer has ended"):
        one.commit()
    assert not list(quiet.glob("*.tmp"))


def test_damage_of_segments_is_left_where_it_is(quiet: Path) -> None:
    one = segments(quiet)[1].path
    data = bytearray(one.read_bytes())
    data[3_000] ^= 1
    one.write_bytes(data)
    with pytest.raises(DamageError):
        close_segments(quiet, 0, 0, segments(quiet)[-1].first, quiet / "draft.tmp")


@pytest.mark.parametrize("where", ["received", "target_name", "body", "properties", "end"])
def test_a_damaged_file_is_told_or_passed_over(quiet: Path, where: str) -> None:
    """In a column, or in its end, which says where the columns are."""
    path = converted(quiet)
    data = bytearray(path.read_bytes())
    group = pq.read_metadata(path).row_group(0)
    columns = {group.column(at).path_in_schema: group.column(at) for at in range(group.num_columns)}
    found = columns.get(where)
    begin = 0 if found is None else min(filter(None, (found.dictionary_page_offset, found.data_page_offset)))
    data[-5 if found is None else begin + found.total_compressed_size - 2] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DamageError, match=path.name):
        list(JournalReader(quiet).rows("0"))
    sound = JournalReader(quiet, skip=True)
    behind = segments(quiet)[-1].first
    found = list(sound.rows("0", 0))
    gaps = [one for one in found if isinstance(one, Gap) and one.reason == "damage"]
    assert gaps
    numbers = [one["sequence"] for one in found if not isinstance(one, Gap)]
    assert numbers[-1] >= behind
    assert len(numbers) + sum(one.rows for one in found if isinstance(one, Gap)) == sound.end("0")
    assert any(isinstance(one, Gap) and one.reason == "damage" for one in sound.verify("0"))
    assert sound.extent("0").next == sound.end("0")


def test_a_store_has_each_row_once(quiet: Path, tmp_path: Path) -> None:
    """Segments that were copied before are deleted there when their file has been copied."""
    to = tmp_path / "store"
    ship(quiet, place_of(str(to)))
    before = everything(to)
    path = converted(quiet)
    done = ship(quiet, place_of(str(to)))
    assert (done.files, done.deleted) == (1, 0), "who lists the store meanwhile finds the one or the others"
    assert everything(to) == before
    done = ship(quiet, place_of(str(to)))
    assert (done.files, done.total) == (0, 1)
    assert [one.name for one in to.iterdir() if one.is_file()] == [path.name]
    assert everything(to) == before
    assert ship(quiet, place_of(str(to))).files == 0
    late = path.stat().st_mtime + 2 * 86_400
    assert ship(quiet, place_of(str(to)), keep_days=1, now=lambda: late).total == 1, "the newest stays"
