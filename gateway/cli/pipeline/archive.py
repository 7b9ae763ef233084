"""`gateway pipeline archive`: the journal as Parquet, or another format of Spark's."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import JournalFolder, Master, SparkOption, journal_of, progress, started
from gateway.errors import PipelineError

MEBIBYTE = 1_048_576
app = typer.Typer()


@app.command()
def archive(
    to: Annotated[str, typer.Option(metavar="FOLDER", help="Folder or URI of the archive; or a table.")],
    journal: JournalFolder = None,
    config: ConfigFile = None,
    format_: Annotated[
        str, typer.Option("--format", help="parquet; a table: delta, iceberg; or what the session has: orc.")
    ] = "parquet",
    keep_days: Annotated[
        int | None, typer.Option(min=0, help="Drop days before these; default: none.")
    ] = None,
    file_mib: Annotated[int, typer.Option(min=1, help="A useful size of a file, in MiB.")] = 128,
    checkpoint: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Of another format: where to keep the position.")
    ] = None,
    grace_minutes: Annotated[
        int, typer.Option(min=0, help="Of parquet: how long files stay that were merged or dropped.")
    ] = 60,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on where rows were deleted or damaged before.")
    ] = False,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Bring the archive up to the end of the journal: new rows once, small files merged, old days dropped."""
    if format_ not in ("parquet", "delta", "iceberg") and keep_days is not None:
        raise PipelineError(f"--keep-days is for parquet and tables; {format_} has commands of its own")
    folder = journal_of(journal, config)
    spark = started("archive", master, conf, formats=[format_])
    from gateway.pipeline.archive import tables
    from gateway.pipeline.failures import plainly
    from gateway.pipeline.jobs import archive as job

    if format_ in tables.FORMATS:
        with plainly():
            appended = tables.run(
                spark, folder, to, format_, keep_days=keep_days, fail=not skip_lost, tell=progress
            )
        typer.echo(
            f"{appended.rows} rows archived as {format_}, {appended.missing} rows of the journal missing;"
            f" {appended.total_rows} rows now"
        )
        return
    if format_ != job.PARQUET:
        with plainly():
            rows = job.run_stream(spark, folder, to, format_, checkpoint=checkpoint, fail=not skip_lost)
        typer.echo(f"{rows} rows archived as {format_}")
        return
    octets = file_mib * MEBIBYTE
    with plainly():
        done = job.run(
            spark,
            folder,
            to,
            keep_days=keep_days,
            file_octets=octets,
            fail=not skip_lost,
            grace_secs=60.0 * grace_minutes,
            tell=progress,
        )
    typer.echo(
        f"{done.rows} rows archived in {done.files} files, {done.missing} rows of the journal missing;"
        f" {done.merged} files merged, {done.dropped} dropped;"
        f" {done.total_rows} rows in {done.total_files} files of {done.total_octets} octets"
    )
