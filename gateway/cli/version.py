"""`gateway version`: prints the version of the gateway."""

from __future__ import annotations

import platform

import orjson
import typer

from gateway import __version__, is_compiled
from gateway.cli.options import AsJson

app = typer.Typer()


def describe_version() -> str:
    """Return a line of text with the versions of the gateway and of Python."""
    form = "compiled" if is_compiled() else "interpreted"
    return f"gateway {__version__}, {form} (Python {platform.python_version()})"


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of the gateway and of Python, and whether the gateway is compiled."""
    if as_json:
        versions = {"gateway": __version__, "python": platform.python_version(), "compiled": is_compiled()}
        typer.echo(orjson.dumps(versions))
    else:
        typer.echo(describe_version())
