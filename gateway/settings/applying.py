"""The configuration for people and editors: as it takes effect, and its JSON Schema.

What takes effect has its defaults, and not its secrets.
What is absent, belongs to another protocol or to something that is switched off says nothing, and is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

from gateway.protocols import DIALECTS
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT
from gateway.settings.amqp091 import AmqpOptions
from gateway.settings.amqpfast import FastOptions
from gateway.settings.mqtt import MqttOptions
from gateway.settings.tree import Settings

LISTENERS: Final = {
    **dict.fromkeys(MqttOptions.model_fields, (MQTT.name,)),
    **dict.fromkeys(AmqpOptions.model_fields, (AMQP091.name,)),
    **dict.fromkeys(FastOptions.model_fields, (AMQPFAST.name,)),
    "virtual_hosts": (AMQP091.name, AMQPFAST.name),
    "byte_order": (MQTT.name,),
    "anonymous": (MQTT.name, AMQPFAST.name),
    "websocket_path": tuple(one.name for one in DIALECTS.values() if one.port("websocket")),
    "shares": ("shared",),
}
"""Options of listeners that are not for every protocol."""

LINKS: Final = {
    **dict.fromkeys(
        ("version", "authentication", "qos", "bridge", "share", "session_expiry_secs"), (MQTT.name,)
    ),
    **dict.fromkeys(("single_active_consumer", "consumer_priority", "declare"), (AMQP091.name,)),
    "durable_subscriptions": (AMQPFAST.name,),
}
"""The same of links."""


def effective(settings: Settings) -> dict[str, Any]:
    """What applies, without secrets, as JSON and YAML have it."""
    tree = settings.model_dump(mode="json")
    for name, listener in settings.listeners.items():
        tree["listeners"][name] = _of(listener.protocol, tree["listeners"][name], LISTENERS)
        if listener.proxy_protocol == "off":
            del tree["listeners"][name]["proxy_protocol_from"]
    for name, link in settings.links.items():
        tree["links"][name] = _of(link.protocol, tree["links"][name], LINKS)
    for name, section in tree.items():
        if isinstance(section, dict) and section.get("enabled") is False:
            tree[name] = {"enabled": False}
    whole: dict[str, Any] = _stated(tree)
    return whole


def masked(settings: Settings) -> str:
    """The same as YAML that may be shown to anyone."""
    return yaml.safe_dump(effective(settings), sort_keys=False, allow_unicode=True)


def _of(protocol: str, options: dict[str, Any], known: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if protocol in known.get(name, (protocol,))}


def _stated(part: Any) -> Any:
    """Without what is absent or empty."""
    if isinstance(part, dict):
        kept = {name: _stated(value) for name, value in part.items()}
        return {name: value for name, value in kept.items() if value not in (None, {}, [])}
    return [_stated(one) for one in part] if isinstance(part, list) else part


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the configuration, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Settings.model_json_schema()}
