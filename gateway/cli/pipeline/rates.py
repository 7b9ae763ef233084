"""`gateway pipeline rates`: messages, bytes, errors and latency per window, route, protocol and client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import (
    JournalFolder,
    Master,
    SparkOption,
    SummaryFile,
    check_file,
    installed,
    progress,
    started,
)
from gateway.cli.pipeline.traffic import Archive, check_span, recorded_in

app = typer.Typer()


@app.command()
def rates(
    journal: JournalFolder = None,
    config: ConfigFile = None,
    archive: Archive = None,
    window: Annotated[str, typer.Option(help="As Spark says it.")] = "1 minute",
    clients: Annotated[bool, typer.Option("--clients", help="By client, too.")] = False,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="From this time on, ISO 8601.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Before this time.")] = None,
    to: Annotated[str | None, typer.Option(metavar="FOLDER", help="Write them here, or to a table.")] = None,
    format_: Annotated[
        str, typer.Option("--format", help="parquet; a table, in which windows are replaced: delta, iceberg.")
    ] = "parquet",
    checkpoint: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="With --follow into a named table: for the position.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the journal is written.")] = False,
    late: Annotated[
        str, typer.Option(help="How long a window waits at most for what is still open.")
    ] = "10 minutes",
    summary: SummaryFile = None,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Measure what crossed: a table (Parquet), a page with plots (HTML), once or for as long as it runs."""
    from gateway.pipeline.telling import told, watch

    with told("rates", summary) as made:
        if to is None and (follow or report is None):
            raise typer.BadParameter(
                "say --to FOLDER" if follow else "say --to FOLDER, --report FILE, or both"
            )
        check_file(report, "--report")
        if follow and (archive or since or until):
            raise typer.BadParameter(
                "--follow reads the journal, from its first row on: no --archive, --since, --until"
            )
        check_span(since, until)
        folder = recorded_in(journal, archive, config)
        installed()
        given: dict[str, Any] = {"window": window, "clients": clients, "report": report, "tell": progress}
        given |= {"format_": format_}
        spark = started("rates", master, conf, formats=[format_], archive=archive)
        from gateway.pipeline.failures import plainly
        from gateway.pipeline.jobs import rates as job

        with plainly():
            if follow:
                query = job.follow(spark, str(folder), to=str(to), late=late, checkpoint=checkpoint, **given)
                try:
                    watch(query, made, follow=True)
                except KeyboardInterrupt:
                    query.stop()
                return
            done = job.run(spark, folder, archive=archive, since=since, until=until, to=to, **given)
        made.figures |= {"rows": done.rows, "messages": done.messages}
    typer.echo(f"{done.messages} messages in {done.rows} rows")
