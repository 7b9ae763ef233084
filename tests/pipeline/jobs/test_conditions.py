"""What Arrow says of a condition is what Spark says, row by row; and what it cannot be asked, Spark is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.errors import ParseException

from gateway.pipeline.columns import arrow_schema
from gateway.pipeline.journal.arrow import coded_schema
from gateway.pipeline.traffic.conditions import condition_of, evaluate, leaves_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES: Final = ("sequence", "route", "assurance", "durable", "received", "message_id", "body", "hops")
YEAR: Final = 1_767_225_600_000_000  # 2026
ROWS: Final = [
    (0, "up", 0, True, YEAR, None, b"1", None),
    (1, "", 1, False, YEAR + 1, "a", b"", 3),
    (2, "UP", 2, True, YEAR - 1, "a%b", b"\xff", 255),
    (3, "up\u00e4", 1, False, 0, "", None, 0),
    (1 << 62, None, None, None, None, None, None, None),
    (-1, "u\\p", 1, True, YEAR, "null", b"a%", 1),
]
ASKED: Final = [
    "route = 'up'",
    "route <> 'up'",
    "not (route = 'up' or durable)",
    "route <=> null",
    "not route <=> 'up'",
    "route in ('up', 'UP')",
    "message_id in ('a', null)",
    "not message_id in ('a', 'null')",
    "message_id is null and durable",
    "durable",
    "not durable or hops > 2",
    "assurance = 1 and sequence >= 1",
    "1 < assurance",
    "hops = 255",
    "sequence > 4611686018427387900",
    "received >= timestamp'2026-01-01T00:00:00Z'",
    "received < '2026-01-01' or received = timestamp'2026-01-01T00:00:00.000001Z'",
    "route like 'up%'",
    "route like '%p'",
    "message_id like '%a%' and route > 'U'",
    "body = X'FF'",
    "body in (X'', X'31')",
    "ROUTE = 'up'",
]
NOT_ASKED: Final = [
    "length(body) > 3",
    "sequence % 2 = 0 and route = 'up'",
    "route rlike 'u'",
    "message_id like 'a\\\\%%'",
    "route = message_id",
    "true",
    "1 = 2",
    "message_id not in ('a', null)",  # never true
    "size(headers) > 1",
]


@pytest.mark.parametrize("coded", [False, True], ids=["texts", "places"])
def test_the_answers_are_those_of_spark(spark: SparkSession, coded: bool) -> None:
    plain = pa.table([list(column) for column in zip(*ROWS, strict=True)], arrow_schema(NAMES))
    (batch,) = plain.cast(coded_schema(NAMES) if coded else plain.schema).combine_chunks().to_batches()
    table = spark.createDataFrame(plain).coalesce(1)
    conditions = {sql: condition_of(spark, sql) for sql in ASKED}
    assert [sql for sql, condition in conditions.items() if condition is None] == []
    wrong = {}
    for sql, condition in conditions.items():
        assert condition is not None
        found = evaluate(condition, batch).to_pylist()
        told = [row[0] for row in table.selectExpr(f"({sql})").collect()]
        kept = [answer or False for answer in told]  # Spark says of a pushed condition what it lets pass
        if [answer or False for answer in found] != kept:
            wrong[sql] = found, told
    assert not wrong


def test_what_only_spark_can_ask(spark: SparkSession) -> None:
    assert {sql: condition_of(spark, sql) for sql in NOT_ASKED} == dict.fromkeys(NOT_ASKED)
    with pytest.raises(ParseException):
        condition_of(spark, "route = = 1")


def test_what_chooses_blocks(spark: SparkSession) -> None:
    condition = condition_of(spark, "route = 'up' and (durable or hops = 1) and sequence < 5")
    assert condition is not None
    told = {(type(leaf).__name__, *leaf.attribute) for leaf in leaves_of(condition)}
    assert {("EqualTo", "route"), ("LessThan", "sequence")} <= told
    assert not {("EqualTo", "hops"), ("EqualTo", "durable")} & told
