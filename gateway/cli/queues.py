"""`gateway queues list | delete | purge`: the queues of a running gateway's embedded broker.

These are the queues of AMQP 0-9-1 and AMQP/Fast, and durable subscriptions of AMQP/Fast. The commands use the
gateway's HTTP interface, as `gateway deadletters` does.
"""

from __future__ import annotations

from operator import itemgetter

import typer

from gateway.cli.operations import Columns, Document, ObjectCommands, age
from gateway.operations import PURGE_QUEUES, QUEUES, REMOVE_QUEUES

app = typer.Typer()
queues = ObjectCommands(app, "queues", "List, delete and purge queues of the embedded broker.")


def _state(one: Document) -> str:
    return "temporary" if one["temporary"] else "durable" if one["durable"] else "transient"


def _report_removed(found: Document) -> None:
    typer.echo(f"{found['removed']} deleted, with {found['messages']} messages")
    if found["in_use"]:
        typer.echo(f"{found['in_use']} in use were not deleted", err=True)


columns: Columns = {
    "protocol": itemgetter("protocol"),
    "virtual host": itemgetter("virtual_host"),
    "kind": itemgetter("kind"),
    "queue": itemgetter("queue"),
    "messages": itemgetter("messages"),
    "bytes": itemgetter("messages_bytes"),
    "unacknowledged": itemgetter("unacknowledged"),
    "consumers": itemgetter("consumers"),
    "state": _state,
    "idle": lambda one: age(one["idle_secs"]),
}
queues.add_list(
    QUEUES,
    "List queues by protocol, virtual host, kind and name, or the longest first.",
    columns,
    without=("history",),
)
queues.add_action(
    "delete",
    REMOVE_QUEUES,
    "Delete queues with their messages. Exit code 1 if there is none.",
    _report_removed,
    failed=lambda found: not found["removed"],
)
queues.add_action(
    "purge",
    PURGE_QUEUES,
    "Purge the ready messages of queues. Exit code 1 if there are none.",
    lambda found: typer.echo(f"{found['purged']} purged of {found['messages']} messages"),
    failed=lambda found: not found["purged"],
    without=("empty",),  # an empty queue has nothing to purge
)
