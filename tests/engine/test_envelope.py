"""What replicas tell each other of a message, and what they make of those of others and of later versions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.engine import envelope
from gateway.engine.envelope import decode, encode
from gateway.model.message import Message, Sender
from gateway.model.properties import NO_PROPERTIES, Value, ValueType, string
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.translate import ENGINE_HEADER, content_properties, with_pair
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import PacketType
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import Property
from gateway.protocols.mqtt.translate import publish_essentials
from tests.engine.messages import message_of

TOPIC = topic_address("a/b")
LISTED = encode_list(
    {
        Property.CONTENT_TYPE: "text/plain",
        Property.RESPONSE_TOPIC: "reply/to",
        Property.CORRELATION_DATA: b"\xff\0",
        Property.USER_PROPERTY: (("a", "1"), ("b", "2"), ("a", "3")),
    },
    PacketType.PUBLISH,
)


@given(
    qos=st.integers(0, 2),
    retain=st.booleans(),
    hops=st.integers(0, 300),
    client=st.text(max_size=30).filter(lambda text: text.isprintable()),
    listed=st.sampled_from([b"", LISTED]),
    expires=st.sampled_from([0.0, 2_000_000_000.25]),
    is_other=st.booleans(),
)
def test_what_is_encoded_comes_back(
    qos: int, retain: bool, hops: int, client: str, listed: bytes, expires: float, is_other: bool
) -> None:
    properties = publish_essentials(listed) if listed else NO_PROPERTIES
    sender = Sender("mqtt", client)
    message = Message(TOPIC, b"x", properties, qos, qos > 0, retain, expires, hops, sender)
    number = (b"12345678", 2**40) if qos == 2 else None
    found = decode(encode(message, 1_000_000_000.0, number=number, is_other=is_other))
    assert found.property_set.raw == listed
    assert (found.qos, found.durable, found.retain, found.expires) == (qos, qos > 0, retain, expires)
    assert found.hops == min(hops, 255)
    assert found.sender == Sender("engine, other" if is_other else "engine", client)
    assert found.number == number


def test_a_message_of_another_protocol_keeps_its_properties() -> None:
    raw = encode_basic_properties(BasicProperties(content_type="a/b", headers=(("n", string("v")),)))
    message = message_of(properties=content_properties(raw), qos=1)
    said = decode(encode(message, 0.0)).property_set.properties
    assert said.content_type == "a/b"
    assert said.headers == (("n", string("v")),)


def test_what_a_program_publishes_is_what_its_properties_say() -> None:
    native = BasicProperties(delivery_mode=2, expiration="1500", headers=(("x-mqtt-retain", YES),))
    found = decode(encode_basic_properties(native))
    assert (found.qos, found.durable, found.retain, found.lifetime) == (1, True, True, 1.5)


def test_a_later_version_is_what_its_properties_say() -> None:
    header = envelope.PAIR + (4).to_bytes(4, "big") + b"\x02new"
    found = decode(with_pair(encode_basic_properties(BasicProperties(delivery_mode=2)), header))
    assert (found.qos, found.sender.client) == (1, "")
    assert ENGINE_HEADER not in dict(found.property_set.properties.headers)


def test_a_header_that_is_cut_short_is_passed_over() -> None:
    message = message_of(client="someone", qos=1, expires=2_000_000_000.0)
    raw = encode(message, 0.0)
    at = raw.index(envelope.PAIR) + len(envelope.PAIR)
    size = int.from_bytes(raw[at : at + 4], "big")
    value = raw[at + 4 : at + 4 + size]
    for length in range(size):
        cut = with_pair(
            encode_basic_properties(BasicProperties(delivery_mode=2)),
            envelope.PAIR + length.to_bytes(4, "big") + value[:length],
        )
        assert decode(cut).qos == 1
        assert decode(cut).sender.client in ("", "someone")


YES = Value(ValueType.BOOL, True)
