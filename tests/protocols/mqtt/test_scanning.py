"""The one pass over a property list says what the rules say, or leaves the list to them."""

from __future__ import annotations

import random
from typing import Final

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.properties import PropertySet
from gateway.protocols.amqp091 import translate as amqp
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.properties import encode_property, spans
from gateway.protocols.mqtt.property_scan import scan, texts_of
from gateway.protocols.mqtt.spec import PacketType, Property
from gateway.protocols.mqtt.translate import HOPS, REPLY_TO, TYPES, decode_properties, publish_essentials

OF_THE_WAY: Final = (Property.TOPIC_ALIAS, Property.MESSAGE_EXPIRY_INTERVAL)
texts = st.text(st.characters(min_codepoint=1, max_codepoint=0x7F), max_size=300)
pairs = st.tuples(texts, texts).map(lambda pair: encode_property(Property.USER_PROPERTY, pair))
names = st.sampled_from(("g", "gate", "gateway", "a", "amqp", "x-mqtt-retain", "n" * 256))
others = st.one_of(
    st.tuples(names, texts).map(lambda pair: encode_property(Property.USER_PROPERTY, pair)),
    texts.map(lambda text: encode_property(Property.CONTENT_TYPE, text)),
    st.sampled_from(("a", "a/b", "$x")).map(lambda text: encode_property(Property.RESPONSE_TOPIC, text)),
    st.sampled_from((0, 1)).map(lambda bit: encode_property(Property.PAYLOAD_FORMAT_INDICATOR, bit)),
    st.integers(1, 0x7F7F).map(lambda alias: encode_property(Property.TOPIC_ALIAS, alias)),
    st.integers(0, 0xFFFF_FFFF).map(lambda secs: encode_property(Property.MESSAGE_EXPIRY_INTERVAL, secs)),
)
odd = st.one_of(
    st.binary(max_size=8),
    st.sampled_from((HOPS, TYPES, REPLY_TO, "é", "n\0")).map(
        lambda name: b"\x26" + len(name.encode()).to_bytes(2, "big") + name.encode() + b"\0\x01v"
    ),
    st.just(encode_property(Property.CORRELATION_DATA, b"\0\xff")),
    st.just(encode_property(Property.SUBSCRIPTION_IDENTIFIER, 5)),
)


def agrees(raw: bytes, most: int = 1_000) -> bool:
    """Whether the list was scanned; if so, the rules say the same."""
    found = scan(raw, most, decode_properties)
    if found is None:
        return False
    told = list(spans(raw, PacketType.PUBLISH, most))
    by_id = {span.id: span for span in told}
    alias = by_id.get(Property.TOPIC_ALIAS)
    expiry = by_id.get(Property.MESSAGE_EXPIRY_INTERVAL)
    assert found.total == len(told)
    assert found.alias == (0 if alias is None else alias.value)
    assert found.bare == (raw if alias is None else raw[: alias.start] + raw[alias.stop :])
    assert found.expiry == (None if expiry is None else expiry.value)
    assert found.has_reply_to == (Property.RESPONSE_TOPIC in by_id)
    assert found.parsed == b"".join(raw[one.start : one.stop] for one in told if one.id not in OF_THE_WAY)
    assert (found.read_texts is not None) == all(one.id is Property.USER_PROPERTY for one in told)
    if found.read_texts is not None:
        long = any(len(one.value[0]) > 255 for one in told)
        cut = texts_of(raw, b"<", b">")
        said = [
            (bytes((len(one.value[0]),)) + one.value[0].encode(), one.value[1]) for one in told if not long
        ]
        assert cut == [
            part
            for name, value in said
            for part in (b"<", name, b">", len(value).to_bytes(2, "big") + value.encode())
        ]
        bare = [one.decode() for one in texts_of(raw, b"", b"", bare=True)]
        assert bare == [] if long else bare == [text for one in told for text in one.value]
        read = tuple(one.value for one in told)
        assert read == tuple((name, value.value) for name, value in decode_properties(raw).headers)
    return True


@given(st.lists(st.one_of(pairs, others), max_size=8))
def test_what_is_common(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    try:
        list(spans(raw, PacketType.PUBLISH))
    except RemoteProtocolError:
        assert not agrees(raw)  # the same one twice
    else:
        assert agrees(raw)


@given(st.lists(st.one_of(pairs, others, odd), max_size=6))
def test_whatever_it_is(parts: list[bytes]) -> None:
    raw = b"".join(parts)
    if not agrees(raw):
        return
    essentials = publish_essentials(raw)
    assert essentials.raw == raw


@pytest.mark.parametrize("seed", range(4))
def test_bytes_changed_by_chance(seed: int) -> None:
    chance = random.Random(seed)
    scanned = 0
    for _ in range(5_000):
        parts = [
            encode_property(Property.USER_PROPERTY, ("k" * chance.randrange(4), "v" * chance.randrange(300)))
            for _ in range(chance.randrange(4))
        ]
        parts.append(encode_property(Property.MESSAGE_EXPIRY_INTERVAL, chance.randrange(1 << 32)))
        parts.append(encode_property(Property.TOPIC_ALIAS, chance.randrange(1, 1 << 16)))
        chance.shuffle(parts)
        data = bytearray(b"".join(parts))
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 0x26, 0x23, 0x7F, 0xFF))
        scanned += agrees(bytes(data))
    assert scanned > 500


def test_too_many_are_left_to_the_rules() -> None:
    raw = encode_property(Property.USER_PROPERTY, ("a", "b")) * 5
    assert scan(raw, 5, decode_properties) is not None
    assert scan(raw, 4, decode_properties) is None
    with pytest.raises(RemoteProtocolError, match="more than 4"):
        publish_essentials(raw, 4)


@given(
    st.lists(st.tuples(st.one_of(names, texts), texts), min_size=1, max_size=5), st.booleans(), st.booleans()
)
@example([("amqp-message-id", "")], False, False)
def test_amqp_writes_texts_straight_as_it_would_write_them(
    said: list[tuple[str, str]], durable: bool, retain: bool
) -> None:
    raw = b"".join(encode_property(Property.USER_PROPERTY, pair) for pair in said)
    for expires in (0.0, 100.0):
        for hops in (0, 3):
            straight = scan(raw, len(said), decode_properties)
            assume(straight is not None)  # it leaves names such as amqp-message-id to the rules
            assert straight is not None
            assert straight.read_texts is texts_of
            decoded = PropertySet("mqtt", raw, decode_properties)
            one, other = (
                Message(topic_address("a"), b"", made, 1, durable, retain, expires, hops)
                for made in (straight, decoded)
            )
            assert amqp.encode_properties(one, 90.0) == amqp.encode_properties(other, 90.0)
            assert amqp.losses(one) == amqp.losses(other)


@pytest.mark.parametrize("byte_count", [65_518, 65_519, 65_520, 200_000])
def test_amqp_writes_as_much_as_there_is(byte_count: int) -> None:
    """At 65 535 bytes the length of the table needs a third one."""
    count = -(-byte_count // 50_000)
    said = [(f"n{at}", "v" * (byte_count // count)) for at in range(count)]
    raw = b"".join(encode_property(Property.USER_PROPERTY, pair) for pair in said)
    for hops in (0, 1):
        straight = publish_essentials(raw)
        decoded = PropertySet("mqtt", raw, decode_properties)
        assert straight.read_texts is not None
        one, other = (Message(topic_address("a"), b"", made, 1, hops=hops) for made in (straight, decoded))
        assert amqp.encode_properties(one, 0.0) == amqp.encode_properties(other, 0.0)
