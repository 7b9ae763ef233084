"""`gateway pipeline table`: a route's messages as a table with the columns of their JSON Schema."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.exits import Exit
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
    tolerance_of,
)
from gateway.cli.pipeline.traffic import MappingOption, candidate_of, mappings_of
from gateway.errors import PipelineError

if TYPE_CHECKING:
    from gateway.pipeline.jobs.encodings import BodyEncoding
    from gateway.pipeline.jobs.registry import Registry
    from gateway.pipeline.traffic.fates import CandidateMapping

app = typer.Typer()


@app.command()
def table(
    route: Annotated[str, typer.Argument(help="Name of a route in the mapping.")],
    to: Annotated[str, typer.Option(metavar="FOLDER", help="Folder, URI or name of the table.")],
    rejected: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Table for bodies that do not fit; default: TO_rejected."),
    ] = None,
    format_: Annotated[
        str, typer.Option("--format", help="Format: parquet; delta or iceberg for a table.")
    ] = "parquet",
    files: MappingOption = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="JSON Schema of the bodies; default: the route's body_schema.")
    ] = None,
    event_time: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD",
            help="Field of the body with the event time, such as sent.at, or sent.at:s if it counts seconds.",
        ),
    ] = None,
    follow: Follow = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder for the read position, for a named table."),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[:MESSAGE]",
            help="Avro schema of all bodies (reading.avsc), or Protobuf descriptor set and message"
            " (reading.desc:plant.Reading).",
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Schema registry of bodies in Confluent's wire format, such as http://user@registry:8081.",
        ),
    ] = None,
    registry_password_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with the password of the registry's user."),
    ] = None,
    registry_ca_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="PEM file of the authorities of the registry's certificate."
        ),
    ] = None,
    tolerance: Annotated[
        str,
        typer.Option(
            metavar="N|N%",
            help="Tolerated bodies that do not fit: a number, or a percentage of all messages.",
        ),
    ] = "0",
    journal: JournalFolder = None,
    config: ConfigFile = None,
    summary: SummaryFile = None,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Append new messages of a route to its table, with captures and the fields of bodies as columns.

    Each message is inserted once. Bodies that do not fit their JSON Schema go to a second table with the
    reason. Exit code 1 if more do not fit than --tolerance permits.
    """
    from gateway.pipeline.run_summary import watch, write_summary

    with write_summary("table", summary) as made:
        mappings = mappings_of(files or [], config)
        allowed = tolerance_of(tolerance)
        spark = start_session("table", master, conf, formats=[format_])
        from gateway.pipeline.failures import convert_spark_errors
        from gateway.pipeline.jobs import table as job
        from gateway.pipeline.jobs.bodies import EventTime, schema_of

        candidate = candidate_of(mappings, config)
        counted = {"rows": 0, "rejected": 0, "rescued": 0}

        def count(done: job.BatchCounts) -> None:
            counted["rows"] += done.fitting
            counted["rejected"] += done.rejected
            counted["rescued"] += done.rescued
            made.figures |= counted

        with convert_spark_errors():
            query = job.follow(
                spark,
                journal_of(journal, config),
                candidate,
                route,
                schema_of(json_schema or _file(candidate, route)),
                to=to,
                rejected=rejected or f"{to.rstrip('/')}_rejected",
                format_=format_,
                event_time=None if event_time is None else EventTime.read(event_time),
                checkpoint=checkpoint,
                encoding=_encoding(decode, registry, registry_password_file, registry_ca_file),
                available_now=not follow,
                count=count,
                tell=progress,
            )
            try:
                watch(query, made, follow=follow)
            except KeyboardInterrupt:
                query.stop()
        made.figures |= counted
        rows, wrong = counted["rows"], counted["rejected"]
        typer.echo(
            f"{rows} messages in the table, {counted['rescued']} of them with rescued values;"
            f" {wrong} do not fit"
        )
        if not allowed.allows(wrong, rows + wrong):
            allowing = f"--tolerance {tolerance}: exit code {Exit.FAILED.value}"
            typer.echo(f"{wrong} of {rows + wrong} messages do not fit, more than {allowing}", err=True)
            raise typer.Exit(Exit.FAILED)


def _encoding(
    decode: str | None, url: str | None, password_file: Path | None, ca_file: Path | None
) -> Registry | BodyEncoding | None:
    """Return the encoding of bodies that the options --decode or --registry define, or None without them.

    `url` is the URL of the registry. Raises PipelineError if the registry does not respond or a file cannot
    be used, and typer.BadParameter if both options are given.
    """
    from gateway.pipeline.jobs.encodings import BodyEncoding
    from gateway.pipeline.jobs.registry import registry_of
    from gateway.settings.endpoints import secret_from

    if decode is not None:
        if url is not None:
            raise typer.BadParameter("give --decode or --registry, not both")
        return BodyEncoding.read(decode)
    if url is None:
        return None
    password = None if password_file is None else secret_from(password_file)
    return registry_of(url, password, None if ca_file is None else str(ca_file.absolute())).checked()


def _file(candidate: CandidateMapping, name: str) -> Path:
    """Return the path of the JSON Schema in the `body_schema` of the route `name`.

    Raises PipelineError if the route has none.
    """
    from gateway.pipeline.jobs.schema import route_of

    route = route_of(candidate, name)
    if route.rule.body_schema is None:
        raise PipelineError(f"route {name} has no body_schema; give --json-schema FILE")
    return Path(route.file).parent / route.rule.body_schema
