"""Output of `gateway tap` for each message: two lines, or a line of JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import orjson
import typer

from gateway.cli.api_client import events
from gateway.cli.tables import printable
from gateway.operations import TAP

BODY_SHOWN: Final = 1_024  # bytes of a body that the gateway sends


def watch(
    url: str, token_file: Path | None, words: Mapping[str, str], count: int | None, *, as_json: bool
) -> None:
    """Print messages that pass through a gateway, until `count` are printed, the stream ends, or Ctrl-C.

    `words` are the parameters of the request, which select the messages. Raises GatewayError.
    """
    printed_count = 0
    try:
        for name, found in events(url, token_file, f"{TAP.url}?{urlencode(words)}"):
            if name == "skipped" and not as_json:
                typer.echo(f"... and {found['messages']} more", err=True)
            if name != "message":
                continue
            typer.echo(orjson.dumps(found) if as_json else text_of(found))
            printed_count += 1
            if printed_count == count:
                return
    except KeyboardInterrupt:
        return


def text_of(found: Mapping[str, Any]) -> str:
    """Return a message of the tap's stream as two lines of text for people."""
    message, sender = found["message"], found["message"]["sender"]
    by = sender["client"] or sender["user"] or found["endpoint"] or "somebody"
    way = found["route"] or "no route"
    outcome = " ".join(word for word in (found["outcome"], found["text"]) if word)
    encoding = message["body_encoding"]
    body = message["body"] if encoding == "utf-8" else f"({encoding}) {message['body']}"
    cut = " ..." if message["body_bytes"] > BODY_SHOWN else ""
    head = f"{printable(message['address'])}  ({way}, from {printable(by)}, {outcome})"
    return f"{head}\n    {printable(body)}{cut}"
