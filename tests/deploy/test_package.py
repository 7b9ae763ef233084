"""What is installed: a wheel with its page and mapping files, and the image that is made of it."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires
from itertools import chain
from pathlib import Path
from typing import Final

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.lock import constraints_in

ROOT: Final = Path(__file__).resolve().parents[2]
PINNED: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(?: ; (.*?))? ?\\?$", re.MULTILINE)


def pinned(part: str = "") -> dict[str, str]:
    """Versions by name, of all or of the part with this heading."""
    text = (ROOT / "requirements.lock").read_text()
    if part:
        text = text.split(f"# {part}", 1)[1].partition("\n#")[0].partition("\n")[2]
    found = [
        (name, version)
        for name, version, marker in PINNED.findall(text)
        if not marker or Marker(marker).evaluate()  # colorama is for Windows
    ]
    return {canonicalize_name(name): version for name, version in found}


def test_a_lock_may_have_a_package_once_for_each_python() -> None:
    """Both versions bound what is resolved next; one alone has no solution for the other's Python."""
    old, new = "one==1.3 ; python_full_version < '3.12'", "one==3.0 ; python_full_version >= '3.12'"
    hashed = "\\\n    --hash=sha256:00 \\\n    --hash=sha256:01\n"
    text = f"# Heading\n{old} {hashed}{new} {hashed}two==2"
    assert constraints_in(text) == f"{old}\n{new}\ntwo==2\n"


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


def test_the_source_archive_holds_the_package_and_its_pages_alone(tmp_path: Path) -> None:
    """No folder is in it that merely has the name of one of them, such as `tests/docs`."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames()}
    assert {name.split("/")[0] for name in names if "/" in name} == {"deploy", "docs", "gateway", "mappings"}
    assert {name for name in names if name.startswith("deploy/")} == {"deploy/compile.py"}
    assert {"LICENSE", "README.md", "gateway/py.typed", "docs/index.md"} <= names


def test_every_dependency_is_pinned_by_version_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    versions = pinned()
    for requirement in map(Requirement, wanted):
        if requirement.name == project["name"]:
            continue  # one extra brings another along
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier
    assert all(re.fullmatch(r"([0-9]+!)?[0-9][0-9a-z.]*", version) for version in versions.values())


def test_every_locked_version_has_hashes_of_all_its_files() -> None:
    text = (ROOT / "requirements.lock").read_text()
    for block in re.split(r"\n(?=[A-Za-z0-9#])", text):
        if PINNED.match(block):
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block
            assert "\n" in block
    re2 = text.partition("\ngoogle-re2==")[2].partition("\n\n")[0]
    assert re2.partition("==")[0].count("--hash=") > 10, "a wheel for each interpreter and processor"


def needs(*wanted: str) -> set[str]:
    """The names of packages and of all that they need here."""
    found: set[str] = set()
    left = [Requirement(one) for one in wanted]
    while left:
        requirement = left.pop()
        extras = ["", *requirement.extras]
        name = canonicalize_name(requirement.name)
        for one in map(Requirement, requires(requirement.name) or []):
            if any(one.marker is None or one.marker.evaluate({"extra": extra}) for extra in extras) and (
                canonicalize_name(one.name) not in found or one.extras
            ):
                left.append(one)
        found.add(name)
    return found


def test_each_part_needs_nothing_but_the_parts_above_it() -> None:
    """What the Makefile and the Dockerfiles install is whole."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    gateway, builder = pinned("The gateway"), pinned("What builds it")
    traces, compiler = pinned("Traces"), pinned("What compiles it")
    bill = pinned("The image's bill of materials")
    assert needs(*project["dependencies"]) <= gateway.keys()
    assert needs("hatchling") <= gateway.keys() | builder.keys()
    running = gateway.keys() | traces.keys()
    assert needs(*project["dependencies"], *extras["otel"]) <= running
    parquet = pinned("The journal in Parquet")
    assert needs(*extras["parquet"]) <= running | parquet.keys()
    building = ["mypy", "setuptools", "types-PyYAML", "pathspec", "cyclonedx-bom"]
    assert needs(*building) <= running | builder.keys() | compiler.keys() | bill.keys()
    spark = needs(*extras["pipeline"], *extras["hdfs"], *extras["postgresql"])
    parts = [pinned(one) for one in ("The data pipeline", "HDFS", "Rates in PostgreSQL")]
    running |= parquet.keys()
    assert spark <= running | builder.keys() | bill.keys() | {name for one in parts for name in one}
    assert "pyspark" in parts[0]
    assert "sphinx" in pinned("The documentation's site")
    assert not gateway.keys() & pinned("The data pipeline").keys()


@pytest.mark.parametrize("file", ["Makefile", "Dockerfile", "deploy/spark/Dockerfile"])
def test_what_is_installed_from_the_lock_has_its_hashes_checked(file: str) -> None:
    text = (ROOT / file).read_text().replace("\\\n", " ")
    installs = re.findall(r"install [^&\n]*-r [^&\n]*", text)
    assert installs
    assert all("--require-hashes" in one for one in installs)
    headings = re.findall(r"\^(# [A-Za-z' ]+?)/", text)
    assert headings
    lock = (ROOT / "requirements.lock").read_text()
    assert all(f"\n{heading}" in lock for heading in headings)


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
    text = (ROOT / "deploy/spark/Dockerfile").read_text()
    assert 'sed "/^# What compiles it/,/^$/d; /^# The documentation\'s site/,\\$d" requirements.lock' in text
    lock = (ROOT / "requirements.lock").read_text()
    end = lock.index("\n# The documentation's site")
    assert all(lock.index(f"\n{name}==") < end for name in ("pyspark", "psycopg", "hdfs-native"))


def test_the_image_runs_as_nobody_in_particular() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    users = [line for line in lines if line.startswith("USER ")]
    assert users == ["USER 10001:10001"]
    assert any(line.startswith("HEALTHCHECK") and "/livez" in line for line in lines)
