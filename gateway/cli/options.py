"""Options that several commands share, and functions that load settings and call a running gateway."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from gateway.settings import Settings

HERE: Final = "http://localhost:8080"
CONTEXT_VARIABLES: Final = ("GATEWAY_CONTEXT", "GATEWAY_URL")

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        readable=False,  # an unreadable file is a faulty configuration (exit code 78), no wrong argument (2)
        help="Configuration file; default: $GATEWAY_CONFIG, or none.",
    ),
]


def _chosen_url(context: typer.Context, url: str) -> str:
    """Return the value of the option --url, or if it was not given, the URL of the context (contexts.py).

    Raises BadParameter if the URL does not begin with http:// or https://, has a user or a password, or an
    invalid host or port. The error quotes no URL that may contain a password.
    """
    source = context.get_parameter_source("url")
    is_default = source is not None and source.name == "DEFAULT"
    if is_default and not os.environ.keys().isdisjoint(CONTEXT_VARIABLES):
        from gateway.cli.contexts import read_context

        url = read_context().url or url
    if "@" in url:
        raise typer.BadParameter(
            "must not contain a user or a password; set $GATEWAY_USER and $GATEWAY_PASSWORD_FILE"
        )
    if not url.startswith(("http://", "https://")):
        raise typer.BadParameter(f"must begin with http:// or https://, not {url!r}")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host:
        raise typer.BadParameter(f"must be http://HOST:PORT or https://HOST:PORT, not {url!r}")
    return url


Url = Annotated[
    str,
    typer.Option(
        metavar="URL",
        callback=_chosen_url,
        help="URL of the gateway's HTTP interface; $GATEWAY_URL or $GATEWAY_CONTEXT replace the default.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="File with a token; default: that of $GATEWAY_TOKEN_FILE or $GATEWAY_CONTEXT, "
        "else the temporary token of a gateway on this machine.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def settings_of(config: Path | None) -> Settings:
    """Load the settings from a configuration file and the environment. Raises ConfigurationError."""
    from gateway.settings import load_settings

    return load_settings(config, os.environ)


def call_gateway(url: str, token_file: Path | None, path: str, choice: dict[str, Any] | None = None) -> Any:
    """Send a request to a gateway, with a progress bar, and return the JSON of its response.

    `choice` is the JSON body of a POST request; None sends a GET request. Raises GatewayError if the gateway
    does not respond or refuses.
    """
    from gateway.cli.api_client import request_json
    from gateway.cli.progress import progress_bar

    with progress_bar("waiting for the gateway"):
        return request_json(url, token_file, path, choice)
