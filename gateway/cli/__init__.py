"""The command line: one file for each group of commands, found by their attribute `app`.

`main` is the entry point; errors that the user can mend become lines on standard error and an exit code.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

from gateway.cli.exits import Exit
from gateway.errors import ConfigurationError, GatewayError


def commands() -> typer.Typer:
    """All commands of this folder."""
    app = typer.Typer(
        name="gateway",
        help="A protocol gateway between MQTT, AMQP 0-9-1 and AMQP/Fast.",
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
