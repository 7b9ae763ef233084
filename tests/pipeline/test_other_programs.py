"""The lines of the guide with which other programs read the journal's files in Parquet and its table."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyarrow")

from gateway.pipeline.columns import BY_NAME
from gateway.pipeline.stores import place_of
from gateway.store.journal.reader import JournalReader
from tests.conftest import missing
from tests.pipeline.journals import convert, written

ROOT: Final = Path(__file__).resolve().parents[2]
GUIDE: Final = ROOT / "docs" / "guides" / "journal.md"
OF_FILES, _, OF_LAKE = GUIDE.read_text().partition("## Append it to a Delta table")
LINES: Final = dict(re.findall(r"^\| (DuckDB|Polars|pandas) \| `(.+)` \|$", OF_FILES, re.MULTILINE))
LAKE: Final = "/data/lake/messages"
LAKE_LINES: Final = dict(re.findall(r"^\| (DuckDB|Polars|pandas)[^|]* \| (.+) \|$", OF_LAKE, re.MULTILINE))


@pytest.fixture
def routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """A journal in data/journal below this folder, and how many rows in Parquet each route has."""
    folder = written(tmp_path / "data" / "journal", 1_000, block_rows=20, segment_bytes=20_000)
    convert(folder, 0, 2)
    convert(folder, 1, 2)
    monkeypatch.chdir(tmp_path)
    closed = [one for one in JournalReader(folder).segments("0") if one.next is not None]
    rows = JournalReader(folder).rows("0")
    return Counter(row["route"] for row in rows if row["sequence"] < closed[-1].next)  # type: ignore[operator]


def program(name: str) -> Any:
    """The module of a program, which continuous integration has."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing(f"{error}: pip install -r requirements.lock")
        raise


def test_duckdb(routes: Counter[str]) -> None:
    duckdb = program("duckdb")
    assert dict(duckdb.sql(LINES["DuckDB"]).fetchall()) == routes
    described = duckdb.sql("DESCRIBE SELECT * FROM 'data/journal/*.parquet'").fetchall()
    assert {name: kind for name, kind, *_ in described}["received"] == "TIMESTAMP WITH TIME ZONE"
    assert [name for name, *_ in described] == [*BY_NAME]
    headers = "SELECT DISTINCT header.value FROM 'data/journal/*.parquet', unnest(headers) AS _(header)"
    assert ("°C",) in duckdb.sql(f"{headers} WHERE header.name = 'unit'").fetchall()


def test_polars(routes: Counter[str]) -> None:
    polars = program("polars")
    assert dict(eval(LINES["Polars"], {"polars": polars}).iter_rows()) == routes
    schema = polars.scan_parquet("data/journal/*.parquet").collect_schema()
    assert (schema["received"], schema["body"]) == (polars.Datetime("us", "UTC"), polars.Binary)


def test_pandas(routes: Counter[str]) -> None:
    pandas = program("pandas")
    found = eval(LINES["pandas"], {"pandas": pandas, "Path": Path})
    assert found["route"].value_counts().to_dict() == routes
    assert list(found["sequence"]) == [*range(sum(routes.values()))]


def test_programs_read_the_delta_table(tmp_path: Path) -> None:
    deltalake, duckdb, polars = (program(name) for name in ("deltalake", "duckdb", "polars"))
    to = tmp_path / "lake"
    journal = written(tmp_path / "journal", 1_000, block_rows=20, segment_bytes=20_000)
    reader = JournalReader(journal)
    complete = reader.segments("0")[-1].first
    routes = Counter(row["route"] for row in reader.rows("0") if row["sequence"] < complete)  # type: ignore[operator]
    assert len(routes) == 2
    lake = program("gateway.pipeline.lake")
    assert sum(commit.rows for commit in lake.LakeTable(place_of(str(to))).append(journal)) == complete
    lines = {name: re.findall(r"`([^`]+)`", line.replace(LAKE, str(to))) for name, line in LAKE_LINES.items()}
    assert dict(eval(lines["Polars"][0], {"polars": polars}).iter_rows()) == routes
    table = eval(lines["pandas"][0], {"deltalake": deltalake})
    assert table["route"].value_counts().to_dict() == routes
    opened, query = lines["DuckDB"]
    known = {"deltalake": deltalake, "duckdb": duckdb}
    exec(f"{opened}; found = {query}.fetchall()", known)
    assert dict(known["found"]) == routes
