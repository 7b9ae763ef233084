"""`gateway journal`: the newest rows, what there is, and whether it is sound."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gateway.cli.exits import Exit
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.properties import Properties, property_set
from gateway.model.times import Monotonic
from gateway.store.journal.format import HEADER_BYTES
from tests.cli.conftest import Run
from tests.store.journal.samples import HOME, UP, block, message, write, writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three rows at home, two that crossed, one that was refused."""
    made = writer(tmp_path, clock=lambda: 0.0, utc=lambda: 1_700_000_000.0)
    made.record(HOME, [message(n) for n in range(3)], ACCEPTED, Monotonic(0.0))
    sources = [message(3), message(4)]
    made.record(UP, sources, ACCEPTED, Monotonic(0.0), sources)
    made.refuse(UP, [message(5)], Outcome(Verdict.REJECTED, Reason.HOPS, "a loop?"), Monotonic(0.0))
    made.close()
    return tmp_path


def test_tail_in_lines(run: Run, folder: Path) -> None:
    ran = run("journal", "tail", "--folder", str(folder), "-n", "3")
    assert (ran.code, ran.err) == (0, "")
    at = "2023-11-14T22:13:20.000000+00:00"
    assert ran.out.splitlines() == [
        f"{at} 0:3 mqtt plant/0 -[up]-> erp plant/0 1 bytes accepted",
        f"{at} 0:4 mqtt plant/1 -[up]-> erp plant/1 1 bytes accepted",
        f"{at} 0:5 mqtt plant/2 -[up]-> erp - 1 bytes rejected (hops: a loop?)",
    ]


def test_explain_tells_the_fate_of_a_message(run: Run, tmp_path: Path) -> None:
    """By the id that its sender gave it: each target's row, and no other message's."""
    known = [message(n, property_set=property_set(Properties(message_id=f"id-{n}"))) for n in range(3)]
    made = writer(tmp_path, clock=lambda: 0.0, utc=lambda: 1_700_000_000.0)
    made.record(UP, known, ACCEPTED, Monotonic(0.0), known)
    made.refuse(UP, known[1:2], Outcome(Verdict.REJECTED, Reason.NO_ROUTE, "no queue"), Monotonic(0.0))
    made.close()
    config = tmp_path / "gateway.yaml"
    config.write_text(f"journal: {{enabled: true, path: {tmp_path}}}\n")
    ran = run("explain", "--message", "id-1", "--config", str(config))
    assert ran.code == 0
    assert [line.split(" 1 bytes ")[1] for line in ran.out.splitlines()] == [
        "accepted",
        "rejected (no_route: no queue)",
    ]
    unknown = run("explain", "--message", "id-9", "--config", str(config))
    assert (unknown.code, unknown.out) == (Exit.FAILED, "")
    assert "id-9" in unknown.err
    config.write_text(f"journal: {{path: {tmp_path / 'none'}}}\n")
    assert "journal.enabled" in run("explain", "--message", "id-1", "--config", str(config)).err


TAILS = [
    ((), [0, 1, 2, 3, 4, 5]),
    (("-n", "0"), []),
    (("--last", "2"), [4, 5]),
    (("--start", "2"), [2, 3, 4, 5]),
    (("--start", "1", "--count", "2"), [1, 2]),
    (("--route", "up"), [3, 4, 5]),
    (("--route", "up", "-n", "1"), [5]),
    (("--route", "up", "--start", "4"), [4, 5]),
    (("--route", "none"), []),
    (("--follow", "--count", "2"), [0, 1]),
    (("--follow", "--start", "4", "--count", "2"), [4, 5]),
]


@pytest.mark.parametrize("arguments, expected", TAILS, ids=range(len(TAILS)))
def test_tail_in_json(run: Run, folder: Path, arguments: tuple[str, ...], expected: list[int]) -> None:
    ran = run("journal", "tail", "--folder", str(folder), "--json", *arguments)
    assert ran.code == 0
    rows = [json.loads(line) for line in ran.out.splitlines()]
    assert [row["sequence"] for row in rows] == expected
    for row in rows:
        assert row["properties"] == {}
        assert (row["body"], row["body_encoding"]) == (str(row["sequence"]), "utf-8")
        assert row["received"] == "2023-11-14T22:13:20.000000+00:00"


def test_tail_of_a_body_that_is_no_text(run: Run, tmp_path: Path) -> None:
    made = writer(tmp_path)
    odd = message(0)
    odd.body = b"\xff"
    made.record(HOME, [odd], ACCEPTED, Monotonic(time.monotonic()))
    made.close()
    row = json.loads(run("journal", "tail", "--folder", str(tmp_path), "--json").out)
    assert (row["body"], row["body_encoding"]) == ("/w==", "base64")


def test_tail_says_what_is_missing(run: Run, folder: Path) -> None:
    path = next(folder.glob("*.gwj"))
    path.write_bytes(path.read_bytes() + block(10, 1))
    ran = run("journal", "tail", "--folder", str(folder), "--start", "5")
    assert ran.err == "0 4 rows from 6 on are missing: damage no intact block contains these rows\n"
    assert [line.split()[1] for line in ran.out.splitlines()] == ["0:5", "0:10"]


def test_stat(run: Run, folder: Path) -> None:
    write(folder, range(2), shard=7)
    ran = run("journal", "stat", "--journal", str(folder))
    byte_count = [path.stat().st_size for path in sorted(folder.glob("*.gwj"))]
    time_ = "2023-11-14T22:13:20.000000+00:00"
    lines = ran.out.splitlines()
    first, second = lines[::3]
    assert "1 small blocks remain; 0 files have an index; everything received before 2" in lines[1]
    assert "% of 10737418240 bytes, the oldest row is" in lines[2]
    assert first == (
        "shard 0: rows 0 to 5 (6 present, 0 missing), 1 blocks in 1 files,"
        f" {byte_count[0]} bytes, received {time_} to {time_}"
    )
    assert second.startswith("shard 7: rows 0 to 1 (2 present, 0 missing)")
    (found,) = json.loads(run("journal", "stat", "--folder", str(folder), "--shard", "7", "--json").out)
    assert (found["shard"], found["first"], found["next"], found["byte_count"]) == ("7", 0, 2, byte_count[1])


def test_stat_of_nothing(run: Run, tmp_path: Path) -> None:
    assert run("journal", "stat", "--folder", str(tmp_path)).out == "the journal is empty\n"


def test_the_folder_of_the_configuration(run: Run, tmp_path: Path) -> None:
    write(tmp_path / "data" / "journal", range(1))
    config = tmp_path / "gateway.yaml"
    config.write_text(f"store: {{path: {tmp_path / 'data'}}}\n")
    assert "rows 0 to 0" in run("journal", "stat", "--config", str(config)).out


def test_verify_of_a_sound_journal(run: Run, folder: Path) -> None:
    assert run("journal", "verify", "--folder", str(folder)) == (Exit.OK, "intact\n", "")
    assert json.loads(run("journal", "verify", "--folder", str(folder), "--json").out) == {
        "ok": True,
        "findings": [],
    }


def test_verify_names_a_torn_end_that_is_no_damage(run: Run, folder: Path) -> None:
    path = next(folder.glob("*.gwj"))
    whole = path.read_bytes()
    path.write_bytes(whole + b"GWJB")
    ran = run("journal", "verify", "--folder", str(folder))
    text = f"shard 0: torn: {path}: bytes {len(whole)} to {len(whole) + 4} are not a valid block"
    assert (ran.code, ran.out.splitlines()) == (Exit.OK, [text, "intact"])


@pytest.mark.parametrize("place, what", [(3, ["hole", "damage"]), (HEADER_BYTES + 5, ["damage"])])
def test_verify_names_damage(run: Run, folder: Path, place: int, what: list[str]) -> None:
    path = next(folder.glob("*.gwj"))
    data = bytearray(path.read_bytes() + block(6, 1))
    data[place] ^= 1
    path.write_bytes(data)
    ran = run("journal", "verify", "--folder", str(folder), "--json")
    assert ran.code == Exit.FAILED
    document = json.loads(ran.out)
    assert not document["ok"]
    assert [finding["what"] for finding in document["findings"]] == what
    assert all(str(path) in finding["text"] for finding in document["findings"])
    assert "rows 0 to 5" in document["findings"][-1]["text"]
    lines = run("journal", "verify", "--folder", str(folder)).out.splitlines()
    assert lines[-1] == "damaged"


ERRORS = [
    (("tail", "--folder", "/nonexistent"), Exit.USAGE, "does not exist"),
    (("stat", "--shard", "9"), Exit.USAGE, "unknown shard 9"),
    (("tail", "-n", "-1"), Exit.USAGE, "Invalid value"),
]


@pytest.mark.parametrize("arguments, code, text", ERRORS, ids=range(len(ERRORS)))
def test_errors(run: Run, folder: Path, arguments: tuple[str, ...], code: Exit, text: str) -> None:
    if "--folder" not in arguments:
        arguments = (*arguments, "--folder", str(folder))
    ran = run("journal", *arguments)
    assert ran.code == code
    assert text in ran.err
