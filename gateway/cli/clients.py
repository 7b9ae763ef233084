"""`gateway clients list | disconnect`: who is connected to a running gateway, and sending somebody off.

The commands talk to its HTTP side, as `gateway deadletters` does.
"""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import urlencode

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import HERE, AsJson, TokenFile, Url, ask
from gateway.cli.tables import table

clients = typer.Typer(name="clients", help="Clients that are connected: look, disconnect.")
app = typer.Typer()
app.add_typer(clients)

COLUMNS: Final = ("endpoint", "protocol", "address", "client", "user")

Client = Annotated[str | None, typer.Option(metavar="ID", help="By client id or connection name.")]
User = Annotated[str | None, typer.Option(metavar="NAME", help="By user.")]
Address = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="By address, as `list` prints it.")]
Endpoint = Annotated[str | None, typer.Option(metavar="NAME", help="At this listener only.")]


@clients.command(name="list")
def list_clients(
    client: Client = None,
    user: User = None,
    address: Address = None,
    endpoint: Endpoint = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, max=1_000, help="So many.")] = 100,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print the clients that are connected."""
    query = _wanted(client, user, address, endpoint) | {"count": str(count)}
    found = ask(url, token_file, f"/api/v1/connections?{urlencode(query)}")
    if as_json:
        typer.echo(orjson.dumps(found))
        return
    if found["items"]:
        rows = [[one[word] for word in COLUMNS] for one in found["items"]]
        typer.echo("\n".join(table(rows, COLUMNS)))
    left = found["total"] - len(found["items"])
    if left or not found["total"]:
        typer.echo(f"and {left} more" if left else "there are none")


@clients.command()
def disconnect(
    client: Client = None,
    user: User = None,
    address: Address = None,
    endpoint: Endpoint = None,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Disconnect clients by --client, --user or --address. Exit code 1 when there is none."""
    if client is None and user is None and address is None:
        raise typer.BadParameter("give --client, --user or --address")
    found = ask(url, token_file, "/api/v1/connections/disconnect", _wanted(client, user, address, endpoint))
    typer.echo(orjson.dumps(found) if as_json else f"{found['disconnected']} disconnected")
    if not found["disconnected"]:
        raise typer.Exit(Exit.FAILED)


def _wanted(
    client: str | None, user: str | None, address: str | None, endpoint: str | None
) -> dict[str, str]:
    given = {"client": client, "user": user, "address": address, "endpoint": endpoint}
    return {word: value for word, value in given.items() if value is not None}
