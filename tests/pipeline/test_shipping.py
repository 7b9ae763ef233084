"""What is shipped, what goes when it is old, and what lies beside the journal; no Spark is needed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from gateway.pipeline import shipment
from gateway.pipeline.shipment import DAY_SECS, ship
from gateway.pipeline.stores import place_of
from gateway.store.journal.mappings import store_mappings, versions
from gateway.store.journal.merge import merge_segments
from gateway.store.journal.reader import JournalReader
from tests.pipeline.journals import START, written


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Several files of one moment, all but the newest of them complete, and a mapping file."""
    folder = written(tmp_path / "journal", 600, block_rows=20, segment_bytes=20_000)
    store_mappings(folder, {"7f3a": ("/etc/plant.yaml", "version: 1")})
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


@pytest.mark.parametrize("deleted", [True, False], ids=["deleted", "merged"])
def test_beside_a_gateway_that_goes_on(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """What is listed may be gone when its turn comes."""
    copy, first, second = shipment._copy, *sorted(journal.glob("*.gwj"))[:2]
    whole = JournalReader(journal).extent("0").rows

    def overtaken(*given: Any) -> int:
        monkeypatch.setattr(shipment, "_copy", copy)
        done = copy(*given)
        if deleted:
            second.unlink()
        else:
            merge_segments(JournalReader(journal).segments("0")[:2])
        return done

    monkeypatch.setattr(shipment, "_copy", overtaken)
    to = tmp_path / "store"
    ship(journal, place_of(str(to)))
    assert (first.name in names(to), second.name in names(to)) == (True, False)
    complete = {one.path.name: one.byte_count for one in JournalReader(journal).segments("0")[:-1]}
    assert {path.name: path.stat().st_size for path in to.glob("*.gwj")} == complete
    assert whole


def test_two_runs_at_once_copy_each_file_whole(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is held in the middle of a file, and another one copies it meanwhile."""
    monkeypatch.setattr(shipment, "COPY_BYTES", 1_000)
    to, passed = tmp_path / "store", []
    opened = Path.open

    class Held:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Held:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def read(self, count: int) -> bytes:
            data: bytes = self._file.read(count)
            if not passed:
                passed.append(None)
                ship(journal, place_of(str(to)))
            return data

    def held(path: Path, mode: str = "r", *given: Any, **more: Any) -> Any:
        file = opened(path, mode, *given, **more)
        return Held(file) if mode == "rb" and path.suffix == ".gwj" and not more and not passed else file

    monkeypatch.setattr(Path, "open", held)
    ship(journal, place_of(str(to)))
    assert passed
    complete = {one.path.name: one.path.read_bytes() for one in JournalReader(journal).segments("0")[:-1]}
    assert {path.name: path.read_bytes() for path in to.glob("*.gwj")} == complete
    assert not list(to.rglob("*.tmp"))


def test_two_runs_at_once_delete_what_is_old(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is done when the first begins to delete what both have found."""
    to, late, over = tmp_path / "store", START + 1.5 * DAY_SECS, shipment._expired_files
    place = place_of(str(to))
    ship(journal, place)
    before = len(names(to))

    def overtaken(*given: Any) -> list[str]:
        found = over(*given)
        monkeypatch.setattr(shipment, "_expired_files", over)
        assert ship(journal, place, keep_days=1, now=lambda: late).deleted == before - 1
        return found

    monkeypatch.setattr(shipment, "_expired_files", overtaken)
    assert ship(journal, place, keep_days=1, now=lambda: late) == (0, 0, before - 1, 1)
    assert len(names(to)) == 1


def test_what_a_killed_run_has_begun_goes_when_nobody_can_be_at_it(journal: Path, tmp_path: Path) -> None:
    to = tmp_path / "store"
    to.mkdir()
    old, fresh = to / "0-1.gwj.a.tmp", to / "0-1.gwj.b.tmp"
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - shipment.DRAFT_SECS - 1.0,) * 2)
    ship(journal, place_of(str(to)))
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_clock_that_is_ahead_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what another run is copying, nor files that are young by the store's clock."""
    to, now = tmp_path / "store", time.time
    journal = written(tmp_path / "journal", 600, block_rows=20, segment_bytes=20_000, start=now())
    done = ship(journal, place_of(str(to)))
    draft = to / "0-1.gwj.a.tmp"
    draft.write_bytes(b"half")
    monkeypatch.setattr(time, "time", lambda: now() + DAY_SECS)
    assert ship(journal, place_of(str(to)), keep_days=1) == (0, 0, 0, done.total)
    assert draft.exists()


def test_the_mapping_files_of_replicas_go_along(tmp_path: Path) -> None:
    folder, to = tmp_path / "journals", tmp_path / "store"
    for below in ("one", "two/worker-0"):
        written(folder / below, 5)
        store_mappings(folder / below, {"7f3a": ("/etc/plant.yaml", "version: 1")})
    ship(folder, place_of(str(to)))
    for below in ("one", "two/worker-0"):
        assert [one.version for one in versions(to / below)] == ["7f3a"]


def test_the_mapping_files_go_along(journal: Path, tmp_path: Path) -> None:
    place = place_of(str(tmp_path / "store"))
    ship(journal, place)
    store_mappings(journal, {"7f3b": ("/etc/plant.yaml", "version: 2")})
    ship(journal, place)
    assert {one.version: one.path.read_text() for one in versions(tmp_path / "store")} == {
        "7f3a": "version: 1",
        "7f3b": "version: 2",
    }
