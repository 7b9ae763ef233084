"""A session has the gateway's formats and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.pipeline import session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_it_is_ours(spark: SparkSession) -> None:
    assert {key: spark.conf.get(key) for key in session.OPTIONS} == session.OPTIONS
