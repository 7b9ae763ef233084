"""`gateway pipeline archive`: copies the journal to Parquet or another format of Spark's."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import (
    Follow,
    JournalFolder,
    Master,
    SparkOption,
    SummaryFile,
    journal_of,
    progress,
    start_session,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from gateway.pipeline.run_summary import RunSummary

MEBIBYTE = 1_048_576
app = typer.Typer()


@app.command()
def archive(
    to: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder or URI of the archive, or name of a table.")
    ],
    journal: JournalFolder = None,
    config: ConfigFile = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format: parquet; delta or iceberg for a table; or another format of Spark, such as orc.",
        ),
    ] = "parquet",
    keep_days: Annotated[
        int | None, typer.Option(min=0, help="Delete rows older than this number of days; default: never.")
    ] = None,
    file_mib: Annotated[int, typer.Option(min=1, help="Target size of a file in MiB.")] = 128,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder for the read position, for other formats."),
    ] = None,
    grace_minutes: Annotated[
        int, typer.Option(min=0, help="Parquet: time that merged or deleted files stay on disk.")
    ] = 60,
    follow: Follow = False,
    every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Interval between two runs, with --follow.")
    ] = 60.0,
    skip_lost: Annotated[
        bool,
        typer.Option(
            "--skip-lost", help="Continue where rows were deleted or damaged before they were archived."
        ),
    ] = False,
    summary: SummaryFile = None,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Append new rows of the journal to an archive, merge small files, and delete old days.

    With --follow, repeat this in one Spark session until it is interrupted.
    """
    from gateway.pipeline.run_summary import write_summary

    with write_summary("archive", summary) as made:
        if format_ not in ("parquet", "delta", "iceberg") and keep_days is not None:
            raise typer.BadParameter(
                f"--keep-days is only for parquet and tables; delete rows of {format_} with its own commands"
            )
        if format_ not in ("parquet", "delta", "iceberg") and follow:
            raise typer.BadParameter(
                f"--follow is only for parquet and tables; for {format_} start the command again"
            )
        folder = journal_of(journal, config)
        spark = start_session("archive", master, conf, formats=[format_])
        options = _ArchiveOptions(
            folder, to, format_, keep_days, file_mib, checkpoint, grace_minutes, not skip_lost
        )
        if follow:
            with suppress(KeyboardInterrupt):
                _follow(spark, options, every, made)
            return
        text, figures = _archived(spark, options)
        made.figures |= figures
    typer.echo(text)


def _follow(spark: SparkSession, options: _ArchiveOptions, every_secs: float, made: RunSummary) -> None:
    """Archive new rows at intervals of `every_secs` seconds until interrupted.

    Print a line for each run that archived rows, and write the summary `made` after every run.
    """
    from gateway.pipeline.failures import convert_spark_errors
    from gateway.pipeline.jobs import archive as job

    def run(number: int) -> tuple[str, dict[str, float]]:
        return _archived(spark, options._replace(sweep=not number))

    rows = 0.0
    for text, figures in job.following(run, every_secs):
        rows += figures["rows"]
        if figures["rows"]:
            typer.echo(text)
        with convert_spark_errors():
            behind = job.rows_behind(spark, options.folder, options.to)
        made.figures |= figures | {"rows": rows, "rows_behind": behind}
        made.write(ok=True, running=True)


class _ArchiveOptions(NamedTuple):
    folder: str
    to: str
    format: str
    keep_days: int | None
    file_mib: int
    checkpoint: str | None
    grace_minutes: int
    fail: bool
    sweep: bool = True


def _archived(spark: SparkSession, options: _ArchiveOptions) -> tuple[str, dict[str, float]]:
    """Archive the new rows once. Return the result twice: as text for people, and as numbers by name."""
    from gateway.pipeline.archive import tables
    from gateway.pipeline.failures import convert_spark_errors
    from gateway.pipeline.jobs import archive as job

    folder, to, format_, keep_days, _, checkpoint, _, fail, sweep = options
    if format_ in tables.FORMATS:
        with convert_spark_errors():
            appended = tables.run(spark, folder, to, format_, keep_days=keep_days, fail=fail, tell=progress)
        return (
            f"{appended.rows} rows archived as {format_}, {appended.missing} rows of the journal missing;"
            f" {appended.total_rows} rows now",
            {
                "rows": appended.rows,
                "rows_missing": appended.missing,
                "total_rows": appended.total_rows,
            },
        )
    if format_ != job.PARQUET:
        with convert_spark_errors():
            rows = job.run_stream(spark, folder, to, format_, checkpoint=checkpoint, fail=fail)
        return f"{rows} rows archived as {format_}", {"rows": rows}
    with convert_spark_errors():
        done = job.run(
            spark,
            folder,
            to,
            keep_days=keep_days,
            file_bytes=options.file_mib * MEBIBYTE,
            fail=fail,
            grace_secs=60.0 * options.grace_minutes,
            sweep=sweep,
            tell=progress,
        )
    return (
        f"{done.rows} rows archived in {done.files} files, {done.missing} rows of the journal missing;"
        f" {done.merged} files merged, {done.dropped} dropped;"
        f" {done.total_rows} rows in {done.total_files} files of {done.total_bytes} bytes",
        {
            "rows": done.rows,
            "rows_missing": done.missing,
            "files": done.files,
            "deleted": done.dropped,
            "total_rows": done.total_rows,
            "bytes": done.total_bytes,
        },
    )
