"""Configuration sources for pydantic-settings: the YAML file and environment variables.

A variable GATEWAY_LISTENERS__MQTT__PORT sets the key listeners.mqtt.port. The value of a table or a list is
YAML. Kubernetes sets variables that begin with the name of each Service (GATEWAY_SERVICE_HOST); those are
ignored, as are those of commands that call a running gateway (GATEWAY_URL). Any other unknown variable is an
error, as an unknown key in the file is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, InitSettingsSource

from gateway.documents import Document, Place, dotted, keys_of, options, parse, suggestion, type_below
from gateway.errors import ConfigurationError
from gateway.hints import content_hint
from gateway.protocols import OWN
from gateway.protocols.mqtt.dialect import MQTT
from gateway.settings.engine import RABBITMQ
from gateway.settings.tree import Settings

PREFIX: Final = "GATEWAY_"
CONFIG_VARIABLE: Final = "GATEWAY_CONFIG"
CONTEXT_VARIABLE: Final = "GATEWAY_CONTEXT"
CLIENT_VARIABLES: Final = tuple(
    f"{PREFIX}{key}"
    for key in ("URL", "TOKEN", "TOKEN_FILE", "USER", "PASSWORD_FILE", "CA_FILE", "CERT_FILE", "KEY_FILE")
)
"""Variables of commands that call a running gateway (cli/contexts.py)."""
NOT_KEYS: Final = frozenset((CONFIG_VARIABLE, CONTEXT_VARIABLE, *CLIENT_VARIABLES))
SERVICE_LINK: Final = re.compile(r"SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP|SCTP).*)?")
DELIMITER: Final = "__"
DEFAULT_LISTENERS: Final = {one.name: {"protocol": one.name} for one in OWN}


class FileSource(InitSettingsSource):
    """Source of the values in the configuration file, and of defaults that depend on the environment.

    These defaults are the name `replica`, and the listeners: one for each protocol, or only MQTT with
    `engine: rabbitmq`.
    """

    def __init__(self, document: Document, replica: str) -> None:
        """Read the values of a document, and add the defaults for `replica` and for listeners.

        `replica` is the default of the key `replica`. Raises ConfigurationError for a document that is not a
        table of keys.
        """
        self.document = document
        stated = {} if document.content is None else document.content
        if not isinstance(stated, dict):
            reason = f"a configuration must be a table of keys, such as `listeners:`{content_hint(stated)}"
            raise ConfigurationError(reason, file=document.file, line=1, column=1)
        # A key without a value (`links:` with everything below it commented out) stands for its default.
        tree = {str(key): value for key, value in stated.items() if value is not None}
        broker = tree.get("broker")
        shared = isinstance(broker, dict) and broker.get("engine") == RABBITMQ
        listeners = {MQTT.name: DEFAULT_LISTENERS[MQTT.name]} if shared else DEFAULT_LISTENERS
        super().__init__(Settings, {"replica": replica, "listeners": listeners} | tree)


class EnvironmentSource(EnvSettingsSource):
    """Source of the values in environment variables.

    `variables` has the name of the variable that sets a key, by the path of the key.
    """

    def __init__(self, env: Mapping[str, str], file: FileSource) -> None:
        """Read the configuration from `env`, which may differ from the environment of this process.

        `file` is the source of the file's values. Raises ConfigurationError for a variable that names no key,
        and for two variables that set the same key.
        """
        super().__init__(Settings, env_prefix="", env_nested_delimiter=DELIMITER)
        self.variables: dict[Place, str] = {}
        values: dict[Place, Any] = {}
        for variable, text in env.items():
            name = variable.removeprefix(PREFIX)
            if name == variable or variable in NOT_KEYS or SERVICE_LINK.fullmatch(name):
                continue
            place, value_type = _key(variable, name.split(DELIMITER), file.init_kwargs)
            if (other := self.variables.setdefault(place, variable)) != variable:
                raise ConfigurationError(f"{other} sets the same key", file=_called(variable))
            values[place] = parse(text, _called(variable)).content if _is_composite(value_type) else text
        for place, variable in self.variables.items():
            for end in range(1, len(place)):
                if not isinstance(values.get(place[:end], {}), dict):
                    reason = (
                        f"{self.variables[place[:end]]} sets {dotted(place[:end])} to a value, but"
                        " other variables set keys below it; remove one of them"
                    )
                    raise ConfigurationError(reason, file=_called(variable))
        # A variable that sets a whole table comes before those that set keys in it.
        self.env_vars = {DELIMITER.join(map(str, place)): values[place] for place in sorted(values, key=len)}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Return `value` unchanged, because it has been parsed as YAML already."""
        return value

    def origin(self, place: Place) -> str:
        """Return a text for error messages that names the variable which sets the key at `place`.

        Return "" if no variable sets the key.
        """
        variable = self.variables.get(place)
        return "" if variable is None else _called(variable)


def _called(variable: str) -> str:
    return f"environment {variable}"


def _key(variable: str, words: list[str], tree: Mapping[str, Any]) -> tuple[Place, Any]:
    """Return the path of the key that an environment variable sets, and the type of the key's value.

    `words` are the parts of the variable's name, `tree` is the content of the file. A part that is a name
    chosen by the user, such as that of a link, is compared with the names in the file: upper and lower case
    are the same, and `_` also matches `-`. Raises ConfigurationError for an unknown key.
    """
    place: Place = ()
    value_type: Any = Settings
    inner: Any = tree
    for word in words:
        known_keys = keys_of(value_type) or [str(key) for key in (inner if isinstance(inner, dict) else ())]
        spelt = {key.lower().replace("-", "_"): key for key in known_keys}
        key = spelt.get(word.lower(), word.lower())
        found = type_below(value_type, key)
        if found is None:
            reason = (
                f"unknown key {dotted((*place, key))}{_key_hint(variable) or suggestion(key, known_keys)}"
            )
            raise ConfigurationError(reason, file=_called(variable))
        place, value_type = (*place, key), found
        inner = inner.get(key) if isinstance(inner, dict) else None
    return place, value_type


def _key_hint(variable: str) -> str:
    """Return the end of an error message about a variable that sets no key: a suggestion, or "".

    The suggestion is the same name with two underscores behind the section, if that sets a key.
    """
    if DELIMITER in variable:
        return ""
    words = variable.removeprefix(PREFIX).lower().split("_")
    for end in range(1, len(words)):
        section, key = "_".join(words[:end]), "_".join(words[end:])
        section_type = type_below(Settings, section)
        if section_type is not None and type_below(section_type, key) is not None:
            variable_name = f"{section}{DELIMITER}{key}".upper()
            return f"; below a section write two underscores: {PREFIX}{variable_name}"
    return ""


def _is_composite(value_type: Any) -> bool:
    """Return True if values of this type consist of several values, as tables and lists do."""
    return any(
        get_origin(option) in (dict, list, tuple)
        or (isinstance(option, type) and issubclass(option, BaseModel))
        for option in options(value_type)
    )
