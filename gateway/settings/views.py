"""Output of the effective configuration and of its JSON Schema, for people and editors.

`effective` returns the configuration with defaults and without secrets; `masked_yaml` returns the same as
YAML; `json_schema` returns the schema. Absent values and options of disabled sections are left out. The
module neither loads nor changes settings.
"""

from __future__ import annotations

from typing import Any, Final

import yaml

from gateway.settings.tree import Settings

UNKNOWN: Final = ("UnknownLink", "UnknownListener")
"""Classes of the settings model that exist for error messages only; the published schema omits them."""


def effective(settings: Settings) -> dict[str, Any]:
    """Return the configuration in force as plain JSON values. It includes defaults, but no secrets."""
    tree = settings.model_dump(mode="json")
    for name, listener in settings.listeners.items():
        if listener.proxy_protocol == "off":
            del tree["listeners"][name]["proxy_protocol_from"]
    for name, section in tree.items():
        if isinstance(section, dict) and section.get("enabled") is False:
            tree[name] = {"enabled": False}
    whole: dict[str, Any] = _without_empty(tree)
    return whole


def masked_yaml(settings: Settings) -> str:
    """Return the configuration in force as YAML without secrets."""
    return yaml.safe_dump(effective(settings), sort_keys=False, allow_unicode=True)


def _without_empty(part: Any) -> Any:
    """Return a copy of a JSON value without fields that are null, an empty object or an empty array."""
    if isinstance(part, dict):
        stated = {name: _without_empty(value) for name, value in part.items()}
        return {name: value for name, value in stated.items() if value not in (None, {}, [])}
    return [_without_empty(one) for one in part] if isinstance(part, list) else part


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the configuration, for editors."""
    schema = Settings.model_json_schema()
    for name in UNKNOWN:
        del schema["$defs"][name]
    public_schema: dict[str, Any] = _without_references(schema, {f"#/$defs/{name}" for name in UNKNOWN})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **public_schema}


def _without_references(part: Any, references: set[str]) -> Any:
    """Return a copy of a JSON Schema, without alternatives that refer to one of the definitions `references`.

    `anyOf` replaces `oneOf`, because several link classes may accept the same section: they differ by the
    scheme of a URL, which a schema does not parse.
    """
    if isinstance(part, dict):
        return {
            "anyOf" if name == "oneOf" else name: _without_references(value, references)
            for name, value in part.items()
        }
    if isinstance(part, list):
        return [
            _without_references(one, references)
            for one in part
            if not (isinstance(one, dict) and one.get("$ref") in references)
        ]
    return part
