"""`gateway journal tail | stat | verify | export | lake`: prints, measures, checks and exports the journal.

The commands read the files, beside a running gateway or without one.
"""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, settings_of
from gateway.cli.pipeline.common import Follow, SparkOption, SummaryFile, hadoop_of
from gateway.cli.pipeline.traffic import Begin, End, check_span
from gateway.cli.progress import progress_bar
from gateway.errors import PipelineError

journal = typer.Typer(
    name="journal", help="Read, check and export the journal of messages that crossed the gateway."
)
app = typer.Typer()
app.add_typer(journal)

Folder = Annotated[
    Path | None,
    typer.Option(
        "--journal",
        "--folder",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        help="Folder of the journal; default: that of the configuration.",
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        help="Name of a shard, the journal of one replica or worker, such as host-1/0; default: all."
    ),
]


@journal.command()
def tail(
    config: ConfigFile = None,
    folder: Folder = None,
    shard: Shard = None,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Number of rows of each shard.")] = 10,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Wait for further rows and print them.")
    ] = False,
    start: Annotated[
        int | None, typer.Option(min=0, help="Sequence number of the first row, instead of --last.")
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option(help="Route whose rows are printed; default: all; may repeat.")
    ] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this number of rows.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the newest rows, one per line; report missing rows on standard error."""
    from gateway.cli.journal_rows import chosen_shards, newest, print_item, reader_of
    from gateway.store.journal.reader import Gap

    reader = reader_of(config, folder)
    only = {"route": route} if route else None
    positions = dict.fromkeys(chosen_shards(reader, shard), start or 0)
    remaining = count
    try:
        for item in newest(reader, positions, last if start is None else None, follow=follow, only=only):
            print_item(item, as_json)
            if remaining is not None and not isinstance(item, Gap):
                remaining -= 1
                if not remaining:
                    return
    except KeyboardInterrupt:
        return


@journal.command()
def stat(
    config: ConfigFile = None, folder: Folder = None, shard: Shard = None, as_json: AsJson = False
) -> None:
    """Print statistics of each shard: rows, gaps, files, bytes, times, small and merged blocks, retention."""
    from gateway.cli.journal_rows import chosen_shards, compaction, describe_extent, reader_of, retention

    limits = settings_of(config).journal
    reader = reader_of(config, folder)
    extents = [reader.extent(name) for name in chosen_shards(reader, shard)]
    if as_json:
        kept = {"retention_bytes": limits.retention_bytes, "retention_secs": limits.retention_secs}
        typer.echo(orjson.dumps([extent._asdict() | kept for extent in extents]))
        return
    for extent in extents:
        typer.echo(describe_extent(extent))
        typer.echo(f"  {compaction(extent)}")
        typer.echo(f"  {retention(extent, limits.retention_bytes, limits.retention_secs)}")
    if not extents:
        typer.echo("the journal is empty")


@journal.command()
def verify(
    config: ConfigFile = None, folder: Folder = None, shard: Shard = None, as_json: AsJson = False
) -> None:
    """Read and check every block. Exit code 1 if a block is damaged or missing.

    An incomplete block at the end of a shard is reported, but is no damage: the gateway is writing it, or
    will remove it when it starts. Rows that the gateway itself has recorded as lost are reported, but are no
    damage either.
    """
    from gateway.cli.journal_rows import chosen_shards, finding_of, reader_of
    from gateway.store.journal.segments import Hole

    reader = reader_of(config, folder)
    findings: list[dict[str, Any]] = []
    names = chosen_shards(reader, shard)
    with progress_bar("reading the journal, one shard at a time", len(names)) as bar:
        for at, name in enumerate(names):
            bar.update(at)
            last = reader.segments(name)[-1].path
            for item in reader.verify(name):
                torn = isinstance(item, Hole) and item.path == last and item.end >= last.stat().st_size
                findings.append(finding_of(name, item, torn=torn))
    damaged = any(finding["damage"] for finding in findings)
    if as_json:
        typer.echo(orjson.dumps({"ok": not damaged, "findings": findings}))
    else:
        for finding in findings:
            typer.echo(f"shard {finding['shard']}: {finding['what']}: {finding['text']}")
        typer.echo("damaged" if damaged else "intact")
    if damaged:
        raise typer.Exit(Exit.FAILED)


@journal.command()
def export(
    config: ConfigFile = None,
    folder: Folder = None,
    shard: Shard = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="Parquet file to write.")] = None,
    arrow: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Arrow IPC file (Feather 2) to write.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Columns, separated by commas; default: all.")
    ] = None,
    route: Annotated[
        list[str] | None, typer.Option(help="Route whose rows are exported; default: all; may repeat.")
    ] = None,
    since: Begin = None,
    until: End = None,
) -> None:
    """Write rows into one file for other programs, without Spark.

    This command needs pyarrow, which the extra `parquet` includes. It reports rows that are missing in the
    journal.
    """
    if (parquet is None) == (arrow is None):
        raise typer.BadParameter("give --parquet FILE or --arrow FILE")
    from gateway.cli.journal_rows import chosen_shards, reader_of

    try:
        from gateway.pipeline.columns import BY_NAME
        from gateway.pipeline.journal.export import ExportSelection
        from gateway.pipeline.journal.export import export as job
        from gateway.pipeline.journal.options import microseconds_of
        from gateway.pipeline.times import moment
    except ImportError as error:
        raise PipelineError(
            "the export needs pyarrow, which is not installed: pip install 'gateway[parquet]'"
        ) from error
    reader = reader_of(config, folder)
    names = None if columns is None else [name.strip() for name in columns.split(",")]
    if names is not None and (unknown := [name for name in names if name not in BY_NAME]):
        raise typer.BadParameter(f"unknown column {unknown[0]!r}; known: {', '.join(BY_NAME)}")
    check_span(since, until)
    from_us, to_us = (None if text is None else microseconds_of(moment(text)) for text in (since, until))
    shards = None if shard is None else chosen_shards(reader, shard)
    chosen = ExportSelection(shards, frozenset(route) if route else None, from_us, to_us)
    to = parquet or arrow
    assert to is not None
    form: Literal["parquet", "arrow"] = "arrow" if parquet is None else "parquet"
    try:
        with progress_bar(f"writing {to}"):
            rows, missing = job(reader, to, form, columns=names, chosen=chosen)
    except OSError as error:
        raise PipelineError(f"{to} cannot be written: {error.strerror}") from error
    typer.echo(f"{rows} rows in {to}" + (f", {missing} missing in the journal" if missing else ""))


@journal.command()
def lake(
    to: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder of the Delta table, or its URI in S3 (s3a://).")
    ],
    config: ConfigFile = None,
    folder: Folder = None,
    follow: Follow = False,
    every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Interval between two runs, with --follow.")
    ] = 60.0,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Continue where rows were damaged before they were appended.")
    ] = False,
    summary: SummaryFile = None,
    conf: SparkOption = None,
) -> None:
    """Append the rows of complete files to a Delta table, without Spark and Java.

    A run continues where the one before it ended, also after it was killed. This command needs deltalake,
    which the extra `lake` includes. Exit code 1 if rows were deleted or damaged before they were appended;
    standard error says which.
    """
    from gateway.cli.journal_rows import print_item, reader_of
    from gateway.pipeline.run_summary import write_summary

    with write_summary("lake", summary) as made:
        try:
            from gateway.pipeline.lake import LakeTable
            from gateway.pipeline.stores import place_of
        except ImportError as error:
            raise PipelineError(
                "the lake needs deltalake, which is not installed: pip install 'gateway[lake]'"
            ) from error
        reader = reader_of(config, folder)
        table = LakeTable(place_of(to, hadoop_of(conf)), skip_lost=skip_lost)
        lost = 0
        with suppress(KeyboardInterrupt) if follow else nullcontext():
            while True:
                rows = missing = 0
                for commit in table.append(reader.folder):
                    rows += commit.rows
                    for gap in commit.gaps:
                        print_item(gap, as_json=False)
                        missing += gap.rows
                        lost += gap.rows if gap.reason in ("damage", "gone") else 0
                if rows or missing or not follow:
                    typer.echo(f"{rows} rows appended to {to}, {missing} rows of the journal missing")
                for name, count in (("rows", rows), ("rows_missing", missing)):
                    made.figures[name] = made.figures.get(name, 0.0) + count
                if not follow:
                    break
                made.write(ok=not lost, running=True)
                time.sleep(every)
        if lost:
            raise typer.Exit(Exit.FAILED)
