"""SQL conditions evaluated on Arrow batches in tasks, which avoids converting rows for Spark.

Spark parses the SQL and translates it to the filters that it passes to data sources. Conditions that Spark
does not translate, such as functions, must be evaluated by Spark. Results follow SQL: true, false, or null.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql import datasource as words
from pyspark.sql.datasource import Filter

from gateway.pipeline.columns import Arrow, spark_schema

Java = Any
"""Java object of Spark."""


class AndCondition(NamedTuple):
    """Condition that is true if two conditions are both true."""

    one: Condition
    other: Condition


class OrCondition(NamedTuple):
    """Condition that is true if at least one of two conditions is true."""

    one: Condition
    other: Condition


class NotCondition(NamedTuple):
    """Condition that is true if the condition in `of` is false."""

    of: Condition


Condition = Filter | AndCondition | OrCondition | NotCondition

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
JOINED: Final[dict[str, type[AndCondition] | type[OrCondition]]] = {"And": AndCondition, "Or": OrCondition}
COMPARED: Final = {
    "EqualTo": pc.equal,
    "GreaterThan": pc.greater,
    "GreaterThanOrEqual": pc.greater_equal,
    "LessThan": pc.less,
    "LessThanOrEqual": pc.less_equal,
}
SEARCHED: Final = {
    "StringStartsWith": pc.starts_with,
    "StringEndsWith": pc.ends_with,
    "StringContains": pc.match_substring,
}
NULLS: Final = ("IsNull", "IsNotNull")


class UntranslatedError(Exception):
    """Error for a part of an SQL condition that Spark cannot convert to a data source filter."""


def condition_of(spark: SparkSession, sql: str) -> Condition | None:
    """Parse the SQL condition `sql` on the journal's columns.

    Return None if only Spark can evaluate the condition, or if it is always or never true. Raises Spark's
    errors for invalid SQL.
    """
    rows = spark.createDataFrame(spark.sparkContext.emptyRDD(), spark_schema())
    plan = rows.where(sql)._jdf.queryExecution().optimizedPlan()
    if plan.nodeName() != "Filter":
        return None  # Always or never true.
    jvm: Java = spark._jvm
    strategy = getattr(jvm.org.apache.spark.sql.execution.datasources, "DataSourceStrategy$")
    found = getattr(strategy, "MODULE$").translateFilter(plan.condition(), False)
    if not found.isDefined():
        return None
    try:
        return _translated(found.get())
    except UntranslatedError:
        return None


def _translated(predicate: Java) -> Condition:
    """Convert a data source filter from Spark's JVM to a condition.

    Raises UntranslatedError for an unknown kind of filter.
    """
    name = predicate.getClass().getSimpleName()
    if name in JOINED:
        return JOINED[name](_translated(predicate.left()), _translated(predicate.right()))
    if name == "Not":
        return NotCondition(_translated(predicate.child()))
    if name not in (*COMPARED, *SEARCHED, *NULLS, "EqualNullSafe", "In"):
        raise UntranslatedError
    made, column = getattr(words, name), (predicate.attribute().lower(),)  # SQL names are case-insensitive.
    found: Condition
    if name in NULLS:
        found = made(column)
    elif name == "In":
        found = made(column, tuple(map(_value, predicate.values())))
    else:
        found = made(column, _value(predicate.value()))
    return found


def _value(value: Java) -> Any:
    """Convert a value from Spark's JVM to a type that Arrow accepts."""
    if value is None or isinstance(value, str | int | bool | bytes):
        return value
    if value.getClass().getName() != "java.sql.Timestamp":
        raise UntranslatedError
    instant = value.toInstant()
    try:
        return EPOCH + timedelta(seconds=instant.getEpochSecond(), microseconds=instant.getNano() // 1_000)
    except OverflowError as error:  # Year beyond Python's range.
        raise UntranslatedError from error


def leaves_of(condition: Condition) -> Iterator[Filter]:
    """Yield the filters that a row must all satisfy if `condition` is to be true for the row."""
    if isinstance(condition, AndCondition):
        yield from leaves_of(condition.one)
        yield from leaves_of(condition.other)
    elif isinstance(condition, Filter):
        yield condition


def evaluate(condition: Condition, batch: Arrow) -> Arrow:
    """Evaluate a condition for each row of a batch: return a boolean array, with null for unknown results."""
    if isinstance(condition, AndCondition):
        return pc.and_kleene(evaluate(condition.one, batch), evaluate(condition.other, batch))
    if isinstance(condition, OrCondition):
        return pc.or_kleene(evaluate(condition.one, batch), evaluate(condition.other, batch))
    if isinstance(condition, NotCondition):
        return pc.invert(evaluate(condition.of, batch))
    leaf: Any = condition
    column = batch.column(leaf.attribute[0])
    if isinstance(condition, words.IsNull | words.IsNotNull):
        return column.is_null() if isinstance(condition, words.IsNull) else column.is_valid()
    if not pa.types.is_dictionary(column.type):
        return _evaluate_comparison(condition, column)
    found = _evaluate_comparison(condition, column.dictionary).take(column.indices)
    # A null equals null, but is no text of the dictionary.
    return found.fill_null(condition.value is None) if isinstance(condition, words.EqualNullSafe) else found


def _evaluate_comparison(condition: Any, column: Arrow) -> Arrow:
    word = type(condition).__name__
    if word in SEARCHED:
        return SEARCHED[word](column, condition.value)
    if word in COMPARED:
        return COMPARED[word](column, pa.scalar(condition.value, column.type))
    if isinstance(condition, words.EqualNullSafe):
        if condition.value is None:
            return column.is_null()
        return pc.equal(column, pa.scalar(condition.value, column.type)).fill_null(False)
    values = pa.array([value for value in condition.value if value is not None], column.type)
    found = pc.is_in(column, value_set=values)
    unknown = column.is_null() if None not in condition.value else pc.invert(found)
    return pc.if_else(unknown, pa.scalar(None, pa.bool_()), found)
