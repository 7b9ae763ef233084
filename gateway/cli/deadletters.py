"""`gateway deadletters list | show | redrive | purge`: what a running gateway could not deliver.

The commands talk to its HTTP side. On the same machine that is enough; from elsewhere `--token-file` names
the file with the secret that the gateway has in `http.token_file`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import HERE, AsJson, TokenFile, Url, ask
from gateway.cli.tables import table

letters = typer.Typer(name="deadletters", help="Messages that nothing would take: look, try again, forget.")
app = typer.Typer()
app.add_typer(letters)

COLUMNS: Final = ("id", "time", "route", "protocol", "address", "body_bytes")

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Dead letters by id.")]
ByRoute = Annotated[str | None, typer.Option("--route", help="Those of a route.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]


@letters.command(name="list")
def list_letters(
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1_000, help="So many.")] = 100,
    route: ByRoute = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest dead letters, newest first."""
    query = {"count": str(count)} | ({} if route is None else {"route": route})
    found = ask(url, token_file, f"/api/v1/dead-letters?{urlencode(query)}")
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    if not found["items"]:
        typer.echo("there are none")
        return
    rows = [[one[word] for word in COLUMNS] + [_why(one)] for one in found["items"]]
    headings = [word.replace("_", " ") for word in COLUMNS]
    typer.echo("\n".join(table(rows, (*headings, "reason"), right=("id", "body bytes"))))


def _why(one: dict[str, Any]) -> str:
    return f"{one['reason']}: {one['text']}" if one["text"] else one["reason"]


@letters.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="Of the dead letter, as `list` prints it.")],
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print one dead letter with its properties and its body. Exit code 1 when there is none."""
    found = ask(url, token_file, f"/api/v1/dead-letters/{quote(id, safe='')}")
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    rows = [
        (f"{name}:", value if isinstance(value, str) else orjson.dumps(value).decode())
        for name, value in found.items()
        if name != "body"
    ]
    typer.echo("\n".join(table(rows)) + "\n")
    typer.echo(found["body"])


@letters.command()
def redrive(
    ids: Ids = None,
    route: ByRoute = None,
    every: All = False,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Publish dead letters again, each through the route that it failed on, and no other.

    A letter that the target accepts is deleted; all others stay. Exit code 1 if there are others.
    """
    found = ask(url, token_file, "/api/v1/dead-letters/redrive", _choice(ids, route, every=every))
    if as_json:
        typer.echo(orjson.dumps(found))
    else:
        others = sum(len(found[word]) for word in ("left", "waiting", "unknown")) + found["untried"]
        typer.echo(f"{found['redriven']} redriven" + (f", {others} not" if others else ""))
        for one in found["left"]:
            typer.echo(f"{one['id']}: refused again: {one['reason']}: {one['text']}", err=True)
        for id in found["waiting"]:
            typer.echo(f"{id}: on its way, and not accepted yet", err=True)
        for id in found["unknown"]:
            typer.echo(f"{id}: there is no such dead letter", err=True)
        if found["untried"]:
            typer.echo(f"{found['untried']} more were not tried", err=True)
    if any(found[word] for word in ("left", "waiting", "unknown", "untried")):
        raise typer.Exit(Exit.FAILED)


@letters.command()
def purge(
    ids: Ids = None,
    route: ByRoute = None,
    every: All = False,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Forget dead letters. Exit code 1 when an id is not known."""
    found = ask(url, token_file, "/api/v1/dead-letters/purge", _choice(ids, route, every=every))
    if as_json:
        typer.echo(orjson.dumps(found))
    else:
        typer.echo(f"{found['purged']} purged")
        for id in found["unknown"]:
            typer.echo(f"{id}: there is no such dead letter", err=True)
    if found["unknown"]:
        raise typer.Exit(Exit.FAILED)


def _choice(ids: list[str] | None, route: str | None, *, every: bool) -> dict[str, Any]:
    given: list[dict[str, Any]] = []
    if ids:
        given.append({"ids": ids})
    if route is not None:
        given.append({"route": route})
    if every:
        given.append({"all": True})
    if len(given) != 1:
        raise typer.BadParameter("give ids, --route or --all, and one of them only")
    return given[0]
