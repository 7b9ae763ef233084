"""What is shipped, what goes when it is old, and what lies beside the journal; no Spark is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from gateway.pipeline.shipping import DAY_SECS, ship
from gateway.pipeline.stores import place_of
from gateway.store.journal.mappings import keep, versions
from gateway.store.journal.reader import JournalReader
from tests.pipeline.journals import START, written


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Several files of one moment, all but the newest of them complete, and a mapping file."""
    folder = written(tmp_path / "journal", 600, block_rows=20, segment_bytes=20_000)
    keep(folder, {"7f3a": ("/etc/plant.yaml", "version: 1")})
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.gwj")}


def test_files_go_when_their_newest_row_is_old_enough(journal: Path, tmp_path: Path) -> None:
    """And are not copied again, though the journal still has them; the newest of a shard stays."""
    to = tmp_path / "store"
    place = place_of(str(to))
    done = ship(journal, place)
    there = names(to)
    assert len(there) == done.files == done.total > 2
    soon, late = START + 0.5 * DAY_SECS, START + 1.5 * DAY_SECS
    assert ship(journal, place, keep_days=1, now=lambda: soon) == (0, 0, 0, done.total)
    gone = ship(journal, place, keep_days=1, now=lambda: late)
    assert gone == (0, 0, done.total - 1, 1)
    assert names(to) == {max(there)}
    assert ship(journal, place, keep_days=1, now=lambda: late) == (0, 0, 0, 1)
    assert JournalReader(to).extent("0").rows > 0
    assert ship(journal, place).files == done.total - 1, "who keeps all gets all"


def test_the_mapping_files_go_along(journal: Path, tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "store"))
    ship(journal, place)
    keep(journal, {"7f3b": ("/etc/plant.yaml", "version: 2")})
    ship(journal, place)
    assert {one.version: one.path.read_text() for one in versions(tmp_path / "store")} == {
        "7f3a": "version: 1",
        "7f3b": "version: 2",
    }
