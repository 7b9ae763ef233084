"""`gateway access`: shows the rights of users by the configuration, before anything runs."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, settings_of
from gateway.operations import protocols

app = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Who may do what.")
app.add_typer(group, name="access")


@group.command(name="explain")
def explain(
    user: Annotated[str, typer.Argument(help='Who asks; "" is a client without a name.')],
    action: Annotated[
        str,
        typer.Argument(
            help="connect, publish, or a right that the protocol's rules know, as read or subscribe; a wrong"
            " one is answered with those that there are."
        ),
    ],
    protocol: Annotated[
        str,
        typer.Argument(
            help="By its name in the configuration; a wrong one is answered with those that there are.",
            autocompletion=protocols,
        ),
    ],
    address: Annotated[
        str,
        typer.Argument(
            help="Topic or filter; exchange:key; the name of a queue or exchange; service:destination. Within"
            " the name of an exchange or queue a colon is %3A, a percent sign %25. To connect: the client"
            " identifier, or the virtual host."
        ),
    ],
    client_id: Annotated[str, typer.Option(help="Client identifier, for rules that name it.")] = "",
    virtual_host: Annotated[str, typer.Option(help="Of AMQP.")] = "/",
    role: Annotated[list[str] | None, typer.Option(help="A role that a token gives.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="A scope of a token.")] = None,
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="What a certificate or token says.")
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a client may do something, and which rule says so. Exit code 1 when it may not."""
    from gateway.access.authorization import Authorization
    from gateway.access.explaining import QUESTIONS
    from gateway.access.principal import Principal
    from gateway.app.access import roles_of, with_imported_hosts
    from gateway.model.dialect import NameRefused

    settings = with_imported_hosts(settings_of(config))
    questions = QUESTIONS.get(protocol)
    if questions is None:
        raise typer.BadParameter(f"{protocol!r} is no protocol with rules; there are: {', '.join(QUESTIONS)}")
    question = questions.get(action)
    if question is None:
        raise typer.BadParameter(f"{protocol} knows no {action!r}; there are: {', '.join(questions)}")
    fields = dict(one.partition("=")[::2] for one in field or ())
    principal = Principal(user, roles=tuple(role or ()), scopes=tuple(scope or ()), fields=fields)
    rights = Authorization(roles_of(settings)).rights_of(principal, client_id)
    try:
        decision = question(rights, virtual_host, address)
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        told = {"allowed": decision.allowed, "rule": decision.rule, "roles": rights.roles}
        typer.echo(orjson.dumps(told))
    else:
        typer.echo(f"{'yes' if decision.allowed else 'no'}: {decision.rule}")
        typer.echo(f"roles: {', '.join(rights.roles) or 'none'}")
    if not decision.allowed:
        raise typer.Exit(Exit.FAILED)
