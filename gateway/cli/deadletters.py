"""`gateway deadletters list | show | redrive | purge`: messages that a running gateway could not deliver.

The commands use its HTTP interface. On the same machine they find a token; from elsewhere `--token-file`
names the file with the secret that the gateway has in `http.token_file`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from urllib.parse import quote, urlencode

import orjson
import typer

from gateway.cli.operations import Count, Document, ObjectCommands
from gateway.cli.options import HERE, AsJson, TokenFile, Url, call_gateway
from gateway.cli.tables import table
from gateway.operations import DEAD_LETTERS, PURGE_DEAD_LETTERS, REDRIVE

app = typer.Typer()
letters = ObjectCommands(app, "deadletters", "List, redrive and purge dead letters.")

COLUMNS: Final = ("id", "time", "route", "protocol", "address", "body_bytes")


@letters.typer.command(name="list")
def list_letters(
    count: Count = 100,
    route: Annotated[str | None, typer.Option(help=DEAD_LETTERS.choice["route"].meaning)] = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """List the newest dead letters, newest first."""
    query = {"count": str(count)} | ({} if route is None else {"route": route})
    found = call_gateway(url, token_file, f"{DEAD_LETTERS.url}?{urlencode(query)}")
    while found["next"] is not None and len(found["items"]) < count:  # a page of large messages is shorter
        query |= {"count": str(count - len(found["items"])), "after": found["next"]}
        page = call_gateway(url, token_file, f"{DEAD_LETTERS.url}?{urlencode(query)}")
        found = page | {"items": found["items"] + page["items"]}
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    if not found["items"]:
        typer.echo("no rows found")
        return
    rows = [[one[word] for word in COLUMNS] + [_reason_text(one)] for one in found["items"]]
    headings = [word.replace("_", " ") for word in COLUMNS]
    typer.echo("\n".join(table(rows, (*headings, "reason"), right=("id", "body bytes"))))


def _reason_text(one: dict[str, Any]) -> str:
    return f"{one['reason']}: {one['text']}" if one["text"] else one["reason"]


@letters.typer.command()
def show(
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the dead letter, as `list` prints it.")],
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print one dead letter with its properties and its body. Exit code 1 if it does not exist."""
    found = call_gateway(url, token_file, f"{DEAD_LETTERS.url}/{quote(id, safe='')}")
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


def _report_redriven(found: Document) -> None:
    others = sum(len(found[word]) for word in ("left", "waiting", "unknown")) + found["untried"]
    typer.echo(f"{found['redriven']} redriven" + (f", {others} not" if others else ""))
    for one in found["left"]:
        typer.echo(f"{one['id']}: refused by its target: {one['reason']}: {one['text']}", err=True)
    _print_waiting(found)
    _report_unknown(found)
    if found["untried"]:
        typer.echo(f"{found['untried']} more were not attempted", err=True)


def _report_purged(found: Document) -> None:
    waiting = len(found["waiting"])
    typer.echo(f"{found['purged']} purged" + (f", {waiting} not" if waiting else ""))
    _print_waiting(found)
    _report_unknown(found)


def _print_waiting(found: Document) -> None:
    for id in found["waiting"]:
        typer.echo(f"{id}: being redriven, not accepted yet", err=True)


def _report_unknown(found: Document) -> None:
    for id in found["unknown"]:
        typer.echo(f"{id}: no such dead letter", err=True)


def _check(choice: Document) -> None:
    if len(choice) != 1:
        raise typer.BadParameter("give exactly one of: ids, --route, --all")


letters.add_action(
    "redrive",
    REDRIVE,
    """Publish dead letters again, each only through the route on which it failed.

    A dead letter that the target accepts is deleted; others stay. Exit code 1 if a dead letter stays.
    """,
    _report_redriven,
    failed=lambda found: any(found[word] for word in ("left", "waiting", "unknown", "untried")),
    check=_check,
)
letters.add_action(
    "purge",
    PURGE_DEAD_LETTERS,
    """Delete dead letters, except those that are being redriven.

    Exit code 1 if a dead letter is being redriven, or an id does not exist.
    """,
    _report_purged,
    failed=lambda found: bool(found["waiting"] or found["unknown"]),
    check=_check,
)
