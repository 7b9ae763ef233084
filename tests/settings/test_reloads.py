"""Files that are read again: when they are whole."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.reloads import ChangeDetector, stamp_if_there


def test_a_file_has_changed_once_nobody_writes_to_it_any_more(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    path.write_text("ann: {}\nbob: {}\n")
    watched = ChangeDetector(lambda: stamp_if_there(path))
    assert not watched.has_changed()
    with path.open("w") as file:
        seen = [watched.has_changed()]  # empty
        for line in ("ann: {}\n", "bob: {}\n", "eve: {}\n"):
            file.write(line)
            file.flush()
            seen.append(watched.has_changed())
    assert not any(seen), "somebody is in the midst of writing it"
    assert [watched.has_changed() for _ in range(3)] == [True, False, False]


def test_a_file_that_is_replaced_goes_or_comes_back_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "users.yaml"
    path.write_text("ann: {}\n")
    watched = ChangeDetector(lambda: stamp_if_there(path))
    (tmp_path / "new").write_text("eve: {}\n")
    os.replace(tmp_path / "new", path)
    assert [watched.has_changed() for _ in range(3)] == [False, True, False]
    path.unlink()
    assert [watched.has_changed() for _ in range(3)] == [False, True, False]
    path.write_text("eve: {}\n")
    assert [watched.has_changed() for _ in range(3)] == [False, True, False]
    os.utime(path, ns=(0, 0))
    path.write_text("ann: {}\n")
    os.utime(path, ns=(0, 0))
    assert [watched.has_changed() for _ in range(3)] == [False, True, False], "the same size, another time"
