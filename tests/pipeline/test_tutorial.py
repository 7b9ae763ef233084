"""The tutorial of rates is followed: each command is run, and each message that was sent is counted."""

from __future__ import annotations

import importlib.util
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

pytest.importorskip("pyspark")

import pyarrow.parquet as pq

from gateway.store.journal.reader import JournalReader
from tests.adversary.arena import Arena
from tests.docs.pages import PAGES, ROOT
from tests.docs.test_commands import Reader, follow
from tests.interop.servers import program
from tests.store.journal.samples import until

PAGE: Final = ROOT / "docs" / "tutorials" / "rates.md"
SENT: Final = {"temperature": 200, "pressure": 50}
COMMANDS: Final = 8
HAS_DUCKDB: Final = importlib.util.find_spec("duckdb") is not None


class Analyst(Reader):
    """A reader of this page, whose gateway writes its journal in the reader's folder."""

    patience_secs = 300.0

    def run_gateway(self, line: str) -> None:
        assert "--config gateway.yaml" in line
        journal: dict[str, Any] = {"enabled": True, "path": str(self.folder / "data" / "journal")}
        mappings = [str(self.folder / "mapping.yaml")]
        place = self.folder.parent / "gateway"
        self._arena = self._arenas.enter_context(Arena(place, journal=journal, mappings=mappings))

    def type(self, line: str, expected: list[str]) -> None:
        if line == "python rates.py" and not HAS_DUCKDB:
            warnings.warn("the part of DuckDB is left out: pip install duckdb", stacklevel=1)
            return
        if line.startswith("gateway journal export"):
            until(lambda: rows(self.folder) == sum(SENT.values()), 60.0)
        super().type(line, expected)


def rows(folder: Path) -> int:
    """Count the rows of the journal that are written."""
    reader = JournalReader(folder / "data" / "journal")
    return sum(reader.extent(shard).rows for shard in reader.shards())


def counted(path: Path, column: str | None) -> dict[str, int]:
    """Return the messages of each route in Parquet: the sum of a column, or the rows."""
    found: dict[str, int] = {}
    for row in pq.read_table(path).to_pylist():
        found[row["route"]] = found.get(row["route"], 0) + (1 if column is None else row[column])
    return found


@pytest.mark.timeout(900)  # Spark starts twice
@pytest.mark.filterwarnings("default:the part of DuckDB")
def test_the_tutorial_of_rates(tmp_path: Path) -> None:
    program("mosquitto_pub")
    with ExitStack() as arenas:
        reader = Analyst(tmp_path / "reader", arenas)
        try:
            assert follow(reader, PAGES[PAGE].blocks) == COMMANDS
        finally:
            reader.leave()
    assert counted(reader.folder / "today.parquet", None) == SENT
    assert counted(reader.folder / "rates", "messages") == SENT
    assert "<svg" in (reader.folder / "rates.html").read_text()
