"""From file and environment to settings: environment over file over defaults, and errors that say where.

A variable GATEWAY_LISTENERS__MQTT__PORT is the key listeners.mqtt.port. Its text is read as YAML, unless the
key wants text. Kubernetes sets variables that begin with the name of each Service (GATEWAY_SERVICE_HOST), so
those are passed over; any other unknown one is an error, as an unknown key in the file is.
"""

from __future__ import annotations

import difflib
import platform
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from gateway.errors import ConfigurationError
from gateway.protocols import OWN
from gateway.settings.tree import Settings

PREFIX: Final = "GATEWAY_"
CONFIG_VARIABLE: Final = "GATEWAY_CONFIG"
SERVICE_LINK: Final = re.compile(r"SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_(TCP|UDP|SCTP).*)?")
DEFAULT_LISTENERS: Final = {one.name: {"protocol": one.name} for one in OWN}

KeyPath = tuple[str, ...]
Tree = dict[str, Any]


class _Origins(NamedTuple):
    """Where keys were said: the file's lines and the environment's variables."""

    file: str
    lines: dict[KeyPath, int]
    variables: dict[KeyPath, str]

    def of(self, path: KeyPath) -> str:
        """The place to look at for `path`, or for the nearest key above it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.variables:
                return f"environment {self.variables[path[:end]]}: "
            if path[:end] in self.lines:
                return f"{self.file}:{self.lines[path[:end]]}: "
        return f"{self.file}: " if self.file else ""


def load_settings(path: Path | str | None, env: Mapping[str, str]) -> Settings:
    """Read the configuration; `path` None: the file that GATEWAY_CONFIG names, or none.

    Raises ConfigurationError with one line per fault: place, key, reason, suggestion.
    """
    chosen = path or env.get(CONFIG_VARIABLE) or None
    tree, lines = _read(Path(chosen)) if chosen else ({}, {})
    tree.setdefault("replica", env.get("HOSTNAME") or platform.node() or "gateway")
    if "listeners" not in tree:
        tree["listeners"] = dict(DEFAULT_LISTENERS)
    over, variables = _environment(env, tree)
    origins = _Origins(str(chosen or ""), lines, variables)
    try:
        return Settings(**_merged(tree, over))
    except ValidationError as error:
        raise ConfigurationError("\n".join(_explain(error, origins))) from error


def masked(settings: Settings) -> str:
    """The whole configuration, defaults included, as YAML that may be shown to anyone."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path) -> tuple[Tree, dict[KeyPath, int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{path}: cannot be read: {why}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigurationError(f"{path}:{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path}:1: a configuration is a table of keys, such as `listeners:`")
    lines: dict[KeyPath, int] = {}
    _note_lines(root, (), lines, path)
    # A key without a value (`links:` with everything below it commented out) stands for its default.
    return {str(key): value for key, value in tree.items() if value is not None}, lines


def _merged(tree: Tree, over: Tree) -> Tree:
    """`tree` with what `over` says instead, key by key."""
    result = dict(tree)
    for key, value in over.items():
        below = result.get(key)
        result[key] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def _note_lines(node: yaml.Node | None, at: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*at, str(key.value))
            line = key.start_mark.line + 1
            if here in lines:
                raise ConfigurationError(
                    f"{path}:{line}: {'.'.join(here)}: said before in line {lines[here]}"
                )
            lines[here] = line
            _note_lines(value, here, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            here = (*at, str(number))
            lines[here] = value.start_mark.line + 1
            _note_lines(value, here, lines, path)


def _environment(env: Mapping[str, str], tree: Tree) -> tuple[Tree, dict[KeyPath, str]]:
    """The tree that the variables say, and which variable said which key."""
    over: Tree = {}
    variables: dict[KeyPath, str] = {}
    for variable in sorted(env):
        name = variable.removeprefix(PREFIX)
        if name == variable or variable == CONFIG_VARIABLE or SERVICE_LINK.fullmatch(name):
            continue
        path, wanted = _key_path(variable, name.split("__"), tree)
        inner = over
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigurationError(f"environment {variable}: {key} is said whole by another variable")
        inner[path[-1]] = _value(variable, wanted, env[variable])
        variables[path] = variable
    return over, variables


def _key_path(variable: str, words: list[str], tree: Tree) -> tuple[KeyPath, Any]:
    """The key that a variable means, and the type which the key wants.

    Names given by the user are matched with those in the file without regard to case, and `_` also means `-`.
    """
    path: KeyPath = ()
    wanted: Any = Settings
    inner: Any = tree
    for word in words:
        fields = _fields(wanted)
        known = inner.keys() if fields is None and isinstance(inner, dict) else fields or ()
        spelt = {str(key).lower().replace("-", "_"): str(key) for key in known}
        key = spelt.get(word.lower().replace("-", "_"), word.lower())
        below = _child(wanted, key)
        if below is None:
            reason = f"unknown key {'.'.join((*path, key))}{_suggestion(key, list(known))}"
            raise ConfigurationError(f"environment {variable}: {reason}")
        path, wanted = (*path, key), below
        inner = inner.get(key) if isinstance(inner, dict) else None
    return path, wanted


def _value(variable: str, wanted: Any, text: str) -> Any:
    if any(option in (str, Path, SecretStr) or get_origin(option) is Literal for option in _options(wanted)):
        return int(text) if _wants_number(wanted) and text.isdecimal() else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"environment {variable}: not a YAML value: {text!r}") from error


def _wants_number(wanted: Any) -> bool:
    return any(isinstance(choice, int) for option in _options(wanted) for choice in get_args(option))


def _options(annotation: Any) -> list[Any]:
    """The types that an annotation allows: unions and Annotated taken apart."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _options(get_args(annotation)[0])
    if origin is Union or origin is types.UnionType:
        return [one for part in get_args(annotation) for one in _options(part)]
    return [annotation]


def _fields(annotation: Any) -> list[str] | None:
    """The keys of a part of the tree; None when its keys are the user's own, or it has none."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return list(option.model_fields)
    return None


def _child(annotation: Any, key: str) -> Any:
    """The type of what `key` names below `annotation`; None when it cannot be there."""
    for option in _options(annotation):
        if get_origin(option) is dict:
            return get_args(option)[1]
        if isinstance(option, type) and issubclass(option, BaseModel) and key in option.model_fields:
            return option.model_fields[key].annotation
    return None


def _suggestion(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key.lower(), known, n=1) or [one for one in known if one.startswith(key)]
    if near:
        return f"; did you mean {near[0]}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _explain(error: ValidationError, origins: _Origins) -> list[str]:
    """One line per fault, in the order of the tree."""
    told = []
    for fault in error.errors(include_url=False):
        path = tuple(str(word) for word in fault["loc"])
        key = ".".join(path)
        if fault["type"] == "extra_forbidden":
            owner: Any = Settings
            for word in path[:-1]:
                owner = _child(owner, word)
            reason = f"unknown key{_suggestion(path[-1], _fields(owner) or [])}"
        else:
            reason = fault["msg"].removeprefix("Value error, ")
            reason = reason[:1].lower() + reason[1:]
            if isinstance(given := fault["input"], str | int | float) and not _is_secret(path):
                reason += f" (given: {given!r})"
        told.append(f"{origins.of(path)}{key}: {reason}" if key else f"{origins.of(path)}{reason}")
    return told


def _is_secret(path: KeyPath) -> bool:
    return path[-1:] in {("password",), ("password_hash",), ("url",)} or path[-2:-1] == ("urls",)
