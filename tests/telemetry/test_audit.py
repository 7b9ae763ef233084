"""The audit log: what an event may say, and that strangers cannot fill a disk with it."""

from __future__ import annotations

import io
import json
import stat
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from gateway.telemetry.audit import EVENTS, AuditFile, Trail, audit, configure_audit, sanitized, trail
from gateway.telemetry.logs import configure_logs

SECRET_WORDS = ("password", "token", "body", "payload", "secret", "hash", "cookie", "proof")
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJkZXZpY2UifQ.c2lnbmF0dXJlLXRoYXQtaXMtbG9uZw"


@pytest.fixture
def written() -> list[tuple[str, dict[str, Any]]]:
    return []


def test_no_event_has_a_place_for_a_secret() -> None:
    facts = {fact for event in EVENTS.values() for fact in event.facts}
    assert not [fact for fact in facts for word in SECRET_WORDS if word in fact]


@pytest.mark.parametrize("event", EVENTS)
def test_a_fact_that_an_event_has_not_is_refused(event: str) -> None:
    kept = Trail(lambda *_: None)
    with pytest.raises(ValueError, match="password"):
        kept.add(event, {"password": "x"})
    assert not kept.counts[event]


def test_an_event_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="connectde"):
        Trail(lambda *_: None).add("connectde", {})


@pytest.mark.parametrize(
    "given, said",
    [
        ("plain", "plain"),
        ("a\nb\x1b[31m", "a\\nb\\x1b[31m"),
        ("x" * 201, "x" * 200 + "..."),
        (TOKEN, "***"),
        (f"user {TOKEN} and more", "user *** and more"),
        ("y" * 190 + " " + TOKEN, "y" * 190 + " ***"),  # cut first, half of it would be seen
        ("\udcff", "\\udcff"),
        (7, 7),
        (None, None),
        ([TOKEN, "a"], ["***", "a"]),
    ],
)
def test_what_a_peer_chose_is_made_fit_to_be_read(given: Any, said: Any) -> None:
    assert sanitized(given) == said


def test_strangers_get_so_many_lines_a_second(written: list[tuple[str, dict[str, Any]]]) -> None:
    now = [10.0]
    kept = Trail(lambda event, facts: written.append((event, facts)), 2, lambda: now[0])
    for _ in range(5):
        kept.add("refused", {"reason": "wrong"})
    kept.add("connected", {"user": "a"})
    assert [event for event, _ in written] == ["refused", "refused", "connected"]
    now[0] = 11.0
    kept.add("refused", {"reason": "wrong"})
    assert written[3:] == [("refused", {"more": 3}), ("refused", {"reason": "wrong"})]
    assert (kept.counts["refused"], kept.dropped["refused"]) == (6, 3)
    kept.add("refused", {})
    kept.add("refused", {})
    kept.write_omitted()
    kept.write_omitted()
    assert written[-1] == ("refused", {"more": 1})
    assert sum("more" in facts for _, facts in written) == 2


def provoked(kept: Trail, user: str, times: int) -> None:
    for _ in range(times):
        kept.add("denied", {"user": user, "remote": "192.0.2.1:9"})


def test_one_user_takes_not_all_lines_of_a_second(written: list[tuple[str, dict[str, Any]]]) -> None:
    now, several = [10.0], [True]
    kept = Trail(
        lambda event, facts: written.append((event, facts)),
        10,
        lambda: now[0],
        user_share=0.8,
        several=lambda: several[0],
    )
    provoked(kept, "greedy", 20)
    provoked(kept, "modest", 2)
    assert Counter(facts["user"] for _, facts in written) == {"greedy": 8, "modest": 2}
    assert kept.dropped["denied"] == 12
    now[0] = 11.0
    for number in range(20):  # names that are not proved, from one address
        kept.add("refused", {"user": f"guess {number}", "remote": "[2001:db8::1]:9"})
    kept.add("refused", {"user": "greedy", "remote": "192.0.2.1:9"})
    assert sum(event == "refused" for event, _ in written) == 9
    several[0] = False
    provoked(kept, "greedy", 20)
    assert sum(facts.get("user") == "greedy" and event == "denied" for event, facts in written) == 18


def test_one_user_pushes_out_no_lines_of_others(tmp_path: Path) -> None:
    now = [10.0]
    file = AuditFile(tmp_path / "audit.jsonl", 10_000, 1)
    kept = Trail(file.write, 100, lambda: now[0], user_share=0.5, several=lambda: True, file=file)
    provoked(kept, "modest", 1)
    for _ in range(20):
        provoked(kept, "greedy", 100)
        now[0] += 1.0
    provoked(kept, "modest", 1)
    kept.write_omitted()
    file.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert not (tmp_path / "audit.jsonl.1").exists()
    assert [line.get("user") for line in lines].count("modest") == 2
    assert sum(line.get("more", 0) for line in lines) == kept.dropped["denied"] > 1_000
    assert [line.get("user") for line in lines[-8:]].count("greedy") >= 3, "one in each second"


def test_events_go_into_the_log() -> None:
    out = io.StringIO()
    configure_logs("info", "json", out)
    configure_audit()
    audit("refused", endpoint="mqtt", user=TOKEN, remote="192.0.2.1:9", reason="wrong")
    line = json.loads(out.getvalue())
    assert (line["event"], line["audit"], line["user"]) == ("audit", "refused", "***")
    assert (line["level"], line["logger"], line["timestamp"][-1]) == ("info", "gateway.audit", "Z")
    with structlog.testing.capture_logs() as lines:
        audit("refused", user="eve")
    assert [(one["audit"], one["user"]) for one in lines] == [("refused", "eve")], "whoever listens hears it"
    for level, form in (("warning", "json"), ("info", "console")):
        out = io.StringIO()
        configure_logs(level, form, out)  # type: ignore[arg-type]
        audit("refused", user="eve")
        assert ("eve" in out.getvalue()) is (form == "console")
    configure_logs("info", "json")


def test_events_go_into_a_file_that_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    configure_audit(path=path, bytes_max=200, files=1)
    for number in range(5):
        audit("disconnected", user=f"user {number}", secs=1.5)
    configure_audit()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["user"] == "user 4"
    assert lines[-1]["timestamp"].endswith("Z")


def test_a_disk_that_takes_nothing_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AuditFile(tmp_path / "audit.jsonl", 1_000, 1)

    def full(_: str) -> int:
        raise OSError(28, "No space left on device")

    with structlog.testing.capture_logs() as lines:
        monkeypatch.setattr(file._file, "stream", SimpleNamespace(write=full, flush=list, close=list))
        file.write("refused", {})
        file.write("refused", {})
        monkeypatch.undo()
        file.write("refused", {})
    assert [line["log_level"] for line in lines] == ["error"]
    file.close()
    assert len((tmp_path / "audit.jsonl").read_text().splitlines()) == 1


def test_what_is_off_is_counted() -> None:
    configure_audit(enabled=False)
    audit("refused", reason="wrong")
    assert trail().counts["refused"] == 1
    configure_audit()


def test_nobody_else_may_read_the_file(tmp_path: Path) -> None:
    """Nor the files after it, unless the operator has made it with other rights."""
    for given, expected in ((None, 0o600), (0o640, 0o640)):
        path = tmp_path / f"audit-{given}.jsonl"
        if given is not None:
            path.touch()
            path.chmod(given)
        file = AuditFile(path, 10, 2)
        for _ in range(2):
            file.write("connected", {})
        file.close()
        modes = {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.glob(f"{path.name}*")}
        assert (len(list(tmp_path.glob(f"{path.name}*"))), modes) == (2, {expected})
