"""From file and environment to settings: environment over file over defaults, and errors that say where."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import yaml
from pydantic import ValidationError

from gateway.documents import Document, Place, complaints, read
from gateway.errors import ConfigurationError
from gateway.settings.declare import Origin
from gateway.settings.sources import CONFIG_VARIABLE, EnvironmentSource, FileSource
from gateway.settings.tree import Settings

SECRETS: Final = frozenset(("password", "password_hash", "scram", "url", "urls"))


def load_settings(path: Path | str | None, env: Mapping[str, str]) -> Settings:
    """Read the configuration; `path` None: the file that GATEWAY_CONFIG names, or none.

    Raises ConfigurationError with one line per fault: place, key, reason, suggestion.
    """
    chosen = path or env.get(CONFIG_VARIABLE) or None
    file = FileSource(
        read(chosen) if chosen else Document(), env.get("HOSTNAME") or platform.node() or "gateway"
    )
    environment = EnvironmentSource(env, file)
    try:
        settings = Settings(_build_sources=((environment, file), {}))
    except ValidationError as error:
        raise ConfigurationError("\n".join(_told(error, environment, file.document))) from error
    settings.note_origins(dict(_origins(settings, environment, file.document)))
    settings.note_file(None if chosen is None else Path(chosen))
    return settings


def masked(settings: Settings) -> str:
    """The whole configuration, defaults included, as YAML that may be shown to anyone."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _told(error: ValidationError, environment: EnvironmentSource, document: Document) -> Iterator[str]:
    """One line per fault, in the order of the tree."""
    for complaint in complaints(error, Settings):
        shown = complaint._replace(given=None) if _is_secret(complaint.place) else complaint
        yield str(_where(complaint.place, environment, document, shown.text))


def _origins(
    settings: Settings, environment: EnvironmentSource, document: Document
) -> Iterator[tuple[Place, Origin]]:
    """Where each thing that is declared is said."""
    given = settings.declare
    for kind, several in (
        ("exchanges", given.exchanges),
        ("queues", given.queues),
        ("bindings", given.bindings),
    ):
        for at in range(len(several)):
            place = ("declare", kind, at)
            whole = environment.origin(place[:1]) or environment.origin(place[:2])  # a list is never merged
            found = ConfigurationError("", file=whole) if whole else _where(place, environment, document, "")
            yield place, Origin(found.file, found.line, found.column)


def _where(
    place: Place, environment: EnvironmentSource, document: Document, reason: str
) -> ConfigurationError:
    """The fault at what says `place`, or the nearest key above it."""
    for end in range(len(place), 0, -1):
        if origin := environment.origin(place[:end]):
            return ConfigurationError(reason, file=origin)
        if place[:end] in document.positions:
            line, column = document.positions[place[:end]]
            return ConfigurationError(reason, file=document.file, line=line, column=column)
    return ConfigurationError(reason, file=document.file)


def _is_secret(place: Place) -> bool:
    """Whether what stands there may hold a password."""
    return not SECRETS.isdisjoint(place[-2:])
