"""Tuning of the Python processes in which Spark runs this package.

Spark reuses its Python workers, for planning and for reading, and collects garbage in each after every task.
A collection visits every object, and nearly all of them were created when pyspark, pandas and pyarrow were
imported: 25 ms of processor time after a task that may have taken 40 ms.
"""

from __future__ import annotations

import gc
import sys
from functools import cache


@cache
def freeze_imports() -> None:
    """Exclude all existing objects from garbage collection, if this process is a Spark worker."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name.startswith("pyspark."):  # python -m pyspark.daemon
        gc.collect()
        gc.freeze()
