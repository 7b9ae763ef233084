"""`gateway retained list | remove`: the retained MQTT messages of a running gateway.

The commands talk to its HTTP side, as `gateway deadletters` does.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any, Final

import orjson
import typer

from gateway.cli.choosing import After, All, Count, Exact, Yes, chosen, removal, show_page
from gateway.cli.exits import Exit
from gateway.cli.options import HERE, AsJson, TokenFile, Url, ask

retained = typer.Typer(name="retained", help="Retained MQTT messages: look, remove.")
app = typer.Typer()
app.add_typer(retained)

Topic = Annotated[str | None, typer.Option(metavar="FILTER", help="By topic, an MQTT filter with + and #.")]
Client = Annotated[str | None, typer.Option(metavar="PATTERN", help="By who published it; * is any text.")]
User = Annotated[str | None, typer.Option(metavar="PATTERN", help="By that client's user.")]


@retained.command(name="list")
def list_retained(
    topic: Topic = None,
    client: Client = None,
    user: User = None,
    exact: Exact = False,
    count: Count = 100,
    after: After = "",
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print topics with a retained message, in their order."""
    words = chosen(topic=topic, client=client, user=user, exact=exact or None)
    show_page(url, token_file, "/api/v1/retained", words, COLUMNS, count=count, after=after, as_json=as_json)


COLUMNS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "topic": itemgetter("topic"),
    "octets": itemgetter("body_bytes"),
    "QoS": itemgetter("qos"),
    "client": itemgetter("client"),
    "user": itemgetter("user"),
    "expires": itemgetter("expires"),
}


@retained.command()
def remove(
    topic: Topic = None,
    client: Client = None,
    user: User = None,
    exact: Exact = False,
    every: All = False,
    yes: Yes = False,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Clear retained messages; subscribers hear nothing of it. Exit code 1 when there is none."""
    words = chosen(topic=topic, client=client, user=user)
    found = ask(url, token_file, "/api/v1/retained/remove", removal(words, every=every, yes=yes, exact=exact))
    typer.echo(orjson.dumps(found) if as_json else f"{found['removed']} removed")
    if not found["removed"]:
        raise typer.Exit(Exit.FAILED)
