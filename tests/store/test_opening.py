"""Opening: who may, what is refused and with which advice, migrations, damaged files."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from gateway.errors import StoreError
from gateway.store.folder import fault
from gateway.store.repair import check, repair
from gateway.store.schema import BASE, STEPS, newest_layout
from tests.store.parts import Opened, content, log_of, numbered, opened


def filled(folder: Path) -> None:
    with Opened(folder) as one:
        log = one.store.log("queue", "q")
        for first in range(0, 2000, 20):
            one.append(log, first, *[b"x" * 100] * 20)
        one.store.put("kind", "key", b"value")
        one.commit()


def unclean(folder: Path) -> None:
    """As if the last gateway had been killed."""
    connection = sqlite3.connect(folder / "gateway.db", isolation_level=None)
    connection.execute("UPDATE meta SET value = 0 WHERE key = 'clean'")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(StoreError) as caught:
        opened(folder, **options)
    return str(caught.value)


def test_the_folder_is_ours_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    store = opened(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("gateway.db", "gateway.db-wal", "gateway.db-shm", "gateway.lock"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    store.close()


def test_a_folder_that_is_in_use_is_refused_and_names_the_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    told = refusal(tmp_path)
    assert f"another gateway, process {os.getpid()}" in told
    assert "store.path" in told
    store.close()
    opened(tmp_path).close()


def test_a_lock_of_another_process_counts_until_it_ends(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.store.parts import opened\n"
        "store = opened(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        assert f"process {other.pid}." in refusal(tmp_path)
        other.kill()
    opened(tmp_path).close()


def test_a_refused_store_lets_go_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "gateway.db").write_bytes(b"no database at all" * 100)
    refusal(tmp_path)
    (tmp_path / "gateway.db").unlink()
    opened(tmp_path).close()


@pytest.mark.parametrize("path", ["file", "file/data", "nowhere"])
def test_a_path_that_is_no_folder_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    told = refusal(tmp_path / path)
    assert told == (
        f"the store's folder {tmp_path / path} cannot be used: {tmp_path / path.partition('/')[0]} is a "
        "file, not a folder. Correct that, or set store.path to another folder"
    )


def test_a_folder_of_somebody_else_is_named() -> None:
    with TemporaryDirectory() as made:  # unlike tmp_path, below folders that everybody may enter
        folder = Path(made)
        folder.chmod(0o755)
        (folder / "mine").mkdir()
        (folder / "locked").mkdir()
        (folder / "locked" / "gateway.lock").touch()
        assert fault(folder / "mine" / "data") == fault(folder / "locked") == ""
        (folder / "mine").chmod(0o555)
        (folder / "locked").chmod(0o777)
        (folder / "locked" / "gateway.lock").chmod(0o444)
        mine, locked = by_nobody(folder / "mine" / "data"), by_nobody(folder / "locked")
        assert mine.startswith(f"{folder}/mine cannot be written by user id ")
        assert locked.startswith(f"{folder}/locked/gateway.lock cannot be written by user id ")


def by_nobody(folder: Path) -> str:
    """The fault that a user without rights finds, for root finds none."""
    program = (
        "import os, sys; from pathlib import Path; from gateway.store.folder import fault\n"
        "os.geteuid() or os.setuid(65534); print(fault(Path(sys.argv[1])))"
    )
    told = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


def test_a_read_only_place_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=real.f_flag | os.ST_RDONLY))
    assert fault(tmp_path / "data") == f"{tmp_path} is on a file system that is mounted read-only"


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "gateway.db").mkdir()
    assert "unable to open database file: make the folder and the files in it readable" in refusal(tmp_path)


def test_a_newer_store_is_refused(tmp_path: Path) -> None:
    opened(tmp_path, steps=(*STEPS, lambda connection: None)).close()
    before = (tmp_path / "gateway.db").read_bytes()
    told = refusal(tmp_path)
    assert (
        f"its schema is version {newest_layout() + 1}, but this gateway knows only {newest_layout()}" in told
    )
    assert (tmp_path / "gateway.db").read_bytes() == before


def test_a_database_of_another_program_is_refused_and_not_touched(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "gateway.db")
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = (tmp_path / "gateway.db").read_bytes()
    assert "belongs to another program" in refusal(tmp_path)
    assert (tmp_path / "gateway.db").read_bytes() == before


def test_an_older_store_is_migrated_and_keeps_its_content(tmp_path: Path) -> None:
    filled(tmp_path)

    def added(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE logs ADD COLUMN colour TEXT DEFAULT 'red'")

    store = opened(tmp_path, steps=(*STEPS, added))
    connection = store._database.connection
    assert connection.execute("PRAGMA user_version").fetchone() == (newest_layout() + 1,)
    assert connection.execute("SELECT colour FROM logs").fetchall() == [("red",)]
    assert len(content(store, log_of(store))) == 2000
    store.close()
    opened(tmp_path, steps=(*STEPS, added)).close()


def test_a_store_that_no_release_wrote_is_refused_and_not_touched(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / "gateway.db", isolation_level=None)) as connection:
        connection.execute("DROP TABLE places")
        connection.execute(f"PRAGMA user_version = {BASE - 1}")
    before = (tmp_path / "gateway.db").read_bytes()
    told = refusal(tmp_path)
    assert f"its schema {BASE - 1} is older than that of release 0.1.0, {BASE}" in told
    assert "set store.path to another folder" in told
    with pytest.raises(StoreError, match="older than that of release"):
        check(tmp_path)
    with pytest.raises(StoreError, match="older than that of release"):
        repair(tmp_path)
    assert (tmp_path / "gateway.db").read_bytes() == before


def test_a_store_whose_creation_was_cut_short_is_created(tmp_path: Path) -> None:
    """A kill between two statements of the first step leaves no table: it is one transaction."""
    connection = sqlite3.connect(tmp_path / "gateway.db")
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.close()
    with Opened(tmp_path) as one:
        one.append(one.store.log("queue", "q"), 0, b"x")
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (newest_layout(),)


def test_a_migration_that_fails_leaves_the_old_version(tmp_path: Path) -> None:
    filled(tmp_path)

    def broken(connection: sqlite3.Connection) -> None:
        connection.execute("DROP TABLE things")
        connection.execute("ALTER TABLE nonsense ADD COLUMN x")

    assert "nonsense" in refusal(tmp_path, steps=(*STEPS, broken))
    store = opened(tmp_path)
    assert list(store.records("kind")) == [("key", b"value")]
    store.close()


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def cut(path: Path, byte_count: int) -> None:
    with path.open("r+b") as file:
        file.truncate(byte_count)


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    ("no header", lambda path: overwrite(path, 0, b"\xff" * 100)),
    ("no magic", lambda path: overwrite(path, 0, b"SQLite format 9\0")),
    ("another page size", lambda path: overwrite(path, 16, b"\x00\x07")),
    ("no schema", lambda path: overwrite(path, 100, b"\xff" * 3000)),
    ("half a page", lambda path: cut(path, 2048)),
    ("half a file", lambda path: cut(path, path.stat().st_size // 2)),
    ("the last page", lambda path: cut(path, path.stat().st_size - 4096)),
]


@pytest.mark.needs("time")
@pytest.mark.parametrize("name, damage", DAMAGES, ids=[name for name, _ in DAMAGES])
@pytest.mark.parametrize("killed", [True, False])
def test_a_damaged_file_is_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None], killed: bool
) -> None:
    filled(tmp_path)
    if killed:
        unclean(tmp_path)
    damage(tmp_path / "gateway.db")
    told = refusal(tmp_path)
    assert "gateway.db" in told
    assert "`gateway store check` reports what is lost, `gateway store repair` saves" in told


def test_any_damaged_page_is_found_after_a_crash_or_does_no_harm(tmp_path: Path) -> None:
    filled(tmp_path / "whole")
    unclean(tmp_path / "whole")
    whole = tmp_path / "whole" / "gateway.db"
    pages = whole.stat().st_size // 4096
    assert pages > 50
    refused = 0
    for page in range(pages):
        folder = tmp_path / str(page)
        folder.mkdir()
        shutil.copy(whole, folder)
        overwrite(folder / "gateway.db", page * 4096, b"\xa5" * 64)
        try:
            store = opened(folder)
        except StoreError:
            refused += 1
            continue
        content(store, log_of(store))
        store.close()
    assert refused > pages // 2


def test_a_large_file_is_checked_without_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.database.CHECK_BYTES_MAX", 10_000)
    filled(tmp_path)
    unclean(tmp_path)
    store = opened(tmp_path)
    assert len(content(store, log_of(store))) == 2000
    store.close()


def test_a_store_that_was_not_closed_keeps_everything(tmp_path: Path) -> None:
    with Opened(tmp_path / "running") as one:
        log = one.store.log("queue", "q")
        one.append(log, 0, *numbered(0, 10))
        shutil.copytree(tmp_path / "running", tmp_path / "copy")
        one.append(log, 10, b"later")
    store = opened(tmp_path / "copy")
    assert content(store, log_of(store)) == list(enumerate(numbered(0, 10)))
    store.close()


def test_the_file_is_checked_after_a_crash_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Path] = []
    monkeypatch.setattr("gateway.store.database._check", lambda connection, path: checked.append(path))
    filled(tmp_path)
    opened(tmp_path).close()
    assert checked == []
    unclean(tmp_path)
    opened(tmp_path).close()
    assert len(checked) == 1
    opened(tmp_path).close()
    assert len(checked) == 1
