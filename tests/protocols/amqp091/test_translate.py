"""Native properties <-> messages: every row comes back as it was, or its loss has a name."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RemoteProtocolError
from gateway.model.caches import NEW_MAX
from gateway.model.message import NEVER, Message
from gateway.model.properties import Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols.amqp091 import translate as t
from gateway.protocols.amqp091.codec import BasicProperties, decode_properties, encode_basic_properties
from gateway.protocols.mqtt.dialect import topic_address
from tests.protocols.amqp091.wires import all_properties, headers

V = ValueType
TOPIC = topic_address("a/b")


def message(said: PropertySet | Properties, **options: Any) -> Message:
    return Message(TOPIC, b"", property_set(said) if isinstance(said, Properties) else said, **options)


def crossed(said: Message, utc: float = 0.0) -> PropertySet:
    """The property set that an AMQP peer receives."""
    return t.content_properties(t.encode_properties(said, utc))


KEPT = [
    Properties(),
    Properties("a/b", "gzip", True, b"id", "reply", 9, 1 << 40, "message", "type", "app", "user"),
    Properties(utf8=False),
    Properties(correlation=b"\xff\x00"),
    Properties(correlation=b""),
    Properties(correlation=bytes(range(256)) * 2),
    Properties(correlation=b"x" * 256),
    Properties(content_type="x" * 256, reply_to="y" * 300, message_id="\u00e9" * 128),
    Properties(headers=(("b", string("1")), ("a", string("2")))),
    Properties(headers=(("a", string("1")), ("a", string("2")), ("a", string("1")), ("b", string("")))),
    Properties(headers=(("a", Value(V.ARRAY, (string("1"),))), ("b", Value(V.ARRAY, ())))),
    Properties(headers=(("a", Value(V.ARRAY, (Value(V.INT8, 1), Value(V.INT8, 2)))),)),
    Properties(headers=(("", Value(V.DECIMAL, Decimal("1.5"))), ("n", Value(V.VOID, None)))),
]


@pytest.mark.parametrize("said", KEPT)
@pytest.mark.parametrize("durable", [False, True])
def test_a_round_trip(said: Properties, durable: bool) -> None:
    found = crossed(message(said, durable=durable))
    assert found.properties == said
    assert t.delivery_mode(found.raw) == (2 if durable else 1)
    assert t.essentials(found)[:4] == (durable, None, False, 0)


LOSSES = [
    (
        Properties(headers=(("x" * 256, string("1")), ("a", string("2")))),
        (("a", string("2")),),
        "header_name_long",
    ),
    (Properties(headers=(("a", Value(V.INT8, 999)),)), (("a", string("999")),), "header_value"),
    (
        Properties(headers=(("a", Value(V.INT8, 1)), ("a", string("2")))),
        (("a", Value(V.ARRAY, (Value(V.INT8, 1), string("2")))),),
        "header_repeated",
    ),
    (
        Properties(headers=(("a", string("1")), ("b", string("2")), ("a", string("3")))),
        (("a", string("1")), ("a", string("3")), ("b", string("2"))),
        "header_order",
    ),
    (Properties(headers=((t.HOPS_HEADER, Value(V.INT8, 1)),)), (), "header_own"),
    (Properties(headers=(("\ud800", string("")),)), (), "header_name"),
    (Properties(headers=(("a", string("\ud800")),)), (("a", string("?")),), "header_value"),
    (Properties(app_id="\ud800"), (), "text"),
    (Properties(priority=256), (), "priority_range"),
    (Properties(priority=-1), (), "priority_range"),
    (Properties(timestamp=-1), (), "timestamp_range"),
    (Properties(timestamp=1 << 64), (), "timestamp_range"),
]


@pytest.mark.parametrize("said, left, loss", LOSSES)
def test_a_loss_has_a_name(said: Properties, left: object, loss: str) -> None:
    assert crossed(message(said)).properties == Properties(headers=left)  # type: ignore[arg-type]
    assert t.losses(message(said)) == (loss,)


def test_what_is_said_in_another_place_is_not_lost() -> None:
    assert t.losses(message(Properties(app_id="x" * 256, correlation=b"\xff"))) == ()
    assert t.losses(message(t.content_properties(b"\0\0"))) == ()
    named = {loss.name for loss in t.LOSSES}
    assert len(named) == len(t.LOSSES)
    assert {row[2] for row in LOSSES} <= named


def test_retain_and_hops_travel_in_headers() -> None:
    found = crossed(message(Properties("a/b"), retain=True, hops=3))
    assert decode_properties(found.raw).headers == (
        (t.RETAIN_HEADER, Value(V.BOOL, True)),
        (t.HOPS_HEADER, Value(V.INT32, 3)),
    )
    assert (t.retain(found), t.hops(found)) == (True, 3)
    assert found.properties == Properties("a/b")
    assert (t.retain(property_set(Properties())), t.hops(property_set(Properties()))) == (False, 0)


STRANGE = [
    (((t.RETAIN_HEADER, string("yes")), (t.HOPS_HEADER, string("2"))), Properties()),
    (((t.UTF8_HEADER, string("yes")),), Properties()),
    (((t.CORRELATION_HEADER, string("x")),), Properties()),
    ((("x-reply-to", Value(V.INT8, 1)),), Properties()),
    (((t.HOPS_HEADER, Value(V.INT32, -4)),), Properties()),
]


@pytest.mark.parametrize("table, said", STRANGE)
def test_own_headers_that_say_nothing(table: Any, said: Properties) -> None:
    found = t.content_properties(encode_basic_properties(BasicProperties(headers=table)))
    assert found.properties == said
    assert t.essentials(found) == t.NO_ESSENTIALS


def test_claimed_hops_are_limited() -> None:
    table = ((t.HOPS_HEADER, Value(V.INT64, 1 << 60)),)
    found = t.content_properties(encode_basic_properties(BasicProperties(headers=table)))
    assert t.hops(crossed(message(found, hops=t.hops(found)))) == t.HOPS_MAX


def test_a_correlation_that_is_no_base64_is_kept() -> None:
    table = ((t.ENCODING_HEADER, string(t.BASE64)),)
    found = t.content_properties(
        encode_basic_properties(BasicProperties(correlation_id=b"a-b!", headers=table))
    )
    assert found.properties.correlation == b"a-b!"


EXPIRIES = [
    (100.0, 40.0, "60000"),
    (100.0, 99.99951, "1"),
    (100.0, 100.0, "0"),
    (100.0, 200.0, "0"),
    (100.0, 99.9, "100"),
]


def test_a_long_life_is_told_as_it_is_or_as_a_broker_takes_it() -> None:
    one = message(Properties(), expires=100.0 + 0xFFFFFFFF)
    assert decode_properties(t.encode_properties(one, 100.0)).expiration == "4294967295000"
    bounded = t.encode_properties(one, 100.0, ms_max=t.EXPIRATION_MS_MAX)
    assert decode_properties(bounded).expiration == "315360000000"
    assert t.outlasts(one, 100.0)
    assert not t.outlasts(message(Properties(), expires=100.0 + t.EXPIRATION_MS_MAX / 1000), 100.0)


@pytest.mark.parametrize("expires, utc, text", EXPIRIES)
@pytest.mark.parametrize(
    "said", [Properties(), Properties("a/b", message_id="m", type="t", correlation=b"c")]
)
def test_expiry_becomes_relative_and_rounds_up(
    expires: float, utc: float, text: str, said: Properties
) -> None:
    found = crossed(message(said, expires=expires), utc)
    assert decode_properties(found.raw).expiration == text
    assert t.expiration_ms(found.raw) == int(text)
    assert found.properties == said


@given(all_properties)
def test_what_amqp_wrote_goes_out_as_it_came_in(native: BasicProperties) -> None:
    native.expiration = None if native.expiration is None else "60000"
    raw = encode_basic_properties(native)
    came = t.content_properties(raw)
    known = t.essentials(came)
    assert t.delivery_mode(raw) == (native.delivery_mode or 0)
    assert t.expiration_ms(raw) == (None if native.expiration is None else 60000)
    expires = NEVER if known.expiration_ms is None else 60.0
    options = {"durable": known.durable, "retain": known.retain, "hops": known.hops, "expires": expires}
    assert t.encode_properties(message(came, **options), 1.0) == raw
    options["hops"] = 7
    again = decode_properties(t.encode_properties(message(came, **options), 1.0))
    table = (*(native.headers or ()), (t.HOPS_HEADER, Value(V.INT32, 7)))
    native.headers = table
    assert again == native


CHANGES = [
    ({"durable": True}, BasicProperties("a/b", delivery_mode=2, expiration="5", cluster_id="c")),
    ({"durable": False}, BasicProperties("a/b", delivery_mode=None, expiration="5", cluster_id="c")),
    ({"expires": NEVER}, BasicProperties("a/b", cluster_id="c")),
    ({"expires": NEVER, "durable": True}, BasicProperties("a/b", delivery_mode=2, cluster_id="c")),
]


@pytest.mark.parametrize("change, expected", CHANGES)
def test_a_change_changes_only_itself(change: dict[str, Any], expected: BasicProperties) -> None:
    came = t.content_properties(
        encode_basic_properties(BasicProperties("a/b", expiration="5", cluster_id="c"))
    )
    options = {"expires": 9.0, **change}
    assert decode_properties(t.encode_properties(message(came, **options), 0.0)) == expected


def test_an_expiry_that_a_route_gave() -> None:
    came = t.content_properties(encode_basic_properties(BasicProperties("a/b", delivery_mode=2, type="t")))
    found = decode_properties(t.encode_properties(message(came, durable=True, expires=9.0), 8.0))
    assert found == BasicProperties("a/b", delivery_mode=2, expiration="1000", type="t")


def test_a_persistent_message_may_become_transient() -> None:
    came = t.content_properties(encode_basic_properties(BasicProperties(delivery_mode=2)))
    assert decode_properties(t.encode_properties(message(came), 0.0)) == BasicProperties(delivery_mode=1)


@given(headers)
def test_any_headers_can_be_sent(table: Any) -> None:
    raw = t.encode_properties(message(Properties(headers=table)), 0.0)
    written = decode_properties(raw).headers or ()
    assert len({name for name, _ in written}) == len(written)
    assert t.content_properties(raw).properties is t.content_properties(raw).properties


def test_a_hop_count_is_replaced() -> None:
    table = ((t.HOPS_HEADER, Value(V.INT8, 3)), ("a", string("b")))
    came = t.content_properties(encode_basic_properties(BasicProperties(headers=table)))
    found = decode_properties(t.encode_properties(message(came, hops=4), 0.0))
    assert found.headers == (("a", string("b")), (t.HOPS_HEADER, Value(V.INT32, 4)))


def test_a_hop_count_is_remembered() -> None:
    came = t.content_properties(b"\0\0")
    first = t.encode_properties(message(came, hops=1), 0.0)
    assert t.encode_properties(message(came, hops=1), 0.0) is first
    assert t.hops(t.content_properties(t.encode_properties(message(came, hops=2), 0.0))) == 2
    continued = t.content_properties(bytes.fromhex("8001 0000 0161"))
    assert t.hops(crossed(message(continued, hops=3))) == 3


@given(st.binary(max_size=40))
def test_peeks_agree_with_decoding(raw: bytes) -> None:
    try:
        native = decode_properties(raw)
    except RemoteProtocolError:
        return
    assert t.delivery_mode(raw) == (native.delivery_mode or 0)
    if native.expiration is None:
        assert t.expiration_ms(raw) is None


FAULTS = [
    ("", 502),
    ("10", 502),
    ("1000", 502),
    ("3000 000000", 502),
    ("0100 05 31", 502),
    ("0100 01 61", 406),
]
FAULTS += [("0100 00", 406), ("0101 0000", 502), ("0100 02 2d31", 406)]


@pytest.mark.parametrize("data, code", FAULTS)
def test_bytes_that_cannot_be_read(data: str, code: int) -> None:
    found = t.content_properties(bytes.fromhex(data))
    for _ in range(2):
        with pytest.raises(RemoteProtocolError) as caught:
            t.essentials(found)
        assert caught.value.reason == code


def test_sets_are_shared_and_bounded() -> None:
    assert t.content_properties(b"\0\0") is t.content_properties(b"\0\0")
    large = encode_basic_properties(BasicProperties(headers=(("a", string("x" * t.SET_BYTES_MAX)),)))
    assert t.content_properties(large) is not t.content_properties(large)
    for number in range(t.SETS_MAX + 5):
        t.content_properties(encode_basic_properties(BasicProperties(timestamp=number)))
    assert len(t._sets) <= t.SETS_MAX + 2 * NEW_MAX


def test_forms_are_remembered_and_bounded() -> None:
    said = property_set(Properties("a/b"))
    assert t.encode_properties(message(said), 0.0) is t.encode_properties(message(said), 9.0)
    for resolved in range(t.FORMS_MAX + 5):
        t.encode_properties(message(said, hops=resolved), 0.0)
    assert len(said.forms) <= t.FORMS_MAX


@pytest.mark.parametrize(
    "said, left",
    [
        ({"headers": (("CC", string("q")), ("n", string("1")))}, {"headers": (("n", string("1")),)}),
        ({"headers": (("BCC", string("q")),)}, {}),
        ({"user_id": "ann"}, {"headers": (("x-user-id", string("ann")),)}),
        (
            {"user_id": "ann", "headers": (("x-user-id", string("bob")),)},
            {"headers": (("x-user-id", string("ann")),)},
        ),
    ],
)
def test_another_broker_is_given_no_orders(said: dict[str, Any], left: dict[str, Any]) -> None:
    raw = encode_basic_properties(BasicProperties(content_type="t", **said))
    told = t.without_orders(raw)
    assert decode_properties(told) == BasicProperties(content_type="t", **left)
    assert t.without_orders(told) is told
    assert not t.essentials(t.content_properties(told)).special


def test_what_gives_no_orders_goes_as_it_is() -> None:
    headers = (("CCC", string("CC BCC")), ("user-id", string("x")))
    raw = encode_basic_properties(BasicProperties(headers=headers))
    assert t.without_orders(raw) is raw
