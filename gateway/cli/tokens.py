"""`gateway tokens list | make | revoke`: manages tokens for access to the console and the HTTP interface."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
import typer

from gateway.cli.operations import act
from gateway.cli.options import HERE, AsJson, TokenFile, Url, call_gateway
from gateway.cli.tables import table
from gateway.operations import MAKE_TOKEN, REVOKE_TOKEN, TOKENS

tokens = typer.Typer(
    name="tokens", help="List, create and revoke bearer tokens for the HTTP interface and the console."
)
app = typer.Typer()
app.add_typer(tokens)

COLUMNS: Final = ("name", "may", "made by", "made", "expires")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token.")]


@tokens.command(name="list")
def list_tokens(url: Url = HERE, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List tokens; their texts are not stored."""
    found = call_gateway(url, token_file, TOKENS.url)
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    rows = [
        [one["name"], one["console"], one["by"], _day(one["made"]), _day(one["expires"])]
        for one in found["tokens"]
    ]
    typer.echo("\n".join(table(rows, COLUMNS)) if rows else "no rows found")


@tokens.command()
def make(
    name: Name,
    write: Annotated[bool, typer.Option("--write", help="Permit changes.")] = False,
    bodies: Annotated[
        bool, typer.Option("--bodies", help="Show bodies of messages; tokens with --write always do.")
    ] = False,
    days: Annotated[
        float | None, typer.Option(min=0, help="Days until the token expires; default: never.")
    ] = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Create a token and print its text, which cannot be shown again."""
    choice: dict[str, Any] = {"name": name, "console": "write" if write else "read"}
    if bodies:
        choice["bodies"] = True
    if days is not None:
        choice["days"] = days
    act(MAKE_TOKEN, url, token_file, choice, lambda found: typer.echo(found["token"]), as_json=as_json)


@tokens.command()
def revoke(name: Name, url: Url = HERE, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Revoke a token, so that it is no longer accepted. Exit code 1 if it does not exist."""
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
