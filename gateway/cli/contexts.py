"""URL and credentials of the gateway that client commands call, from the environment or a file.

$GATEWAY_CONTEXT names a YAML file with the keys of `Context`; each key is also a variable, such as
$GATEWAY_URL, which takes precedence over the file. The options --url and --token-file take precedence over
both. Credentials of a file with a URL are sent to that URL only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from gateway.documents import dotted, read, suggestion
from gateway.errors import ConfigurationError
from gateway.settings.sources import CLIENT_VARIABLES, CONTEXT_VARIABLE, PREFIX

PATHS: Final = ("token_file", "password_file", "ca_file", "cert_file", "key_file")


class Context(NamedTuple):
    """URL of a gateway, and credentials for it. A field is "" if it is not set.

    `ca_file`, `cert_file` and `key_file` are PEM files; `token_file` and `password_file` contain a secret.
    """

    url: str = ""
    token: str = ""
    token_file: str = ""
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


def read_context() -> Context:
    """Return the context from the environment variables and from the file that $GATEWAY_CONTEXT names.

    If the variable $GATEWAY_URL has another URL than the file, the file is ignored. Raises
    ConfigurationError.
    """
    stated = {
        variable.removeprefix(PREFIX).lower(): os.environ[variable]
        for variable in CLIENT_VARIABLES
        if os.environ.get(variable)
    }
    path = os.environ.get(CONTEXT_VARIABLE)
    filed = _read_file(Path(path)) if path else {}
    if "url" in filed and stated.get("url", filed["url"]) != filed["url"]:
        filed = {}
    return Context(**{**filed, **stated})


def _read_file(path: Path) -> dict[str, str]:
    """Return the keys in a context file, with paths made relative to its folder.

    Raises ConfigurationError for an unknown key, or a value that is not a text.
    """
    document = read(path)
    content = document.content
    if not isinstance(content, dict):
        raise ConfigurationError(
            "a context must be a table of keys, such as `url: http://host:8080`", file=str(path), line=1
        )
    for key, value in content.items():
        line, column = document.position((str(key),))
        reason = ""
        if key not in Context._fields:
            reason = f"{dotted((str(key),))}: unknown key{suggestion(str(key), list(Context._fields))}"
        elif not isinstance(value, str):
            reason = f"{key}: must be a text"
        if reason:
            raise ConfigurationError(reason, file=str(path), line=line, column=column)
    return {key: str(path.parent / value) if key in PATHS else value for key, value in content.items()}
