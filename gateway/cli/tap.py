"""`gateway tap`: shows messages that pass through a running gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import HERE, AsJson, TokenFile, Url

app = typer.Typer()


@app.command()
def tap(
    route: Annotated[str | None, typer.Option(help="Route of the messages.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Listener or link that received the messages.")] = None,
    name: Annotated[
        str | None, typer.Option(help="Topic, key or destination of the delivered messages; * is any text.")
    ] = None,
    per_second: Annotated[
        float,
        typer.Option(min=0.1, max=100.0, help="Maximum messages per second; further ones are not shown."),
    ] = 10.0,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this number of messages.")] = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch messages as they are delivered, without disturbing them, until Ctrl-C."""
    from gateway.cli.tap_output import watch

    choice = {"route": route, "endpoint": endpoint, "name": name, "per_second": str(per_second)}
    words = {word: text for word, text in choice.items() if text is not None}
    watch(url, token_file, words, count, as_json=as_json)
