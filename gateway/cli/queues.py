"""`gateway queues list | remove | purge`: the queues of a running gateway's embedded broker.

Those of AMQP 0-9-1 and AMQP/Fast, and durable subscriptions of AMQP/Fast. The commands talk to its HTTP side,
as `gateway deadletters` does.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Annotated, Any, Final, Literal

import orjson
import typer

from gateway.cli.choosing import After, All, Count, Exact, Idle, Yes, age, chosen, removal, show_page
from gateway.cli.exits import Exit
from gateway.cli.options import HERE, AsJson, TokenFile, Url, ask, protocols

queues = typer.Typer(name="queues", help="Queues of the embedded broker: look, remove, purge.")
app = typer.Typer()
app.add_typer(queues)

Queue = Annotated[str | None, typer.Option(metavar="PATTERN", help="By name; * is any text.")]


def _holder(name: str | None) -> str | None:
    """A protocol whose embedded broker has queues. Raises BadParameter."""
    if name is not None:
        from gateway.protocols import DIALECTS

        holders = [one.name for one in DIALECTS.values() if one.has_virtual_hosts]
        if name not in holders:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(holders)}")
    return name


Protocol = Annotated[
    str | None,
    typer.Option(callback=_holder, autocompletion=protocols, help="Of this protocol, which has queues."),
]
Host = Annotated[str | None, typer.Option(metavar="NAME", help="Of this virtual host.")]
Kind = Annotated[
    Literal["queue", "subscription"] | None,
    typer.Option(help="Queues, or durable subscriptions (named CLIENT/IDENTIFIER), only."),
]
Empty = Annotated[bool | None, typer.Option("--empty/--not-empty", help="Without messages, or with some.")]


@queues.command(name="list")
def list_queues(
    queue: Queue = None,
    protocol: Protocol = None,
    virtual_host: Host = None,
    kind: Kind = None,
    empty: Empty = None,
    idle: Idle = None,
    exact: Exact = False,
    in_use: Annotated[
        bool | None, typer.Option("--in-use/--not-in-use", help="With consumers or an owner, or without.")
    ] = None,
    sort: Annotated[
        Literal["name", "messages"], typer.Option(help="By name, or the longest first.")
    ] = "name",
    count: Count = 100,
    after: After = "",
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Print queues, in order of protocol, virtual host, kind and name, or the longest first."""
    words = _words(queue, protocol, virtual_host, kind, empty, idle) | chosen(
        in_use=in_use, exact=exact or None, sort=None if sort == "name" else sort
    )
    show_page(url, token_file, "/api/v1/queues", words, COLUMNS, count=count, after=after, as_json=as_json)


def _state(one: dict[str, Any]) -> str:
    return "temporary" if one["temporary"] else "durable" if one["durable"] else "transient"


COLUMNS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "protocol": itemgetter("protocol"),
    "virtual host": itemgetter("virtual_host"),
    "kind": itemgetter("kind"),
    "queue": itemgetter("queue"),
    "messages": itemgetter("messages"),
    "octets": itemgetter("messages_bytes"),
    "unacknowledged": itemgetter("unacknowledged"),
    "consumers": itemgetter("consumers"),
    "state": _state,
    "idle": lambda one: age(one["idle_secs"]),
}


@queues.command()
def remove(
    queue: Queue = None,
    protocol: Protocol = None,
    virtual_host: Host = None,
    kind: Kind = None,
    empty: Empty = None,
    idle: Idle = None,
    exact: Exact = False,
    every: All = False,
    yes: Yes = False,
    in_use: Annotated[bool, typer.Option("--in-use", help="Also those with consumers.")] = False,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Delete queues with their messages. Exit code 1 when there is none."""
    words = _words(queue, protocol, virtual_host, kind, empty, idle)
    choice = removal(words, every=every, yes=yes, in_use=in_use, exact=exact)
    found = ask(url, token_file, "/api/v1/queues/remove", choice)
    if as_json:
        typer.echo(orjson.dumps(found))
    else:
        typer.echo(f"{found['removed']} removed, with {found['messages']} messages")
        if found["in_use"]:
            typer.echo(f"{found['in_use']} in use were left alone", err=True)
    if not found["removed"]:
        raise typer.Exit(Exit.FAILED)


@queues.command()
def purge(
    queue: Queue = None,
    protocol: Protocol = None,
    virtual_host: Host = None,
    kind: Kind = None,
    idle: Idle = None,
    exact: Exact = False,
    every: All = False,
    yes: Yes = False,
    url: Url = HERE,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Drop the ready messages of queues, which stay. Exit code 1 when there are none."""
    words = _words(queue, protocol, virtual_host, kind, None, idle)
    found = ask(url, token_file, "/api/v1/queues/purge", removal(words, every=every, yes=yes, exact=exact))
    typer.echo(
        orjson.dumps(found) if as_json else f"{found['purged']} purged of {found['messages']} messages"
    )
    if not found["purged"]:
        raise typer.Exit(Exit.FAILED)


def _words(
    queue: str | None,
    protocol: str | None,
    virtual_host: str | None,
    kind: str | None,
    empty: bool | None,
    idle: str | None,
) -> dict[str, Any]:
    return chosen(
        queue=queue, protocol=protocol, virtual_host=virtual_host, kind=kind, empty=empty, idle=idle
    )
