"""`gateway check --connect` asks of links what their dialects name, and says so where that is nothing."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.cli import broker_trials
from gateway.mapping.linter import Severity
from gateway.mapping.loader import parse
from gateway.mapping.router import Router
from gateway.settings import Settings

MAPPING = """
version: 1
routes:
  - {name: a, from: {endpoint: mqtt, topic: "up/#"}, to: {endpoint: fast, service: queue, destination: a}}
  - {name: b, from: {endpoint: mqtt, topic: "up/#"}, to: {endpoint: rabbit, exchange: e, routing_key: k}}
  - {name: c, from: {endpoint: rabbit, queue: q}, to: {endpoint: mqtt, topic: t}}
  - {name: d, from: {endpoint: far, topic: "down/#"}, to: {endpoint: mqtt, topic: t}}
"""
LINKS = {"fast": "amqpfast://h", "rabbit": "amqp://h", "far": "mqtt://h"}


class Lets:
    """A client that is let in, and notes what it is asked."""

    asked: list[tuple[str, object]]

    def __init__(self) -> None:
        self.asked = []

    def close(self) -> None: ...

    def subscribe(self, topic: str, qos: int) -> None:
        self.asked.append((topic, qos))

    def check_exists(self, *, queue: str = "", exchange: str = "") -> None:
        self.asked.append((queue, exchange))

    def try_publishing(self, exchange: str) -> None:
        self.asked.append(("publish", exchange))


def test_each_protocol_is_asked_what_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Lets] = {}
    monkeypatch.setattr(
        broker_trials, "connect", lambda access: made.setdefault(access.target.protocol, Lets())
    )
    given: Any = {"links": {name: {"url": url} for name, url in LINKS.items()}}
    settings = Settings.model_validate(given)
    endpoints = {"mqtt": "mqtt", "fast": "amqpfast", "rabbit": "amqp091", "far": "mqtt"}
    findings = list(broker_trials.try_links(settings, Router([parse(MAPPING, "m.yaml")], endpoints)))
    assert [(one.severity, one.code, one.text) for one in findings] == [
        (
            Severity.NOTE,
            "untried",
            "links.fast: login succeeded; further rights cannot be tested with AMQP/Fast",
        )
    ]
    assert {name: one.asked for name, one in made.items()} == {
        "amqpfast": [],
        "amqp091": [("q", ""), ("", "e"), ("", "e"), ("publish", "e")],
        "mqtt": [("down/#", 1)],
    }
