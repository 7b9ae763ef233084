"""`gateway access`: shows the rights of users according to the configuration, without a running gateway."""

from __future__ import annotations

from typing import Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, settings_of
from gateway.operations import protocols

app = typer.Typer()
group = typer.Typer(no_args_is_help=True, help="Explain access rights.")
app.add_typer(group, name="access")


@group.command(name="explain")
def explain(
    user: Annotated[str, typer.Argument(help='User name; "" is a client without a name.')],
    action: Annotated[
        str,
        typer.Argument(
            help="Action: connect, publish, or a right of the protocol's rules, such as read or subscribe."
            " An unknown one prints the list."
        ),
    ],
    protocol: Annotated[
        str,
        typer.Argument(
            help="Protocol, by its name in the configuration. An unknown one prints the list.",
            autocompletion=protocols,
        ),
    ],
    address: Annotated[
        str,
        typer.Argument(
            help="Topic or filter; exchange:key; name of a queue or exchange; service:destination. Within "
            "the name of an exchange or queue write a colon as %3A, a percent sign as %25. For "
            "connect: the client identifier, or the virtual host."
        ),
    ],
    client_id: Annotated[str, typer.Option(help="Client identifier, for rules that use it.")] = "",
    virtual_host: Annotated[str, typer.Option(help="Virtual host of AMQP.")] = "/",
    role: Annotated[list[str] | None, typer.Option(help="Role from a token; may repeat.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="Scope from a token; may repeat.")] = None,
    field: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=TEXT", help="Field of a certificate or token; may repeat."),
    ] = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Print whether a client may do something, and which rule decides. Exit code 1 if it may not."""
    from gateway.access.authorization import Authorization
    from gateway.access.explanation import QUESTIONS
    from gateway.access.principal import Principal
    from gateway.app.access import roles_of, with_imported_hosts
    from gateway.model.dialect import NameRefused

    settings = with_imported_hosts(settings_of(config))
    questions = QUESTIONS.get(protocol)
    if questions is None:
        raise typer.BadParameter(f"{protocol!r} is not a protocol with rules; known: {', '.join(QUESTIONS)}")
    question = questions.get(action)
    if question is None:
        raise typer.BadParameter(f"{protocol} has no action {action!r}; known: {', '.join(questions)}")
    fields = dict(one.partition("=")[::2] for one in field or ())
    principal = Principal(user, roles=tuple(role or ()), scopes=tuple(scope or ()), fields=fields)
    rights = Authorization(roles_of(settings)).rights_of(principal, client_id)
    try:
        decision = question(rights, virtual_host, address)
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error
    if as_json:
        document = {"allowed": decision.allowed, "rule": decision.rule, "roles": rights.roles}
        typer.echo(orjson.dumps(document))
    else:
        typer.echo(f"{'yes' if decision.allowed else 'no'}: {decision.rule}")
        typer.echo(f"roles: {', '.join(rights.roles) or 'none'}")
    if not decision.allowed:
        raise typer.Exit(Exit.FAILED)
