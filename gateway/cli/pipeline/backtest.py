"""`gateway pipeline backtest`: shows what a changed mapping would do to recorded traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from gateway.cli.exits import Exit
from gateway.cli.options import AsJson, ConfigFile
from gateway.cli.pipeline.common import (
    JournalFolder,
    Master,
    SparkOption,
    check_file,
    progress,
    start_session,
)
from gateway.cli.pipeline.traffic import (
    Archive,
    Begin,
    End,
    Where,
    candidate_of,
    check_span,
    mappings_of,
    recorded_in,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from gateway.mapping.loader import Mapping
    from gateway.pipeline.jobs.backtest import Report
    from gateway.pipeline.traffic.fates import CandidateMapping
    from gateway.pipeline.traffic.verdicts import DeliveryVerdict

app = typer.Typer()


@app.command()
def backtest(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Mapping file of the candidate; default: those of the configuration; may repeat."
        ),
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Mapping file to compare with, instead of the recorded results; may repeat."),
    ] = None,
    journal: JournalFolder = None,
    archive: Archive = None,
    begin: Begin = None,
    end: End = None,
    where: Where = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="VERDICT", help="Difference to permit; an unknown one prints the list; may repeat."
        ),
    ] = None,
    tests: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Mapping file to write: the candidate with tests from recorded messages."
        ),
    ] = None,
    tests_per_route: Annotated[
        int, typer.Option(min=1, max=100, help="Maximum number of tests for each route, with --tests.")
    ] = 2,
    config: ConfigFile = None,
    master: Master = None,
    conf: SparkOption = None,
    as_json: AsJson = False,
) -> None:
    """Route recorded messages by a candidate mapping, and print the differences.

    Exit code 1 if there are differences that --allow does not permit.
    """
    mappings = mappings_of(files or [], config)
    if tests is not None and len(mappings) != 1:
        raise typer.BadParameter("--tests needs exactly one mapping file")
    check_file(tests, "--tests")
    check_span(begin, end)
    spark = start_session("backtest", master, conf, archive=archive)
    from gateway.pipeline.failures import convert_spark_errors
    from gateway.pipeline.jobs import backtest as job
    from gateway.pipeline.progress import progress as watched
    from gateway.pipeline.traffic.loader import Recording, RowSelection, traffic

    allowed = _verdicts(allow or [])
    candidate = candidate_of(mappings, config)
    reference = candidate_of(mappings_of(against, config), config) if against else None
    folder = recorded_in(journal, archive, config)
    with convert_spark_errors(), watched(spark, "backtest", progress):
        recording = Recording(spark, folder, RowSelection(begin, end, where), archive)
        samples = tests_per_route if tests is not None else 0
        report = job.backtest(recording, candidate, reference, samples=samples)
        _print(report, as_json)
        if tests is not None:
            every = traffic(spark, folder, _every(), RowSelection(), archive=archive)
            _write_tests(tests, mappings[0], candidate, every, report)
    if report.unexpected(allowed):
        raise typer.Exit(Exit.FAILED)


def _verdicts(words: list[str]) -> list[DeliveryVerdict]:
    from gateway.pipeline.traffic.verdicts import DeliveryVerdict

    by_value = {verdict.value: verdict for verdict in DeliveryVerdict}
    if unknown := set(words) - set(by_value):
        raise typer.BadParameter(f"--allow: must be one of {', '.join(by_value)}, not {', '.join(unknown)}")
    return [by_value[word] for word in words]


def _every() -> list[str]:
    from gateway.pipeline.columns import BY_NAME

    return [name for name in BY_NAME if name != "headers"]


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(orjson.dumps(report.as_json()))
        return
    from gateway.pipeline.jobs.backtest import show

    for finding in report.sorted():
        typer.echo("\n".join(show(finding)))
    typer.echo(f"{report.messages} messages, {report.changed} with another result")


def _write_tests(
    file: Path, mapping: Mapping, candidate: CandidateMapping, rows: DataFrame, report: Report
) -> None:
    from gateway.pipeline.traffic.cases import with_tests
    from gateway.pipeline.traffic.loader import rows_at

    places = [place for some in report.samples.values() for place in some]
    found = rows_at(rows, places)
    made = with_tests(mapping, Path(mapping.file).read_text(encoding="utf-8"), candidate, found)
    file.write_text(made.text, encoding="utf-8")
    progress(f"{made.tests} tests written to {file}; {made.left_out} messages cannot be expressed as a test")
