"""Queries on a machine that has much else to do.

Spark gives the planner of a Python stream ten seconds to start and connect, which is no option of it; a
machine that runs ten other things may need longer. A query keeps its position, so that it can simply be
started again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery

TOO_LATE: Final = "failed to connect back"
PATIENCE_SECS: Final = 120
TRIES: Final = 20


def finished(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query that ends, and wait for its end; start it again when Spark was too impatient."""
    for left in reversed(range(TRIES)):
        query = start()
        try:
            ended = query.awaitTermination(PATIENCE_SECS)
        except StreamingQueryException as error:
            if TOO_LATE in str(error) and left:
                continue
            raise
        if not ended:
            where = f"{query.status}, after {query.lastProgress}"
            query.stop()
            raise AssertionError(f"the query does not end: {where}")
        return query
    raise AssertionError("not reached")
