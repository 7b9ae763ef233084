"""Property values and typed-header notes, crossed in all six directions.

Whatever a peer writes is read as something that every protocol can say, or lose by name; whatever stands in a
message is encoded, or refused by a declared error. Nothing else is ever raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import LocalProtocolError, ProtocolError
from gateway.model.message import Message
from gateway.model.properties import Headers, Properties, PropertySet, Value, ValueType, fits, property_set
from gateway.protocols.amqp091 import translate as amqp091
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqpfast import translate as amqpfast
from gateway.protocols.amqpfast.codec import Head, encode_head_properties
from gateway.protocols.amqpfast.tables import decode_headers
from gateway.protocols.mqtt import translate as mqtt
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.properties import encode_property
from gateway.protocols.mqtt.spec import Property
from gateway.protocols.mqtt.values import from_text
from gateway.store.messages import MessageReader, encode_message
from tests.containment.nasty import CONTENTS, HALF, NAMES, TEXTS, TYPES, VALUES

ADDRESS: Final = topic_address("t")
UTC: Final = 1_700_000_000.0

ENCODE: Final[dict[str, Callable[[Message], bytes]]] = {
    "mqtt": lambda message: mqtt.encode_properties(message, UTC),
    "amqp091": lambda message: amqp091.encode_properties(message, UTC),
    "amqpfast": amqpfast.encode_properties,
}
DECODE: Final[dict[str, Callable[[bytes], PropertySet]]] = {
    "mqtt": mqtt.publish_essentials,
    "amqp091": amqp091.content_properties,
    "amqpfast": amqpfast.head_properties,
}


def crosses(found: PropertySet) -> None:
    """Every protocol can say it, and understands what the others have said; so does the store."""
    for target, encode in ENCODE.items():
        message = Message(ADDRESS, b"", found, hops=1)
        said = DECODE[target](encode(message))
        assert all(fits(value) for _, value in said.properties.headers)
        for encode_again in ENCODE.values():
            encode_again(Message(ADDRESS, b"", said))
    model = property_set(found.properties)
    (read,) = MessageReader().decode(encode_message(Message(ADDRESS, b"", model)))[1]
    assert len(read.properties.headers) == len(found.properties.headers)


@pytest.mark.parametrize("target", ENCODE)
def test_whatever_stands_in_a_message_is_encoded_or_refused_by_name(target: str) -> None:
    for value in VALUES:
        for name in NAMES:
            headers: Headers = ((name, value), ("sound", Value(ValueType.INT32, 7)), (name, value))
            message = Message(ADDRESS, b"", property_set(Properties(headers=headers)))
            try:
                data = ENCODE[target](message)
            except LocalProtocolError:
                continue
            assert all(fits(one) for _, one in DECODE[target](data).properties.headers)


@pytest.mark.parametrize("target", ENCODE)
@pytest.mark.parametrize("content", ["", HALF, "a\0b", "x" * 256, "x" * 70_000])
def test_texts_of_every_kind(target: str, content: str) -> None:
    fields = ("content_type", "content_encoding", "reply_to", "message_id", "type", "app_id", "user_id")
    for field in fields:
        said: dict[str, Any] = {field: content}
        message = Message(ADDRESS, b"", property_set(Properties(**said)))
        DECODE[target](ENCODE[target](message)).properties  # noqa: B018


@pytest.mark.parametrize("content", [-1, 0, 255, 256, 1 << 32, 1 << 64, 10**400])
def test_numbers_of_every_size(content: int) -> None:
    for said in (Properties(priority=content), Properties(timestamp=content)):
        for target, encode in ENCODE.items():
            found = DECODE[target](encode(Message(ADDRESS, b"", property_set(said)))).properties
            fitted = min(max(content, 0), 9) if target == "amqpfast" else content
            assert found.priority in (None, fitted)
            assert found.timestamp in (None, content)


def pairs(*found: tuple[str, str]) -> bytes:
    return b"".join(encode_property(Property.USER_PROPERTY, pair) for pair in found)


@pytest.mark.parametrize("type", TYPES, ids=repr)
def test_notes_of_mqtt_fit_or_are_passed_over(type: Any) -> None:
    note = json.dumps({"h": type, "other": "int8"})
    for text in TEXTS:
        if len(text) <= 65_535:
            found = mqtt.publish_essentials(pairs(("h", text), ("gateway-types", note), ("other", "5")))
            (_, value), (_, other) = found.properties.headers
            assert fits(value)
            assert other == Value(ValueType.INT8, 5)
            crosses(found)


@pytest.mark.parametrize("note", TEXTS, ids=lambda text: text[:20])
def test_notes_that_are_no_notes(note: str) -> None:
    note = note[:65_000]
    crosses(mqtt.publish_essentials(pairs(("h", "5"), ("gateway-types", note))))
    crosses(fast(("H", Value(ValueType.INT32, 5)), ("GATEWAY_TYPES", Value(ValueType.STRING, note))))


def fast(*found: tuple[str, Value]) -> PropertySet:
    return amqpfast.head_properties(encode_head_properties(Head(headers=found), strict=False))


@pytest.mark.parametrize("type", TYPES, ids=repr)
def test_notes_of_amqpfast_fit_or_are_passed_over(type: Any) -> None:
    note = Value(ValueType.STRING, json.dumps({"H": type, "O": "int8"}))
    values = [Value(ValueType.STRING, text) for text in TEXTS if len(text) < 60_000]
    values += [Value(ValueType.STRING, b"\xff"), Value(ValueType.INT32, -1), Value(ValueType.TIMESTAMP, 5)]
    for value in values:
        found = fast(("H", value), ("GATEWAY_TYPES", note), ("O", Value(ValueType.INT32, 5)))
        assert all(fits(one) for _, one in found.properties.headers)
        assert dict(found.properties.headers)["O"] == Value(ValueType.INT8, 5)
        crosses(found)


def test_whatever_amqp_can_write_crosses() -> None:
    for value in VALUES:
        for name in NAMES:
            try:
                raw = encode_basic_properties(BasicProperties(headers=((name, value),)))
            except (ProtocolError, ValueError, TypeError, AttributeError, RecursionError):
                continue  # no peer can write that
            found = amqp091.content_properties(raw)
            if fits(value):
                crosses(found)


def test_what_fits_has_one_type() -> None:
    """A value is of its type, or it is not: no content makes the question raise."""
    taken = {kind: sum(fits(Value(kind, content)) for content in CONTENTS) for kind in ValueType}
    assert all(count >= 1 for count in taken.values())
    assert all(count < len(CONTENTS) for count in taken.values())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
kinds = st.sampled_from([kind.value for kind in ValueType] + ["string64", "repeated"])
types = st.recursive(
    st.none() | kinds,
    lambda inner: (
        st.builds(lambda one: {"array": one}, st.lists(inner, max_size=3))
        | st.builds(lambda one: {"table": one}, st.dictionaries(st.text(max_size=3), inner, max_size=3))
    ),
    max_leaves=8,
)
typed = st.recursive(
    st.tuples(kinds, json_values).map(list),
    lambda inner: st.tuples(kinds, st.lists(inner, max_size=3)).map(list),
    max_leaves=8,
)


@given(json_values, types | json_values)
def test_any_text_under_any_note_of_mqtt(plain: Any, type: Any) -> None:
    assert fits(from_text(json.dumps(plain), type))


@given(st.lists(typed, max_size=3) | json_values, kinds | json_values)
def test_any_text_under_any_note_of_amqpfast(said: Any, type: Any) -> None:
    note = Value(ValueType.STRING, json.dumps({"H": type}))
    found = decode_headers((("H", Value(ValueType.STRING, json.dumps(said))), ("GATEWAY_TYPES", note)))
    assert all(fits(value) for _, value in found)
    crosses(property_set(Properties(headers=found)))
