"""`gateway sessions list | remove`: the MQTT sessions of a running gateway, those above all that nobody uses.

The commands talk to its HTTP side, as `gateway deadletters` does.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any, Final

import orjson
import typer

from gateway.cli.choosing import After, All, Count, Exact, Idle, Yes, age, chosen, removal, show_page
from gateway.cli.exits import Exit
from gateway.cli.options import HERE, AsJson, TokenFile, Url, ask

sessions = typer.Typer(name="sessions", help="MQTT sessions: look, remove.")
app = typer.Typer()
app.add_typer(sessions)

Client = Annotated[str | None, typer.Option(metavar="PATTERN", help="By client id; * is any text.")]
User = Annotated[str | None, typer.Option(metavar="PATTERN", help="By user; * is any text.")]


@sessions.command(name="list")
def list_sessions(
    client: Client = None,
    user: User = None,
    idle: Idle = None,
    exact: Exact = False,
    in_use: Annotated[
        bool | None, typer.Option("--in-use/--not-in-use", help="Whose client is connected, or is not.")
    ] = None,
    count: Count = 100,
    after: After = "",
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print sessions, in order of client id."""
    words = chosen(client=client, user=user, idle=idle, in_use=in_use, exact=exact or None)
    show_page(url, token_file, "/api/v1/sessions", words, COLUMNS, count=count, after=after, as_json=as_json)


COLUMNS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "client": itemgetter("client"),
    "user": itemgetter("user"),
    "idle": lambda one: "connected" if one["in_use"] else age(one["idle_secs"]),
    "ends in": lambda one: None if one["in_use"] else age(one["expires_secs"]),
    "subscriptions": itemgetter("subscriptions"),
    "waiting": itemgetter("waiting"),
    "in flight": itemgetter("in_flight"),
}


@sessions.command()
def remove(
    client: Client = None,
    user: User = None,
    idle: Idle = None,
    exact: Exact = False,
    every: All = False,
    yes: Yes = False,
    in_use: Annotated[bool, typer.Option("--in-use", help="Also of connected clients.")] = False,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """End sessions, with all that they are owed. Exit code 1 when there is none, or some are left."""
    words = chosen(client=client, user=user, idle=idle)
    choice = removal(words, every=every, yes=yes, in_use=in_use, exact=exact)
    found = ask(url, token_file, "/api/v1/sessions/remove", choice)
    if as_json:
        typer.echo(orjson.dumps(found))
    else:
        typer.echo(f"{found['removed']} removed")
        if found["in_use"]:
            typer.echo(f"{found['in_use']} in use were left alone; --in-use removes them, too", err=True)
        if found["leaving"]:
            typer.echo(f"{found['leaving']} end when their clients have gone", err=True)
    if not found["removed"] or found["leaving"]:
        raise typer.Exit(Exit.FAILED)
