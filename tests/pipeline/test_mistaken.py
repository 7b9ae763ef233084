"""Arguments that are mistaken: each is a line, before there is work that would be thrown away, and nothing of
somebody else is deleted. Exit code 2 where the arguments alone tell.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from gateway.cli.exits import Exit
from gateway.errors import PipelineError
from gateway.pipeline.stores import check_unoccupied, place_of
from tests.cli.conftest import Run
from tests.pipeline.journals import written

pytestmark = pytest.mark.usefixtures("spark")

MAPPING = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{line}/t"}
    to: {endpoint: erp, exchange: amq.topic, routing_key: "{line}.t"}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands run: a journal of three rows, files and folders of somebody else."""
    written(tmp_path / "j", 3)
    (tmp_path / "m.yaml").write_text(MAPPING)
    (tmp_path / "file").write_text("dear")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dear.txt").write_text("dear")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SCHEMA = ("schema", "up", "--mapping", "m.yaml")
ROWS: list[tuple[tuple[str, ...], int, str]] = [
    (("reconcile", "--since", "2026-02-01", "--until", "2026-01-01"), Exit.USAGE, "must be before --until"),
    (("lineage", "--since", "2026-02-01", "--until", "2026-02-01"), Exit.USAGE, "must be before --until"),
    (("backtest", "m.yaml", "--until", ""), Exit.USAGE, "'' is not a time"),
    (("rates", "--to", "r", "--since", "tomorrow"), Exit.USAGE, "'tomorrow' is not a time"),
    (("rates",), Exit.USAGE, "give --to FOLDER, --report FILE, or both"),
    (("rates", "--report", "folder"), Exit.USAGE, "folder is a folder"),
    (("rates", "--report", "none/r.html"), Exit.USAGE, "no folder none"),
    (("backtest", "m.yaml", "--tests", "none/t.yaml"), Exit.USAGE, "no folder none"),
    (("reconcile", "--tolerance", "few"), Exit.USAGE, "a tolerance must be an integer"),
    (("archive", "--to", "a", "--format", "orc", "--keep-days", "3"), Exit.USAGE, "with its own commands"),
    ((*SCHEMA, "--json-schema", "folder"), Exit.USAGE, "'folder' is a"),
    (("replay", "mqtt://127.0.0.1:1", "--resume", "folder"), Exit.USAGE, "folder is a folder"),
    (("rates", "--to", "folder"), Exit.FAILED, "exists: give"),
    (("rates", "--to", "file"), Exit.FAILED, "exists: give"),
    (("rates", "--follow", "--to", "r", "--window", "soon"), Exit.FAILED, "Unable to parse 'soon'"),
    (("archive", "--to", "file"), Exit.FAILED, "is a file, not a folder"),
    (("archive", "--to", "s3a:bucket"), Exit.FAILED, "s3a://bucket?"),
    (("ship", "--to", "j", "--keep-days", "1"), Exit.FAILED, "is the journal itself"),
    ((*SCHEMA, "--out", "folder"), Exit.FAILED, "dear.txt"),
    ((*SCHEMA, "--out", "file"), Exit.FAILED, "is a file, not a folder"),
    (("lineage", "--to", "folder"), Exit.FAILED, "dear.txt"),
    (("lineage", "--to", "j"), Exit.FAILED, "would delete"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), ROWS)
def test_it_is_said(place: Path, run: Run, arguments: tuple[str, ...], code: int, says: str) -> None:
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    ran = run("pipeline", *arguments, "--journal", "j")
    assert (ran.code, says in ran.err) == (code, True), ran.err
    assert "Traceback" not in ran.err
    after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert before.items() <= after.items()


@pytest.mark.parametrize("command", [("rates", "--to", "r"), ("archive", "--to", "a"), ("reconcile",)])
@pytest.mark.parametrize("journal", ["none", "file"])
def test_a_journal_that_is_none(place: Path, run: Run, command: tuple[str, ...], journal: str) -> None:
    ran = run("pipeline", *command, "--journal", journal)
    assert ran.code == Exit.FAILED
    assert ran.err.endswith(f"no journal in {place / journal}: no such folder\n")


def test_what_spark_refuses_is_said_once(place: Path, run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """pyspark writes it as JSON besides, with a traceback."""
    ran = run("pipeline", "reconcile", "--journal", "j", "--where", "nonsense = 1")
    assert ran.code == Exit.FAILED
    (line,) = ran.err.splitlines()
    assert "`nonsense` cannot be resolved" in line
    assert not [record for record in caplog.records if "nonsense" in record.getMessage()]


def test_what_a_job_has_written_is_written_over(place: Path, run: Run) -> None:
    """And may be an empty folder, of any name."""
    (place / "l'état #1").mkdir()
    for _ in range(2):
        for command in ((*SCHEMA, "--out"), ("lineage", "--to")):
            ran = run("pipeline", *command, f"l'état #1/{command[0]}", "--journal", "j")
            assert ran.code == 0, ran.err
    assert check_unoccupied(place_of(str(place / "none"))).uri == str(place / "none")
    with pytest.raises(PipelineError, match="dear"):
        check_unoccupied(place_of(str(place / "folder")))
