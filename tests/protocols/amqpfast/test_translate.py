"""Heads <-> messages: every row comes back as it was, or its loss has a name."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import RemoteProtocolError
from gateway.model.caches import NEW_MAX
from gateway.model.message import Message
from gateway.model.outcome import Reason
from gateway.model.properties import Properties, PropertySet, Value, ValueType, property_set, string
from gateway.protocols.amqpfast import translate as t
from gateway.protocols.amqpfast.codec import Head, decode_head_properties, encode_head_properties
from gateway.protocols.amqpfast.spec import ReplyCode, Scope
from gateway.protocols.mqtt.dialect import topic_address
from tests.protocols.amqpfast.wires import all_heads, headers

V = ValueType
TOPIC = topic_address("a/b")


def message(said: PropertySet | Properties, **options: Any) -> Message:
    return Message(TOPIC, b"", property_set(said) if isinstance(said, Properties) else said, **options)


def crossed(said: Message) -> PropertySet:
    """The property set that an AMQP/Fast peer receives."""
    return t.head_properties(t.encode_properties(said))


KEPT = [
    Properties(),
    Properties("a/b", "gzip", True, b"id", "reply", 9, 1 << 30, "message", "type", "app", "user"),
    Properties(utf8=False),
    Properties(correlation=b"\xff\x00"),
    Properties(correlation=b""),
    Properties(reply_to="", type="", app_id="", user_id=""),
    Properties(content_type="x" * 256, reply_to="y" * 300, message_id="\u00e9" * 128),
    Properties(message_id="a\0b", content_encoding="\0"),
    Properties(timestamp=0, priority=9),
    Properties(headers=(("b", string("1")), ("a", string("2")))),
    Properties(headers=(("x-a", string("1")), ("RETAIN", string("2")), ("HOPS", string("3")))),
    Properties(headers=(("a", string("1")), ("a", string("2")), ("b", string("")))),
    Properties(headers=(("", Value(V.DECIMAL, Decimal("1.5"))), ("n", Value(V.VOID, None)))),
    Properties(headers=(("GATEWAY_TYPES", string("x")), ("f", Value(V.FLOAT, 1.5)))),
]


@pytest.mark.parametrize("said", KEPT)
@pytest.mark.parametrize("durable", [False, True])
def test_a_round_trip(said: Properties, durable: bool) -> None:
    """A user id is written and not believed: any client could have written it."""
    found = crossed(message(said, durable=durable, expires=100.0))
    unproved = (("USER_ID", string(said.user_id)),) if said.user_id is not None else ()
    assert found.properties == replace(said, user_id=None, headers=(*unproved, *said.headers))
    assert t.essentials(found) == t.Essentials(durable, said.priority or 0, 100.0, False, 0)


LOSSES: list[tuple[Properties, Properties, str]] = [
    (Properties(content_type=""), Properties(), "text_empty"),
    (Properties(priority=0), Properties(), "priority_zero"),
    (Properties(priority=10), Properties(priority=9), "priority_range"),
    (Properties(priority=255), Properties(priority=9), "priority_range"),
    (Properties(priority=256), Properties(priority=9), "priority_range"),
    (Properties(priority=-1), Properties(), "priority_range"),
    (Properties(timestamp=-1), Properties(), "timestamp_range"),
    (Properties(timestamp=1 << 32), Properties(), "timestamp_range"),
    (Properties(type="x" * 65_536), Properties(), "text_longer"),
    (Properties(correlation=b"x" * 65_536), Properties(), "correlation_long"),
    (
        Properties(headers=(("a", string("x" * 40_000)), ("b", string("x" * 40_000)))),
        Properties(headers=(("a", string("x" * 40_000)),)),
        "headers_long",
    ),
    (Properties(content_type="x" * 256), Properties(content_type="x" * 256), "long_text"),
    (Properties(headers=(("-" * 60, string("")),)), Properties(), "header_name_long"),
    (Properties(headers=(("a", string("x" * 65_536)),)), Properties(), "header_value_long"),
    (
        Properties(headers=(("a", string("1")), ("b", string("2")), ("a", string("3")))),
        Properties(headers=(("a", string("1")), ("a", string("3")), ("b", string("2")))),
        "header_order",
    ),
    (Properties(headers=(("a", Value(V.INT8, 999)),)), Properties(), "header_value"),
    (Properties(headers=(("a", string("\ud800")),)), Properties(), "header_value"),
    (Properties(message_id="\ud800"), Properties(), "text"),
    (Properties(app_id="\ud800"), Properties(), "text"),
]


@pytest.mark.parametrize("said, left, loss", LOSSES)
def test_a_loss_has_a_name(said: Properties, left: Properties, loss: str) -> None:
    assert crossed(message(said)).properties == left
    policy = {one.name: one.policy for one in t.LOSSES}[loss]
    assert t.losses(message(said)) == (() if policy == "encode" else (loss,))


@pytest.mark.parametrize("priority, written", [(0, 0), (9, 9), (10, 9), (255, 9)])
def test_a_priority_that_a_peer_wrote_is_passed_on_within_0_to_9(priority: int, written: int) -> None:
    said = Head(True, priority, 0, "text/plain", "", "id", (("a", string("1")),))
    one = message(t.head_properties(encode_head_properties(said)), durable=True)
    assert decode_head_properties(t.encode_properties(one)) == replace(said, priority=written)
    assert t.losses(one) == (("priority_range",) if priority > written else ())
    assert decode_head_properties(t.fit_priority(one.property_set.raw)) == replace(said, priority=written)


EXPIRIES = [
    (0.0, 0),
    (100.0, 100),
    (100.25, 101),
    (2.0**33, 0),
]


@pytest.mark.parametrize("expires, said", EXPIRIES)
def test_expiration_is_absolute(expires: float, said: int) -> None:
    one = message(Properties("a/b"), expires=expires)
    assert decode_head_properties(t.encode_properties(one)).expiration == said
    later = decode_head_properties(t.encode_properties(one, 3_600)).expiration
    assert later == (said + 3_600 if said else 0), "by a clock that is an hour ahead"
    # A fraction is that of one message, and no loss of the properties that it shares.
    assert t.losses(one) == (("expiration_range",) if expires and not said else ())


def test_every_loss_is_tried() -> None:
    named = [loss.name for loss in t.LOSSES]
    assert len(set(named)) == len(named)
    assert {row[2] for row in LOSSES} | t.OF_ONE_MESSAGE | {"expiration_range"} == set(named) - {
        "header_types_long"
    }


def test_retain_and_hops_travel_in_headers() -> None:
    found = crossed(message(Properties("a/b"), retain=True, hops=3))
    assert decode_head_properties(found.raw).headers == (
        (t.RETAIN, Value(V.INT32, 1)),
        (t.HOPS, Value(V.INT32, 3)),
    )
    assert (t.retain(found), t.hops(found)) == (True, 3)
    assert found.properties == Properties("a/b")
    assert (t.retain(property_set(Properties())), t.hops(property_set(Properties()))) == (False, 0)


@given(all_heads.map(lambda head: replace(head, priority=min(head.priority, 9))))
def test_what_fast_wrote_goes_out_as_it_came(head: Head) -> None:
    raw = encode_head_properties(head)
    found = t.head_properties(raw)
    known = t.essentials(found)
    assert known[:3] == (head.persistent, head.priority, float(head.expiration))
    options = {"durable": known.durable, "expires": known.expires, "retain": known.retain}
    assert t.encode_properties(message(found, hops=known.hops, **options)) is found.raw
    changed = message(found, hops=known.hops + 1, **options)
    again = t.head_properties(t.encode_properties(changed))
    assert t.essentials(again) == known._replace(hops=known.hops + 1)
    assert again.properties == found.properties
    assert t.encode_properties(changed) is t.encode_properties(changed)


@given(st.builds(Properties, content_type=st.none() | st.text(min_size=1, max_size=20), headers=headers))
def test_any_message_comes_back(said: Properties) -> None:
    one = message(said)
    if not set(t.losses(one)) - {"long_text"}:
        assert crossed(one).properties == said


def test_a_change_replaces_what_it_changes() -> None:
    table = (("a", string("1")), (t.HOPS, Value(V.INT32, 1)), (t.RETAIN, Value(V.INT32, 1)))
    raw = encode_head_properties(Head(True, 3, 50, "m", "e", "i", table))
    found = t.head_properties(raw)
    assert t.essentials(found) == t.Essentials(True, 3, 50.0, True, 1)
    head = decode_head_properties(t.encode_properties(message(found, hops=2)))
    assert head == Head(False, 3, 0, "m", "e", "i", ((t.HOPS, Value(V.INT32, 2)), ("a", string("1"))))


def test_names_that_we_would_not_write_pass() -> None:
    raw = encode_head_properties(Head(headers=(("x-a", string("1")),)), strict=False)
    found = t.head_properties(raw)
    again = decode_head_properties(t.encode_properties(message(found, hops=1)))
    assert again.headers == ((t.HOPS, Value(V.INT32, 1)), ("x-a", string("1")))


STRANGE = [
    ((t.RETAIN, string("yes")),),
    ((t.HOPS, string("2")),),
    ((t.HOPS, Value(V.INT32, -4)),),
    ((t.UTF8, string("yes")),),
    ((t.CORRELATION, Value(V.INT32, 1)),),
    ((t.TIMESTAMP, string("now")),),
    ((t.REPLY_TO, Value(V.INT32, 1)),),
    ((t.REPLY_TO, Value(V.STRING, b"\xff")),),
]


@pytest.mark.parametrize("table", STRANGE)
def test_own_headers_that_say_nothing(table: Any) -> None:
    found = t.head_properties(encode_head_properties(Head(headers=table)))
    assert found.properties == Properties()
    assert t.essentials(found) == t.NO_ESSENTIALS


def test_claimed_hops_are_limited() -> None:
    found = t.head_properties(encode_head_properties(Head(headers=((t.HOPS, Value(V.INT32, 1 << 30)),))))
    assert t.hops(found) == t.HOPS_MAX


@pytest.mark.parametrize(
    "raw", [b"", bytes(10), encode_head_properties(Head()) + b"x", b"\0\0\0\0\0\0\1\0\0\0\0\0"]
)
def test_what_is_no_head(raw: bytes) -> None:
    found = t.head_properties(raw)
    for ask in (t.essentials, lambda one: one.properties, lambda one: t.encode_properties(message(one))):
        with pytest.raises(RemoteProtocolError) as caught:
            ask(found)
        assert caught.value.reason == ReplyCode.MESSAGE_CONTENTS_INVALID


@pytest.mark.needs("time")
def test_sets_are_shared_and_bounded() -> None:
    raw = encode_head_properties(Head(mime_type="shared"))
    assert t.head_properties(raw) is t.head_properties(bytes(bytearray(raw)))
    for at in range(t.SETS_MAX + 10):
        t.head_properties(encode_head_properties(Head(expiration=at)))
    assert len(t._sets) <= t.SETS_MAX + 2 * NEW_MAX
    one = property_set(Properties("a/b"))
    for at in range(t.FORMS_MAX + 10):
        t.encode_properties(message(one, expires=float(at)))
    assert len(one.forms[t.FORMS]) <= t.FORMS_MAX


TABLE = (("a", string("")),)
DEFAULTS = [
    (Head(), "", "", Head()),
    (Head(), "m", "e", Head(mime_type="m", encoding="e")),
    (Head(), "m", "", Head(mime_type="m")),
    (Head(mime_type="x"), "m", "", Head(mime_type="x")),
    (Head(mime_type="x"), "m", "e", Head(mime_type="x", encoding="e")),
    (Head(encoding="x"), "", "e", Head(encoding="x")),
    (Head(True, 3, 9, "x", "y", "i"), "m", "e", Head(True, 3, 9, "x", "y", "i")),
    (
        Head(True, 3, 9, "", "y", "i", (("a", string("")),)),
        "m",
        "e",
        Head(True, 3, 9, "m", "y", "i", (("a", string("")),)),
    ),
]


@pytest.mark.parametrize("said, mime_type, encoding, filled", DEFAULTS)
def test_defaults_of_the_handle(said: Head, mime_type: str, encoding: str, filled: Head) -> None:
    raw = encode_head_properties(said)
    found = t.fill_defaults(raw, mime_type, encoding)
    assert decode_head_properties(found) == filled
    if said == filled:
        assert found is raw


def test_every_reason_has_a_refusal() -> None:
    assert set(t.REFUSALS) == set(Reason)
    assert all(isinstance(scope, Scope) and code >= 300 for scope, code in t.REFUSALS.values())
    for reason in (Reason.NOT_AUTHORIZED, Reason.NO_ROUTE, Reason.TOO_LARGE, Reason.QUOTA):
        assert t.refusal(t.REFUSALS[reason][1]) is reason
    assert t.refusal(9999) is Reason.TARGET_REFUSED
