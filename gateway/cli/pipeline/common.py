"""What the commands of `gateway pipeline` share: their options, and a session for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.options import settings_of
from gateway.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PACKAGES: Final = ("pyspark", "pyarrow", "pandas")

JournalFolder = Annotated[
    str | None,
    typer.Option("--journal", metavar="FOLDER", help="The journal; default: that of the configuration."),
]
Master = Annotated[
    str | None,
    typer.Option(help="Where Spark runs; default: what spark-submit says, else all cores of this machine."),
]
SparkOption = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="An option of Spark; may repeat."),
]


def installed() -> None:
    """Raises PipelineError, which says what to install, when the extra is missing."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise PipelineError(
            f"the pipeline needs {', '.join(missing)}; install them, in the checkout, with: "
            "pip install -c requirements.lock -e '.[pipeline]'"
        )


def started(name: str, master: str | None, conf: list[str] | None) -> SparkSession:
    """A session for the command `name`. Raises PipelineError: what has to be installed."""
    options = dict(_pair(text) for text in conf or ())
    installed()
    from gateway.pipeline.session import session

    return session(f"gateway pipeline {name}", master=master, options=options)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--conf {text}: KEY=VALUE is wanted")
    return key, value


def journal_of(folder: str | None, config: Path | None) -> str:
    """The journal that was named, else that of the configuration. Raises ConfigurationError."""
    return folder or str(settings_of(config).journal_path())


def progress(text: str) -> None:
    """A line for whoever waits, apart from the results."""
    typer.echo(text, err=True)
