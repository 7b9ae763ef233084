"""`gateway run`: starts the gateway itself."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.exits import Exit
from gateway.cli.options import ConfigFile, settings_of

if TYPE_CHECKING:
    from gateway.settings import Settings

app = typer.Typer()


@app.command()
def run(
    config: ConfigFile = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Run the gateway until SIGTERM or Ctrl-C."""
    if worker:
        code = _run_worker(settings_of(config))
    else:
        settings = settings_of(config)
        code = _run_alone(settings) if settings.workers == 1 else _run_workers(settings)
    if code:
        raise typer.Exit(Exit.CONFIGURATION if code == Exit.CONFIGURATION else Exit.FAILED)


def _run_alone(settings: Settings) -> int:
    from gateway import app as composition
    from gateway.cli.welcome import welcome
    from gateway.telemetry.logs import configure_logs

    configure_logs(settings.log.level, settings.log.format)
    return composition.run(
        settings, lambda gateway: _greet(settings, welcome(gateway, with_link=sys.stdout.isatty()))
    )


def _run_workers(settings: Settings) -> int:
    from gateway.app.workers import run_workers
    from gateway.cli.welcome import welcome_to_workers
    from gateway.telemetry.logs import configure_logs

    configure_logs(settings.log.level, settings.log.format)
    return run_workers(settings, lambda supervisor: _greet(settings, welcome_to_workers(supervisor)))


def _greet(settings: Settings, text: str) -> None:
    """Print the welcome text, unless the log is JSON, whose event `started` has the addresses."""
    if settings.log.format != "json" or sys.stdout.isatty():
        typer.echo(text)


def _run_worker(settings: Settings) -> int:
    """Run as one of several workers, with the number given by the parent process. Return the exit code."""
    from gateway.app.control import SupervisorLink
    from gateway.app.worker import run_worker
    from gateway.settings.workers import settings_of_worker
    from gateway.telemetry.logs import configure_logs

    ordered = SupervisorLink.read()
    configure_logs(settings.log.level, settings.log.format, worker=ordered.order.number)
    return run_worker(settings_of_worker(settings, *ordered.order), ordered)
