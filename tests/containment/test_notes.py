"""What a client claims about its headers, true or not, reaches consumers of all protocols in some form, and
upsets nobody: over sockets, with the nasty values of every protocol.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Final

import pytest

from gateway.errors import LocalProtocolError
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqpfast.codec import Head, encode_head_properties
from gateway.protocols.mqtt.properties import encode_property
from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import Property
from tests.containment.faults import counting, faulty
from tests.containment.nasty import NAMES, TEXTS, TYPES, VALUES
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running

BYTES_MAX: Final = 60_000  # what fits the frames of every consumer


@pytest.fixture
def counted() -> Iterator[Counter[str]]:
    with counting() as found:
        yield found


def mqtt_sources() -> list[bytes]:
    """Property lists: each text under each note."""
    found = []
    for type in TYPES:
        note = json.dumps({"h": type})
        for text in TEXTS:
            if len(text) < BYTES_MAX:
                pairs = (("h", text), ("gateway-types", note))
                found.append(b"".join(encode_property(Property.USER_PROPERTY, pair) for pair in pairs))
    return found


def fast_sources() -> list[bytes]:
    """Heads: each text, and what is no text, under each note."""
    found = []
    for type in TYPES:
        note = Value(ValueType.STRING, json.dumps({"H": type}))
        values = [Value(ValueType.STRING, text) for text in TEXTS if len(text) < BYTES_MAX]
        for value in (*values, Value(ValueType.STRING, b"\xff"), Value(ValueType.INT32, -1)):
            pairs = (("H", value), ("GATEWAY_TYPES", note))
            found.append(encode_head_properties(Head(headers=pairs), strict=False))
    return found


def amqp_sources() -> list[bytes]:
    """Content headers: whatever a table can hold."""
    found = []
    for value in VALUES:
        for name in NAMES:
            try:
                raw = encode_basic_properties(BasicProperties(headers=((name, value),)))
            except (LocalProtocolError, ValueError, TypeError, AttributeError, RecursionError):
                continue  # no peer can write that
            if len(raw) < BYTES_MAX:
                found.append(raw)
    return found


SOURCES: Final = {"mqtt": mqtt_sources, "amqp091": amqp_sources, "amqpfast": fast_sources}


def publish(gateway: Running, protocol: str, said: list[bytes]) -> None:
    """A message for each; its body is its number."""
    if protocol == "mqtt":
        with connect(gateway, "publisher")[0] as client:
            for number, raw in enumerate(said):
                client.machine.publish(b"a/b", b"%d" % number, 1, packet_id=number + 1, properties=raw)
                if number % 100 == 99:
                    client.flush()
            client.flush()
            answered = 0
            while answered < len(said):
                answered += len(client.next(Acks).rows)
    elif protocol == "amqp091":
        with Amqp(gateway).open() as program:
            for number, raw in enumerate(said):
                program.publish("amq.topic", "a.b", b"%d" % number, properties=raw)
            program.call(m.QueueDeclare("last"), m.QueueDeclareOk)
    else:
        with Fast(gateway).open() as fast:
            handle = fast.handle("a.b", TOPIC)
            for number, raw in enumerate(said):
                fast.put(handle, b"%d" % number, head=raw)


@pytest.mark.parametrize("source", SOURCES)
def test_every_message_reaches_every_consumer(counted: Counter[str], source: str) -> None:
    said = SOURCES[source]()
    wanted = {b"%d" % number for number in range(len(said))}
    assert len(wanted) > 400
    with (
        faulty() as gateway,
        connect(gateway, "subscriber")[0] as device,
        Amqp(gateway).open() as program,
        Fast(gateway).open() as fast,
    ):
        device.subscribe("a/b")
        program.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        program.call(m.QueueBind("q", "amq.topic", "a.b"), m.QueueBindOk)
        program.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        fast.consume(fast.handle("a.b", TOPIC), unreliable=True)
        publish(gateway, source, said)
        assert {row[6] for row in program.delivered(len(said))} == wanted
        assert set(fast.bodies(len(said))) == wanted
        assert {device.body() for _ in said} == wanted
    assert not counted
