"""`gateway top`: shows the activity of a running gateway, second by second, in a terminal."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import HERE, TokenFile, Url

app = typer.Typer()


@app.command()
def top(
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.2, max=60.0, help="Seconds between two updates.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    sort: Annotated[
        str,
        typer.Option(
            "--sort", metavar="COLUMN", help="Column by which a table is sorted, if it has that column."
        ),
    ] = "",
    url: Url = HERE,
    token_file: TokenFile = None,
) -> None:
    """Watch endpoints, routes, outboxes and the longest queues, with rates, until Ctrl-C."""
    from gateway.cli.top_output import check_column, print_once, watch

    check_column(sort)
    if once:
        print_once(url, token_file, interval, sort)
    else:
        watch(url, token_file, interval, sort)
