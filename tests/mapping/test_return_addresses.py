"""Return addresses: made and read without a key known to others, and opened where they cross again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MappingError
from gateway.mapping.reply_routes import answer_to
from gateway.mapping.return_addresses import Return, ReturnAddresses, decode_correlation
from gateway.mapping.router import Router
from gateway.mapping.routes import HOPS_EXCEEDED, PlainRoute, Route, ShapedRoute
from gateway.model.dialect import Dialect, NameRefused
from gateway.model.message import Message
from gateway.model.properties import NO_PROPERTIES, Properties, property_set
from gateway.protocols import DIALECTS, OWN
from gateway.protocols.amqp091.dialect import AMQP091, amqp_address
from gateway.protocols.amqp091.translate import content_properties, essentials
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT, topic_address
from gateway.protocols.mqtt.translate import publish_essentials
from tests.mapping.rows import ENDPOINTS, mapping

WORLDS = {"m": "1", "m2": "1", "a": "2", "f": "3", "odd:%name.": "4"}
OTHERS = {one.name: "m" if one is MQTT else "a" if one is AMQP091 else "f" for one in OWN}
MADE = ReturnAddresses(b"key", WORLDS)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
DIRECT = (
    "name: ask, from: {endpoint: mqtt, topic: '{x...}'}, "
    "to: {endpoint: amqp, exchange: e, routing_key: '{x...}'}, answers: direct"
)


def rest_of(dialect: Dialect, name: str) -> str:
    """What stands behind the prefix; the name is one that the dialect allows."""
    address = dialect.address(dialect.scope_default, name)
    found = dialect.return_part(address)
    assert found is not None
    return found


@given(st.sampled_from(OWN), TEXTS, st.sampled_from(sorted(WORLDS)))
def test_what_is_made_is_read(dialect: Dialect, text: str, endpoint: str) -> None:
    spoken = next(one for one in OWN if one is not dialect and not text.startswith(one.return_prefix))
    name, correlation = MADE.build((spoken, endpoint), (dialect, OTHERS[dialect.name]), text, b"c")
    rest = rest_of(dialect, name)
    assert (MADE.read(rest), correlation) == (Return(endpoint, text, False), b"c")
    assert not set(dialect.forbidden) & set(rest)


@given(st.sampled_from(OWN), TEXTS, st.data())
def test_what_is_changed_or_made_with_another_key_is_not_read(
    dialect: Dialect, text: str, data: st.DataObject
) -> None:
    name, _ = MADE.build((MQTT, "m"), (AMQP091, "a"), "t", None)
    rest = rest_of(AMQP091, name)
    at = data.draw(st.integers(0, len(rest) - 1))
    other = data.draw(st.characters(exclude_categories=["Cs"]).filter(lambda one: one != rest[at]))
    assert MADE.read(rest[:at] + other + rest[at + 1 :]) is None
    assert MADE.read(rest[:at]) is None
    assert MADE.read(rest + text) is None
    assert MADE.read(text) is None
    assert ReturnAddresses(b"other", WORLDS).read(rest) is None


@pytest.mark.parametrize(
    "rest", ["", "x", ":", "A" * 16, "A" * 16 + "-m:t", "é" * 16 + "-m:t", "\udcff" * 20 + ":"]
)
def test_what_nobody_has_made(rest: str) -> None:
    assert MADE.read(rest) is None


@pytest.mark.parametrize("source", OWN)
@pytest.mark.parametrize("target", OWN)
def test_one_that_crosses_again_is_opened(source: Dialect, target: Dialect) -> None:
    there, here = OTHERS[source.name], OTHERS[target.name]
    name, _ = MADE.build((DIALECTS["mqtt"], "m2"), (source, there), "r/x", None)
    again, _ = MADE.build((source, there), (target, here), name, None)
    if target is MQTT:
        assert again == "r/x"  # they meet the requester
    else:
        assert MADE.read(rest_of(target, again)) == Return("m2", "r/x", False)


def test_a_correlation_is_restored_where_it_was_coded() -> None:
    name, correlation = MADE.build((MQTT, "m"), (AMQP091, "a"), "r", b"\xff")
    assert correlation == b"\xff"  # AMQP writes base64
    assert MADE.read(rest_of(AMQP091, name)) == Return("m", "r", True)
    assert MADE.build((AMQP091, "a"), (MQTT, "m"), name, b"/w==") == ("r", b"\xff")
    onward, correlation = MADE.build((AMQP091, "a"), (AMQPFAST, "f"), name, b"/w==")
    assert (MADE.read(rest_of(AMQPFAST, onward)), correlation) == (Return("m", "r", False), b"\xff")
    assert [decode_correlation(one) for one in (None, b"\xff", b"/w==", b"x")] == [
        None,
        b"\xff",
        b"\xff",
        b"x",
    ]


@pytest.mark.parametrize("text", ["x" * 230, "é" * 115, "." * 80, "\udcff", AMQP091.return_prefix + "x"])
def test_refused(text: str) -> None:
    with pytest.raises(NameRefused):
        MADE.build((AMQP091, "a"), (AMQPFAST, "f"), text, None)


def test_not_every_protocol_has_them() -> None:
    class Other(type(MQTT)):  # type: ignore[misc]
        return_prefix = ""

    with pytest.raises(NameRefused, match="MQTT has no return addresses"):
        MADE.build((AMQP091, "a"), (Other(), "m"), "r", None)
    assert Other().return_part(topic_address("$gateway/reply/x")) is None


# In routes.


def router(*routes: str, key: bytes | None = b"key", domains: dict[str, str] | None = None) -> Router:
    return Router([mapping(*routes)], ENDPOINTS, return_key=key, domains=domains)


def test_a_direct_route_makes_them_and_has_a_route_of_answers() -> None:
    kept: list[Message] = []

    def keep(route: Route, message: Message) -> None:
        assert route is made.routes[0]
        kept.append(message)

    made = Router([mapping(DIRECT)], ENDPOINTS, return_key=b"key", reply_kept=keep)
    (resolved,) = made.resolve("mqtt", topic_address("q"))
    has_reply_to = Message(topic_address("q"), b"", property_set(Properties(reply_to="r/x")))
    crossed = resolved.cross(has_reply_to)
    assert isinstance(crossed, Message)
    there = amqp_address("", crossed.properties.reply_to or "")
    assert made.is_return(there)
    assert made.requester(there) == Return("mqtt", "r/x", False)
    assert not made.is_return(amqp_address("e", there.name))
    (route,) = made.answers
    assert made.answer_route("amqp", "mqtt") is route
    assert made.answer_route("mqtt", "amqp") is made.answer_route("", "mqtt") is None
    assert (route.name, route.source, route.target_endpoint) == ("ask+answers", "amqp", "mqtt")
    assert route not in made.routes
    assert kept == []
    forged = Message(topic_address("q"), b"", property_set(Properties(reply_to=MQTT.return_prefix + "x")))
    assert isinstance(resolved.cross(forged), Message)
    assert (kept, made.routes[0].reply_kept) == ([forged], 1)
    assert "not a valid one" in made.routes[0].reply_kept_reason


def test_without_a_key_or_by_route_there_are_none() -> None:
    for made in (router(DIRECT, key=None), router(DIRECT.replace("direct", "by_route"))):
        (resolved,) = made.resolve("mqtt", topic_address("q"))
        assert isinstance(resolved, PlainRoute)
        assert made.answers == ()


def test_direct_is_for_listeners() -> None:
    with pytest.raises(MappingError, match="answers: direct is for routes between two listeners"):
        router(DIRECT, domains={"mqtt": "mqtt"})
    router(DIRECT, domains={"mqtt": "mqtt", "amqp": "amqp"})


@pytest.mark.parametrize(
    "properties, has_reply_to",
    [
        (NO_PROPERTIES, False),
        (property_set(Properties(content_type="t")), False),
        (property_set(Properties(reply_to="")), False),
        (property_set(Properties(reply_to="r")), True),
        (publish_essentials(b"\x01\x01"), False),
        (publish_essentials(b"\x26\0\x01n\0\x01v"), False),
        (publish_essentials(b"\x08\0\x01r"), True),
        (publish_essentials(b"\x26\0\x0damqp-reply-to\0\x01r"), True),
        (content_properties(b"\x80\0\x01t"), False),
        (content_properties(b"\x02\0\x01r"), True),
    ],
)
def test_only_what_asks_is_looked_into(properties: object, has_reply_to: bool) -> None:
    """Without a reply address the property set crosses as it is, by a direct route as by a plain one."""
    assert hasattr(properties, "has_reply_to")
    if getattr(properties, "protocol", "") == "amqp091":
        essentials(properties)  # type: ignore[arg-type]
    assert properties.has_reply_to is has_reply_to
    (resolved,) = router(DIRECT).resolve("mqtt", topic_address("q"))
    assert isinstance(resolved, ShapedRoute)
    assert (resolved.plain, resolved.bare_plain) == (False, True)
    message = Message(topic_address("q"), b"", properties)  # type: ignore[arg-type]
    assert resolved.will_cross(message) is not has_reply_to
    crossed = resolved.cross(message)
    assert isinstance(crossed, Message)
    assert (crossed.property_set is properties) is not has_reply_to


def test_answers_count_hops_and_are_not_retained() -> None:
    made = router(DIRECT)
    for coded in (False, True):
        resolved = answer_to(made.answers[0], topic_address("r/x"), 3, coded=coded)
        message = Message(amqp_address("", "n"), b"", retain=True, property_set=NO_PROPERTIES, hops=2)
        crossed = resolved.cross(message)
        assert isinstance(crossed, Message)
        assert (crossed.address, crossed.retain, crossed.hops) == (topic_address("r/x"), False, 3)
        assert resolved.cross(crossed) is HOPS_EXCEEDED
    stated = Properties(correlation=b"/w==", content_type="t")
    resolved = answer_to(made.answers[0], topic_address("r/x"), 3, coded=True)
    crossed = resolved.cross(Message(amqp_address("", "n"), b"", property_set(stated)))
    assert isinstance(crossed, Message)
    assert crossed.properties == replace(stated, correlation=b"\xff")
