"""Bodies that are all Avro or Protobuf, by a schema in a file."""

from __future__ import annotations

import json
from base64 import b64encode
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("fastavro")
pytest.importorskip("google.protobuf")

import fastavro

from gateway.cli.exits import Exit
from gateway.errors import PipelineError
from gateway.pipeline.jobs import encodings
from gateway.pipeline.jobs.encodings import BodyEncoding, UndecodableError
from tests.cli.conftest import Run
from tests.pipeline.jobs.protobuf import descriptor_set, encoded, reading_file, whole_set
from tests.pipeline.jobs.test_table import MAPPING, SCHEMA, Traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PRICE: Final = Decimal("-123456789012345678.90")
UNSCALED: Final = b64encode(int(PRICE * 100).to_bytes(16, "big", signed=True)).decode()
VALUE: Final[dict[str, Any]] = {
    "t": 21.5,
    "n": str(1 << 60),
    "of": {"unit": "C"},
    "price": {"value": UNSCALED, "precision": 20, "scale": 2},
    "seen": "2026-05-01T06:00:00.123456Z",
    "raw": b64encode(b"\xff\0").decode(),
    "list": [1, -2],
    "by_line": {"7": {"unit": "F"}},
    "count": str((1 << 64) - 1),
    "state": "ON",
}
AVRO: Final[dict[str, Any]] = {
    "type": "record",
    "name": "Reading",
    "fields": [{"name": "t", "type": "double"}, {"name": "n", "type": ["null", "long"]}],
}


@pytest.fixture
def readings(tmp_path: Path) -> str:
    """The encoding of readings in Protobuf, as the command line names it."""
    (tmp_path / "reading.desc").write_bytes(whole_set())
    return f"{tmp_path / 'reading.desc'}:plant.Reading"


def decoded(encoding: str, value: bytes) -> Any:
    return json.loads(BodyEncoding.read(encoding).decoder()(None, value), parse_float=Decimal)


def test_protobuf_becomes_json_with_every_digit(readings: str) -> None:
    found = decoded(readings, encoded("plant.Reading", VALUE))
    numbers = {"n": 1 << 60, "count": (1 << 64) - 1, "price": PRICE, "t": Decimal("21.5")}
    assert found == VALUE | numbers


def test_a_field_that_is_not_in_the_value_has_its_default_unless_it_has_presence(readings: str) -> None:
    assert decoded(readings, b"") == {"t": 0, "n": 0, "raw": "", "list": [], "by_line": {}, "state": "OFF"}
    assert decoded(readings, encoded("plant.Reading", {"of": {}, "count": 0})) == {
        "t": 0,
        "n": 0,
        "raw": "",
        "list": [],
        "by_line": {},
        "state": "OFF",
        "of": {"unit": ""},
        "count": 0,
    }


WHOLE: Final = encoded("plant.Reading", VALUE)


@pytest.mark.parametrize(
    "value, text",
    [
        (WHOLE[:-5], "not Protobuf of its schema"),
        (b"\x00" + WHOLE, "not Protobuf of its schema"),
        (encoded("plant.Reading", {"t": "NaN"}), "JSON has no nan"),
        (encoded("plant.Reading", {"t": "-Infinity"}), "JSON has no -inf"),
        (b"\x2a\x09\x08\xff\xff\xff\xff\xff\xff\xff\x7f", "not Protobuf of its schema"),
    ],
    ids=["cut", "other", "no number", "infinity", "no time"],
)
def test_what_is_not_protobuf_of_its_schema_has_a_reason(readings: str, value: bytes, text: str) -> None:
    with pytest.raises(UndecodableError, match=text):
        decoded(readings, value)


@pytest.mark.parametrize("digits", [38, 60])
def test_a_decimal_has_every_digit(readings: str, digits: int) -> None:
    price = int("1234567890" * 6) // 10 ** (60 - digits)
    raw = b64encode(price.to_bytes(30, "big")).decode()
    value = encoded("plant.Reading", {"price": {"value": raw, "scale": 2}})
    assert decoded(readings, value)["price"] == Decimal(f"{price}e-2")


@pytest.mark.parametrize("scale", [(1 << 31) - 1, -(1 << 31), -1_000_000, 1_001])
def test_a_decimal_of_any_scale_is_decoded_or_has_a_reason(readings: str, scale: int) -> None:
    value = encoded("plant.Reading", {"price": {"value": b64encode(b"\x01").decode(), "scale": scale}})
    with pytest.raises(UndecodableError, match=f"a decimal has scale {scale}"):
        decoded(readings, value)


@pytest.mark.parametrize("depth", [300, 100_000])
@pytest.mark.parametrize("kind", ["record", "array", "map", "other"])
def test_avro_that_is_nested_too_deeply_has_a_reason(tmp_path: Path, kind: str, depth: int) -> None:
    """And does not end the process, as the compiled reader does."""
    parts = {
        "record": (["null", "A"], b"\x02"),
        "array": ({"type": "array", "items": "A"}, b"\x02"),
        "map": ({"type": "map", "values": "A"}, b"\x02\0"),
        "other": ({"type": "record", "name": "B", "fields": [{"name": "b", "type": ["null", "A"]}]}, b"\x02"),
    }
    part, byte = parts[kind]
    schema = {"type": "record", "name": "A", "fields": [{"name": "a", "type": part}]}
    (tmp_path / "a.avsc").write_text(json.dumps(schema))
    decode = BodyEncoding.read(str(tmp_path / "a.avsc")).decoder()
    with pytest.raises(UndecodableError, match="recursion"):
        decode(None, byte * depth + b"\0")
    assert decode(None, b"\0")


def test_a_number_that_the_enumeration_does_not_name_stays_a_number(readings: str) -> None:
    assert decoded(readings, b"\x58\x07")["state"] == 7


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str, content: bytes | None, text: str, message: str = "") -> None:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(PipelineError, match=text):
            BodyEncoding.read(f"{tmp_path / name}{message}")

    refused("missing.avsc", None, "cannot be read: No such file")
    refused("a.json", b"{}", "neither a schema of Avro")
    refused("a.avsc", b"{", "a.avsc: ")
    refused("b.avsc", b'{"type": "record"}', "b.avsc: ")
    refused("empty", b"", "no descriptor set", ":plant.Reading")
    refused("text", b'syntax = "proto3";', "no descriptor set", ":plant.Reading")
    refused("whole", whole_set(), "no message Reading; its messages are plant.Unit", ":Reading")
    refused("alone", descriptor_set(reading_file()), "imports plant/unit.proto, which is missing", ":a.B")
    monkeypatch.setattr(encodings, "_is_installed", lambda _: False)
    refused("whole", None, r"--decode needs google.protobuf; .*'gateway\[registry\]'", ":plant.Reading")
    refused("a.avsc", None, "--decode needs fastavro", "")


@pytest.mark.parametrize("form", ["Avro", "Protobuf"])
def test_the_command_reads_bodies_by_a_file(
    streams: SparkSession, run: Run, tmp_path: Path, form: str, readings: str
) -> None:
    """A body may begin with a zero byte, which is no sign of a registry's number here."""
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    (tmp_path / "reading.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "reading.avsc").write_text(json.dumps(AVRO))
    traffic = Traffic(tmp_path / "journal")
    if form == "Avro":
        out = BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(AVRO), {"t": 0.0, "n": 1 << 60})
        decode, body, expected = str(tmp_path / "reading.avsc"), out.getvalue(), 0.0
        assert body[:6] == bytes(6)
    else:
        decode, body, expected = readings, WHOLE, 21.5
    traffic.write(body, b'{"t": 1}')
    to = str(tmp_path / "to")
    given = ("pipeline", "table", "up", "--to", to, "--journal", str(traffic.folder), "--decode", decode)
    ran = run(*given, "--mapping", str(tmp_path / "mapping.yaml"), "--tolerance", "1")
    assert ran.code == 0, ran.err
    (row,) = streams.read.parquet(to).collect()
    assert (row.body.t, row.body.n, row.registry_id) == (expected, 1 << 60, None)
    assert row.body.price == (PRICE if form == "Protobuf" else None)
    (wrong,) = streams.read.parquet(f"{to}_rejected").collect()
    assert bytes(wrong.body) == b'{"t": 1}'
    assert wrong.fault.startswith(f"not {form} of its schema")
    both = run(*given, "--mapping", str(tmp_path / "mapping.yaml"), "--registry", "http://registry")
    assert both.code == Exit.USAGE
    assert "not both" in both.err
