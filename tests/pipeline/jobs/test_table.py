"""A route's messages as a table by their JSON Schema, and what does not fit beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from gateway.errors import PipelineError
from gateway.mapping.loader import parse
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED
from gateway.pipeline.jobs import table as job
from gateway.pipeline.jobs.bodies import (
    EventTime,
    NoPlaceError,
    ValueConversion,
    additions,
    merge_types,
    schema_of,
    validate_body,
    validator,
)
from gateway.pipeline.jobs.schema import from_json_schema
from gateway.pipeline.traffic.fates import CandidateMapping
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.journal.columns import WAS_DELIVERED
from gateway.store.journal.mappings import store_mappings
from gateway.store.journal.writer import JournalOptions, JournalWriter
from tests.cli.conftest import Run
from tests.needs import needed
from tests.pipeline.journals import SENDERS, START, UP, Clock
from tests.pipeline.streams import finished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAPPING = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "plant/{line}/{rest...}"}
    to: {endpoint: erp, exchange: amq.topic, routing_key: "{line}.{rest}"}
    body_schema: reading.json
"""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["t"],
    "properties": {
        "t": {"type": "number"},
        "n": {"type": "integer"},
        "at": {"type": "string"},
        "of": {"type": "object", "properties": {"unit": {"type": "string", "maxLength": 3}}},
        "seen": {"type": "string", "format": "date-time"},
        "price": {"type": "number", "multipleOf": 0.01},
        "any": {"type": ["number", "string"]},
    },
}
FITTING = [
    b'{"t": 20.5, "n": 1, "at": "2026-05-01T06:00:00Z", "of": {"unit": "C"}}',
    b'{"t": 21, "seen": "2026-05-01T06:00:00.5Z", "new": [1]}',
    b"\0\0\0\0\x2a" + b'{"t": 22}',
    b'{"t": 23, "n": 1e3, "seen": "2026-05-01t06:00:00z"}',
    b'{"t": 24.1234567890123456789, "price": 12345678901234567.89, "any": 0.1000000000000000000001}',
    b'{"t": 9007199254740993, "seen": "2026-06-30T23:59:60z", "of": {"unit": "C", "more": {"x": 1.0}}}',
    b'{"t": 25, "seen": "2026-05-01T06:00:00.123456789Z", "price": 1.5}',
]
FAULTY: list[tuple[bytes, str, str | None]] = [
    (b'{"t": "hot"}', "is not of type", "t"),
    (b'{"n": 1}', '"t" is a required property', ""),
    (b'{"t": 1, "of": {"unit": "Kelvin"}}', "longer than 3", "of/unit"),
    (b"21.5 C", "not JSON", None),
    (b"", "not JSON", None),
    (b'{"t": 1, "n": 123456789012345678901234567890}', "does not fit its column", "n"),
    (b'{"t": 1e400}', "", None),
    (b'{"t": 1, "price": 1e36}', "does not fit its column of decimal(38,2)", "price"),
    (b'{"t": 1, "seen": "yesterday"}', "date-time", "seen"),
    (b'{"t": 1, "at": "yesterday"}', "no valid time at this place", "at"),
    (b"\0\0\0\0\x2b\x06\x02avro", "not JSON", None),
]


LATER: dict[str, Any] = {
    "$id": "reading/2",
    "type": "object",
    "properties": {
        "t": {"type": "number"},
        "of": {"type": "object", "properties": {"unit": {"type": "string"}, "by": {"type": "string"}}},
        "list": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
}


class Traffic:
    """A journal of messages on route `up`, with bodies of our choosing; each has two rows, and what leaves an
    outbox another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()

    def write(self, *bodies: bytes) -> None:
        clock = self.clock
        writer = JournalWriter(
            self.folder,
            options=JournalOptions(flush_interval_secs=60),
            clock=clock,  # type: ignore[arg-type]
            utc=clock,  # type: ignore[arg-type]
        )
        for number, body in enumerate(bodies):
            clock.now += 1
            came = Message(topic_address(f"plant/l{number}/t"), body, sender=SENDERS[0])
            went = Message(amqp_address("amq.topic", "l.t"), body, sender=SENDERS[0])
            for _ in "ab":
                writer.record(UP, [went], ACCEPTED, clock.now, [came])  # type: ignore[arg-type]
            left = ACCEPTED._replace(text=WAS_DELIVERED)
            writer.record(UP, [went], left, clock.now + 0.5)  # type: ignore[arg-type]
        writer.close()


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    (tmp_path / "reading.json").write_text(json.dumps(SCHEMA))
    return Traffic(tmp_path / "journal")


@pytest.fixture
def bring(spark: SparkSession, tmp_path: Path) -> Callable[..., tuple[int, int]]:
    """Runs the job to the end of the journal; returns what it counted."""

    def run(format_: str, schema: dict[str, Any] = SCHEMA, **also: Any) -> tuple[int, int]:
        file = tmp_path / "schema.json"
        file.write_text(json.dumps(schema))
        told: list[job.BatchCounts] = []
        to = str(tmp_path / format_)
        candidate = CandidateMapping([parse(MAPPING)], {"<text>": MAPPING}, {})
        given: dict[str, Any] = {
            "to": to,
            "rejected": f"{to}_rejected",
            "format_": format_,
            "count": told.append,
        } | also
        finished(
            lambda: job.follow(spark, str(tmp_path / "journal"), candidate, "up", schema_of(file), **given)
        )
        return sum(one.fitting for one in told), sum(one.rejected for one in told)

    return run


@pytest.mark.usefixtures("streams")
def test_what_fits_and_what_does_not(
    tables: SparkSession, traffic: Traffic, bring: Callable[..., tuple[int, int]], tmp_path: Path
) -> None:
    """And all of it again, as Spark does after a kill, by a schema that has grown, inside of a field too:
    what is there already is there once, and has nulls for what is new."""
    traffic.write(*FITTING, *(body for body, *_ in FAULTY))
    at, to = {"event_time": EventTime.read("at")}, str(tmp_path / "delta")
    assert bring("delta", **at) == (len(FITTING), len(FAULTY))

    def read(name: str) -> Any:
        return tables.read.format("delta").load(name).orderBy("received")

    collected = read(to).withColumn("utc", F.unix_seconds("event_time")).collect()
    first, second, third, fourth, digits, leap, nanos = collected
    assert (first.line, first.rest, first.address) == ("l0", "t", "plant/l0/t")
    assert (first.body.t, first.body.n, first.body.of.unit) == (20.5, 1, "C")
    assert [one.utc for one in (first, second)] == [
        int(datetime(2026, 5, 1, 6, tzinfo=UTC).timestamp()),
        None,
    ]
    assert (second.body.t, second.body.seen is None) == (21.0, False)
    assert (third.body.t, third.registry_id) == (22.0, 42)
    assert (fourth.body.n, fourth.body.seen) == (1_000, second.body.seen.replace(microsecond=0))
    assert (digits.body.t, digits.body.price) == (24.123456789012345, Decimal("12345678901234567.89"))
    assert digits.body.any == "0.1000000000000000000001"
    assert (leap.body.t, leap.body.seen.minute, leap.body.of.unit) == (9007199254740992.0, 0, "C")
    assert (nanos.body.seen.microsecond, nanos.body.price) == (123_456, Decimal("1.50"))
    assert [row.rescued for row in (first, second, third, fourth, digits, leap, nanos)] == [
        None,
        '{"new":[1]}',
        None,
        None,
        '{"t":24.1234567890123456789}',
        '{"t":9007199254740993,"of/more":{"x":1.0},"seen":"2026-06-30T23:59:60z"}',
        '{"seen":"2026-05-01T06:00:00.123456789Z"}',
    ]
    for row, (body, fault, place) in zip(read(f"{to}_rejected").collect(), FAULTY, strict=True):
        assert fault in row.fault
        assert row.place == place
        assert bytes(row.body) == body.removeprefix(b"\0\0\0\0\x2b")
    assert {row.registry_id for row in read(f"{to}_rejected").collect()} == {None, 43}

    shutil.rmtree(f"{to}/_checkpoint")
    traffic.write(b'{"t": 7, "of": {"by": "eve"}, "list": [{"x": 1}]}')
    assert bring("delta", LATER, **at) == (len(FITTING) + 3, len(FAULTY) - 2)
    rows = read(to).collect()
    assert [row.body.t for row in rows][:4] == [20.5, 21.0, 22.0, 23.0]
    assert [rows[0].body.of.by, rows[-1].body.of.by] == [None, "eve"]
    assert [row.body.list and row.body.list[0].x for row in rows] == [None] * (len(rows) - 1) + [1.0]
    assert sum(row.schema_version != "reading/2" for row in rows) == len(FITTING)
    assert read(f"{to}_rejected").count() == len(FAULTY)
    other = LATER | {"properties": {"of": {"type": "string"}}}
    with pytest.raises(PipelineError, match=r"body.of is struct<.*> in the table, and string by this"):
        bring("delta", other)


DEEP: Final = from_json_schema(
    json.dumps(
        {
            "properties": {
                "list": {"type": "array", "items": {"properties": {"n": {"type": "integer"}}}},
                "map": {"type": "object", "additionalProperties": {"type": "string", "format": "date-time"}},
                "x": {"type": "number"},
            }
        }
    )
)


def test_values_that_spark_writes_another_way() -> None:
    given = {"list": [{"n": 1}, {"n": -2e3}], "map": {"a": "2026-05-01t06:00:00.5+02:00"}, "x": 1e3, "y": "t"}
    placing = ValueConversion()
    assert placing.convert(given, DEEP) == given | {
        "list": [{"n": 1}, {"n": -2_000}],
        "map": {"a": "2026-05-01T06:00:00.5+02:00"},
    }
    plain = {"list": [{"n": 1}, None], "map": {"a": "2026-05-01T06:00:00Z"}, "x": None, "y": "t"}
    assert placing.rescued == {"y": "t"}
    assert ValueConversion().convert(plain, DEEP) is plain


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 1e16, 1.5])
def test_numbers_without_a_place_are_named(number: float) -> None:
    with pytest.raises(NoPlaceError, match="does not fit its column") as told:
        ValueConversion().convert({"list": [{"n": 1}, {"n": number}]}, DEEP)
    assert told.value.path == ("list", "1", "n")


@needed("Spark")
@pytest.mark.usefixtures("streams")
def test_by_the_command(traffic: Traffic, run: Run, tmp_path: Path) -> None:
    """With the schema that the route names, a tolerance, and a file for schedulers."""
    traffic.write(*FITTING, FAULTY[0][0])
    summary, to = tmp_path / "table.prom", str(tmp_path / "out")
    command = ("pipeline", "table", "up", "--mapping", str(tmp_path / "mapping.yaml"), "--to", f"{to}/")
    done = run(*command, "--journal", str(traffic.folder), "--tolerance", "1", "--summary", str(summary))
    count = f"{len(FITTING)} messages in the table, 4 of them with rescued values; 1 do not fit\n"
    assert (done.code, done.out) == (0, count), done.err
    assert Path(f"{to}_rejected").is_dir()
    told = summary.read_text()
    for line, number in (("ok", 1), ("rejected", 1), ("rescued", 4), ("rows", len(FITTING))):
        assert f'gateway_pipeline_{line}{{command="table"}} {number}.0' in told
    assert 'gateway_pipeline_rows_behind{command="table"} 0.0' in told
    traffic.write(FAULTY[0][0])
    summary = tmp_path / "table.json"
    again = run(*command, "--journal", str(traffic.folder), "--tolerance", "50%", "--summary", str(summary))
    count = "0 messages in the table, 0 of them with rescued values; 1 do not fit\n"
    assert (again.code, again.out) == (1, count), again.err
    assert "1 of 1 messages do not fit, more than --tolerance 50%: exit code 1" in again.err
    assert {"command": "table", "ok": False, "rows": 0, "rejected": 1}.items() <= json.loads(
        summary.read_text()
    ).items()


@needed("Spark")
@pytest.mark.usefixtures("streams")
def test_another_position_writes_nothing_over(
    traffic: Traffic, bring: Callable[..., tuple[int, int]], tmp_path: Path
) -> None:
    """Each has micro-batches of its own, from 0 on."""
    traffic.write(*FITTING)
    assert bring("parquet") == (len(FITTING), 0)
    with pytest.raises(PipelineError, match="whose position is not in"):
        bring("parquet", checkpoint=str(tmp_path / "other"))
    assert bring("parquet") == (0, 0)


def test_by_which_mapping_rows_were_made(
    traffic: Traffic, run: Run, spark: SparkSession, tmp_path: Path
) -> None:
    traffic.write(b"1", b"2")
    assert " not stored " in run("pipeline", "lineage", "--journal", str(traffic.folder)).out
    store_mappings(traffic.folder, {UP.mapping_version: ("/etc/plant.yaml", "version: 1")})
    to = str(tmp_path / "lineage")
    done = run("pipeline", "lineage", "--journal", str(traffic.folder), "--to", to)
    words = done.out.splitlines()[-1].split()
    assert words[:3] == ["up", UP.mapping_version, "plant.yaml"], done.err
    assert words[-1] == "6"
    (row,) = spark.read.parquet(to).collect()
    assert (row.text, row.rows) == ("version: 1", 6)
    assert row["first"].timestamp() == START + 1


WRONG: list[tuple[Any, str]] = [
    ({"type": "object", "properties": {"a": {"type": "nothing"}}}, "is invalid"),
    ({"type": "array"}, "does not describe an object"),
]


@pytest.mark.parametrize(("schema", "complaint"), WRONG)
def test_schemas_that_are_none(tmp_path: Path, schema: Any, complaint: str) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(schema))
    with pytest.raises(PipelineError, match=complaint):
        schema_of(file)
    with pytest.raises(PipelineError, match="cannot be read"):
        schema_of(tmp_path / "no.json")


def test_nothing_is_fetched() -> None:
    """A schema may name others; what a worker would fetch is not there."""
    with pytest.raises(PipelineError, match="another file"):
        validator('{"$ref": "http://127.0.0.1:9/other.json"}')


def test_a_body_that_was_left_out_is_no_json_either() -> None:
    assert validate_body(None, validator("{}"), StructType([])).fault == "the body was not recorded"


def test_event_times_that_are_none(spark: SparkSession) -> None:
    kind = from_json_schema('{"properties": {"a": {"type": "boolean"}}}')
    assert isinstance(kind, StructType)
    with pytest.raises(PipelineError, match="must be s, ms, us"):
        EventTime.read("a:h")
    for text, complaint in (("b", "no field b; its fields are a"), ("a.b", "no field"), ("a", "not a time")):
        with pytest.raises(PipelineError, match=complaint):
            EventTime.read(text).column(F.col("body"), kind)


NUMBERS: Final = [
    # A number, the type of its column, what the column has, and what is rescued.
    ("1e16", {"type": "integer"}, "10000000000000000", None),
    ("9223372036854775807.0", {"type": "integer"}, "9223372036854775807", None),
    ("1.00", {"type": "integer"}, "1", None),
    ("0.1", {"type": "number"}, "0.1", None),
    ("0.10000000000000000", {"type": "number"}, "0.1", None),
    ("0.12345678901234567890", {"type": "number"}, "0.12345678901234568", "0.12345678901234567890"),
    ("123456789012345678901", {"type": "number"}, "1.2345678901234568e+20", "123456789012345678901"),
    ("-9007199254740993", {"type": "number"}, "-9007199254740992.0", "-9007199254740993"),
    ("18446744073709551617.25", {"type": "number", "multipleOf": 0.01}, "18446744073709551617.25", None),
    ("0.00000000000000001", {"type": "number", "multipleOf": 1e-17}, "0.00000000000000001", None),
    ("7", {"type": "number", "multipleOf": 1}, "7", None),
    ("1.10000000000000000000", {"type": ["string", "number"]}, '"1.10000000000000000000"', None),
]


@pytest.mark.parametrize("text, schema, column, rescued", NUMBERS, ids=[row[0] for row in NUMBERS])
def test_numbers_keep_their_value(text: str, schema: Any, column: str, rescued: str | None) -> None:
    whole = json.dumps({"properties": {"x": schema}})
    kind = from_json_schema(whole)
    for body, place in ((f'{{"x": {text}}}', "x"), (f'{{"x": {text}, "long": "1234567890123456"}}', "x")):
        told = validate_body(body.encode(), validator(whole), kind)
        assert told.fault is None
        assert told.body is not None
        written = told.body.decode()
        assert f'"x":{column}' in written.replace(" ", "")
        kept = json.loads(told.rescued or "{}", parse_float=str, parse_int=str)
        assert kept.get(place) == rescued


def test_numbers_that_no_decimal_has_do_not_fit() -> None:
    whole = '{"properties": {"x": {"type": "number", "multipleOf": 0.01}}}'
    for text in ("1e37", "1e-99999999999999999999", "123456789012345678901234567890123456789"):
        told = validate_body(b'{"x": %s}' % text.encode(), validator(whole), from_json_schema(whole))
        assert told.fault is not None, text


def test_additions_name_what_lies_deep() -> None:
    def kind(*names: str) -> Any:
        of = {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
        return from_json_schema(
            json.dumps(
                {
                    "properties": {
                        "m": {"type": "object", "additionalProperties": {"items": of, "type": "array"}}
                    }
                }
            )
        )

    whole = merge_types(kind("x", "y"), kind("z", "x"), "body")
    assert dict(additions(kind("x", "y"), whole, "body")) == {"body.`m`.value.element.`z`": "bigint"}  # type: ignore[arg-type]
