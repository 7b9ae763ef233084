"""The journal as one file of another format, without Spark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import pyarrow.feather as feather
import pyarrow.parquet as pq

from gateway.cli.exits import Exit
from gateway.store.journal.reader import Gap, JournalReader
from tests.cli.conftest import Run
from tests.pipeline.journals import START, written

COUNT = 1_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path / "journal", COUNT, block_rows=100)
    return written(tmp_path / "journal", 500, shard=1, block_rows=64)


def rows_of(path: Path) -> list[dict[str, Any]]:
    table = pq.read_table(path) if path.suffix == ".parquet" else feather.read_table(path)
    return table.to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_every_row_is_there_in_order(folder: Path, run: Run, tmp_path: Path, form: str) -> None:
    to = tmp_path / f"out.{form}"
    ran = run("journal", "export", "--folder", str(folder), f"--{form}", str(to))
    assert (ran.code, ran.out) == (0, f"{COUNT + 500} rows in {to}\n"), ran.err
    reader = JournalReader(folder)
    expected = [row for shard in reader.shards() for row in reader.rows(shard) if not isinstance(row, Gap)]
    found = rows_of(to)
    same = ("shard", "sequence", "route", "source_address", "target_address", "body", "message_id", "outcome")
    assert [[row[name] for name in same] for row in found] == [
        [row[name] for name in same] for row in expected
    ]
    assert [row["received"].timestamp() for row in found] == pytest.approx(
        [row["received"] / 1e6 for row in expected]
    )
    assert [path.name for path in tmp_path.glob("out*")] == [to.name]


def test_only_what_is_asked_for(folder: Path, run: Run, tmp_path: Path) -> None:
    to = tmp_path / "out.parquet"
    given = ("--shard", "0", "--route", "up", "--columns", "sequence,route", "--parquet", str(to))
    times = ("--since", "2023-11-14T22:13:20.100", "--until", "2023-11-14T22:13:20.200+00:00")
    assert run("journal", "export", "--folder", str(folder), *given, *times).code == 0
    assert START == 1_700_000_000
    assert rows_of(to) == [{"sequence": number, "route": "up"} for number in range(101, 200, 2)]


@pytest.mark.parametrize(
    "arguments, code, text",
    [
        ((), Exit.USAGE, "--parquet FILE or --arrow FILE"),
        (("--parquet", "x", "--arrow", "y"), Exit.USAGE, "--parquet FILE or --arrow FILE"),
        (("--parquet", "/nonexistent/x"), Exit.FAILED, "cannot be written"),
        (("--parquet", "x", "--since", "yesterday"), Exit.USAGE, "is not a time; write"),
        (("--parquet", "x", "--columns", "topic"), Exit.USAGE, "unknown column 'topic'"),
    ],
)
def test_errors(folder: Path, run: Run, arguments: tuple[str, ...], code: Exit, text: str) -> None:
    ran = run("journal", "export", "--folder", str(folder), *arguments)
    assert (ran.code, text in ran.err) == (code, True), ran.err


def test_it_needs_no_spark(folder: Path, tmp_path: Path) -> None:
    to = tmp_path / "out.arrow"
    program = (
        "import sys; sys.modules['pyspark'] = None; from gateway.cli import main;"
        f"sys.argv = ['gateway', 'journal', 'export', '--folder', {str(folder)!r}, '--arrow', {str(to)!r}];"
        "main()"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(rows_of(to)) == COUNT + 500
