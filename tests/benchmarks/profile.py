"""`python -m tests.benchmarks.profile SCENARIO`: where the gateway's processor time goes under one load.

py-spy samples the gateway's process while the load runs: a flame graph goes to `build/`, and the functions
with the most samples of their own are printed. `--native` shows the frames of extensions as well, which a
compiled gateway needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.benchmarks.load import run
from tests.benchmarks.roles import Load
from tests.benchmarks.sections import embedded, varied
from tests.benchmarks.subjects import CHECKOUT, Gateway

BUILD: Final = CHECKOUT / "build"
SAMPLES_PER_SEC: Final = 250
ROWS: Final = 25

Make = Callable[[int, int, float], Load]


def _scenarios() -> dict[str, Make]:
    """By the letter or word that stands before the colon; of what differs, by a word."""
    found: dict[str, Make] = {name.partition(":")[0]: make for name, make in embedded.SCENARIOS.items()}
    for name, load in varied.loads_that_differ().items():
        found[name] = _at(load)
    return found


def _at(load: Load) -> Make:
    def made(mqtt: int, amqp: int, seconds: float) -> Load:
        ports = {"mqtt": mqtt, "amqp": amqp}
        publish, consume = ports[load.publish], ports[load.consume]
        return replace(load, publish_port=publish, consume_port=consume, seconds=seconds)

    return made


def main(given: Sequence[str]) -> int:
    """Write the flame graph, print the table."""
    scenarios = _scenarios()
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.profile", description=__doc__)
    parser.add_argument("scenario", choices=sorted(scenarios))
    parser.add_argument("--seconds", type=float, default=10.0, help="that are sampled (default: %(default)s)")
    parser.add_argument("--native", action="store_true", help="frames of extensions, too")
    chosen = parser.parse_args(given)
    BUILD.mkdir(exist_ok=True)
    graph, raw = (BUILD / f"profile-{chosen.scenario}.{kind}" for kind in ("svg", "txt"))
    with (
        tempfile.TemporaryDirectory(prefix="gateway-profile-") as folder,
        Gateway(Path(folder)) as gateway,
    ):
        load = scenarios[chosen.scenario](gateway.mqtt_port, gateway.amqp_port, 2 * chosen.seconds + 5)
        recorders = [
            _recorder(gateway.pid, chosen.seconds, kind, file, native=chosen.native)
            for kind, file in (("flamegraph", graph), ("raw", raw))
        ]
        measured = run(load, gateway.cpu)
        if any(recorder.wait() for recorder in recorders):
            return 1
    print(f"{chosen.scenario}: {measured.server_us:.1f} us of processor time a message; {graph}")
    print(_table(raw.read_text()))
    return 0


def _recorder(pid: int, seconds: float, kind: str, file: Path, *, native: bool) -> subprocess.Popen[bytes]:
    command = ["py-spy", "record", "--pid", str(pid), "--duration", str(round(seconds)), "--format", kind]
    command += ["--rate", str(SAMPLES_PER_SEC), "--nonblocking", "--output", str(file)]
    program = Path(sys.executable).with_name(command[0])
    more = ["--native"] if native else []
    return subprocess.Popen([str(program), *command[1:], *more], stderr=subprocess.DEVNULL)


def _table(raw: str) -> str:
    """Functions with the most samples of their own. A line is `outermost;...;innermost COUNT`."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        for frame in set(frames):
            below[frame] += int(count)
    total = own.total() or 1
    lines = ["  own  below it  function"]
    lines += [
        f"{count / total:5.1%}  {below[name] / total:8.1%}  {name}" for name, count in own.most_common(ROWS)
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
