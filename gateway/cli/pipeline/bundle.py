"""`gateway pipeline bundle`: writes the files for spark-submit that the executors of a cluster need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.pipeline.common import installed
from gateway.cli.progress import progress_bar

app = typer.Typer()


@app.command()
def bundle(
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the files.")] = Path("bundle"),
    environment: Annotated[
        bool,
        typer.Option(
            "--environment", help="Also pack the gateway's dependencies, for a cluster that has only Spark."
        ),
    ] = False,
) -> None:
    """Write the program and the code for a Spark cluster, and print how to submit them.

    Driver and executors need the same version of Python as this program.
    """
    installed()
    from gateway.pipeline.bundle import ENVIRONMENT, write

    with progress_bar("packing the gateway's dependencies" if environment else "writing the bundle"):
        made = write(to, environment=environment)
    options = [f"--py-files {made.code}"]
    if made.environment is not None:
        options.append(f"--archives {made.environment}#{ENVIRONMENT}")
        options.append(f"--conf spark.executorEnv.PYTHONPATH={ENVIRONMENT}")
    typer.echo(f"spark-submit --master MASTER {' '.join(options)} {made.submit} COMMAND …")
