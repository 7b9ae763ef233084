"""Times of the event loop's clock and of the wall clock are told apart, by type and by who reads them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.house.test_house import OURS, ROOT, name_of

GIVEN: Final = """
from gateway import clock
from gateway.model.batch import Batch, Source
from gateway.model.times import Monotonic, WallTime

def mixed(loop: Monotonic, wall: WallTime, source: Source) -> None:
"""
WRONG: Final = (
    "loop - wall",
    "wall - loop",
    "loop < wall",
    "wall >= loop",
    "loop == wall",
    "Batch(source, wall)",
    "Batch(source, 0.0)",
    "[loop].append(wall)",
)
RIGHT: Final = ("loop - loop < 3.0", "wall + 3.0 < wall", "Batch(source, loop + 3.0)", "max(loop, loop)")
READ: Final = re.compile(
    r"\btrio\.current_time\b|\btime\.(monotonic|time)\b|import monotonic\b|\b(Monotonic|WallTime)\("
)
ROOMS: Final = ("broker", "store", "model", "mapping", "engine", "app", "admin")

# Who may make times: from a clock, or from what was written down.
MAKERS: Final = {
    "gateway/clock.py": "reads the clocks",
    "gateway/model/times.py": "the types",
    "gateway/store/letters.py": "read from the store",
    "gateway/store/timeline.py": "read from the store",
    "gateway/store/journal/appending.py": "of files and blocks",
    # Durations of their own, in threads or beside the loop, that nobody else sees.
    "gateway/broker/memory.py": "between two looks",
    "gateway/broker/mqtt/session.py": "how fast its client takes messages",
    "gateway/broker/mqtt/system.py": "how long it runs",
    "gateway/broker/amqp091/queue.py": "how long nobody uses a queue",
    "gateway/broker/amqp091/virtual_host.py": "how long nobody uses a queue",
    "gateway/store/writer.py": "the store's own thread",
    "gateway/engine/letters.py": "read from a log, and before the clock runs",
    "gateway/engine/session.py": "before the clock runs",
    "gateway/engine/cluster_clock.py": "the time that a broker says",
    "gateway/engine/sessions.py": "before the clock runs",
    "gateway/engine/elections.py": "before the clock runs",
    "gateway/engine/membership.py": "before the clock runs",
    "gateway/engine/retained.py": "before the clock runs",
    "gateway/admin/queues.py": "how long nobody uses a queue",
    "gateway/admin/rabbitmq.py": "how long it runs",
}


def test_mypy_sees_a_mix(tmp_path: Path) -> None:
    given = tmp_path / "given.py"
    given.write_text(GIVEN + "".join(f"    {line}\n" for line in (*WRONG, *RIGHT)))
    command = (sys.executable, "-m", "mypy", "--strict", str(given))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    first = GIVEN.count("\n") + 1
    told = {int(number) for number in re.findall(r"given\.py:(\d+): error", done.stdout)}
    assert told == set(range(first, first + len(WRONG))), done.stdout + done.stderr


def test_the_clocks_are_read_in_one_place() -> None:
    found = {
        name_of(path)
        for path in OURS
        if path.relative_to(ROOT).parts[1] in (*ROOMS, "clock.py") and READ.search(path.read_text())
    }
    assert found == set(MAKERS), found ^ set(MAKERS)
