"""`gateway links list | pause | resume`: the links of a running gateway to other brokers."""

from __future__ import annotations

from operator import itemgetter

import typer

from gateway.cli.operations import Columns, Document, ObjectCommands
from gateway.operations import ENDPOINTS, PAUSE_LINK, RESUME_LINK

app = typer.Typer()
links = ObjectCommands(app, "links", "List, pause and resume links to other brokers.")


def _state(one: Document) -> str:
    if one["paused"]:
        return "paused"
    return "up" if one["up"] else f"DOWN: {one['why'] or one['last_error'] or 'not connected yet'}"


columns: Columns = {
    "link": itemgetter("name"),
    "protocol": itemgetter("protocol"),
    "address": itemgetter("place"),
    "messages in": itemgetter("messages_in"),
    "messages out": itemgetter("messages_out"),
    "in flight": itemgetter("in_flight"),
    "state": _state,
}
links.add_list(
    ENDPOINTS, "List links with their state, by name.", columns, without=("kind",), always={"kind": "link"}
)
links.add_change("pause", PAUSE_LINK, "Pause a link; messages for it are held meanwhile.", "paused")
links.add_change("resume", RESUME_LINK, "Resume a link; held messages are sent.", "resumed")
