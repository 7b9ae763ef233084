"""`gateway version`: which gateway this is."""

from __future__ import annotations

import platform

import orjson
import typer

from gateway import __version__
from gateway.cli.options import AsJson

app = typer.Typer()


def described() -> str:
    """The versions of the gateway and of Python, in a line."""
    return f"gateway {__version__} (Python {platform.python_version()})"


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of the gateway and of Python."""
    if as_json:
        typer.echo(orjson.dumps({"gateway": __version__, "python": platform.python_version()}))
    else:
        typer.echo(described())
