"""What is installed: a wheel with its page and mapping files, and the image that is made of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from itertools import chain
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]


def pinned(part: str = "") -> dict[str, str]:
    """Versions by name, of all or of the part with this heading."""
    text = (ROOT / "requirements.lock").read_text()
    if part:
        text = text.split(f"# {part}", 1)[1].partition("\n#")[0].partition("\n")[2]
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_the_wheel_holds_the_page_and_the_mapping_files(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"gateway/shipped_mappings/{path.name}" for path in (ROOT / "mappings").glob("*.yaml")}
    assert {
        "gateway/admin/console/index.html",
        "gateway/admin/console/vendor/htm.js",
        "gateway/py.typed",
        *shipped,
    } <= names
    assert "gateway/shipped_mappings/identity.yaml" in names
    assert not any(name.startswith("tests") for name in names)


def test_every_dependency_is_pinned_by_version_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    versions = pinned()
    for requirement in map(Requirement, wanted):
        if requirement.name == project["name"]:
            continue  # one extra brings another along
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier
    assert all(re.fullmatch(r"([0-9]+!)?[0-9][0-9a-z.]*", version) for version in versions.values())


def test_the_first_part_is_all_that_the_gateway_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, pipeline = pinned("The gateway"), pinned("The data pipeline")
    site = pinned("The documentation's site")
    wanted = [*project["dependencies"], "hatchling"]
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert canonicalize_name(requirement.name) in first
            wanted.extend(requires(requirement.name) or [])
    assert "pyspark" in pipeline
    assert "sphinx" in site
    assert not first.keys() & (pipeline.keys() | site.keys())


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/spark/Dockerfile"])
def test_an_image_copies_what_the_builder_is_given(file: str) -> None:
    """Everything is kept from the builder but what .dockerignore names."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    given = {line[1:] for line in ignored if line.startswith("!")}
    copied = [
        source
        for line in (ROOT / file).read_text().replace("\\\n", " ").splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert all((ROOT / source).exists() for source in copied)
    assert set(copied) <= given


def test_the_image_for_spark_has_what_its_commands_need() -> None:
    """Executors read HDFS, and rates are written to PostgreSQL."""
    (line,) = (one for one in (ROOT / "deploy/spark/Dockerfile").read_text().splitlines() if "'.[" in one)
    stated = line.partition("'.")[2].partition("'")[0]
    assert Requirement(f"gateway{stated}").extras == {"pipeline", "postgresql", "hdfs"}


def test_the_image_runs_as_nobody_in_particular() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert any(line.startswith("HEALTHCHECK") and "/livez" in line for line in lines)
