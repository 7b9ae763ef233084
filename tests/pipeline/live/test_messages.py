"""Rows to messages, options to connections: what the sink understands, and what it says when it does not."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from gateway.errors import PipelineError
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType, string
from gateway.pipeline.live import source
from gateway.pipeline.live.messages import RowConversion
from gateway.pipeline.live.options import CONNECTION, QueryOptions
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address


def messages(protocol: str, rows: list[dict[str, Any]], **fixed: str) -> list[Message]:
    batch = pa.RecordBatch.from_pylist(rows)
    fields = [
        StructField(name, BinaryType() if name == "body" else StringType()) for name in batch.schema.names
    ]
    return list(RowConversion(protocol, StructType(fields), fixed, "p-").messages(batch, "q:7:0", 5))


ADDRESSES = [
    ("mqtt", {"topic": "a/b"}, {}, topic_address("a/b")),
    ("mqtt", {"address": "a/b"}, {}, topic_address("a/b")),
    ("mqtt", {}, {"topic": "all/here"}, topic_address("all/here")),
    ("amqp091", {"queue": "q"}, {}, amqp_address("", "q")),
    ("amqp091", {"exchange": "x", "routing_key": "a.b"}, {}, amqp_address("x", "a.b")),
    ("amqp091", {"routing_key": "a.b"}, {"exchange": "x"}, amqp_address("x", "a.b")),
    ("amqp091", {"address": "x:a:b"}, {}, amqp_address("x", "a:b")),
    ("amqpfast", {"destination": "d"}, {"service": "queue"}, fast_address("queue", "d")),
    ("amqpfast", {"address": "topic:d.e"}, {}, fast_address("topic", "d.e")),
]


@pytest.mark.parametrize("protocol, row, fixed, address", ADDRESSES)
def test_addresses(protocol: str, row: dict[str, Any], fixed: dict[str, str], address: object) -> None:
    (made,) = messages(protocol, [{"body": b"1", **row}], **fixed)
    assert made.address == address


def test_a_row_without_an_id_is_named_for_its_place() -> None:
    plain = messages("mqtt", [{"topic": "a", "body": b""}] * 2)
    assert [one.properties.message_id for one in plain] == ["p-q:7:0:5", "p-q:7:0:6"]
    (recorded,) = messages("mqtt", [{"topic": "a", "body": b"", "shard": "r/0", "sequence": 9}])
    assert recorded.properties.message_id == "p-r/0:9"
    (own,) = messages("mqtt", [{"topic": "a", "body": b"", "message_id": "mine"}])
    assert own.properties.message_id == "mine"


def test_columns_replace_what_properties_say() -> None:
    said = '{"content_type":"a/b","priority":3,"headers":[["n","int32",1]]}'
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    (made,) = messages(
        "amqp091",
        [
            {
                "queue": "q",
                "body": b"x",
                "properties": said,
                "content_type": "c/d",
                "assurance": 2,
                "durable": False,
                "retain": True,
                "expires": moment,
                "timestamp": moment,
                "correlation": b"\0",
                "message_id": "m",
            }
        ],
    )
    assert made.properties == Properties(
        content_type="c/d",
        priority=3,
        correlation=b"\0",
        timestamp=1_767_225_600,
        message_id="m",
        headers=(("n", Value(ValueType.INT32, 1)),),
    )
    assert (made.assurance, made.durable, made.retain) == (2, False, True)
    assert made.expires == moment.timestamp()


def test_headers_are_a_map_or_the_journals() -> None:
    (plain,) = messages("mqtt", [{"topic": "a", "body": b"", "headers": [("n", "1"), ("m", None)]}])
    assert plain.properties.headers == (("n", string("1")), ("m", string("")))
    typed = [{"name": "n", "type": "int32", "value": "1"}, {"name": "t", "type": "string", "value": "x"}]
    (journal,) = messages("mqtt", [{"topic": "a", "body": b"", "headers": typed}])
    assert journal.properties.headers == (("n", Value(ValueType.INT32, 1)), ("t", string("x")))


COMPLAINTS = [
    ({"topic": "a", "body": b"", "topik": "b"}, "did you mean 'topic'"),
    ({"body": b""}, "no target: set a column or option"),
    ({"topic": "a"}, "needs the column body"),
    ({"topic": "a/#", "body": b""}, "no message can be published to 'a/#'"),
    ({"topic": "a", "body": b"", "properties": '{"malformed":true}'}, "not what a journal has"),
]


@pytest.mark.parametrize("row, text", COMPLAINTS)
def test_complaints_about_rows(row: dict[str, Any], text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        messages("mqtt", [row])


OPTIONS = [
    ({"url": "mqtt://h", "topicz": "a"}, "no option topicz; did you mean topics"),
    ({"url": "mqtt://ann:secret@h"}, "use option passwordFile"),
    ({"url": "http://h"}, "option url: a broker's URL must begin with"),
    ({"url": "amqp://h"}, "uses mqtt, but url is for amqp091"),
    ({}, "needs option url, for example mqtts://"),
    ({"url": "mqtt://h", "passwordFile": "/no/such"}, "passwordFile: /no/such: No such file"),
    ({"url": "mqtt://h", "timeoutSecs": "soon"}, "timeoutSecs is a number, not 'soon'"),
]


@pytest.mark.parametrize("given, text", OPTIONS)
def test_complaints_about_options(given: dict[str, str], text: str) -> None:
    with pytest.raises(PipelineError, match=text) as raised:
        QueryOptions("gateway_mqtt", given, (*CONNECTION, "topics")).access("mqtt")
    assert "secret" not in str(raised.value)


def test_a_password_is_in_no_repr(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    options = QueryOptions("gateway_mqtt", {"URL": "mqtt://ann@h", "passwordFile": str(file)}, CONNECTION)
    access = options.access()
    assert (access.target.username, access.target.password) == ("ann", "secret")
    assert "secret" not in f"{options!r} {access!r}"


def test_lists_may_hold_commas() -> None:
    said = QueryOptions("f", {"topics": '["a,b", "c"]', "queues": "x, y ,"}, ("topics", "queues"))
    assert said.listed("topics") == ["a,b", "c"]
    assert said.listed("queues") == ["x", "y"]
    assert said.listed("none") == []


class Consumes:
    """Stands in for a client: what it is asked to consume."""

    def __init__(self, access: object, *, client_name: str) -> None:
        self.asked: list[tuple[str, str, str]] = []

    def consume(self, service: str, name: str, *, identifier: str, prefetch: int) -> None:
        self.asked.append((service, name, identifier))


def test_destinations_are_read_as_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FastClient", Consumes)
    given = {"url": "amqpfast://h", "clientId": "c", "subscription": "s"}
    asked = source.LiveFastSource({**given, "destinations": '["queue:a:b%3A","topic:plant.","queue:"]'})
    asked.check()
    client = asked.connect()
    assert isinstance(client, Consumes)
    assert client.asked == [("queue", "a:b%3A", ""), ("topic", "plant.", "s.1"), ("queue", "", "")]
    for wrong in ("plant", "stack:plant", ":plant"):
        with pytest.raises(PipelineError, match=f"destinations: '{wrong}' is not service:name with one of"):
            source.LiveFastSource({**given, "destinations": wrong}).check()
