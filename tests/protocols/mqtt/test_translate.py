"""Properties into the model and out of it: each row is a round trip, or names its loss."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from math import isnan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access.backends import Denial
from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import Headers, Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.properties import decode_list, encode_list
from gateway.protocols.mqtt.reason_codes import (
    CONNECT_REFUSED,
    LOGIN_REFUSED,
    PROOF_REFUSED,
    PUBLISH_REFUSED,
    REAUTHENTICATION_REFUSED,
    SUBSCRIBE_REFUSED,
    outcome_of,
    publish_refused,
    refusal,
)
from gateway.protocols.mqtt.spec import FAILURE, REASONS, WILL, PacketType
from gateway.protocols.mqtt.spec import Property as P
from gateway.protocols.mqtt.translate import (
    FIELDS,
    LOSSES,
    decode_properties,
    encode_properties,
    losses,
    publish_essentials,
)
from gateway.protocols.mqtt.values import from_text, to_text
from tests.protocols.mqtt import strategies

V = ValueType
ADDRESS = topic_address("t")


def message(properties: Properties | PropertySet, **more: Any) -> Message:
    found = properties if isinstance(properties, PropertySet) else property_set(properties)
    return Message(ADDRESS, b"", found, **more)


def written(headers: Headers) -> tuple[tuple[str, str], ...]:
    """The user properties that `headers` become."""
    data = encode_properties(message(Properties(headers=headers)), 0.0)
    found: tuple[tuple[str, str], ...] = decode_list(data, PacketType.PUBLISH).get(P.USER_PROPERTY, ())
    return found


NESTED = (
    ("n", Value(V.INT32, 1)),
    ("t", Value(V.TABLE, (("d", Value(V.DECIMAL, Decimal("1.50"))), ("v", Value(V.VOID, None))))),
    ("a", Value(V.ARRAY, (string("x"), Value(V.BYTES, b"\xff"), Value(V.BOOL, True)))),
)

# value, its text, its type in gateway-types
VALUES: list[tuple[Value, str, Any]] = [
    (string(""), "", None),
    (string("ü"), "ü", None),
    (string("a\0b"), "YQBi", "string64"),
    (Value(V.STRING, b"\xff"), "/w==", "string64"),
    (Value(V.VOID, None), "", "void"),
    (Value(V.BOOL, True), "true", "bool"),
    (Value(V.BOOL, False), "false", "bool"),
    (Value(V.INT8, -128), "-128", "int8"),
    (Value(V.UINT8, 255), "255", "uint8"),
    (Value(V.INT16, -1), "-1", "int16"),
    (Value(V.UINT16, 65_535), "65535", "uint16"),
    (Value(V.INT32, -(2**31)), "-2147483648", "int32"),
    (Value(V.UINT32, 2**32 - 1), "4294967295", "uint32"),
    (Value(V.INT64, -(2**63)), "-9223372036854775808", "int64"),
    (Value(V.FLOAT, 0.5), "0.5", "float"),
    (Value(V.DOUBLE, 1e300), "1e+300", "double"),
    (Value(V.DOUBLE, float("inf")), "Infinity", "double"),
    (Value(V.DECIMAL, Decimal("-12.50")), "-12.50", "decimal"),
    (Value(V.BYTES, b"\0\x01"), "AAE=", "bytes"),
    (Value(V.TIMESTAMP, 2**63), "9223372036854775808", "timestamp"),
    (Value(V.ARRAY, ()), "[]", {"array": []}),
    (Value(V.TABLE, ()), "{}", {"table": {}}),
    (
        Value(V.TABLE, NESTED),
        '{"n":1,"t":{"d":"1.50","v":null},"a":["x","/w==",true]}',
        {
            "table": {
                "n": "int32",
                "t": {"table": {"d": "decimal", "v": "void"}},
                "a": {"array": [None, "bytes", "bool"]},
            }
        },
    ),
]


@pytest.mark.parametrize("value, text, kind", VALUES)
def test_values(value: Value, text: str, kind: Any) -> None:
    assert to_text(value) == (text, kind)
    assert from_text(text, kind) == value
    headers = (("h", value),)
    if kind is None:
        assert written(headers) == (("h", text),)
    else:
        types = json.dumps({"h": kind}, separators=(",", ":"))
        assert written(headers) == (("h", text), ("gateway-types", types))
    assert decode_properties(encode_properties(message(Properties(headers=headers)), 0.0)).headers == headers


def test_not_a_number() -> None:
    text, kind = to_text(Value(V.DOUBLE, float("nan")))
    assert (text, kind) == ("NaN", "double")
    assert isnan(from_text(text, kind).value)


# a type that does not fit its text leaves a plain string
MISFITS: list[tuple[str, Any]] = [
    ("x", "int32"),
    ("2147483648", "int32"),
    ("-1", "uint8"),
    ("1.5", "int32"),
    ("true", "int8"),
    ("1", "bool"),
    ("1e999", "decimal"),
    ("NaN", "decimal"),
    ("9" * 11, "decimal"),
    ("1e-256", "decimal"),
    ("9" * 600, "decimal"),
    ("1e39", "float"),
    ("9" * 400, "double"),
    ("9" * 5000, "int64"),
    ("%%", "bytes"),
    ("x", "no-such-type"),
    ("x", 5),
    ("x", ["int8"]),
    ("[1]", {"array": []}),
    ("[1]", {"table": {}}),
    ('{"a":1}', {"table": {}}),
    ('{"a":1}', {"table": 3}),
    ("[" * 100_000, {"array": []}),
    ("[" * 80 + "]" * 80, "array"),
    ("x", "void"),
    ("x", {}),
]


@pytest.mark.parametrize("text, kind", MISFITS)
def test_types_that_do_not_fit(text: str, kind: Any) -> None:
    assert from_text(text, kind) == string(text)


def test_types_nested_too_deep() -> None:
    kind: Any = None
    text = '"x"'
    for _ in range(100):
        kind, text = {"array": [kind]}, f"[{text}]"
    assert from_text(text, kind) == string(text)


ROUND_TRIPS: list[Properties] = [
    Properties(),
    Properties(content_type="application/json", utf8=True, correlation=b"\0\xff", reply_to="a/b"),
    Properties(utf8=False),
    Properties(
        content_encoding="gzip",
        priority=9,
        timestamp=1_700_000_000,
        message_id="m",
        type="t",
        app_id="a",
        user_id="u",
    ),
    Properties(priority=0, timestamp=0, message_id=""),
    Properties(reply_to="amq.#"),
    Properties(reply_to=""),
    Properties(headers=(("b", string("2")), ("a", string("1")), ("b", string("3")))),
    Properties(
        headers=(("b", string("2")), ("b", Value(V.INT8, 1)), ("b", string("3")), ("c", Value(V.BOOL, True)))
    ),
    Properties(
        headers=(
            ("amqp-priority", string("x")),
            ("gateway-types", string("{")),
            ("gateway-hops", string("7")),
        )
    ),
    Properties(headers=(("gateway-header-x", Value(V.INT16, 1)), ("", string("empty")))),
]


@pytest.mark.parametrize("properties", ROUND_TRIPS)
def test_round_trips(properties: Properties) -> None:
    """AMQP -> MQTT 5 -> AMQP, once as it comes and once more through another MQTT hop. A user id is written
    and not believed: any client could have written it."""
    data = encode_properties(message(properties), 0.0)
    unproved = (("amqp-user-id", string(properties.user_id)),) if properties.user_id is not None else ()
    expected = replace(properties, user_id=None, headers=(*unproved, *properties.headers))
    assert decode_properties(data) == expected
    assert encode_properties(message(publish_essentials(data)), 0.0) == data


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
simple = st.one_of(
    st.builds(string, texts),
    st.builds(lambda data: Value(V.BYTES, data), st.binary(max_size=8)),
    st.builds(lambda number: Value(V.INT64, number), st.integers(-(2**63), 2**63 - 1)),
    st.builds(lambda flag: Value(V.BOOL, flag), st.booleans()),
    st.builds(lambda real: Value(V.DOUBLE, real), st.floats(allow_nan=False)),
    st.just(Value(V.VOID, None)),
)
nested = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: Value(V.ARRAY, tuple(items))),
        st.dictionaries(texts, inner, max_size=3).map(lambda items: Value(V.TABLE, tuple(items.items()))),
    ),
    max_leaves=6,
)
names = st.one_of(strategies.text, st.sampled_from([*FIELDS.values(), "gateway-types", "gateway-hops", "h"]))


@pytest.mark.needs("time")
@settings(max_examples=200)
@given(st.lists(st.tuples(names, nested), max_size=5).map(tuple))
def test_any_headers(headers: Headers) -> None:
    properties = Properties(headers=headers)
    assert decode_properties(encode_properties(message(properties), 0.0)) == properties


@settings(max_examples=100)
@given(strategies.properties(PacketType.PUBLISH))
def test_mqtt_to_mqtt(properties: dict[P, Any]) -> None:
    """What came from MQTT goes out as it came, less what belongs to one transmission."""
    raw = encode_list(properties, PacketType.PUBLISH)
    kept: dict[P, Any] = {
        id: value
        for id, value in properties.items()
        if id not in (P.MESSAGE_EXPIRY_INTERVAL, P.TOPIC_ALIAS, P.SUBSCRIPTION_IDENTIFIER)
    }
    found = encode_properties(message(publish_essentials(raw)), 0.0)
    assert found == encode_list(kept, PacketType.PUBLISH)
    assert publish_essentials(raw).expiry == properties.get(P.MESSAGE_EXPIRY_INTERVAL)


def test_facts() -> None:
    raw = encode_list(
        {
            P.MESSAGE_EXPIRY_INTERVAL: 60,
            P.USER_PROPERTY: (("a", "1"), ("gateway-hops", "2"), ("gateway-hops", "x")),
        },
        PacketType.PUBLISH,
    )
    facts = publish_essentials(raw)
    assert (facts.expiry, facts.hops) == (60, 2)
    assert publish_essentials(bytes(bytearray(raw))) is facts
    assert facts.properties == Properties(headers=(("a", string("1")),))
    assert publish_essentials(b"").expiry is None
    assert publish_essentials(b"").properties == Properties()


@pytest.mark.parametrize("hops", ["-1", "x", "", "9" * 30, "10000000", "²"])
def test_hops_that_are_no_number(hops: str) -> None:
    raw = encode_list({P.USER_PROPERTY: (("gateway-hops", hops),)}, PacketType.PUBLISH)
    assert publish_essentials(raw).hops == 0


def test_malformed_properties() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        publish_essentials(b"\x21\0\1")
    assert caught.value.reason == 0x81


def test_what_differs_from_message_to_message() -> None:
    shared = property_set(Properties(content_type="x"))
    static = encode_properties(message(shared), 0.0)
    one = message(shared, expires=100.0, hops=3)
    for utc, left in ((0.0, 100), (98.5, 2), (99.0, 1), (200.0, 1), (-1e12, 2**32 - 1)):
        added = encode_list(
            {
                P.MESSAGE_EXPIRY_INTERVAL: left,
                P.USER_PROPERTY: (("gateway-hops", "3"),),
                P.SUBSCRIPTION_IDENTIFIER: (1, 300),
            },
            PacketType.PUBLISH,
        )
        assert encode_properties(one, utc, subscription_ids=(1, 300)) == static + added
    assert encode_properties(message(shared), 0.0) is static
    again = publish_essentials(encode_properties(one, 40.0))
    assert (again.expiry, again.hops) == (60, 3)
    forwarded = message(again, hops=4, expires=100.0)
    assert publish_essentials(encode_properties(forwarded, 50.0)).hops == 4
    assert publish_essentials(encode_properties(forwarded, 50.0)).expiry == 50


LONG = "x" * 65_536
LOST: list[tuple[str, Properties, Properties]] = [
    ("a value too long", Properties(headers=(("a", string(LONG)),)), Properties()),
    (
        "a name too long",
        Properties(headers=((LONG, string("a")), ("b", string("b")))),
        Properties(headers=(("b", string("b")),)),
    ),
    ("a name with NUL", Properties(headers=(("a\0", Value(V.INT8, 1)),)), Properties()),
    ("a field too long", Properties(content_type=LONG, correlation=b"x" * 65_536, app_id=LONG), Properties()),
    ("a field with NUL", Properties(content_type="\0", reply_to="\0", type="\0"), Properties()),
    (
        "a name that repeats in a table",
        Properties(headers=(("t", Value(V.TABLE, (("a", string("1")), ("a", string("2"))))),)),
        Properties(headers=(("t", Value(V.TABLE, (("a", string("2")),))),)),
    ),
    (
        "types too long to tell",
        Properties(headers=(("x" * 40_000, Value(V.INT8, 1)), ("y" * 40_000, Value(V.INT8, 2)))),
        Properties(headers=(("x" * 40_000, string("1")), ("y" * 40_000, string("2")))),
    ),
]


@pytest.mark.parametrize("name, properties, rest", LOST, ids=[row[0] for row in LOST])
def test_losses(name: str, properties: Properties, rest: Properties) -> None:
    assert decode_properties(encode_properties(message(properties), 0.0)) == rest


@pytest.mark.parametrize("name, properties, rest", LOST, ids=[row[0] for row in LOST])
def test_losses_have_names(name: str, properties: Properties, rest: Properties) -> None:
    policies = {loss.name: loss.policy for loss in LOSSES}
    assert all(policies[loss] != "encode" for loss in losses(message(properties)))


def test_every_loss_is_tried() -> None:
    said = Properties(correlation=bytes(65_536), content_type="\0", reply_to="a/+")
    found = {loss for _, properties, _ in LOST for loss in losses(message(properties))} | set(
        losses(message(said))
    )
    assert found == {loss.name for loss in LOSSES if loss.policy != "encode"}


def test_refusals_have_codes_that_their_packets_may_carry() -> None:
    connect = {*CONNECT_REFUSED.values(), *LOGIN_REFUSED.values(), *PROOF_REFUSED.values()}
    for kind, codes in ((PacketType.CONNACK, connect), (PacketType.SUBACK, {*SUBSCRIBE_REFUSED.values()})):
        assert all(code >= FAILURE and code in REASONS[kind] for code in codes)
    assert all(code in REASONS[PacketType.DISCONNECT] for code in REAUTHENTICATION_REFUSED.values())
    assert set(LOGIN_REFUSED) == set(PROOF_REFUSED) == {why.value for why in Denial}


@pytest.mark.parametrize("reason", [Reason.TARGET_DOWN, Reason.TARGET_REFUSED, Reason.QUOTA])
def test_a_bridge_understands_what_is_refused_for_now(reason: Reason) -> None:
    for verdict in (Verdict.RELEASED, Verdict.REJECTED):
        code = publish_refused(Outcome(verdict, reason))
        if reason is not Reason.QUOTA:  # 0x97 in either case
            assert outcome_of(code).verdict is verdict
    assert publish_refused(Outcome(Verdict.RELEASED, reason)) == 0x97


def test_every_reason_has_a_code_that_an_answer_may_carry() -> None:
    assert set(PUBLISH_REFUSED) == set(Reason)
    for code in PUBLISH_REFUSED.values():
        assert code >= FAILURE
        assert code in REASONS[PacketType.PUBACK]
        assert code in REASONS[PacketType.PUBREC]
    assert refusal(0x87) is Reason.NOT_AUTHORIZED
    assert outcome_of(0x87).verdict is Verdict.REJECTED
    for code, reason in (
        (0x88, Reason.TARGET_DOWN),
        (0x89, Reason.TARGET_DOWN),
        (0x96, Reason.QUOTA),
        (0x97, Reason.QUOTA),
    ):
        assert outcome_of(code)[:2] == (Verdict.RELEASED, reason)
    assert refusal(0x80) is Reason.TARGET_REFUSED


@pytest.mark.needs("time")
@settings(max_examples=100)
@given(st.integers(0, 15), st.data())
def test_property_lists(place: int, data: st.DataObject) -> None:
    """Any list of any place, will included, as bytes and back."""
    properties = data.draw(strategies.properties(place))
    assert decode_list(encode_list(properties, place), place) == properties
    if place == WILL:
        assert P.SUBSCRIPTION_IDENTIFIER not in properties
