"""`gateway tap`: shows messages that pass through a running gateway."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import HERE, AsJson, TokenFile, Url, checked

app = typer.Typer()


@app.command()
def tap(
    route: Annotated[str | None, typer.Option(help="Of this route only.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="That came by this listener or link only.")] = None,
    name: Annotated[
        str | None, typer.Option(help="To such topics, keys or destinations only; * is any text.")
    ] = None,
    per_second: Annotated[
        float,
        typer.Option(min=0.1, max=100.0, help="So many at most; the others pass unseen."),
    ] = 10.0,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Watch messages pass, as they are delivered, without disturbing them; Ctrl-C ends it."""
    from gateway.cli.tapping import watch

    wanted = {"route": route, "endpoint": endpoint, "name": name, "per_second": str(per_second)}
    words = {word: text for word, text in wanted.items() if text is not None}
    watch(checked(url), token_file, words, count, as_json=as_json)
