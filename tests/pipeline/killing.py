"""Drivers of Spark, ended with SIGKILL somewhere in a micro-batch."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.pipeline.streams import TOO_LATE

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_SECS: Final = 300.0  # for Spark to start, on a machine that has much else to do


def commits(folder: Path) -> int:
    """Micro-batches that Spark has committed."""
    return sum(path.name.isdecimal() for path in (folder / "checkpoint" / "commits").glob("*"))


def _started(command: Sequence[str], log: Path, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    """A driver, in a process group with its JVM and its workers."""
    with log.open("wb") as said:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said, start_new_session=True)


def killed(
    command: Sequence[str],
    folder: Path,
    least: int = 1,
    *,
    then: Callable[[], None] | None = None,
    env: Mapping[str, str] | None = None,
    commits: Callable[[Path], int] = commits,
) -> int:
    """Run a driver, of which `commits` tells what is in `folder`, until it has committed so often again, and
    kill it a moment later; returns how often it did. `then` is called in between, when it has committed: so
    often again is waited for after it, too."""
    before = commits(folder)
    log = folder.with_name("driver.log")
    driver = _started(command, log, env)
    wanted = before + least
    try:
        deadline = time.monotonic() + PATIENCE_SECS
        while (there := commits(folder)) < wanted or then is not None:
            if there >= wanted and then is not None:
                then()
                then, wanted = None, commits(folder) + least
            if driver.poll() is not None:
                assert TOO_LATE in log.read_text(), log.read_text()[-3_000:]
                driver = _started(command, log, env)
            assert time.monotonic() < deadline, "the driver committed too little"
            time.sleep(0.02)
        time.sleep(random.random())  # chance chooses where in a micro-batch it dies
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()
    return commits(folder) - before
