"""Options that several commands share, and what they lead to: settings, or a gateway that runs elsewhere."""

from __future__ import annotations

import http.client
import os
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import orjson
import typer

from gateway.errors import GatewayError
from gateway.settings import CONFIG_VARIABLE, Settings, load_settings, secret_from

PATIENCE_SECS: Final = 120.0
HERE: Final = "http://localhost:8080"

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", metavar="FILE", help=f"Configuration; default: ${CONFIG_VARIABLE}, or none."
    ),
]
Url = Annotated[str, typer.Option(metavar="URL", help="HTTP side of the gateway.")]
TokenFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Secret for a gateway elsewhere.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def settings_of(config: Path | None) -> Settings:
    """The settings of this process. Raises ConfigurationError."""
    return load_settings(config, os.environ)


def ask(url: str, token_file: Path | None, path: str, choice: dict[str, Any] | None = None) -> Any:
    """What the gateway answers. Raises GatewayError when it does not, or refuses."""
    headers = {"Content-Type": "application/json"}
    if token_file is not None:
        headers["Authorization"] = f"Bearer {secret_from(token_file).strip()}"
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"--url wants http:// or https://, not {url!r}")
    body = None if choice is None else orjson.dumps(choice)
    request = Request(url.rstrip("/") + path, body, headers)
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=PATIENCE_SECS) as answer:
            return orjson.loads(answer.read())
    except HTTPError as error:
        raise GatewayError(f"{url}: {_reason(error)}") from error
    except (URLError, OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
        why = error.reason if isinstance(error, URLError) else error
        raise GatewayError(f"{url}: no answer of a gateway: {why}") from error


def _reason(error: HTTPError) -> str:
    try:
        return f"{error.code}: {orjson.loads(error.read())['error']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
