"""The command line: one file for each group of commands, found by their attribute `app`.

`main` is the entry point; errors that the user can mend become lines on standard error and an exit code.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer

from gateway.cli.exits import Exit
from gateway.cli.version import described
from gateway.errors import ConfigurationError, GatewayError


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(described())
        raise typer.Exit


def _gateway(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """A protocol gateway between MQTT, AMQP 0-9-1 and AMQP/Fast."""


def commands() -> typer.Typer:
    """All commands of this folder."""
    app = typer.Typer(
        name="gateway",
        callback=_gateway,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for found in pkgutil.iter_modules(__path__):
        group = getattr(importlib.import_module(f"{__name__}.{found.name}"), "app", None)
        if isinstance(group, typer.Typer):
            app.add_typer(group)
    return app


def main() -> None:
    """Run the command that the arguments name, and exit."""
    try:
        commands()(prog_name="gateway")  # also where it is a part of another program
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(Exit.CONFIGURATION)
    except GatewayError as error:
        print(error, file=sys.stderr)
        sys.exit(Exit.FAILED)
