"""Hypothesis strategies for control packets, built from the tables of the specification."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gateway.protocols.mqtt.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from gateway.protocols.mqtt.properties import LISTED, PropertyMap
from gateway.protocols.mqtt.spec import (
    FAILURE,
    PROPERTIES,
    REASONS,
    RETURN_CODES,
    WILL,
    Kind,
    PacketType,
    Property,
    Version,
)

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
topic = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#"), min_size=1, max_size=12)
packet_id = st.integers(1, 65_535)
qos = st.integers(0, 2)


def _value(id: Property) -> st.SearchStrategy[Any]:
    rule = PROPERTIES[id]
    if id is Property.RESPONSE_TOPIC:
        return topic
    values: dict[Kind, st.SearchStrategy[Any]] = {
        Kind.BIT: st.integers(0, 1),
        Kind.WORD: st.integers(rule.low, 65_535),
        Kind.LONG: st.integers(rule.low, 2**32 - 1),
        Kind.VARINT: st.integers(rule.low, 268_435_455),
        Kind.TEXT: text,
        Kind.BINARY: st.binary(max_size=12),
        Kind.PAIR: st.tuples(text, text),
    }
    return values[rule.kind]


def properties(place: int) -> st.SearchStrategy[PropertyMap]:
    """Any set of the properties that may stand in `place`."""
    optional: dict[Property, st.SearchStrategy[Any]] = {}
    for id, rule in PROPERTIES.items():
        if place in rule.places:
            most = 3 if place in rule.repeats else 1
            one = _value(id)
            optional[id] = st.lists(one, min_size=1, max_size=most).map(tuple) if id in LISTED else one

    def whole(found: dict[Property, Any]) -> PropertyMap:
        if Property.AUTHENTICATION_METHOD not in found:
            found.pop(Property.AUTHENTICATION_DATA, None)
        return found

    return st.fixed_dictionaries({}, optional=optional).map(whole)


@st.composite
def connects(draw: st.DrawFn, version: Version) -> Connect:
    """A CONNECT that `version` can say."""
    v5 = version is Version.V5

    def place(number: int) -> PropertyMap:
        return draw(properties(number)) if v5 else {}

    will = None
    if draw(st.booleans()):
        will = Will(draw(topic), draw(st.binary(max_size=9)), draw(qos), draw(st.booleans()), place(WILL))
    user = draw(st.none() | text) if version > Version.MQIPDP else None
    password = draw(st.none() | st.binary(max_size=9)) if v5 or user is not None else None
    clean = draw(st.booleans())
    named = version < Version.V311 or (version is Version.V311 and not clean)
    return Connect(
        draw(text.filter(bool) if named else text),
        version,
        clean,
        draw(st.integers(0, 65_535)),
        will,
        user,
        password,
        place(PacketType.CONNECT),
        version in (Version.V31, Version.V311) and draw(st.booleans()),
        version is Version.MQIPDP and draw(st.booleans()),
    )


@st.composite
def packets(draw: st.DrawFn, version: Version) -> Packet:
    """Any packet that `version` can say."""
    v5 = version is Version.V5
    kind = draw(st.sampled_from([one for one in PacketType if v5 or one is not PacketType.AUTH]))

    def place() -> PropertyMap:
        return draw(properties(kind)) if v5 else {}

    def reason() -> int:
        return draw(st.sampled_from(sorted(REASONS[kind]))) if v5 else 0

    match kind:
        case PacketType.CONNECT:
            return draw(connects(version))
        case PacketType.CONNACK:
            code = draw(st.sampled_from(list(RETURN_CODES)[: 4 if version is Version.MQIPDP else 6]))
            answer = reason() if v5 else int(RETURN_CODES[code])
            present = version >= Version.V311 and not answer and draw(st.booleans())
            return Connack(present, answer, place())
        case PacketType.PUBLISH:
            level = draw(qos)
            dup = level > 0 and draw(st.booleans())
            number = draw(packet_id) if level else 0
            body = draw(st.binary(max_size=200))
            return Publish(draw(topic), body, level, draw(st.booleans()), dup, number, place())
        case PacketType.SUBSCRIBE:
            return Subscribe(draw(packet_id), draw(subscriptions(v5)), place())
        case PacketType.SUBACK:
            known = sorted(REASONS[kind]) if v5 else [0, 1, 2, FAILURE]
            reasons = draw(st.lists(st.sampled_from(known), min_size=1, max_size=4))
            return Suback(draw(packet_id), tuple(reasons), place())
        case PacketType.UNSUBSCRIBE:
            filters = draw(st.lists(text.filter(bool), min_size=1, max_size=3))
            return Unsubscribe(draw(packet_id), tuple(filters), place())
        case PacketType.UNSUBACK:
            count = draw(st.integers(1, 3)) if v5 else 0
            return Unsuback(draw(packet_id), tuple(reason() for _ in range(count)), place())
        case PacketType.PINGREQ:
            return Pingreq()
        case PacketType.PINGRESP:
            return Pingresp()
        case PacketType.DISCONNECT:
            return Disconnect(reason(), place())
        case PacketType.AUTH:
            return Auth(reason(), place())
        case _:
            return Ack(kind, draw(packet_id), reason(), place())


def subscriptions(v5: bool) -> st.SearchStrategy[tuple[Subscription, ...]]:
    """The filters of a SUBSCRIBE with the options that the version knows."""
    option = st.booleans() if v5 else st.just(False)
    filters = text.filter(lambda one: one != "" and not one.startswith("$share/"))
    one = st.builds(Subscription, filters, qos, option, option, st.integers(0, 2 if v5 else 0))
    return st.lists(one, min_size=1, max_size=3).map(tuple)
