"""`gateway clients list | disconnect`: lists and disconnects the clients of a running gateway.

The commands use its HTTP interface, as `gateway deadletters` does.
"""

from __future__ import annotations

from operator import itemgetter

import typer

from gateway.cli.operations import Columns, Document, ObjectCommands
from gateway.operations import CONNECTIONS, DISCONNECT

app = typer.Typer()
clients = ObjectCommands(app, "clients", "List and disconnect clients.")


def _check(choice: Document) -> None:
    if choice.keys().isdisjoint(("client", "user", "address")):
        raise typer.BadParameter("give --client, --user or --address")


columns: Columns = {word: itemgetter(word) for word in ("endpoint", "protocol", "address", "client", "user")}
clients.add_list(
    CONNECTIONS,
    "List connected clients, sorted by a column; by bytes_in or bytes_out, the highest rates first.",
    columns,
    without=("history",),
    pages=False,
    measured={
        "bytes_in": itemgetter("bytes_in_per_sec"),
        "bytes_out": itemgetter("bytes_out_per_sec"),
    },
)
clients.add_action(
    "disconnect",
    DISCONNECT,
    "Disconnect clients by --client, --user or --address. Exit code 1 if there is none.",
    lambda found: typer.echo(f"{found['disconnected']} disconnected"),
    failed=lambda found: not found["disconnected"],
    check=_check,
)
