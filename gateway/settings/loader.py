"""Loader of the configuration: merges environment, file and defaults, in this order of precedence.

`load_settings` is the entry point. Faults are collected and raised as one ConfigurationError, with the
position of each key in the file or the name of its variable. Values that may be secrets do not appear in
messages.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from gateway.documents import Document, Place, complaints, read
from gateway.errors import ConfigurationError
from gateway.settings.declare import Origin
from gateway.settings.sources import CONFIG_VARIABLE, EnvironmentSource, FileSource
from gateway.settings.tree import Settings

SECRETS: Final = frozenset(("password", "password_hash", "scram", "url", "urls"))


def load_settings(path: Path | str | None, env: Mapping[str, str]) -> Settings:
    """Read the configuration from the file `path` and from the environment variables `env`.

    If `path` is None, read the file that GATEWAY_CONFIG names, or no file if this variable is not set. Raises
    ConfigurationError with one line for each fault: position, key, reason and suggestion.
    """
    chosen = path or env.get(CONFIG_VARIABLE) or None
    file = FileSource(
        read(chosen) if chosen else Document(), env.get("HOSTNAME") or platform.node() or "gateway"
    )
    environment = EnvironmentSource(env, file)
    try:
        settings = Settings(_build_sources=((environment, file), {}))
    except ValidationError as error:
        first, *others = _configuration_errors(error, environment, file.document)
        raise ConfigurationError(
            first.reason, file=first.file, line=first.line, column=first.column, others=others
        ) from error
    settings.note_origins(_origins(environment, file.document))
    settings.note_file(None if chosen is None else Path(chosen), file.document)
    return settings


def _configuration_errors(
    error: ValidationError, environment: EnvironmentSource, document: Document
) -> Iterator[ConfigurationError]:
    """Yield a ConfigurationError for each fault in `error`, in the order of the settings tree.

    The errors have positions in the file or name environment variables. They contain no values that may be
    secrets.
    """
    for complaint in complaints(error, Settings):
        redacted = complaint._replace(value=None) if _is_secret(complaint.place) else complaint
        yield _error_at(complaint.place, environment, document, redacted.text)


def _origins(environment: EnvironmentSource, document: Document) -> dict[Place, Origin]:
    """Return where each configuration key is set: in the file, or in an environment variable.

    If a variable sets a list, positions in the file's list are omitted, because the variable replaces it.
    """
    from_environment = {place: Origin(environment.origin(place)) for place in environment.variables}
    found = {
        place: Origin(document.file, line, column)
        for place, (line, column) in document.positions.items()
        if not any(
            place[:end] in from_environment
            for end in range(1, len(place) + 1)
            if _is_replaced_whole(place, end)
        )
    }
    return found | from_environment


def _is_replaced_whole(place: Place, end: int) -> bool:
    """Return True if an environment variable replaces the value at the first `end` steps of `place`.

    This is true for the whole of `place`, and for a list that contains it: a variable replaces a list as a
    whole.
    """
    return end == len(place) or isinstance(place[end], int)


def _error_at(
    place: Place, environment: EnvironmentSource, document: Document, reason: str
) -> ConfigurationError:
    """Return a ConfigurationError for the key at `place`, a path of keys and list indexes.

    The error has the position of this key or, if the key is not set, of its nearest parent key.
    """
    for end in range(len(place), 0, -1):
        if origin := environment.origin(place[:end]):
            return ConfigurationError(reason, file=origin)
        if place[:end] in document.positions:
            line, column = document.positions[place[:end]]
            return ConfigurationError(reason, file=document.file, line=line, column=column)
    return ConfigurationError(reason, file=document.file)


def _is_secret(place: Place) -> bool:
    """Return True if the value of the key at `place`, a path of keys, may contain a password."""
    return any(isinstance(step, str) and (step in SECRETS or step.endswith("_url")) for step in place[-2:])
