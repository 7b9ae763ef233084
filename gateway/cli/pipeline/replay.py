"""`gateway pipeline replay`: publishes recorded messages again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.exits import Exit
from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import (
    JournalFolder,
    Master,
    SparkOption,
    SummaryFile,
    check_file,
    progress,
    start_session,
)
from gateway.cli.pipeline.traffic import Archive, Begin, End, Where, check_span, recorded_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from gateway.clients.wire import ConnectionOptions
    from gateway.model.address import Address
    from gateway.pipeline.jobs.replay import Progress, ReplayResult, ReplaySpeed

app = typer.Typer()


@app.command()
def replay(
    url: Annotated[str, typer.Argument(help="URL of the broker to publish to, such as amqp://host:port")],
    journal: JournalFolder = None,
    archive: Archive = None,
    begin: Begin = None,
    end: End = None,
    where: Where = None,
    speed: Annotated[
        float | None, typer.Option(min=0.001, help="Factor of the recorded speed; default: unlimited.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Messages per second.")] = None,
    at_target: Annotated[
        bool,
        typer.Option(
            "--at-target", help="Publish each message to its recorded target instead of its original address."
        ),
    ] = False,
    topic: Annotated[str | None, typer.Option(help="MQTT topic for all messages.")] = None,
    exchange: Annotated[str | None, typer.Option(help="AMQP exchange for all messages.")] = None,
    routing_key: Annotated[str, typer.Option(help="Routing key, with --exchange.")] = "",
    queue: Annotated[str | None, typer.Option(help="AMQP queue for all messages.")] = None,
    service: Annotated[str, typer.Option(help="AMQP/Fast service: queue, topic or peer.")] = "topic",
    destination: Annotated[str | None, typer.Option(help="AMQP/Fast destination for all messages.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File in which the position is stored; a later run with this file continues there.",
        ),
    ] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(help="File with the password of the user in the URL.", exists=True, dir_okay=False),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for a response.", min=0.1)] = 30.0,
    ca_file: Annotated[str | None, typer.Option(help="PEM file of trusted certificate authorities.")] = None,
    config: ConfigFile = None,
    summary: SummaryFile = None,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Publish recorded messages again, in order, with unchanged ids.

    Exit code 1 if some were refused, or their bodies are not in the journal.
    """
    from gateway.pipeline.run_summary import write_summary

    with write_summary("replay", summary) as made:
        if speed is not None and rate is not None:
            raise typer.BadParameter("--speed cannot be combined with --rate")
        check_span(begin, end)
        check_file(resume, "--resume", folder_made=True)
        access = _access(url, password_file, timeout, ca_file)
        protocol = access.target.protocol
        to = _to(protocol, topic, exchange, routing_key, queue, service, destination)
        spark = start_session("replay", master, conf, archive=archive)
        from gateway.pipeline.failures import convert_spark_errors
        from gateway.pipeline.jobs import replay as job
        from gateway.pipeline.traffic.loader import RowSelection, traffic

        marks = job.Progress(resume)
        folder = recorded_in(journal, archive, config)
        spoken = None
        if to is None:  # an address of its own that this broker's protocol has
            spoken = f"{'target' if at_target else 'source'}_protocol = '{protocol}'"
        with convert_spark_errors(), marks.locked():
            rows = traffic(spark, folder, job.COLUMNS, RowSelection(begin, end, where), archive=archive)
            chosen = job.select_rows(rows, where=spoken, after=marks.read())
            progress("sorting")
            done = _send_rows(access, chosen, job.ReplaySpeed(speed, rate), marks, to, at_target)
        made.figures |= {"sent": done.sent, "rejected": done.refused, "rows_missing": done.incomplete}
        typer.echo(
            f"{done.sent} messages sent, {done.refused} refused, {done.incomplete} skipped because"
            " the journal has only part of them"
        )
        if done.refused or done.incomplete:
            raise typer.Exit(Exit.FAILED)


def _send_rows(
    access: ConnectionOptions,
    rows: DataFrame,
    pace: ReplaySpeed,
    marks: Progress,
    to: Address | None,
    at_target: bool,
) -> ReplayResult:
    """Publish the recorded messages in `rows`, and return the numbers of sent and refused ones."""
    from gateway.clients.wire import connect
    from gateway.pipeline.jobs.replay import Replay

    client = connect(access)
    try:
        sender = Replay(client, pace, marks, to=to, at_target=at_target, tell=progress)
        done = sender.send(rows.toLocalIterator(prefetchPartitions=True))
    except BaseException:
        client.close_abruptly()
        raise
    client.close()
    return done


def _access(url: str, password_file: Path | None, timeout: float, ca_file: str | None) -> ConnectionOptions:
    from gateway.cli.publish_subscribe import target_of
    from gateway.clients.wire import ConnectionOptions
    from gateway.settings.endpoints import secret_from

    target = target_of(url)
    if password_file is not None:
        target = target._replace(password=secret_from(password_file))
    return ConnectionOptions(target, timeout, ca_file)


def _to(
    protocol: str,
    topic: str | None,
    exchange: str | None,
    routing_key: str,
    queue: str | None,
    service: str,
    destination: str | None,
) -> Address | None:
    """Return the address in the options to which all messages are published.

    Return None if there is none, so that each message is published to its own address. Raises BadParameter.
    """
    from gateway.model.dialect import NameRefused
    from gateway.protocols import DIALECT_OF_WORD, DIALECTS

    stated = {"topic": topic, "exchange": exchange, "queue": queue, "destination": destination}
    if queue is not None:
        stated["exchange"] = None
    elif exchange is not None:
        stated["routing_key"] = routing_key
    if destination is not None:
        stated["service"] = service
    address_options = {word: text for word, text in stated.items() if text is not None}
    others = [
        DIALECT_OF_WORD[word].name for word in address_options if DIALECT_OF_WORD[word].name != protocol
    ]
    if others:
        raise typer.BadParameter(f"the URL is for {protocol}, but the address options are for {others[0]}")
    if not address_options:
        return None
    try:
        return DIALECTS[protocol].published(address_options)[0]
    except NameRefused as error:
        raise typer.BadParameter(str(error)) from error
