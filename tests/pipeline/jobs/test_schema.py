"""A route as a table, and JSON Schemas as Spark's types."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from gateway.errors import PipelineError
from gateway.mapping.loader import parse
from gateway.pipeline.jobs.schema import COLUMNS, create_views, from_json_schema, infer_type, table
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.pipeline.traffic.loader import RowSelection, traffic
from tests.cli.conftest import Run
from tests.pipeline.jobs.conftest import MAPPING, READINGS, Recorded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TYPES: list[tuple[dict[str, Any], str]] = [
    (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
        "struct<a:bigint,b:double>",
    ),
    ({"type": "array", "items": {"type": "string", "format": "date-time"}}, "array<timestamp>"),
    ({"type": ["string", "null"]}, "string"),
    ({"type": ["integer", "number"]}, "double"),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, "map<string,boolean>"),
    ({"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]}, "date"),
    ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object", "properties": {"x": {}}}}}, "struct<x:string>"),
    ({"properties": {"a": {"enum": [1]}}}, "struct<a:string>"),
]


@pytest.mark.parametrize("schema, type_", TYPES)
def test_json_schemas(schema: dict[str, Any], type_: str) -> None:
    assert from_json_schema(json.dumps(schema)).simpleString() == type_


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"$ref": "other.json"}', "only its own parts"),
        ('{"$ref": "#/no"}', "has no #/no"),
        ('{"$ref": "#"}', "refers to itself"),
    ],
)
def test_complaints(text: str, complaint: str) -> None:
    with pytest.raises(PipelineError, match=complaint):
        from_json_schema(text)


def test_captures_are_columns_and_there_is_a_view_of_last_values(
    spark: SparkSession, recorded: Recorded
) -> None:
    candidate = CandidateMapping([parse(MAPPING)], {"<text>": MAPPING}, {})
    rows = traffic(spark, recorded.journal, COLUMNS, RowSelection())
    body = infer_type(table(rows, candidate, "up", None))
    assert body is not None
    found = table(rows, candidate, "up", body)
    assert found.dtypes == [
        *(("received", "timestamp"), ("address", "string"), ("client", "string"), ("message_id", "string")),
        *(("line", "string"), ("rest", "string"), ("body", "struct<temperature:bigint,unit:string>")),
    ]
    assert found.count() == READINGS, "each message once, whatever recipients it took"
    assert {tuple(row) for row in found.select("line", "rest").distinct().collect()} == {
        ("l0", "t"),
        ("l1", "t"),
        ("l2", "t"),
    }
    _, last = create_views(found, "up")
    newest = spark.sql(f"select address, body.temperature from {last} order by address").collect()
    assert [tuple(row) for row in newest] == [(f"plant/l{line}/t", 57 + line) for line in range(3)]
    with pytest.raises(PipelineError, match="unknown route down; known: up, hot"):
        table(rows, candidate, "down", None)


def test_the_command(spark: SparkSession, recorded: Recorded, run: Run, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"properties": {"temperature": {"type": "number"}}}')
    asked = ("pipeline", "schema", "hot", "--mapping", str(recorded.mapping), "--journal", recorded.journal)
    done = run(*asked, "--json-schema", str(schema), "--last", "1", "--out", str(tmp_path / "last"))
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert "body struct<temperature:double>" in lines
    assert json.loads(lines[-1])["body"] == {"temperature": 57.0}
    assert spark.read.parquet(str(tmp_path / "last")).count() == 3
    assert run("pipeline", "schema", "down", *asked[3:]).code == 1
