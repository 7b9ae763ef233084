"""What `gateway pipeline bundle` writes: the code, which is imported as it is, and how it is submitted."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from gateway.pipeline.bundle import write_code, write_environment
from tests.cli.conftest import Run


def test_the_code_is_imported_out_of_it(run: Run, tmp_path: Path) -> None:
    ran = run("pipeline", "bundle", "--to", str(tmp_path))
    (code,) = tmp_path.glob("*.zip")
    program = tmp_path / "submit.py"
    assert ran.out == f"spark-submit --master MASTER --py-files {code} {program} COMMAND …\n"
    said = "import gateway.pipeline.jobs.archive as found; print(found.__file__)"
    paths = {"PYTHONPATH": str(code), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        (sys.executable, "-c", said), cwd=tmp_path, env=paths, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith(str(code)), done.stderr
    again = tmp_path / "again"
    again.mkdir()
    assert write_code(again).read_bytes() == code.read_bytes()


def test_the_environment_has_what_a_cluster_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names; tests/pipeline/test_cluster.py runs with all of it."""
    from gateway.pipeline import bundle

    whole = {one.name.lower() for one in bundle._needed()}
    assert {"pyarrow", "pandas", "numpy", "orjson", "isal", "pydantic-core", "hdfs-native"} <= {
        name.replace("_", "-") for name in whole
    }
    assert not whole & {"pyspark", "py4j", "pytest", "psycopg"}
    monkeypatch.setattr(bundle, "_needed", lambda: [bundle._installed("six")])
    path = write_environment(tmp_path)
    with tarfile.open(path) as archive:
        names = archive.getnames()
    assert "six.py" in names
    assert not [name for name in names if name.startswith(("/", ".."))]


def test_extras_of_what_is_required_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the client of schema registries, whose own requirements are all in extras."""
    from gateway.pipeline import bundle

    requires = {
        "gateway": ['a[x, y]>=1; extra == "registry"', 'older; python_version < "3" and extra == "registry"'],
        "a": ['b; extra == "x"', 'c; extra == "z"', 'd>=2; extra == "y"'],
    }

    def installed(name: str) -> Any:
        return SimpleNamespace(name=name, requires=requires.get(name))

    monkeypatch.setattr(bundle, "_installed", installed)
    monkeypatch.setattr(bundle, "_is_installed", lambda name: name != "older")
    assert {one.name for one in bundle._needed()} == {"a", "b", "d"}
