"""What our code does for the Python process that Spark runs it in.

Spark keeps its Python workers, and has each collect garbage after every task. A collection looks at every
object there is, and nearly all of them are what pyspark, pandas and pyarrow made when they were imported:
25 ms of processor time after a task that may have had 40 ms to do.
"""

from __future__ import annotations

import gc
from functools import cache

from pyspark import TaskContext


def spare_imports() -> None:
    """Where a task begins: leave what the process is made of out of its collections. Elsewhere than in a
    worker it does nothing, for that process is its user's."""
    if TaskContext.get() is not None:
        _freeze()


@cache
def _freeze() -> None:
    gc.collect()
    gc.freeze()
