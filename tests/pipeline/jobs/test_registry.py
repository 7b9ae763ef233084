"""Bodies in Confluent's wire format, decoded by the schemas of a registry, which speaks Confluent's REST."""

from __future__ import annotations

import json
import threading
from base64 import b64decode, b64encode
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("confluent_kafka")
pytest.importorskip("google.protobuf")

import fastavro

from gateway.errors import PipelineError
from gateway.pipeline.jobs.bodies import ENVELOPE, validate_body, validator
from gateway.pipeline.jobs.encodings import UndecodableError
from gateway.pipeline.jobs.registry import Registry, registry_of
from gateway.pipeline.jobs.schema import from_json_schema
from tests.cli.conftest import Run
from tests.needs import needed
from tests.pipeline.jobs.protobuf import UNIT_FILE, encoded, reading_file, unit_file
from tests.pipeline.jobs.test_table import MAPPING, SCHEMA, Traffic
from tests.pipeline.servers import HOST

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UNIT: Final = {"type": "record", "name": "plant.Unit", "fields": [{"name": "unit", "type": "string"}]}
READING: Final = {
    "type": "record",
    "name": "plant.Reading",
    "fields": [
        {"name": "t", "type": "double"},
        {"name": "n", "type": ["null", "long"], "default": None},
        {"name": "of", "type": ["null", "plant.Unit"], "default": None},
        {
            "name": "price",
            "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 2}],
            "default": None,
        },
        {"name": "seen", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
    ],
}
MANY: Final = {
    "type": "record",
    "name": "Many",
    "fields": [
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {"name": "id", "type": {"type": "string", "logicalType": "uuid"}},
        {"name": "raw", "type": "bytes"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["ON", "OFF"]}},
        {"name": "list", "type": {"type": "array", "items": "float"}},
        {"name": "map", "type": {"type": "map", "values": "boolean"}},
    ],
}
REFERENCE: Final = {"name": "plant.Unit", "subject": "unit", "version": 1}
SCHEMAS: Final[dict[str, Any]] = {
    "/schemas/ids/1": {"schema": json.dumps(READING), "references": [REFERENCE]},
    "/subjects/unit/versions/1": {"subject": "unit", "version": 1, "id": 9, "schema": json.dumps(UNIT)},
    "/schemas/ids/2": {"schema": json.dumps(SCHEMA), "schemaType": "JSON"},
    "/schemas/ids/3": {
        "schema": 'syntax = "proto3"; message M {}',
        "serialized": b64encode(reading_file().SerializeToString()).decode(),
        "schemaType": "PROTOBUF",
        "references": [{"name": UNIT_FILE, "subject": "unit-value", "version": 2}],
    },
    "/subjects/unit-value/versions/2": {
        "subject": "unit-value",
        "version": 2,
        "id": 10,
        "schema": 'syntax = "proto3";',
        "serialized": b64encode(unit_file().SerializeToString()).decode(),
        "schemaType": "PROTOBUF",
    },
    "/schemas/ids/5": {"schema": 'syntax = "proto3"; message M {}', "schemaType": "PROTOBUF"},
    "/schemas/ids/6": {"schema": "{}", "schemaType": "THRIFT"},
    "/schemas/ids/4": {"schema": json.dumps(MANY)},
    "/subjects": ["unit"],
}
SEEN: Final = datetime(2026, 5, 1, 6, 0, 0, 123456, UTC)
PRICE: Final = Decimal("123456789012345678.90")


class Responses(BaseHTTPRequestHandler):
    """Responses of the registry, by path; it fails while `refuses` of its server is set."""

    def do_GET(self) -> None:
        """Respond to one request."""
        server: Any = self.server
        path, _, query = self.path.partition("?")
        server.asked.append((path, self.headers["Authorization"]))
        found = SCHEMAS.get(path)
        if isinstance(found, dict) and "format=serialized" in query and "serialized" in found:
            found = found | {"schema": found["serialized"]}
        status = 500 if server.is_refused else 404 if found is None else 200
        content = json.dumps({"error_code": 40403, "message": "not found"} if found is None else found)
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture
@needed("sockets")
def server() -> Iterator[Any]:
    """A registry."""
    made: Any = ThreadingHTTPServer((HOST, 0), Responses)
    made.asked, made.is_refused = [], False
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def url(server: Any) -> str:
    return f"http://{HOST}:{server.server_address[1]}"


def avro(schema: dict[str, Any], value: dict[str, Any]) -> bytes:
    named: dict[str, Any] = {}
    fastavro.parse_schema(UNIT, named)
    out = BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema, named), value)
    return out.getvalue()


VALUE: Final = {"t": 21.5, "n": 1 << 60, "of": {"unit": "C"}, "price": PRICE, "seen": SEEN}


def test_avro_becomes_json_with_every_digit(url: str, server: Any) -> None:
    """Each schema is requested once, and the one that it refers to."""
    decode = Registry(url).decoder()
    for _ in range(3):
        found = json.loads(decode(1, avro(READING, VALUE)), parse_float=Decimal)
        assert found == VALUE | {"t": Decimal("21.5"), "seen": SEEN.isoformat()}
    assert [path for path, _ in server.asked] == ["/schemas/ids/1", "/subjects/unit/versions/1"]


def test_values_that_json_has_no_type_for(url: str) -> None:
    name = UUID("12345678-1234-5678-1234-567812345678")
    value = {
        "day": date(2026, 5, 1),
        "id": name,
        "raw": b"\xff\0",
        "state": "OFF",
        "list": [0.5, -1.0],
        "map": {"a": True},
    }
    found = json.loads(Registry(url).decoder()(4, avro(MANY, value)))
    assert b64decode(found.pop("raw")) == value.pop("raw")
    assert found == value | {"day": "2026-05-01", "id": str(name)}


def test_protobuf_becomes_json(url: str, server: Any) -> None:
    """By the place of its message in the file; each definition is requested once in each format."""
    decode = Registry(url).decoder()
    value = encoded("plant.Reading", {"t": 21.5, "n": 1 << 60, "of": {"unit": "C"}})
    for begin in (b"\x02\x02", b"\x02\x02"):
        found = json.loads(decode(3, begin + value))
        assert (found["t"], found["n"], found["of"]) == (21.5, 1 << 60, {"unit": "C"})
    inner = encoded("plant.Reading.Inner", {"t": 3.5})
    assert json.loads(decode(3, b"\x04\x02\x02" + inner)) == {"t": 3.5}
    for begin in (b"\0", b"\x02\0"):
        assert json.loads(decode(3, begin + encoded("plant.Other", {"t": 4.5}))) == {"t": 4.5}
    paths = [path for path, _ in server.asked]
    assert paths == ["/schemas/ids/3", "/schemas/ids/3", "/subjects/unit-value/versions/2"]


WHOLE: Final = avro(READING, VALUE)
UNDECODABLE: Final = {
    "unknown": (7, WHOLE, "the registry has no schema 7"),
    "another kind": (6, b"\0\x08\x01", "schema 6 of the registry is THRIFT"),
    "no Protobuf": (3, b"\0\xff", "not Protobuf of its schema"),
    "no message": (3, b"\x02\x08\x09", "it has no such message"),
    "no nested message": (3, b"\x04\0\0", "it has no such message"),
    "a negative place": (3, b"\x02\x01", "it has no such message"),
    "many places": (3, b"\xfe\xff\x7f", "it has no such message"),
    "cut places": (3, b"\x04\x02", "it has no such message"),
    "no place": (3, b"", "it has no such message"),
    "cut": (1, WHOLE[:-3], "not Avro of its schema"),
    "followed": (1, WHOLE + b"abc", "3 extra bytes"),
    "no branch": (1, WHOLE[:8] + b"\xfe\x01", "not Avro of its schema"),
    "no number": (1, avro(READING, VALUE | {"t": float("nan")}), "JSON has no nan"),
}


@pytest.mark.parametrize("number, value, text", UNDECODABLE.values(), ids=UNDECODABLE)
def test_what_cannot_be_decoded_has_a_reason(url: str, number: int, value: bytes, text: str) -> None:
    with pytest.raises(UndecodableError, match=text):
        Registry(url).decoder()(number, value)
    kind = from_json_schema(json.dumps(SCHEMA))
    body = ENVELOPE.pack(0, number) + value
    verdict = validate_body(body, validator(json.dumps(SCHEMA)), kind, Registry(url).decoder())
    assert (verdict.body, verdict.registry_id) == (value, number)
    assert text in (verdict.fault or "")


def test_a_registry_that_fails_is_no_fault_of_a_body(url: str, server: Any) -> None:
    decode = Registry(url).decoder()
    server.is_refused = True
    with pytest.raises(PipelineError, match="schema 1"):
        decode(1, WHOLE)
    server.is_refused = False
    assert decode(1, WHOLE)


def test_a_registry_without_definitions_of_protobuf_fails(url: str) -> None:
    """It returns the text whatever format is requested."""
    with pytest.raises(PipelineError, match=r"schema 5 .* does not return definitions of Protobuf"):
        Registry(url).decoder()(5, b"\0")


def test_a_registry_that_is_not_there(url: str, server: Any) -> None:
    assert Registry(url).checked()
    server.is_refused = True
    with pytest.raises(PipelineError, match="does not respond"):
        Registry(url).checked()


def test_credentials(url: str, server: Any) -> None:
    made = registry_of(url.replace("://", "://press@"), "s3cret", None)
    made.checked()
    assert b64decode(server.asked[-1][1].removeprefix("Basic ")) == b"press:s3cret"
    assert "s3cret" not in repr(made)
    for wrong in ("registry:8081", "ftp://registry", "http://press:s3cret@registry"):
        with pytest.raises(PipelineError):
            registry_of(wrong, None, None)


def test_the_command_reads_avro_protobuf_and_json_into_one_table(
    streams: SparkSession, url: str, run: Run, tmp_path: Path
) -> None:
    """And what cannot be decoded is among what does not fit, with its bytes."""
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    (tmp_path / "reading.json").write_text(json.dumps(SCHEMA))
    traffic = Traffic(tmp_path / "journal")
    reading = ENVELOPE.pack(0, 3) + b"\x02\x02" + encoded("plant.Reading", {"t": 23, "of": {"unit": "F"}})
    traffic.write(
        *(ENVELOPE.pack(0, 1) + WHOLE, ENVELOPE.pack(0, 2) + b'{"t": 22}', reading, b"\0\0\0\0\x03abc")
    )
    to = str(tmp_path / "to")
    ran = run(
        *("pipeline", "table", "up", "--to", to, "--journal", str(traffic.folder), "--registry", url),
        *("--mapping", str(tmp_path / "mapping.yaml"), "--tolerance", "1"),
    )
    assert ran.code == 0, ran.err
    first, second, third = streams.read.parquet(to).orderBy("registry_id").collect()
    assert (first.body.t, first.body.n, first.body.of.unit, first.body.price) == (21.5, 1 << 60, "C", PRICE)
    assert first.body.seen.microsecond == SEEN.microsecond
    assert (second.body.t, second.registry_id) == (22.0, 2)
    assert (third.body.t, third.body.of.unit, third.registry_id) == (23.0, "F", 3)
    (wrong,) = streams.read.parquet(f"{to}_rejected").collect()
    assert (bytes(wrong.body), wrong.registry_id) == (b"abc", 3)
    assert "not Protobuf of its schema" in wrong.fault
