"""`gateway pipeline rates`: messages, bytes, errors and latency per window, route, protocol and client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import (
    Follow,
    JournalFolder,
    Master,
    SparkOption,
    SummaryFile,
    check_file,
    progress,
    start_session,
)
from gateway.cli.pipeline.traffic import Archive, Begin, End, check_span, recorded_in

app = typer.Typer()


@app.command()
def rates(
    journal: JournalFolder = None,
    config: ConfigFile = None,
    archive: Archive = None,
    window: Annotated[str, typer.Option(help="Length of a window, in Spark's notation.")] = "1 minute",
    clients: Annotated[bool, typer.Option("--clients", help="Also group by client.")] = False,
    since: Begin = None,
    until: End = None,
    to: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Folder, table or database for the rates.")
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format", help="Format: parquet; delta or iceberg for a table in which a run replaces windows."
        ),
    ] = "parquet",
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the read position, with --follow into a named table.",
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML page with charts to write.")
    ] = None,
    follow: Follow = False,
    late: Annotated[
        str, typer.Option(help="Longest time that a window waits for unsettled messages.")
    ] = "10 minutes",
    summary: SummaryFile = None,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Measure rates and latencies of messages, once or continuously, as a table or an HTML page."""
    from gateway.pipeline.run_summary import watch, write_summary

    with write_summary("rates", summary) as made:
        if to is None and (follow or report is None):
            raise typer.BadParameter(
                "give --to FOLDER" if follow else "give --to FOLDER, --report FILE, or both"
            )
        check_file(report, "--report")
        if follow and (archive or since or until):
            raise typer.BadParameter(
                "--follow reads the journal from its first row; it cannot be combined with"
                " --archive, --since or --until"
            )
        check_span(since, until)
        folder = recorded_in(journal, archive, config)
        options: dict[str, Any] = {"window": window, "clients": clients, "report": report, "tell": progress}
        options |= {"format_": format_}
        spark = start_session("rates", master, conf, formats=[format_], archive=archive)
        from gateway.pipeline.failures import convert_spark_errors
        from gateway.pipeline.jobs import rates as job

        with convert_spark_errors():
            if follow:
                query = job.follow(
                    spark, str(folder), to=str(to), lateness=late, checkpoint=checkpoint, **options
                )
                try:
                    watch(query, made, follow=True)
                except KeyboardInterrupt:
                    query.stop()
                return
            done = job.run(spark, folder, archive=archive, start=since, end=until, to=to, **options)
        made.figures |= {"rows": done.rows, "messages": done.messages}
    typer.echo(f"{done.messages} messages in {done.rows} rows")
