"""`gateway pipeline …`: the jobs on Spark, one file for each command, found by their attribute `app`.

These files import Spark only when a command runs: `gateway --help` needs no extra, and no Java.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

pipeline = typer.Typer(
    name="pipeline",
    help="Jobs over the journal, on Spark: keep it, measure it, try mappings on it, send it again.",
    no_args_is_help=True,
)
for _found in pkgutil.iter_modules(__path__):
    _group = getattr(importlib.import_module(f"{__name__}.{_found.name}"), "app", None)
    if isinstance(_group, typer.Typer):
        pipeline.add_typer(_group)
app = typer.Typer()
app.add_typer(pipeline)
