"""What an MQTT broker is asked: whether we may subscribe, under a client id of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.cli.trials import Trial
from gateway.clients.mqtt import MqttClient
from gateway.mapping.linter import Severity
from gateway.mapping.router import Subscriptions, Targets
from gateway.settings import Link, MqttLink


def trials(link: Link, sources: Subscriptions, targets: Targets) -> Iterator[Trial]:
    """A subscription to each filter. What may be published cannot be known without publishing."""
    assert isinstance(link, MqttLink)
    for _, topic in sources.bindings:
        yield Trial(f"subscribe to {topic!r}", Severity.ERROR, _subscribe(topic, link.qos))


def _subscribe(topic: str, qos: int) -> Callable[[MqttClient], object]:
    return lambda client: client.subscribe(topic, qos)
