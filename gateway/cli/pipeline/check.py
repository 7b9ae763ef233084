"""`gateway pipeline check`: checks that everything is installed that the pipeline needs."""

from __future__ import annotations

from importlib.metadata import version

import typer

from gateway.cli.pipeline import common

app = typer.Typer()


@app.command()
def check() -> None:
    """Print which Spark and Java the pipeline uses, or what to install."""
    common.installed()
    from gateway.pipeline.session import java

    program = java()
    for package in common.PACKAGES:
        typer.echo(f"{package} {version(package)}")
    typer.echo(f"java {program}")
