"""Explanations: which routes match, what they produce, and why the others do not."""

from __future__ import annotations

from dataclasses import asdict

import orjson
import pytest

from gateway.mapping.explain import explain
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, property_set, string
from gateway.protocols.mqtt.dialect import topic_address
from tests.mapping.rows import down, router, up

ROUTES = (
    up(
        ", when: body.t > 1, settle: stored",
        topic="'{line}/{rest...}'",
        to="exchange: e, routing_key: '{line}'",
    ),
    up(topic="other/#").replace("up", "other"),
    up(", when: topic == 'x'").replace("up", "never"),
    up(", escape: reject").replace("up", "strict"),
    up(to="queue: 'q.{client_id}'").replace("up", "mine"),
    down(),
    "name: gone, from: {endpoint: mqtt, topic: a}, to: {endpoint: nowhere, topic: b}, optional: true",
)


def test_every_route_says_why() -> None:
    found = explain(router(*ROUTES), "mqtt", topic_address("l.1/a/b"), sender=Sender("mqtt", "c1"))
    assert (found.endpoint, found.address) == ("mqtt", "l.1/a/b")
    up_route, strict, mine = found.matches
    assert (up_route.address, up_route.captures) == ("e:l%2E1", {"line": "l.1", "rest": "a/b"})
    assert (up_route.when, up_route.settle, up_route.line) == ("body.t > 1", "stored", 3)
    assert (strict.address, "escape: reject" in strict.refused) == ("", True)
    assert (mine.address, mine.protocol, mine.endpoint) == (":q.c1", "amqp091", "amqp")
    assert {one.route: one.reason for one in found.misses} == {
        "other": "level 1 is 'l.1', not 'other'",
        "never": "when is false for this address: topic == 'x'",
        "down": "its source is 'amqp'",
        "gone": "optional, and endpoint 'nowhere' is not configured",
    }


def test_explanations_are_json() -> None:
    found = explain(router(*ROUTES), "mqtt", topic_address("l1/a"))
    assert orjson.loads(orjson.dumps(asdict(found)))["address"] == "l1/a"


TRIED = [
    (b'{"t": 2}', 0, True, ""),
    (b'{"t": 1}', 0, False, "the condition is false for this message"),
    (b"hot", 0, False, "cannot be decided: the body is not JSON"),
    (b"{}", 0, False, "cannot be decided: a field or header that it names is missing or has another type"),
    (
        b'{"t": "2"}',
        0,
        False,
        "cannot be decided: a field or header that it names is missing or has another type",
    ),
    (b'{"t": 2}', 8, False, "refused: the message crossed too many routes; check the mapping for a loop"),
]


@pytest.mark.parametrize("body, hops, crosses, why", TRIED)
def test_a_message_is_tried(body: bytes, hops: int, crosses: bool, why: str) -> None:
    properties = property_set(Properties(content_type="application/json", headers=(("a", string("b")),)))
    address = topic_address("l1/a")
    message = Message(address, body, properties, 1, True, hops=hops)
    found = explain(router(*ROUTES), "mqtt", address, message=message).matches[0]
    assert (found.crosses, found.why) == (crosses, why)
    if not crosses:
        assert found.made is None
        return
    assert found.made is not None
    words = ("exchange", "routing_key", "delivery_mode", "content_type", "headers", "body")
    assert [found.made[word] for word in words] == ["e", "l1", 2, "application/json", {"a": "b"}, '{"t": 2}']
