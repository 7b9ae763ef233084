"""`gateway pipeline …`: the jobs on Spark, one module for each command, imported when the command is named.

These modules import Spark, and all else that a job needs, only when a command runs: `gateway --help` needs
no extra, and no Java.
"""

from __future__ import annotations

from typing import Final

import typer

from gateway.cli.groups import group_of

FILES: Final = {
    name: name
    for name in (
        *("archive", "backtest", "bundle", "check", "lineage", "rates", "reconcile", "replay"),
        *("schema", "ship", "table"),
    )
}
"""Module of each command, by the command's name."""

pipeline = typer.Typer(
    name="pipeline",
    cls=group_of(__name__, FILES, "pipeline "),
    help="Run Spark jobs over the journal: archive it, measure rates, find lost and repeated messages, "
    "try mappings, replay messages.",
    no_args_is_help=True,
)
app = typer.Typer()
app.add_typer(pipeline)
