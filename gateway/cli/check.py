"""`gateway check`: checks a configuration before the gateway runs."""

from __future__ import annotations

import sys
from typing import Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.findings import documents_of, show
from gateway.cli.options import AsJson, ConfigFile

app = typer.Typer()


@app.command()
def check(
    config: ConfigFile = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect", help="Also log in to the brokers of links, and print which rights are missing there."
        ),
    ] = False,
    print_: Annotated[
        bool,
        typer.Option(
            "--print",
            help="Print the effective configuration without secrets; findings go to standard error.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check the configuration and its mapping files. Exit code 78 if there is an error."""
    from gateway.cli.checks import run_checks

    result = run_checks(config, connect=connect)
    good = not result.errors and not (strict and result.warnings)
    if as_json:
        document = {"ok": good, "findings": documents_of(result.findings), "summary": result.counts()}
        if print_:
            document["configuration"] = result.configuration()
        typer.echo(orjson.dumps(document))
    else:
        if print_:
            typer.echo(result.configuration_text(), nl=False)
        to = sys.stderr if print_ else sys.stdout
        show(result.findings, to)
        print(result.summary(), file=to)
    if not good:
        raise typer.Exit(Exit.CONFIGURATION)
