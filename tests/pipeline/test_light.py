"""A gateway without the extra is none the worse; whoever asks for the pipeline is told what to install."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from gateway.cli.exits import Exit
from gateway.cli.pipeline import common
from tests.cli.conftest import Run
from tests.needs import needed

ROOT: Final = Path(__file__).resolve().parents[2]
HEAVY: Final = "{'pyspark', 'pyarrow', 'pandas', 'numpy'}"


def test_the_command_line_and_the_application_import_nothing_of_spark() -> None:
    program = (
        "import sys, gateway.app, gateway.cli; gateway.cli.commands();"
        f"sys.exit(str({HEAVY} & set(sys.modules)) if {HEAVY} & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@needed("Spark")
def test_what_spark_starts_imports_no_protocol() -> None:
    """Each stream has a process of its own that plans, whose start is part of each stream's."""
    program = (
        "import sys, gateway.pipeline.journal.source, gateway.pipeline.journal.planner;"
        "sys.exit(any(name.startswith('gateway.protocols') for name in sys.modules))"
    )
    done = subprocess.run((sys.executable, "-c", program), cwd=ROOT, check=False)
    assert done.returncode == 0


def test_a_missing_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "PACKAGES", ("json", "pyspark_of_tomorrow"))
    ran = run("pipeline", "check")
    assert ran.code == Exit.FAILED
    assert ran.err == (
        "the pipeline needs pyspark_of_tomorrow; install them, in the checkout, with: "
        "pip install -c requirements.lock -e '.[pipeline]'\n"
    )


def test_a_missing_extra_of_one_command_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "gateway.pipeline.lake", raising=False)
    monkeypatch.setitem(sys.modules, "deltalake", None)  # type: ignore[arg-type]
    ran = run("journal", "lake", "--journal", str(tmp_path), "--to", str(tmp_path / "lake"))
    assert (ran.code, ran.out) == (Exit.FAILED, "")
    assert ran.err == "the lake needs deltalake, which is not installed: pip install 'gateway[lake]'\n"


OLD: Final = "#!/bin/sh\necho 'openjdk version \"11.0.2\" 2019-01-15' >&2\n"


@needed("processes")
@pytest.mark.parametrize(
    "script, text", [(None, "is not a program"), (OLD, "has version 11.0.2")], ids=["none", "old"]
)
def test_a_missing_java_is_named(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    script: str | None,
    text: str,
) -> None:
    if script is not None:
        java = tmp_path / "bin" / "java"
        java.parent.mkdir()
        java.write_text(script)
        java.chmod(java.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(os.environ, "JAVA_HOME", str(tmp_path))
    ran = run("pipeline", "check")
    assert ran.code == Exit.FAILED
    assert text in ran.err
    assert "default-jre-headless" in ran.err


@needed("Java")
def test_what_is_there_is_named(run: Run) -> None:
    ran = run("pipeline", "check")
    assert ran.code in (Exit.OK, Exit.FAILED)
    assert "pyspark 4." in ran.out or "default-jre-headless" in ran.err
