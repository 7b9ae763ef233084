"""What our code does for the Python process that Spark runs it in.

Spark keeps its Python workers, those that plan as well as those that read, and has each collect garbage after
every piece of work. A collection looks at every object there is, and nearly all of them are what pyspark,
pandas and pyarrow made when they were imported: 25 ms of processor time after a task that may have had 40 ms
to do.
"""

from __future__ import annotations

import gc
import sys
from functools import cache


@cache
def spare_imports() -> None:
    """Where a worker begins with our code: leave what the process is made of out of its collections. In any
    other process it does nothing, for that is its user's."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    if main is not None and main.name.startswith("pyspark."):  # python -m pyspark.daemon
        gc.collect()
        gc.freeze()
