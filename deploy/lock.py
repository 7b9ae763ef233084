"""Write requirements.lock: exact versions and hashes for every platform, under headings.

`make lock` preserves the versions of the present lock and adds missing packages; `make lock ARGS=--upgrade`
selects the newest versions. A package is under the first heading that needs it, so everything down to a
heading can be installed without the rest.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LOCK: Final = ROOT / "requirements.lock"
PYTHON: Final = "3.11.5"  # oldest version on which all packages run
HEAD: Final = """\
# Exact versions with the hashes of their files for every platform, written by `make lock`. The Makefile and
# the Dockerfiles read the headings: a part needs nothing but the parts above it.
"""
SECTIONS: Final = (
    ("The gateway", ("",), ()),
    ("Traces: the extra `otel`", ("otel",), ()),
    ("The journal in Parquet: the extra `parquet`", ("parquet",), ()),
    ("What builds it", (), ("hatchling",)),
    ("What compiles it", (), ("mypy", "pathspec", "setuptools", "types-PyYAML")),
    ("The image's bill of materials", (), ("cyclonedx-bom",)),
    ("The data pipeline: the extra `pipeline`", ("pipeline",), ()),
    ("HDFS for the data pipeline: the extra `hdfs`", ("hdfs",), ()),
    ("Rates in PostgreSQL: the extra `postgresql`", ("postgresql",), ()),
    ("Schema registries for the data pipeline: the extra `registry`", ("registry",), ()),
    ("The documentation's site: the extra `docs`", ("docs",), ()),
    ("Tests, linters and types: the extra `dev`", ("dev",), ()),
)
"""Headings, each with its extras of the project ("" is the project without extras) and further packages."""
LINE: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*==[^\\\n]+", re.MULTILINE)
PINNED: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)


def name_of(text: str) -> str:
    """Return the normalized name of a package."""
    return re.sub(r"[-_.]+", "-", text).lower()


def versions_in(text: str) -> dict[str, str]:
    """Return the versions of a lock by name."""
    return {name_of(name): version for name, version in PINNED.findall(text)}


def constraints_in(text: str) -> str:
    """Return the versions of a lock as constraints; a package may have one for each version of Python."""
    return "".join(f"{line.strip()}\n" for line in LINE.findall(text))


def compiled(
    uv: str, extras: tuple[str, ...], more: tuple[str, ...], constraints: Path, *options: str
) -> str:
    """Return the lock text that uv resolves for `extras` of the project and the packages `more`."""
    command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", PYTHON, "--no-header"]
    command += ["--no-annotate", "--constraints", str(constraints), *options]
    for extra in extras:
        command += ["--extra", extra] if extra else []
    inputs = [str(ROOT / "pyproject.toml")] if extras else []
    if more:
        inputs.append("-")
    ran = subprocess.run([*command, *inputs], input="\n".join(more), capture_output=True, text=True, cwd=ROOT)
    if ran.returncode:
        sys.exit(ran.stderr)
    return ran.stdout


def blocks_of(text: str) -> dict[str, str]:
    """Return the lines of each package in the lock text `text`, by name."""
    found: dict[str, str] = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        pinned = PINNED.match(block)
        if pinned is not None:
            name = name_of(pinned[1])
            found[name] = f"{found[name]}\n{block}" if name in found else block
    return found


def main() -> None:
    """Write requirements.lock."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--uv", default="uv", help="Path of the program uv (default: uv).")
    arguments.add_argument("--upgrade", action="store_true", help="Select the newest versions.")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("" if given.upgrade else constraints_in(LOCK.read_text()))
        every = tuple(extra for _, extras, _ in SECTIONS for extra in extras if extra)
        further = tuple(name for _, _, names in SECTIONS for name in names)
        blocks = blocks_of(compiled(given.uv, every, further, constraints, "--generate-hashes"))
        constraints.write_text(constraints_in("\n".join(blocks.values())))
        text = HEAD
        for heading, extras, names in SECTIONS:
            needed = versions_in(compiled(given.uv, extras, names, constraints)) if extras or names else {}
            lines = [blocks.pop(name) for name in sorted(needed) if name in blocks]
            text += "\n".join(["", f"# {heading}", *lines, ""])
    assert not blocks, f"under no heading: {sorted(blocks)}"
    LOCK.write_text(text)


if __name__ == "__main__":
    main()
