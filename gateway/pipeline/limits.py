"""What Spark has for the limits of a stream's micro-batches: since 4.2. Batches do without, so this is
imported where a stream begins, and who only reads batches may have the Spark before, which has Iceberg.
"""

from __future__ import annotations

from pyspark import __version__

from gateway.errors import PipelineError

try:
    from pyspark.sql.streaming.datasource import (
        ReadAllAvailable,
        ReadLimit,
        ReadMaxRows,
        SupportsTriggerAvailableNow,
    )
except ImportError as error:
    raise PipelineError(
        f"streams need Spark 4.2 or newer, and this is {__version__}, which has only batches of the gateway's"
        " formats"
    ) from error

__all__ = ["ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"]
