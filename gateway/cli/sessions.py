"""`gateway sessions list | delete`: lists and deletes MQTT sessions of a running gateway, mainly unused ones.

The commands use its HTTP interface, as `gateway deadletters` does.
"""

from __future__ import annotations

from operator import itemgetter

import typer

from gateway.cli.operations import Columns, Document, ObjectCommands, age
from gateway.operations import REMOVE_SESSIONS, SESSIONS

app = typer.Typer()
sessions = ObjectCommands(app, "sessions", "List and delete MQTT sessions.")


def _report_removed(found: Document) -> None:
    typer.echo(f"{found['removed']} deleted")
    if found["in_use"]:
        typer.echo(f"{found['in_use']} in use were not deleted; --in-use deletes them, too", err=True)
    if found["leaving"]:
        typer.echo(f"{found['leaving']} will be deleted when their clients have disconnected", err=True)


columns: Columns = {
    "client": itemgetter("client"),
    "user": itemgetter("user"),
    "idle": lambda one: "connected" if one["in_use"] else age(one["idle_secs"]),
    "ends in": lambda one: None if one["in_use"] else age(one["expires_secs"]),
    "subscriptions": itemgetter("subscriptions"),
    "waiting": itemgetter("waiting"),
    "in flight": itemgetter("in_flight"),
}
sessions.add_list(SESSIONS, "List sessions by client id.", columns)
sessions.add_action(
    "delete",
    REMOVE_SESSIONS,
    "Delete sessions with their messages. Exit code 1 if there is none, or some remain.",
    _report_removed,
    failed=lambda found: not found["removed"] or found["leaving"],
)
