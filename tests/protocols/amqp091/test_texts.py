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
from gateway.protocols.amqp091.table import TEXTS, UNKNOWN, decode_table, encode_table, survey, texts_of
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
    """All that is made of these bytes."""
    found = made(raw)
    try:
        known = translate.essentials(found)
    except RemoteProtocolError as error:
        return (str(error),)
    message = Message(amqp_address("e", "k"), b"", found, 1, known.durable, known.retain, 0.0, known.hops)
    return (
        known,
        found.has_reply_to,
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
    with patch.object(translate, "survey", lambda data, at: UNKNOWN):
        assert outcome(raw) == quick


@pytest.mark.parametrize("seed", range(4))
def test_nor_with_bytes_changed_by_chance(seed: int) -> None:
    chance = random.Random(seed)
    taken = 0
    for _ in range(3_000):
        table = encode_table(
            tuple(
                ("k" * chance.randrange(1, 5), string("v" * chance.randrange(200)))
                for _ in range(chance.randrange(4))
            )
        )
        data = bytearray(table)
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.choice((0, 1, 0x53, 0x49, 0x7F, 0xFF))
        raw = bytes(data)
        holds = survey(raw, 0)
        decoded = decode_table(raw, 0)[0] if holds else ()
        if holds == TEXTS:
            taken += 1
            told = [one for name, value in decoded for one in (name, value.value)]
            assert told == [one.decode() for one in texts_of(raw, 0, b"", b"", bare=True)]
            cut = texts_of(raw, 0, b"", b"")
            assert told[::2] == [one[1:].decode() for one in cut[::2]]
            assert told[1::2] == [one[2:].decode() for one in cut[1::2]]
    assert taken > 300


anything = st.recursive(
    st.one_of(
        st.integers(-(2**31), 2**31 - 1).map(lambda one: Value(ValueType.INT32, one)),
        st.booleans().map(lambda one: Value(ValueType.BOOL, one)),
        st.just(Value(ValueType.VOID, None)),
        st.floats(allow_nan=False).map(lambda one: Value(ValueType.DOUBLE, one)),
        st.binary(max_size=130).map(lambda one: Value(ValueType.BYTES, one)),
        st.binary(max_size=130).map(lambda one: Value(ValueType.STRING, one)),
        st.integers(0, 2**64 - 1).map(lambda one: Value(ValueType.TIMESTAMP, one)),
        st.decimals(-999, 999, places=2).map(lambda one: Value(ValueType.DECIMAL, one)),
        texts.map(string),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda ones: Value(ValueType.ARRAY, tuple(ones))),
        st.lists(st.tuples(names, inner), max_size=3).map(lambda ones: Value(ValueType.TABLE, tuple(ones))),
    ),
    max_leaves=5,
)
tables = st.lists(st.tuples(names, anything), max_size=5).map(tuple)


@given(tables, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2))
def test_a_table_of_anything_is_known_only_if_it_is_well_formed(
    said: tuple[tuple[str, Value], ...], changed: list[tuple[int, int]]
) -> None:
    data = bytearray(encode_table(said))
    for at, byte in changed:
        data[at % len(data)] = byte
    raw = bytes(data)
    holds = survey(raw, 0)
    if holds == UNKNOWN:
        return
    decoded, end = decode_table(raw, 0)
    assert end == 4 + int.from_bytes(raw[:4], "big")
    assert all(name.isascii() and name[:1] not in ("x", "B", "C") for name, _ in decoded)
    if holds == TEXTS:
        assert all(type(value.value) is str and value.value.isascii() for _, value in decoded)


@given(tables, st.sampled_from((None, 1, 2)), st.sampled_from((None, "60")))
def test_nor_does_it_with_values_of_any_type(
    said: tuple[tuple[str, Value], ...], mode: int | None, expiration: str | None
) -> None:
    raw = encode_basic_properties(BasicProperties(headers=said, delivery_mode=mode, expiration=expiration))
    quick = outcome(raw)
    with patch.object(translate, "survey", lambda data, at: UNKNOWN):
        assert outcome(raw) == quick
