"""`gateway routes list | pause | resume`: the routes of a running gateway."""

from __future__ import annotations

from operator import itemgetter

import typer

from gateway.cli.operations import Columns, Document, ObjectCommands
from gateway.operations import PAUSE_ROUTE, RESUME_ROUTE, ROUTES

app = typer.Typer()
routes = ObjectCommands(app, "routes", "List, pause and resume routes.")


def _state(one: Document) -> str:
    return f"paused, {one['held']} held" if one["paused"] else "running"


columns: Columns = {
    "route": itemgetter("name"),
    "from": itemgetter("source"),
    "to": itemgetter("target"),
    "state": _state,
    "matched": itemgetter("matched"),
    "delivered": itemgetter("delivered"),
    "failed": itemgetter("failed"),
    "in flight": itemgetter("in_flight"),
}
routes.add_list(ROUTES, "List routes with their counters since the start, by name.", columns)
routes.add_change("pause", PAUSE_ROUTE, "Pause a route; its messages are held meanwhile.", "paused")
routes.add_change("resume", RESUME_ROUTE, "Resume a route; held messages are delivered.", "resumed")
