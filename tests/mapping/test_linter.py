"""The linter: a row is a set of routes and what it says about them."""

from __future__ import annotations

import pytest

from gateway.mapping.linter import Finding, Severity, lint, unstorable_routes
from gateway.mapping.router import compile_routes
from tests.mapping.rows import ENDPOINTS, down, mapping, up

LINKS = ("plant", "erp", "hall")


def route(name: str, source: str, to: str, more: str = "") -> str:
    return f"name: {name}, from: {{endpoint: {source}}}, to: {{endpoint: {to}}}{more}"


def lint_rows(*routes: str) -> list[Finding]:
    found = lint([mapping(*routes)], ENDPOINTS, LINKS)
    return [one for one in found if one.severity is not Severity.NOTE]


@pytest.mark.parametrize(
    "routes, expected",
    [
        # nothing to say
        ([up(), down()], []),
        (
            [
                route("a", "mqtt, topic: 'a/#'", "amqp, queue: q"),
                route("b", "mqtt, topic: 'a/b'", "amqp, queue: p"),
            ],
            [],
        ),
        (
            [
                route("a", "plant, topic: a", "erp, exchange: e"),
                route("b", "erp, exchange: f", "plant, topic: a"),
            ],
            [],
        ),
        # errors
        ([route("a", "mqtt, topic: a", "nowhere, topic: b")], [("error", "invalid", 3)]),
        ([route("a", "mqtt, queue: a", "amqp, queue: b")], [("error", "invalid", 3)]),
        ([up(), up()], [("error", "invalid", 4)]),
        ([up(topic="a/#/b"), up(", when: bodi")], [("error", "invalid", 3), ("error", "invalid", 4)]),
        # weakened guarantees
        ([up(", delivery: {qos1: transient}")], [("warning", "weakened", 3)]),
        ([up(", delivery: {qos1: transient, qos2: transient}")], [("warning", "weakened", 3)] * 2),
        ([down(", delivery: {persistent: 0}")], [("warning", "weakened", 3)]),
        ([down(to="topic: t, qos: 0")], [("warning", "weakened", 3)]),
        ([down(to="topic: t, qos: 1")], []),
        ([route("a", "mqtt, topic: a", "plant, topic: a, qos: 1")], [("warning", "weakened", 3)]),
        ([up(", delivery: {qos0: transient, qos1: persistent}")], []),
        # names
        ([up(", escape: keep")], [("warning", "irreversible", 3)]),
        ([up(to=f"queue: '{'q' * 201}.{{all...}}'")], [("warning", "long_key", 3)]),
        # unreachable
        ([up(", when: 1 > 2")], [("warning", "unreachable", 3)]),
        ([up(topic="$share/g/a", to="queue: q")], [("warning", "unreachable", 3)]),
        ([route("a", "erp, exchange: ''", "mqtt, topic: a")], [("warning", "unreachable", 3)]),
        (
            [route("a", f"amqp, exchange: e, binding_key: {'k' * 256}", "mqtt, topic: a")],
            [("warning", "unreachable", 3)],
        ),
        # twice
        (
            [
                route("a", "mqtt, topic: 'a/#'", "amqp, queue: q"),
                route("b", "mqtt, topic: 'a/+'", "amqp, queue: q"),
            ],
            [("warning", "shadowed", 4)],
        ),
        (
            [
                route("a", "mqtt, topic: 'a/+'", "amqp, queue: q"),
                route("b", "mqtt, topic: 'a/#'", "amqp, queue: q"),
            ],
            [("warning", "shadowed", 3)],
        ),
        (
            [
                route("a", "mqtt, topic: 'a/{x}'", "amqp, queue: 'q.{x}'"),
                route("b", "mqtt, topic: 'a/{y...}'", "amqp, queue: 'q.{y...}'"),
            ],
            [("warning", "shadowed", 3)],
        ),
        (
            [
                route("a", "mqtt, topic: 'a/+'", "amqp, queue: q"),
                route("b", "mqtt, topic: '+/b'", "amqp, queue: q"),
            ],
            [("warning", "overlap", 4)],
        ),
        (
            [
                route("a", "mqtt, topic: 'a/#'", "amqp, queue: q", ", when: retain"),
                route("b", "mqtt, topic: 'a/#'", "amqp, queue: q", ", when: '!retain'"),
            ],
            [],
        ),
        (
            [
                route("a", "mqtt, topic: 'a/#'", "amqp, queue: q", ", when: retain"),
                route("b", "mqtt, topic: 'a/b'", "amqp, queue: q"),
            ],
            [("warning", "overlap", 4)],
        ),
        (
            [route("a", "erp, queue: q", "mqtt, topic: t"), route("b", "erp, queue: q", "mqtt, topic: t")],
            [("warning", "shadowed", 4)],
        ),
        # round in circles
        (
            [
                route("a", "plant, topic: 'a/#'", "erp, exchange: e, routing_key: '{topic...}'"),
                route("b", "erp, exchange: e", "plant, topic: '{routing_key...}'"),
            ],
            [("warning", "loop", 4)],
        ),
        ([route("a", "plant, topic: 'a/#'", "plant, topic: 'a/{topic...}'")], [("warning", "loop", 3)]),
        ([route("a", "erp, queue: q", "erp, queue: q")], [("warning", "loop", 3)]),
        (
            [
                route("a", "plant, topic: '{x...}'", "erp, queue: q"),
                route("b", "erp, queue: q", "hall, topic: '{routing_key...}'"),
                route("c", "hall, topic: '{x...}'", "plant, topic: '{x...}'"),
            ],
            [("warning", "loop", 5)],
        ),
        (
            [
                route("a", "plant, topic: 'a/#'", "erp, exchange: '{topic...}'"),
                route("b", "erp, exchange: f", "plant, topic: 'a/{routing_key...}'"),
            ],
            [("warning", "loop", 4)],
        ),
        (
            [
                route("a", "plant, topic: 'out/#'", "erp, exchange: e, routing_key: '{topic...}'"),
                route("b", "erp, exchange: e, binding_key: 'in.#'", "plant, topic: '{routing_key...}'"),
            ],
            [],
        ),
        (
            [
                route("a", "mqtt, topic: 'a/#'", "erp, exchange: e, routing_key: 'x-{client_id}.a'"),
                route("b", "erp, exchange: e, binding_key: '*.a'", "mqtt, topic: b"),
            ],
            [("warning", "echo", 4)],
        ),
    ],
)
def test_findings(routes: list[str], expected: list[tuple[str, str, int]]) -> None:
    found = lint_rows(*routes)
    assert [(one.severity.value, one.code, one.line) for one in found] == expected, found
    assert all(one.file == "test.yaml" for one in found)


def test_a_long_topic_is_a_note() -> None:
    found = lint([mapping(up())], ENDPOINTS)
    assert [(one.severity, one.code) for one in found] == [(Severity.NOTE, "long_key")]
    assert "more than 255 bytes" in found[0].text


def test_findings_name_the_other_route() -> None:
    first = route("a", "mqtt, topic: 'a/+'", "amqp, queue: q")
    (found,) = lint_rows(first, route("b", "mqtt, topic: '+/b'", "amqp, queue: q"))
    assert found.text == (
        "route 'b': overlaps route 'a' (test.yaml:3):"
        " a message to 'a/b' is delivered twice to the same address"
    )


@pytest.mark.parametrize(
    "text, where",
    [(up(", deduplicate: {window: 10m}"), "MQTT 5"), (down(", deduplicate: {window: 1d}"), "id")],
)
def test_what_deduplicates_needs_ids(text: str, where: str) -> None:
    (note,) = [one for one in lint([mapping(text)], ENDPOINTS, LINKS) if one.code == "unidentified"]
    assert note.severity is Severity.NOTE
    assert where in note.text


@pytest.mark.parametrize(
    "to, settle, store, expected",
    [
        ("erp, queue: q", "stored", True, ""),
        ("erp, queue: q", "confirmed", False, ""),
        ("erp, queue: q", "stored", False, "t.yaml:3:6: route 'a': settle: stored needs the store"),
        (
            "amqp, queue: q",
            "stored",
            True,
            "t.yaml:3:6: route 'a': settle: stored is only for links, and 'amqp'",
        ),
        ("amqp, queue: q", "confirmed", True, ""),
    ],
)
def test_only_links_store_and_only_with_a_store(to: str, settle: str, store: bool, expected: str) -> None:
    text = route("a", "mqtt, topic: a", to, f", settle: {settle}")
    routes = compile_routes([mapping(text, file="t.yaml")], ENDPOINTS).routes
    found = unstorable_routes(routes, LINKS, store=store)
    assert len(found) == bool(expected)
    assert all(str(one).startswith(expected) for one in found)


def test_errors_come_first() -> None:
    found = lint_rows(up(", escape: keep"), route("a", "mqtt, topic: a", "nowhere, topic: b"))
    assert [one.severity.value for one in found] == ["error", "warning"]
