"""Make mutants of the rooms that hold messages, and count those that a test kills.

    make mutants COUNT=60 SEED=1
    make mutants COUNT=60 SEED=1 ARGS="gateway/store gateway/engine"

Each mutant is a copy of the checkout with one changed line. The tests run in stages, the quickest first,
until one of them fails. A mutant that no test kills is printed with its difference: a test is missing, or the
line has no effect that could be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT: Final = ROOT / "build" / "mutants"
MAKER: Final = "cosmic-ray==8.7.0"
PLACES: Final = (
    "gateway/store",
    "gateway/broker/mqtt",
    "gateway/broker/outbox",
    "gateway/broker/queue.py",
    "gateway/broker/storage.py",
    "gateway/broker/deduplication.py",
)
STAGES: Final = (
    ("tests/broker", "-m", "not needs"),
    ("tests/store", "--ignore=tests/store/journal", "-m", "not needs"),
    ("tests/simulation",),
    ("tests/ingress", "tests/model", "-m", "not needs"),
    ("tests/broker/outbox", "tests/broker/mqtt", "tests/ingress"),
)
SECS_MAX: Final = 900.0  # of a stage; a mutant that needs more is killed, too
KEPT: Final = 200  # characters of the output of a stage that ended without a failed test


class Mutant(NamedTuple):
    """A file of the gateway with one changed line."""

    path: str
    text: str
    diff: list[str]


def prepare() -> Path:
    """Return an interpreter that has cosmic-ray; it is installed if it is missing."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        subprocess.run([python, "-m", "pip", "-q", "install", MAKER], check=True)
    return python


def drawn(count: int, seed: int, places: Sequence[str]) -> Iterator[Mutant]:
    """Yield mutants of the files and folders in `places`."""
    files = [
        str(file.relative_to(ROOT))
        for place in places
        for file in (sorted((ROOT / place).glob("*.py")) if (ROOT / place).is_dir() else [ROOT / place])
    ]
    command: list[str | Path] = [
        prepare(),
        ROOT / "tests" / "mutation" / "mutants.py",
        str(count),
        str(seed),
        *files,
    ]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for line in found.stdout.splitlines():
        yield Mutant(**json.loads(line))


def copy_to(folder: Path) -> None:
    """Make a copy of the checkout, with what is not committed, and the programs that its tests use."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    archive = ["tar", "-c", "--null", "--ignore-failed-read", "-T", "-"]
    packed = subprocess.run(archive, cwd=ROOT, input=names.stdout, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    for name in (".venv", ".peers", ".node"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)


def killed_in(folder: Path) -> str:
    """Return the first test that fails in the folder, or an empty text if all stages pass."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    for stage in STAGES:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *stage]
        try:
            run = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECS_MAX,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{stage[0]}: it runs for ever"
        if run.returncode:
            failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            said = failed or [f"{stage[0]}: {run.stdout[-KEPT:]}{run.stderr[-KEPT:]}"]
            return said[0].split(" - ")[0]
    return ""


def main() -> int:
    """Print a row for each mutant, then the share that was killed and the differences of the others."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("places", nargs="*", default=PLACES)
    options = parser.parse_args()
    survivors: list[Mutant] = []
    count = 0
    with TemporaryDirectory(prefix="mutants-") as name:
        folder = Path(name)
        copy_to(folder)
        if found := killed_in(folder):
            print(f"the tests fail without a mutant: {found}")
            return 2
        for mutant in drawn(options.count, options.seed, options.places):
            place = folder / mutant.path
            before = place.read_text()
            place.write_text(mutant.text)
            begun = time.monotonic()
            killer = killed_in(folder)
            place.write_text(before)
            count += 1
            secs = time.monotonic() - begun
            print(f"{count} {mutant.path} {mutant.diff[0]} {killer or 'SURVIVES'} {secs:.0f} s")
            sys.stdout.flush()
            if not killer:
                survivors.append(mutant)
                print("\n".join(mutant.diff))
    killed = count - len(survivors)
    print(f"{killed} of {count} mutants were killed ({killed / max(count, 1):.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
