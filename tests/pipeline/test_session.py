"""A session has the gateway's formats and its options."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa

from gateway.pipeline import session
from gateway.pipeline.workers import spare_imports

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_it_is_ours(spark: SparkSession) -> None:
    assert {key: spark.conf.get(key) for key in session.OPTIONS} == session.OPTIONS


def test_only_workers_spare_their_imports(spark: SparkSession) -> None:
    """The process of whoever started Spark collects its garbage as it did."""
    before = gc.get_freeze_count()
    spare_imports()
    assert gc.get_freeze_count() == before

    def frozen(_: Iterator[Any]) -> Iterator[Any]:
        spare_imports()
        yield pa.RecordBatch.from_pydict({"count": [gc.get_freeze_count()]})

    (found,) = spark.range(1).coalesce(1).mapInArrow(frozen, "count long").collect()
    assert found["count"] > 10_000
