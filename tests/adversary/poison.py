"""Messages that nobody can encode: odd values under every typed note, to receivers of every protocol, kept
over a restart."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqpfast import commands as c
from tests.adversary.arena import Arena
from tests.adversary.cases import case
from tests.adversary.wire import answered, mqtt, pair, publish_packet
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import TOPIC, Fast, head
from tests.ingress.clients import connect

NOTES: tuple[tuple[str, Any], ...] = (
    ('["\\ud800"]', {"array": [None]}),
    ('["\\ud800"]', {"array": ["string"]}),
    ("1", {"table": {}}),
    ("{}", {"table": {"a": "int32"}}),
    ('[["int32", Infinity]]', {"array": [None]}),
    ("Infinity", "int32"),
    ("NaN", "timestamp"),
    ("1e400", "double"),
    ("1" * 400, "double"),
    ("1" * 400, "int64"),
    ("-1", "uint8"),
    ("300", "uint8"),
    ("x", "decimal"),
    ("1E999999", "decimal"),
    ("x", "bool"),
    ("x", "nothing"),
    ("[" * 2_000 + "]" * 2_000, {"array": [None]}),
    ("\\ud800", "string"),
    ("x", ["a"]),
    ("x", 1),
    ("x", None),
    ("///", "bytes"),
)


def _noted(name: bytes, value: str, note: object) -> bytes:
    return pair(name, value.encode()) + pair(b"gateway-types", json.dumps({name.decode(): note}).encode())


@case()
def typed_notes(arena: Arena) -> None:
    """From MQTT 5, durable, to a consumer of AMQP 0-9-1 and one of AMQP/Fast; then again after a restart of
    the consumers. A sound message behind each of them arrives."""
    with Amqp(arena).open() as consumer:
        consumer.call(m.QueueDeclare("poison", durable=True), m.QueueDeclareOk)
        consumer.call(m.QueueBind("poison", "amq.topic", "poison.#"), m.QueueBindOk)
    fast = Fast(arena).open()
    fast.consume(fast.handle("poison.x", TOPIC))
    with mqtt(arena.port("mqtt"), b"poisoner") as sock:
        for value, note in NOTES:
            for properties in (_noted(b"h", value, note), pair(b"gateway-types", b"{" * 3_000)):
                answered(sock, publish_packet(b"poison/x", b"bad", qos=1, properties=properties))
            answered(sock, publish_packet(b"poison/x", b"good", qos=1))
    for _ in range(2):
        with Amqp(arena).open() as consumer:
            consumer.call(m.BasicConsume("poison", no_ack=False), m.BasicConsumeOk)
            found = 0
            while found < len(NOTES):
                found += sum(row[6] == b"good" for row in consumer.delivered(1))
    found = 0
    while found < len(NOTES):
        found += fast.bodies(1) == [b"good"]
    fast.cut()


@case()
def the_notes_of_amqpfast(arena: Arena) -> None:
    """The same in the headers of AMQP/Fast, to subscribers of MQTT 5 and consumers of AMQP 0-9-1."""
    with Amqp(arena).open() as amqp:
        amqp.call(m.QueueDeclare("poison"), m.QueueDeclareOk)
        amqp.call(m.QueueBind("poison", "amq.topic", "poison.#"), m.QueueBindOk)
        amqp.call(m.BasicConsume("poison", no_ack=True), m.BasicConsumeOk)
        device, _ = connect(arena, "reader")
        device.subscribe("poison/#")
        producer = Fast(arena).open()
        handle = producer.handle("poison.x", TOPIC)
        for head in _heads():
            producer.put(handle, b"bad", name="", head=head, confirm=False)
            producer.put(handle, b"good", name="", confirm=False)
        heard = 0
        while heard < len(_heads()):
            heard += sum(row[6] == b"good" for row in amqp.delivered(1))
        for _ in _heads():
            while device.body() != b"good":
                pass
        device.cut()
        producer.cut()


def _heads() -> list[bytes]:
    values = ('{"H":"string"}', '{"H":{"table":{}}}', '{"H":["a"]}', '{"H":null}', "[]", "{", '{"H":"int8"}')
    return [head(headers={"H": 4_000, "GATEWAY_TYPES": value}) for value in values] + [
        head(headers={"H": value, "GATEWAY_TYPES": '{"H":{"array":[null]}}'})
        for value in ('["\\ud800"]', '[["int32", Infinity]]', "[" * 2_000)
    ]


@case()
def a_selector_of_three_thousand_bytes(arena: Arena) -> None:
    """Refused, or evaluated; in both languages, with a durable subscription over a restart."""
    for language in ("", "application/cel"):
        for selector in (
            b"+".join([b"a"] * 1_500) + b"=1",
            b"(" * 1_500 + b"a=1" + b")" * 1_500,
            b"NOT " * 750 + b"a=1",
            b"-" * 2_990 + b"1=a",
            b"!" * 2_990 + b"true",
            b"[" * 1_500 + b"]" * 1_500 + b"==1",
            b" AND ".join([b"a=1"] * 300),
        ):
            with Fast(arena, "durable").open() as client:
                handle = client.handle("selected", TOPIC)
                client.say(
                    c.HandleConsume(
                        handle, prefetch=10, identifier="sub", selector=selector, mime_type=language
                    )
                )
                with suppress(ConnectionError):
                    client.quiet()
            with Fast(arena).open() as other:
                other.put(other.handle("selected", TOPIC), b"x", confirm=False)
                other.quiet()
        assert arena.alive
