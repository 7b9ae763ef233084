"""`gateway pipeline ship`: copies the complete files of the journal to a store."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import (
    JournalFolder,
    SparkOption,
    SummaryFile,
    hadoop_of,
    installed,
    journal_of,
)
from gateway.cli.progress import progress_bar
from gateway.errors import PipelineError

app = typer.Typer()


@app.command()
def ship(
    to: Annotated[
        str,
        typer.Option(metavar="URI", help="URI of the store (s3a://, gs://, abfs://, hdfs://), or a folder."),
    ],
    keep_days: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Delete files in the store whose newest row is older than this number of days; default: "
            "never.",
        ),
    ] = None,
    journal: JournalFolder = None,
    config: ConfigFile = None,
    summary: SummaryFile = None,
    conf: SparkOption = None,
) -> None:
    """Copy complete files of the journal to a store, without Spark.

    Other commands and Spark jobs read the journal there with --journal URI.
    """
    from gateway.pipeline.run_summary import write_summary

    with write_summary("ship", summary) as made:
        installed()
        from gateway.pipeline.shipment import ship as job
        from gateway.pipeline.stores import place_of

        folder = journal_of(journal, config)
        if not place_of(folder).is_local:
            raise PipelineError(f"{folder} is not a folder of this machine; give one with --journal")
        with progress_bar(f"shipping to {to}"):
            done = job(place_of(folder).path(), place_of(to, hadoop_of(conf)), keep_days=keep_days)
        made.figures |= {"files": done.files, "bytes": done.byte_count, "deleted": done.deleted}
    typer.echo(
        f"{done.files} files shipped ({done.byte_count} bytes), {done.deleted} deleted, "
        f"{done.total} files in the store now"
    )
