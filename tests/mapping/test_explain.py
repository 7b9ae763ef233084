"""Explanations: which routes match, what they produce, and why the others do not."""

from __future__ import annotations

from dataclasses import asdict

import orjson

from gateway.mapping.explain import explain
from gateway.model.message import Sender
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
        "down": "takes from 'amqp'",
        "gone": "optional, and endpoint 'nowhere' is not configured",
    }


def test_explanations_are_json() -> None:
    found = explain(router(*ROUTES), "mqtt", topic_address("l1/a"))
    assert orjson.loads(orjson.dumps(asdict(found)))["address"] == "l1/a"
