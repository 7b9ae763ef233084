"""What a command leaves for schedulers, also when it fails; and how much may be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from prometheus_client.parser import text_string_to_metric_families

from gateway.errors import PipelineError
from gateway.pipeline.run_summary import FIGURES, rows_behind, watch, write_summary
from gateway.pipeline.tolerance import Tolerance
from tests.cli.conftest import Run


def test_a_command_that_fails_says_so(tmp_path: Path) -> None:
    file = tmp_path / "s.json"

    def fail() -> None:
        with write_summary("archive", file) as summary:
            summary.figures["rows"] = 3
            raise PipelineError("the disk")

    with pytest.raises(PipelineError, match="the disk"):
        fail()
    found = json.loads(file.read_text())
    assert (found["command"], found["ok"], found["rows"]) == ("archive", False, 3)
    assert found["finished_seconds"] >= found["duration_seconds"] >= 0
    assert list(tmp_path.iterdir()) == [file]


def test_prometheus_reads_it(tmp_path: Path) -> None:
    """All figures that there are, with their meaning; another run stands in the place of the one before."""
    file = tmp_path / "s.prom"
    for rows in (7, 8):
        with write_summary("table", file) as summary:
            summary.figures |= dict.fromkeys(FIGURES.keys() - {"ok"}, float(rows))
    families = {one.name: one for one in text_string_to_metric_families(file.read_text())}
    assert families.keys() == {f"gateway_pipeline_{name}" for name in FIGURES}
    (sample,) = families["gateway_pipeline_rows"].samples
    assert (sample.labels, sample.value) == ({"command": "table"}, 8.0)
    (ok,) = families["gateway_pipeline_ok"].samples
    assert ok.value == 1.0


class Query:
    """A stream that has two micro-batches, and ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.seen: list[dict[str, Any]] = []
        self.lastProgress: dict[str, Any] | None = None

    def awaitTermination(self, seconds: int) -> bool:
        if self._file.exists():
            self.seen.append(json.loads(self._file.read_text()))
        sources = [{"endOffset": "{}", "latestOffset": '{"0": 5}'}]
        self.lastProgress = {"timestamp": len(self.seen), "sources": sources}
        return len(self.seen) == 2


@pytest.mark.parametrize("follow", [True, False])
def test_what_is_told_of_a_stream_that_goes_on(tmp_path: Path, follow: bool) -> None:
    """One that is to end has not done what it was to do before it has: it may be killed."""
    query = Query(tmp_path / "s.json")
    with write_summary("table", tmp_path / "s.json") as summary:
        watch(query, summary, follow=follow)  # type: ignore[arg-type]
    assert [(one["ok"], one["running"], one["rows_behind"]) for one in query.seen] == [(follow, True, 5)] * 2
    found = json.loads((tmp_path / "s.json").read_text())
    assert (found["ok"], found["running"]) == (True, False)


COMMANDS = [
    ("archive", "--to", "/a", "--format", "orc", "--keep-days", "1"),
    ("rates",),
    ("reconcile", "--tolerance", "much"),
    ("replay", "mqtt://x", "--speed", "1", "--rate", "1"),
    ("ship", "--to", "/a", "--journal", "s3a://plant/journal"),
    ("table", "telemetry", "--to", "/a", "--mapping", "none.yaml"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one[0])
def test_also_what_it_does_not_begin_with(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    ran = run("pipeline", *command, "--summary", str(tmp_path / "s.json"))
    assert ran.code != 0
    assert json.loads((tmp_path / "s.json").read_text())["ok"] is False


def test_what_a_command_failed_of_is_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PipelineError, match="the disk"), write_summary("ship", tmp_path / "no" / "s.json"):
        raise PipelineError("the disk")
    assert "cannot be written" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with (
        pytest.raises(PipelineError, match="cannot be written"),
        write_summary("ship", tmp_path / "no" / "s.json"),
    ):
        pass


@pytest.mark.parametrize(
    ("end", "latest", "behind"),
    [
        ('{"0": 5, "1": 2}', '{"0": 9, "1": 2}', 4),
        ('{"0": 5}', '{"0": 5, "1": 3}', 3),  # a shard that came since
        ('{"0": 9}', '{"0": 5}', 0),  # what is told is older than what was taken
        (None, '{"0": 5}', 5),
        ('{"0": 5}', None, 0),
    ],
)
def test_rows_behind(end: str | None, latest: str | None, behind: int) -> None:
    progress: dict[str, Any] = {"sources": [{"endOffset": end, "latestOffset": latest}]}
    assert rows_behind(progress) == behind


@pytest.mark.parametrize(
    ("text", "wrong", "of", "allowed"),
    [
        ("0", 0, 10, True),
        ("0", 1, 10, False),
        ("2", 2, 0, True),
        ("10%", 1, 10, True),
        ("10%", 2, 10, False),
        ("0.1%", 1, 999, False),
        ("50%", 1, 0, False),
        ("100%", 7, 7, True),
    ],
)
def test_tolerances(text: str, wrong: int, of: int, allowed: bool) -> None:
    assert Tolerance.read(text).allows(wrong, of) is allowed


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "5%%", "1e3"])
def test_tolerances_that_are_none(text: str) -> None:
    with pytest.raises(PipelineError, match="a tolerance must be"):
        Tolerance.read(text)
