"""`gateway tokens list | make | revoke`: manages tokens for access to the console and the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
import typer

from gateway.cli.operations import act
from gateway.cli.options import HERE, AsJson, TokenFile, Url, ask
from gateway.cli.tables import table
from gateway.operations import MAKE_TOKEN, REVOKE_TOKEN, TOKENS

tokens = typer.Typer(name="tokens", help="List, make and revoke bearer tokens of the console.")
app = typer.Typer()
app.add_typer(tokens)

COLUMNS: Final = ("name", "may", "made by", "made", "expires")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name.")]


@tokens.command(name="list")
def list_tokens(url: Url = HERE, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Print the tokens that were made; their texts are not known."""
    found = ask(url, token_file, TOKENS.url)
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    rows = [
        [one["name"], one["console"], one["by"], _day(one["made"]), _day(one["expires"])]
        for one in found["tokens"]
    ]
    typer.echo("\n".join(table(rows, COLUMNS)) if rows else "there are none")


@tokens.command()
def make(
    name: Name,
    write: Annotated[bool, typer.Option("--write", help="It may change things, too.")] = False,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Show bodies of messages. A token that may change things does.")
    ] = False,
    days: Annotated[float | None, typer.Option(min=0, help="It ends after so many; default: never.")] = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a token, and print its text, which is not shown again."""
    choice: dict[str, Any] = {"name": name, "console": "write" if write else "read"}
    if bodies:
        choice["bodies"] = True
    if days is not None:
        choice["days"] = days
    act(MAKE_TOKEN, url, token_file, choice, lambda found: typer.echo(found["token"]), as_json=as_json)


@tokens.command()
def revoke(name: Name, url: Url = HERE, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Revoke a token: it opens nothing any more. Exit code 1 when there is none of that name."""
    act(
        REVOKE_TOKEN,
        url,
        token_file,
        {"name": name},
        lambda found: typer.echo(f"{found['revoked']} revoked"),
        failed=lambda found: not found["revoked"],
        as_json=as_json,
    )


def _day(secs: float | None) -> str:
    return "never" if secs is None else datetime.fromtimestamp(secs, UTC).strftime("%Y-%m-%d %H:%M")
