"""A line for whoever waits: how many tasks of the running job are done. Spark's own bar needs a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from pyspark.sql import SparkSession

INTERVAL_SECS: Final = 2.0
Tell = Callable[[str], None]


@contextmanager
def progress(spark: SparkSession, name: str, tell: Tell) -> Iterator[None]:
    """Tell how far Spark is, each time that it has changed, until the block ends."""
    done = threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def watch() -> None:
        given = ""
        while not done.wait(INTERVAL_SECS):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            known = [stage for stage in stages if stage is not None]
            ready, tasks = sum(one.numCompletedTasks for one in known), sum(one.numTasks for one in known)
            line = f"{name}: {ready} of {tasks} tasks"
            if tasks and line != given:
                tell(line)
                given = line

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
