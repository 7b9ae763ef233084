"""The configuration for people and editors: as it takes effect, and its JSON Schema.

What takes effect has its defaults, and not its secrets. What is absent, or belongs to something that is
switched off, says nothing, and is left out.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

from gateway.settings.tree import Settings

UNKNOWN: Final = ("UnknownLink", "UnknownListener")
"""Parts of the model that are there for what is wrong to be told, and take anything."""


def effective(settings: Settings) -> dict[str, Any]:
    """What applies, without secrets, as JSON and YAML have it."""
    tree = settings.model_dump(mode="json")
    for name, listener in settings.listeners.items():
        if listener.proxy_protocol == "off":
            del tree["listeners"][name]["proxy_protocol_from"]
    for name, section in tree.items():
        if isinstance(section, dict) and section.get("enabled") is False:
            tree[name] = {"enabled": False}
    whole: dict[str, Any] = _stated(tree)
    return whole


def masked(settings: Settings) -> str:
    """The same as YAML that may be shown to anyone."""
    return yaml.safe_dump(effective(settings), sort_keys=False, allow_unicode=True)


def _stated(part: Any) -> Any:
    """Without what is absent or empty."""
    if isinstance(part, dict):
        kept = {name: _stated(value) for name, value in part.items()}
        return {name: value for name, value in kept.items() if value not in (None, {}, [])}
    return [_stated(one) for one in part] if isinstance(part, list) else part


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the configuration, for editors."""
    schema = Settings.model_json_schema()
    for name in UNKNOWN:
        del schema["$defs"][name]
    known: dict[str, Any] = _without(schema, {f"#/$defs/{name}" for name in UNKNOWN})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **known}


def _without(part: Any, references: set[str]) -> Any:
    """A schema without alternatives that are these. What several of the others take is right as well: links
    say their protocol in an address, which no schema takes apart.
    """
    if isinstance(part, dict):
        return {
            "anyOf" if name == "oneOf" else name: _without(value, references) for name, value in part.items()
        }
    if isinstance(part, list):
        return [
            _without(one, references)
            for one in part
            if not (isinstance(one, dict) and one.get("$ref") in references)
        ]
    return part
