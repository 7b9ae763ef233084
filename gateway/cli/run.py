"""`gateway run`: the gateway itself."""

from __future__ import annotations

import sys

import typer

from gateway.cli.exits import Exit
from gateway.cli.options import ConfigFile, settings_of

app = typer.Typer()


@app.command()
def run(config: ConfigFile = None) -> None:
    """Run the gateway until SIGTERM or Ctrl-C."""
    from gateway import app as composition
    from gateway.cli.welcome import welcome
    from gateway.telemetry.logs import configure_logs

    settings = settings_of(config)
    configure_logs(settings.log.level, settings.log.format)
    code = composition.run(
        settings, lambda gateway: typer.echo(welcome(gateway, with_link=sys.stdout.isatty()))
    )
    if code:
        raise typer.Exit(Exit.FAILED)
