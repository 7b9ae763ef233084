"""`gateway retained list | delete`: the retained MQTT messages of a running gateway.

The commands use its HTTP interface, as `gateway deadletters` does.
"""

from __future__ import annotations

from operator import itemgetter

import typer

from gateway.cli.operations import Columns, ObjectCommands
from gateway.operations import REMOVE_RETAINED, RETAINED

app = typer.Typer()
retained = ObjectCommands(app, "retained", "List and delete retained MQTT messages.")

columns: Columns = {
    "topic": itemgetter("topic"),
    "bytes": itemgetter("body_bytes"),
    "QoS": itemgetter("qos"),
    "client": itemgetter("client"),
    "user": itemgetter("user"),
    "expires": itemgetter("expires"),
}
retained.add_list(RETAINED, "List topics with a retained message, by topic.", columns)
retained.add_action(
    "delete",
    REMOVE_RETAINED,
    "Delete retained messages without notifying subscribers. Exit code 1 if there is none.",
    lambda found: typer.echo(f"{found['removed']} deleted"),
    failed=lambda found: not found["removed"],
)
