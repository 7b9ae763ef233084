"""Times of the event loop's clock and of the wall clock are told apart by type, and read in one module."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.house.sources import OURS, ROOT, nodes_of
from tests.house.test_house import name_of

GIVEN: Final = """
from gateway import clock
from gateway.model.batch import Batch, Source
from gateway.model.times import LeaseTime, Monotonic, WallTime

def mixed(loop: Monotonic, lease: LeaseTime, wall: WallTime, source: Source) -> None:
"""
WRONG: Final = (
    "loop - wall",
    "wall - loop",
    "lease - loop",
    "lease < wall",
    "loop < wall",
    "wall >= loop",
    "loop == wall",
    "Batch(source, wall)",
    "Batch(source, 0.0)",
    "[loop].append(wall)",
)
RIGHT: Final = (
    "loop - loop < 3.0",
    "wall + 3.0 < wall",
    "Batch(source, loop + 3.0)",
    "max(loop, loop)",
    "lease - lease < 3.0",
)
MADE: Final = re.compile(r"\b(Lease|Wall)Time\(|\bMonotonic\(")
ROOMS: Final = ("broker", "store", "model", "mapping", "engine", "app", "admin")

# Files that may make times: from a clock, or from what was written down.
MAKERS: Final = {
    "gateway/clock.py": "reads the clocks",
    "gateway/model/times.py": "the types",
    "gateway/store/letters.py": "read from the store",
    "gateway/store/timeline.py": "read from the store",
    "gateway/store/journal/appender.py": "of files and blocks",
    "gateway/engine/letters.py": "read from a log, and before the clock runs",
    "gateway/engine/session.py": "before the clock runs",
    "gateway/engine/cluster_clock.py": "the time that a broker says",
    "gateway/engine/sessions.py": "before the clock runs",
    "gateway/engine/elections.py": "before the clock runs",
    "gateway/engine/membership.py": "before the clock runs",
    "gateway/engine/retained.py": "before the clock runs",
}

# What reads a clock of the system, or waits by one, or returns random numbers that are no secret.
TIME: Final = re.compile(r"time|datetime|random")
READERS: Final = re.compile(
    r"time\.(time|monotonic|perf_counter|process_time|thread_time|clock_gettime)(_ns)?|time\.(sleep|ctime)"
    r"|trio\.current_time|datetime\.(now|utcnow|today)|date\.today|random\.\w+"
)
FORMATTERS: Final = re.compile(r"time\.(localtime|gmtime|strftime)")  # without a time given they read one
# Programs beside the gateway, which no simulation runs: Spark jobs, blocking clients and the command line.
OTHER_PROGRAMS: Final = ("pipeline", "clients", "cli")
OWN: Final = {
    "gateway/clock.py": "reads the clocks for all others",
    "gateway/chance.py": "makes the one source of random numbers",
    "gateway/store/journal/writer.py": "waits in a thread of its own for a disk that fails",
    "gateway/store/journal/reader.py": "waits in a command for a writer to end",
}


def test_mypy_sees_a_mix(tmp_path: Path) -> None:
    given = tmp_path / "given.py"
    given.write_text(GIVEN + "".join(f"    {line}\n" for line in (*WRONG, *RIGHT)))
    command = (sys.executable, "-m", "mypy", "--strict", str(given))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    first = GIVEN.count("\n") + 1
    told = {int(number) for number in re.findall(r"given\.py:(\d+): error", done.stdout)}
    assert told == set(range(first, first + len(WRONG))), done.stdout + done.stderr


def test_times_are_made_in_few_places() -> None:
    found = {
        name_of(path)
        for path in OURS
        if path.relative_to(ROOT).parts[1] in (*ROOMS, "clock.py") and MADE.search(path.read_text())
    }
    assert found == set(MAKERS), found ^ set(MAKERS)


def _reads_of(path: Path) -> set[str]:
    """Return what a file takes from modules of time and chance, as it is written there."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute | ast.Name):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and TIME.fullmatch(node.module or ""):
            found |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                f"{one.name}.{one.asname}" for one in node.names if TIME.fullmatch(one.name) and one.asname
            }
        elif isinstance(node, ast.Call) and FORMATTERS.fullmatch(ast.unparse(node.func)):
            least = 2 if ast.unparse(node.func).endswith("strftime") else 1
            if len(node.args) < least:
                found.add("time.time")
    return {one for one in found if READERS.fullmatch(one)}


def test_one_module_reads_the_clocks_and_one_is_the_source_of_chance() -> None:
    """So that a simulation sets both: gateway/clock.py and gateway/chance.py."""
    found = {
        name_of(path): reads
        for path in OURS
        if path.relative_to(ROOT).parts[1] not in OTHER_PROGRAMS and (reads := _reads_of(path))
    }
    assert set(found) == set(OWN), {name: found.get(name) for name in set(found) ^ set(OWN)}


def test_one_module_reads_the_identifier_of_the_boot() -> None:
    """A test or a simulation that replaces it there replaces it for all, jobs on Spark included."""
    found = {name_of(path) for path in OURS if "/kernel/random/boot_id" in path.read_text()}
    assert found == {"gateway/boot.py"}
