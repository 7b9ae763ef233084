"""`gateway pipeline reconcile`: finds accepted messages that are missing or duplicated in the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile, TokenFile, call_gateway
from gateway.cli.pipeline.common import (
    JournalFolder,
    Master,
    SparkOption,
    SummaryFile,
    progress,
    start_session,
    tolerance_of,
)
from gateway.cli.pipeline.traffic import Archive, Begin, Where, check_span, recorded_in
from gateway.cli.tables import table
from gateway.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from gateway.pipeline.jobs.reconcile import Account

app = typer.Typer()


@app.command()
def reconcile(
    journal: JournalFolder = None,
    archive: Archive = None,
    begin: Begin = None,
    end: Annotated[
        str | None,
        typer.Option(
            "--until",
            metavar="TIME",
            help=(
                "Time before which the checked messages were accepted; their outcomes are searched to"
                " the end of the journal."
            ),
        ),
    ] = None,
    where: Where = None,
    received: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Messages that the consumer received: Parquet with message_id or body, or another journal.",
        ),
    ] = None,
    still: Annotated[
        int,
        typer.Option(min=0, help="Number of messages that the consumer of --received has not received yet."),
    ] = 0,
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="URL of a gateway's HTTP interface, to query its outboxes; may repeat, for each replica.",
        ),
    ] = None,
    token_file: TokenFile = None,
    tolerance: Annotated[
        str,
        typer.Option(
            metavar="N|N%",
            help="Tolerated faults (lost, repeated, unknown or double): a number, or a percentage of "
            "accepted messages.",
        ),
    ] = "0",
    show: Annotated[int, typer.Option(min=0, help="Maximum number of faulty messages to print.")] = 20,
    config: ConfigFile = None,
    summary: SummaryFile = None,
    master: Master = None,
    conf: SparkOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare accepted messages with delivered, dead-lettered and waiting ones; name lost and repeated ones.

    Exit code 1 if faults exceed --tolerance, or rows of the journal or archive itself are missing.
    """
    from gateway.pipeline.run_summary import write_summary

    with write_summary("reconcile", summary) as made:
        allowed = tolerance_of(tolerance)
        check_span(begin, end)
        spark = start_session("reconcile", master, conf, archive=archive)
        from gateway.pipeline.failures import convert_spark_errors
        from gateway.pipeline.jobs import reconcile as job
        from gateway.pipeline.progress import progress as watched
        from gateway.pipeline.times import moment
        from gateway.pipeline.traffic.loader import RowSelection, traffic

        folder = recorded_in(journal, archive, config)
        requested_at = datetime.now(UTC)
        waiting = _waiting(urls, token_file) if urls else None
        with convert_spark_errors(), watched(spark, "reconcile", progress):

            def read_traffic(span: RowSelection) -> DataFrame:
                return traffic(spark, folder, job.COLUMNS, span, archive=archive)

            account = job.reconcile(
                read_traffic(RowSelection(begin, None, where)),
                None if received is None else _received(spark, received),
                waiting=waiting,
                still=still,
                end=None if end is None else moment(end),
                counted_at=requested_at if urls else None,
                earlier=None if begin is None else lambda: read_traffic(RowSelection(None, begin, where)),
            )
            if folder is None:
                rows = traffic(spark, None, job.ROW, RowSelection(), archive=archive)
                span = (None if text is None else moment(text) for text in (begin, end))
                missing = job.missing_count(rows, *span)
        if folder is not None:
            missing = _missing(spark, folder, begin, end)
        fine = account.is_within(allowed)
        if as_json:
            typer.echo(orjson.dumps(account.as_json() | {"rows_missing": missing, "within_tolerance": fine}))
        else:
            _print(account, missing, show, "archive" if folder is None else "journal")
        made.figures |= {"rows_missing": missing, "messages": account.accepted_count}
        made.figures |= {what: account.totals.get(what, 0) for what in job.FAULTS}
        made.figures[job.WAITING] = account.totals.get(job.WAITING, 0)
        if missing or not fine:
            raise typer.Exit(Exit.FAILED)


def _waiting(urls: Iterable[str], token_file: Path | None) -> dict[str, int]:
    """Return for each route the number of messages that wait in its outboxes at the gateways `urls`.

    All gateways report the same waiting messages for a shared outbox. These are counted once; the messages in
    flight are added for each gateway. Raises PipelineError if a gateway does not know a number at present.
    """
    counts: Counter[str] = Counter()
    common: dict[str, int] = {}
    for url in urls:
        for one in call_gateway(url, token_file, "/api/v1/status")["outboxes"]:
            name, messages = one["route"], one["messages"]
            if messages is None:
                why = one["problem"] or "retry in some seconds"
                raise PipelineError(f"the number of messages that wait for route {name} is unknown: {why}")
            if one["shared"]:
                common[name] = max(messages, common.get(name, 0))
            counts[name] += one["in_flight"] if one["shared"] else messages
    return dict(counts + Counter(common))


def _received(spark: SparkSession, folder: str) -> DataFrame:
    """Return the messages that a consumer has recorded at `folder`, as a table.

    `folder` is a folder or URI with Parquet files, an archive or a journal, or the name of a Spark table.
    """
    from gateway.pipeline.archive.manifest import Archive
    from gateway.pipeline.archive.tables import format_at, is_table_name
    from gateway.pipeline.jobs.archive import read_archive
    from gateway.pipeline.journal.table import read_journal
    from gateway.pipeline.stores import hadoop_of, place_of, spark_reaches
    from gateway.store.journal.reader import JournalReader

    if is_table_name(folder):
        return spark.table(folder)
    place = place_of(folder, hadoop_of(spark))
    found = format_at(place)
    if found is not None:
        return spark.table(found.table(spark, place))
    names = ("message_id", "body", "body_size")
    if Archive(place).manifest().number:
        return read_archive(spark, folder, columns=names)
    if JournalReader(place.path()).is_there():
        return read_journal(spark, folder, {"columns": ",".join(names)})
    return spark.read.parquet(spark_reaches(spark, place))


def _missing(spark: SparkSession, folder: str, begin: str | None, end: str | None) -> int:
    """Return how many rows are missing in a journal between two times.

    Rows are missing if they were not written, or are damaged or deleted.
    """
    from gateway.pipeline.journal.options import microseconds_of
    from gateway.pipeline.stores import hadoop_of, place_of
    from gateway.pipeline.times import moment
    from gateway.store.journal.reader import JournalReader

    reader = JournalReader(place_of(folder, hadoop_of(spark)).path(), skip=True)
    span = [None if text is None else microseconds_of(moment(text)) for text in (begin, end)]
    return sum(reader.missing_count(shard, *span) for shard in reader.shards())


def _print(account: Account, missing: int, show: int, where: str) -> None:
    phases = [(route, phase, rows) for (route, phase), rows in sorted(account.phases.items())]
    if phases:
        typer.echo("\n".join(table(phases, ("route", "phase", "rows"), right=("rows",))))
    for one in account.faulty_messages[:show]:
        name = f" id {one.message_id}" if one.message_id else ""
        times = f" {one.times} times" if one.times > 1 else ""
        typer.echo(f"{one.what}: {one.shard}:{one.sequence} {one.route} {one.address}{name}{times}")
    if len(account.faulty_messages) > show:
        typer.echo(f"and {len(account.faulty_messages) - show} more; --json names them")
    totals = ", ".join(f"{count} {what}" for what, count in sorted(account.totals.items()))
    typer.echo(totals or "no message is lost, no message waits")
    if missing:
        typer.echo(f"{missing} rows are missing in the {where}, so the result is incomplete")
