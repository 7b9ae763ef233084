"""Trials of an MQTT broker: actions that test the right to subscribe, with a client id of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.cli.trials import Trial
from gateway.clients.mqtt import MqttClient
from gateway.mapping.linter import Severity
from gateway.mapping.router import Subscriptions, Targets
from gateway.settings import LinkSettings, MqttLink


def trials(link: LinkSettings, sources: Subscriptions, targets: Targets) -> Iterator[Trial]:
    """Yield trials that subscribe at the broker of a link to each topic filter of the routes' `sources`.

    The right to publish is not tested, because a test would publish a message.
    """
    assert isinstance(link, MqttLink)
    for _, topic in sources.bindings:
        yield Trial(f"subscribe to {topic!r}", Severity.ERROR, _subscribe(topic, link.qos))


def _subscribe(topic: str, qos: int) -> Callable[[MqttClient], object]:
    return lambda client: client.subscribe(topic, qos)
