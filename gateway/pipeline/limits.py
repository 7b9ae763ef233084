"""Classes of Spark 4.2 that limit micro-batches of streams.

Only streams import this module, so that batches also work with Spark 4.1, the newest with Iceberg.
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
        f"streams need Spark 4.2 or newer, but this is {__version__}, which supports only batches"
        " of the gateway's formats"
    ) from error

__all__ = ["ReadAllAvailable", "ReadLimit", "ReadMaxRows", "SupportsTriggerAvailableNow"]
