"""Command line of the gateway: one module for each command or group, imported when it is used.

`main` is the entry point; errors that the user can correct become lines on standard error and an exit code.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Final

import typer

from gateway.cli.exits import Exit
from gateway.cli.findings import lines_of
from gateway.cli.groups import COMPLETE, group_of
from gateway.cli.version import describe_version
from gateway.errors import ArgumentError, ConfigurationError, GatewayError

FILES: Final = {
    "access": "access",
    "bench": "bench",
    "check": "check",
    "clients": "clients",
    "completion": "completion",
    "deadletters": "deadletters",
    "explain": "mapping",
    "import": "import_",
    "journal": "journal",
    "links": "links",
    "passwd": "passwd",
    "pipeline": "pipeline",
    "publish": "messages",
    "queues": "queues",
    "retained": "retained",
    "routes": "routes",
    "run": "run",
    "schema": "mapping",
    "sessions": "sessions",
    "status": "status",
    "store": "store",
    "subscribe": "messages",
    "tap": "tap",
    "test": "mapping",
    "tokens": "tokens",
    "top": "top",
    "version": "version",
}
"""Module of each command, by the command's name."""


def _print_version(show: bool) -> None:
    if show:
        typer.echo(describe_version())
        raise typer.Exit


def _gateway(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Run, test and operate a protocol gateway between MQTT, AMQP 0-9-1 and AMQP/Fast."""


def commands() -> typer.Typer:
    """Build the application with all commands of the program `gateway`."""
    return typer.Typer(
        name="gateway",
        cls=group_of(__name__, FILES),
        callback=_gateway,
        context_settings={"help_option_names": ["-h", "--help"]},
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )


def main() -> None:
    """Run the command that the arguments of the process name, and exit with its exit code."""
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # has no public name

        completion_init()
    try:
        commands()(prog_name="gateway")  # this name even if another program calls `main`
    except ConfigurationError as error:
        print("\n".join(lines_of(error)), file=sys.stderr)
        sys.exit(Exit.CONFIGURATION)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        sys.exit(Exit.USAGE)
    except GatewayError as error:
        print(error, file=sys.stderr)
        sys.exit(Exit.FAILED)
