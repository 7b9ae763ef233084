"""Headers that are nothing but texts: passed on as they are, and it makes no difference."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.properties import PropertySet, Value, ValueType, string
from gateway.protocols.amqp091 import translate
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.table import decode_table, encode_table, is_texts, texts_of
from gateway.protocols.mqtt import translate as mqtt

texts = st.text(max_size=200)
names = st.one_of(
    st.text(min_size=1, max_size=20),
    st.sampled_from(
        ("CC", "x-mqtt-retain", "x-gateway-hops", "gateway-types", "amqp-type", "trace", "n" * 200)
    ),
)
values = st.one_of(texts.map(string), st.integers(-100, 100).map(lambda one: Value(ValueType.INT32, one)))
headers = st.lists(st.tuples(names, st.one_of(texts.map(string), values)), max_size=5)


def made(raw: bytes) -> PropertySet:
    return PropertySet("amqp091", raw, translate.decode_model)


def outcome(raw: bytes) -> tuple[Any, ...]:
    """All that is made of these octets."""
    found = made(raw)
    try:
        known = translate.essentials(found)
    except RemoteProtocolError as error:
        return (str(error),)
    message = Message(amqp_address("e", "k"), b"", found, 1, known.durable, known.retain, 0.0, known.hops)
    return (
        known,
        found.asks,
        mqtt.encode_properties(message, 0.0),
        mqtt.losses(message),
        translate.encode_properties(message, 0.0),
    )


@given(
    headers,
    st.sampled_from((None, 1, 2)),
    st.sampled_from((None, "60")),
    st.sampled_from((None, "text/plain")),
)
def test_it_makes_no_difference(
    said: list[tuple[str, Value]], mode: int | None, expiration: str | None, kind: str | None
) -> None:
    raw = encode_basic_properties(
        BasicProperties(kind, headers=tuple(said), delivery_mode=mode, expiration=expiration)
    )
    quick = outcome(raw)
    with patch.object(translate, "is_texts", lambda data, at: False):
        assert outcome(raw) == quick


@pytest.mark.parametrize("seed", range(4))
def test_nor_with_octets_changed_by_chance(seed: int) -> None:
    chance = random.Random(seed)
    taken = 0
    for _ in range(3_000):
        table = encode_table(
            tuple(
                ("k" * chance.randrange(1, 5), string("v" * chance.randrange(200)))
                for _ in range(chance.randrange(4))
            )
        )
        octets = bytearray(table)
        for _ in range(chance.randrange(3)):
            octets[chance.randrange(len(octets))] = chance.choice((0, 1, 0x53, 0x49, 0x7F, 0xFF))
        raw = bytes(octets)
        if is_texts(raw, 0):
            taken += 1
            decoded = tuple((name, value.value) for name, value in decode_table(raw, 0)[0])
            assert decoded == tuple((name.decode(), value.decode()) for name, value in texts_of(raw, 0))
    assert taken > 300
