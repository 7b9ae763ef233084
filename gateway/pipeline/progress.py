"""Progress of a Spark job: one line with the number of tasks and the duration when the job has ended.

While the job runs, Spark's own progress bar shows more on a terminal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

INTERVAL_SECS: Final = 2.0
Tell = Callable[[str], None]


@contextmanager
def progress(spark: SparkSession, name: str, tell: Tell) -> Iterator[None]:
    """Count the tasks that Spark runs in the block, and report the number at its end by calling `tell`.

    `tell` gets a line of text that begins with `name` and includes the duration. A block shorter than
    INTERVAL_SECS seconds is not reported.
    """
    ended = threading.Event()
    tracker = spark.sparkContext.statusTracker()
    tasks: dict[int, int] = {}  # By stage.
    begun = time.monotonic()

    def watch() -> None:
        while not ended.wait(INTERVAL_SECS):
            for number in tracker.getActiveStageIds():
                stage = tracker.getStageInfo(number)
                if stage is not None:
                    tasks[number] = stage.numTasks

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if tasks:
            count, secs = sum(tasks.values()), time.monotonic() - begun
            tell(f"{name}: {count} tasks in {len(tasks)} stages, {secs:.0f} s")
