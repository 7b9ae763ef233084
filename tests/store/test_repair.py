"""A damaged store: what is lost is said, what can be read is kept, and nothing is worse than before."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.spooled_bodies import OpenBody, Spooled
from gateway.store import repair as repairing
from gateway.store.damage import LostMessages
from gateway.store.repair import check, repair
from tests.store.parts import SENDER, TOPIC, Opened, content, log_of, messages, numbered, opened

PAGE = 4_096
GARBAGE = bytes(range(256)) * 16
COUNT = 240
REJECTED = Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "nobody wants it")


def filled(folder: Path) -> None:
    """Two logs of many rows, some of it settled; small things, a message among them; dead letters."""
    with Opened(folder) as one:
        for name in ("a", "b"):
            log = one.store.log("queue", name)
            for first in range(0, COUNT, 20):
                one.append(log, first, *[body + b"." * 200 for body in numbered(first, first + 20)])
            one.store.settle(log, [3, 25, 26])
        for number in range(60):
            one.store.put("session", b"client %d" % number, b"{}" * 20)
        (message,) = messages(b"retained" * 1_000)
        one.store.put("retained", b"a/b", message)
        one.store.add_letters(messages(*numbered(0, 30)), "route", REJECTED)
        one.commit()


def shrunk(folder: Path, *, clean: bool = True) -> Path:
    """Bring all into the file; `clean` False: as if the gateway had been killed since."""
    path = folder / "gateway.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'clean'", (int(clean),))
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return path


def spoil(path: Path, page: int, data: bytes = GARBAGE) -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(data)


def pages_of(path: Path) -> int:
    return path.stat().st_size // PAGE


def held(folder: Path) -> dict[str, set[bytes]]:
    """What a gateway finds there, by log; and it can be used."""
    store = opened(folder)
    try:
        found = {log.name: {body for _, body in content(store, log)} for log in store.logs()}
        found["things"] = {bytes(key) for key, _ in store.records("session") if isinstance(key, bytes)}
    finally:
        store.close()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    filled(folder)
    shrunk(folder)
    return folder


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    folder = tmp_path / "data"
    shutil.copytree(whole, folder)
    return folder


def test_what_is_sound_stays_as_it_is(damaged: Path) -> None:
    before = (damaged / "gateway.db").read_bytes()
    findings = check(damaged)
    assert findings.is_intact
    assert findings.messages == 2 * (COUNT - 3)
    assert findings.rows == {"logs": 2, "settled": 4, "rows": 24, "dead_letters": 30, "things": 61}
    assert repair(damaged)[1] is None
    assert (damaged / "gateway.db").read_bytes() == before


@pytest.mark.needs("time")
def test_whatever_page_is_spoilt_the_others_are_kept(whole: Path, tmp_path: Path) -> None:
    before = held(shutil.copytree(whole, tmp_path / "before"))
    repaired = unreadable = 0
    for page in range(pages_of(whole / "gateway.db")):
        folder = shutil.copytree(whole, tmp_path / str(page))
        path = shrunk(folder, clean=False)
        (folder / "gateway.db-wal").touch()
        spoil(path, page)
        try:
            findings, aside = repair(folder)
        except StoreError:
            unreadable += 1
            continue
        after = held(folder)
        lost = {name: before[name] - after.get(name, set()) for name in before}
        again = [name for name in before if not after.get(name, set()) <= before[name]]
        assert not again or "settled" in findings.hidden, "only what nobody knows to be settled comes again"
        if any(lost.values()):
            assert not findings.is_intact, (page, findings)
        if aside is not None:
            repaired += 1
            assert (aside / "gateway.db").stat().st_size == path_size(whole)
            assert check(folder).is_intact
        said = sum(one.messages + one.perhaps for one in findings.logs.values()) + 10_000 * len(
            findings.hidden
        )
        assert sum(len(lost[name]) for name in ("a", "b")) <= said, page
        shutil.rmtree(folder)
    assert repaired > 10
    assert unreadable <= 2, "the first page, and that of the tables' names"


def path_size(folder: Path) -> int:
    return (folder / "gateway.db").stat().st_size


def test_spoilt_messages_are_named_by_their_queue(damaged: Path) -> None:
    path = damaged / "gateway.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        (row,) = connection.execute("SELECT id FROM rows WHERE log = 2 AND first = 20").fetchone()
        connection.execute("UPDATE rows SET messages = zeroblob(length(messages)) WHERE id = ?", (row,))
        connection.execute("UPDATE things SET value = x'00' WHERE kind = 'retained'")
        connection.execute("UPDATE dead_letters SET message = x'00' WHERE id = 7")
    findings = check(damaged)
    assert findings.logs == {("queue", "b"): LostMessages(18)}, "two of twenty were settled"
    assert findings.things == [("retained", "a/b")]
    assert (findings.letters, findings.file, findings.hidden) == (1, [], {})
    assert repair(damaged)[0] == findings
    assert check(damaged).is_intact
    after = held(damaged)
    assert (len(after["a"]), len(after["b"])) == (COUNT - 3, COUNT - 3 - 18)
    with closing(opened(damaged)) as store:
        assert [at for at, _ in content(store, log_of(store, "b"), 18)][:3] == [18, 19, 40]


def test_a_missing_log_after_a_kill_is_said(damaged: Path) -> None:
    shrunk(damaged, clean=False)
    (damaged / "gateway.db-wal").unlink(missing_ok=True)
    (damaged / "gateway.db-shm").unlink(missing_ok=True)
    findings = check(damaged)
    assert findings.file == [
        "gateway.db-wal is missing although the gateway was killed: the last commits are lost"
    ]
    assert repair(damaged)[1] is not None
    assert len(held(damaged)["a"]) == COUNT - 3


def with_log(folder: Path) -> Path:
    """As a killed gateway leaves it: the last commits stand in the log."""
    with Opened(folder / "killed", reserve_bytes=8_388_608) as one:  # so that the log may grow
        log = one.store.log("queue", "q")
        for first in range(0, 100, 10):
            one.append(log, first, *numbered(first, first + 10))
        shutil.copytree(folder / "killed", folder / "data")
    return folder / "data"


def test_a_sound_log_is_read_and_a_spoilt_one_is_said(tmp_path: Path) -> None:
    folder = with_log(tmp_path)
    findings = check(folder)
    assert (findings.file, findings.messages) == ([], 100)
    wal = folder / "gateway.db-wal"
    size = wal.stat().st_size
    with wal.open("r+b") as file:
        file.seek(size * 3 // 4)
        file.write(b"spoilt")
    (folder / "gateway.db-shm").unlink()
    findings = check(folder)
    assert "gateway.db-wal is damaged" in findings.file[0]
    assert 0 < findings.messages < 100
    repair(folder)
    assert len(held(folder)["q"]) == findings.messages
    with wal.open("wb") as file:
        file.write(b"x" * 10_000)
    assert "no valid SQLite header" in check(folder).file[0]


def test_a_torn_end_of_the_log_is_no_loss(tmp_path: Path) -> None:
    """Power was lost while it was written; nobody was told that it is there."""
    folder = with_log(tmp_path)
    with (folder / "gateway.db-wal").open("r+b") as file:
        file.truncate((folder / "gateway.db-wal").stat().st_size - 100)
    (folder / "gateway.db-shm").unlink()
    assert check(folder).is_intact


def test_a_gateway_says_what_to_do(damaged: Path) -> None:
    path = shrunk(damaged, clean=False)
    spoil(path, pages_of(path) // 2)
    with pytest.raises(StoreError, match="`gateway store check` reports .* `gateway store repair` saves"):
        opened(damaged)
    repair(damaged)
    opened(damaged).close()


@pytest.mark.parametrize("after", range(6))
def test_a_repair_that_is_interrupted_is_finished(
    damaged: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged / "gateway.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM rows WHERE log = 1")
        connection.execute("UPDATE rows SET messages = x'00' WHERE first = 0")
    left = [after]
    rename = Path.rename

    def rename_or_end(self: Path, target: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_or_end)
    try:
        repair(damaged)
    except KeyboardInterrupt:
        if (damaged / "repaired").exists():
            with pytest.raises(StoreError, match="unfinished repair"):
                opened(damaged)
        monkeypatch.undo()
        repair(damaged)
    assert check(damaged).is_intact
    assert len(held(damaged)["b"]) == COUNT - 20 - 2
    assert {place.name for place in damaged.iterdir()} & {"repaired", "repairing"} <= {"repairing"}


def test_what_is_no_store_is_refused(tmp_path: Path, damaged: Path) -> None:
    with pytest.raises(StoreError, match="no store in"):
        check(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    store = opened(damaged)
    with pytest.raises(StoreError, match="used by another gateway"):
        repair(damaged)
    store.close()
    with closing(sqlite3.connect(damaged / "gateway.db")) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StoreError, match="newer gateway"):
        repair(damaged)
    (damaged / "gateway.db").write_bytes(b"no database" * 1_000)
    with pytest.raises(StoreError, match="to start empty"):
        check(damaged)


def test_nothing_of_a_disk_that_is_full_is_moved(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = damaged / "gateway.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE rows SET messages = x'00' WHERE first = 0")

    def full(place: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(repairing, "sync_path", full)
    with pytest.raises(StoreError, match="cannot be repaired: .*No space left"):
        repair(damaged)
    assert path.exists()
    opened(damaged).close()


class Body:
    """The bytes of a large body, in a file that only the store knows of."""

    name = "large.body"
    checked = b""

    def read(self, at: int, count: int) -> bytes:
        raise NotImplementedError

    def open_file(self) -> OpenBody:
        raise NotImplementedError

    def preserve(self) -> None:
        """It is the test's."""


@pytest.mark.parametrize("there, said", [(None, "is missing"), (999, "has 999 bytes, not 2000000")])
def test_a_message_whose_body_is_missing_is_lost(tmp_path: Path, there: int | None, said: str) -> None:
    with Opened(tmp_path) as one:
        log = one.store.log("fast queue", "q")
        large = Message(TOPIC, Spooled(Body(), 2_000_000), assurance=1, durable=True, sender=SENDER)
        told: list[Outcome] = []
        one.store.append(log, 0, [large], told.append)
        one.commit()
        one.append(log, 1, b"small")
    (tmp_path / "spool").mkdir()
    body = tmp_path / "spool" / Body.name
    body.write_bytes(bytes(2_000_000))
    assert check(tmp_path).is_intact
    body.unlink() if there is None else body.write_bytes(bytes(there))
    findings, _ = repair(tmp_path)
    assert findings.logs == {("fast queue", "q"): LostMessages(1)}
    assert findings.bodies == [f"{body} {said}"]
    assert check(tmp_path).is_intact
    assert held(tmp_path)["q"] == {b"small"}
