"""The tests inside mapping files: the shipped ones pass, and a wrong expectation says what differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.mapping import load, parse
from gateway.mapping.cases import endpoints_of, run_cases
from gateway.mapping.linter import Severity, lint
from gateway.mapping.router import Router

SHIPPED = sorted(Path(__file__).parents[2].joinpath("mappings").glob("*.yaml"))
ROUTES = """\
version: 1
routes:
  - {name: up, from: {endpoint: m, topic: "a/{x...}"}, to: {endpoint: e, exchange: ex, routing_key: "{x...}"}}
  - {name: fast, from: {endpoint: m, topic: f}, to: {endpoint: f, destination: f}, headers: {h: 1}}
tests:
"""
NO_TOPIC = "is not a topic name: it is empty or contains a wildcard or NUL"


def test_there_are_shipped_files() -> None:
    names = ["commands", "identity", "request_reply", "retained_state", "telemetry"]
    assert [file.stem for file in SHIPPED] == names


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_shipped_files_pass_their_tests(file: Path) -> None:
    (mapping,) = load([file])
    results = run_cases(mapping)
    assert len(results) > 3
    assert [result for result in results if not result.passed] == []
    assert all(result.line > 0 for result in results)


def test_the_shipped_files_go_together_without_a_warning() -> None:
    mappings = load(SHIPPED)
    found = lint(mappings, endpoints_of(mappings), links=("erp",))
    assert [one for one in found if one.severity is not Severity.NOTE] == []


@pytest.mark.parametrize(
    "endpoints, routes",
    [
        ({"mqtt": "mqtt"}, 0),
        ({"mqtt": "mqtt", "amqp091": "amqp091"}, 2),
        ({"mqtt": "mqtt", "amqp091": "amqp091", "amqpfast": "amqpfast"}, 6),
    ],
)
def test_identity_joins_what_is_configured(endpoints: dict[str, str], routes: int) -> None:
    mapping = next(file for file in SHIPPED if file.stem == "identity")
    assert len(Router(load([mapping]), endpoints).routes) == routes


@pytest.mark.parametrize(
    "case, differences",
    [
        ("publish: {endpoint: m, topic: a/b}, expect: [{endpoint: e, routing_key: b}]", []),
        ("publish: {endpoint: m, topic: x, headers: {a: b, c: 1}}", []),
        (
            "publish: {endpoint: m, topic: a/b, qos: 1}, "
            "expect: [{endpoint: e, routing_key: c, delivery_mode: 1}]",
            ["expect[0].routing_key: expected 'c', got 'b'", "expect[0].delivery_mode: expected 1, got 2"],
        ),
        (
            "publish: {endpoint: m, topic: f}, expect: [{endpoint: f, headers: {h: true, i: x}}]",
            ["expect[0].headers.h: expected True, got 1", "expect[0].headers.i: expected 'x', got 'absent'"],
        ),
        (
            "publish: {endpoint: m, topic: f}, expect: [{endpoint: f, topic: f, body: x, persistent: true}]",
            [
                "expect[0].topic: expected 'f', got 'absent'",
                "expect[0].body: expected 'x', got ''",
                "expect[0].persistent: expected True, got False",
            ],
        ),
        (
            "publish: {endpoint: m, topic: x}, expect: [{endpoint: e}]",
            ["expect[0]: no message was delivered to 'e'"],
        ),
        ("publish: {endpoint: m, topic: a/b}", ["not expected: route 'up' delivered 'ex:b' to 'e'"]),
        ("publish: {endpoint: m, topic: f, hops: 8}, refused: [hops]", []),
        ("publish: {endpoint: m, topic: f, hops: 8}", ["refused: expected [], got ['hops']"]),
        ("publish: {endpoint: z, topic: f}", ["publish: unknown endpoint 'z'"]),
        ("publish: {endpoint: m, queue: f}", ["publish: endpoint 'm' uses mqtt, but the address is queue"]),
        ("publish: {endpoint: m}", ["publish: endpoint 'm' uses mqtt, but the address is missing"]),
        (
            "publish: {endpoint: m, topic: a/+}",
            [f"publish: 'a/+' {NO_TOPIC}"],
        ),
    ],
)
def test_differences(case: str, differences: list[str]) -> None:
    mapping = parse(ROUTES + f"  - {{name: case, {case}}}\n", "t.yaml")
    (result,) = run_cases(mapping)
    assert (result.name, result.file, result.line) == ("case", "t.yaml", 6)
    assert list(result.differences) == differences
    assert result.passed == (not differences)


def test_results_are_the_same_every_time() -> None:
    (mapping,) = load([SHIPPED[0]])
    assert run_cases(mapping) == run_cases(mapping)
