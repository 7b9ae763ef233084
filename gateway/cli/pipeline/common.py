"""Options and functions that the commands of `gateway pipeline` share, such as the start of Spark."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.cli.options import settings_of
from gateway.cli.progress import progress_bar
from gateway.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from gateway.pipeline.tolerance import Tolerance

PACKAGES: Final = ("pyspark", "pyarrow", "pandas", "jsonschema_rs")

JournalFolder = Annotated[
    str | None,
    typer.Option(
        "--journal",
        metavar="FOLDER",
        help="Folder or URI of the journal; default: that of the configuration.",
    ),
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue as the journal is written.")]
Master = Annotated[
    str | None,
    typer.Option(help="Spark master; default: that of spark-submit, else all cores of this machine."),
]
SparkOption = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="KEY=VALUE", help="Spark option; may repeat."),
]

SummaryFile = Annotated[
    Path | None,
    typer.Option(
        "--summary",
        metavar="FILE",
        help="File for a summary of the run: JSON, or Prometheus' text format if it ends in .prom.",
    ),
]


def installed() -> None:
    """Check that the Python packages of the extra `pipeline` are installed.

    Raises PipelineError, which names the missing packages, if they are not.
    """
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise PipelineError(
            f"the pipeline needs {', '.join(missing)}; install them, in the checkout, with: "
            "pip install -c requirements.lock -e '.[pipeline]'"
        )


def start_session(
    name: str,
    master: str | None,
    conf: list[str] | None,
    *,
    formats: Iterable[str] = (),
    archive: str | None = None,
) -> SparkSession:
    """Start a Spark session for the command `name`.

    `master` and `conf` are the command's options. The session can write tables of these `formats` and read
    the archive. Raises PipelineError if something has to be installed, or if a server does not respond.
    """
    watched = {"spark.ui.showConsoleProgress": str(sys.stderr.isatty()).lower()}  # Spark's own bar
    options = watched | options_of(conf)
    installed()
    logging.getLogger().addFilter(_is_no_interrupt)
    from gateway.pipeline.session import session

    with progress_bar("starting Spark"):
        return session(
            f"gateway pipeline {name}", master=master, options=options, formats=formats, archive=archive
        )


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Return False for the log record that py4j writes when Ctrl-C interrupts Spark, to suppress it."""
    return record.exc_info is None or record.exc_info[0] is not KeyboardInterrupt


def options_of(conf: list[str] | None) -> dict[str, str]:
    """Parse the values KEY=VALUE of the option --conf as Spark's options. Raises BadParameter."""
    return dict(_pair(text) for text in conf or ())


def hadoop_of(conf: list[str] | None) -> dict[str, str]:
    """Return the Hadoop options among the values of --conf, for commands without a Spark session.

    Raises BadParameter.
    """
    from gateway.pipeline.stores import hadoop_in

    return hadoop_in(options_of(conf))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"--conf {text}: write KEY=VALUE")
    return key, value


def journal_of(folder: str | None, config: Path | None) -> str:
    """Return the URL or absolute path of the journal.

    The journal is `folder`, or the journal of the configuration if `folder` is None. Raises
    ConfigurationError.
    """
    if folder is not None and re.match("[A-Za-z][A-Za-z0-9+.-]+:/", folder):
        return folder
    return str(Path(folder or settings_of(config).journal_path()).absolute())


def tolerance_of(text: str) -> Tolerance:
    """Parse the value of --tolerance. Raises BadParameter."""
    from gateway.pipeline.tolerance import Tolerance

    try:
        return Tolerance.read(text)
    except PipelineError as error:
        raise typer.BadParameter(str(error)) from error


def check_file(file: Path | None, option: str, *, folder_made: bool = False) -> None:
    """Check that the output file of an option can be created, before the work begins.

    Raises BadParameter if the file is a folder, or if its folder does not exist. `folder_made` is True if the
    command creates the folder. None is accepted.
    """
    if file is not None and file.is_dir():
        raise typer.BadParameter(f"{option}: {file} is a folder; name a file")
    if file is not None and not folder_made and not file.parent.is_dir():
        raise typer.BadParameter(f"{option} {file.name}: no folder {file.parent}; create it first")


def progress(text: str) -> None:
    """Print a line about the progress to standard error, apart from the results."""
    typer.echo(text, err=True)
