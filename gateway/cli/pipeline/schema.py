"""`gateway pipeline schema`: shows the messages of a route as a Spark table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.options import AsJson, ConfigFile
from gateway.cli.pipeline.common import JournalFolder, Master, SparkOption, progress, start_session
from gateway.cli.pipeline.traffic import (
    Archive,
    Begin,
    End,
    MappingOption,
    Where,
    candidate_of,
    check_span,
    mappings_of,
    recorded_in,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

    from gateway.pipeline.traffic.fates import CandidateMapping

app = typer.Typer()


@app.command()
def schema(
    route: Annotated[str, typer.Argument(help="Name of a route in the mapping.")],
    files: MappingOption = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="JSON Schema of the bodies; default: inferred from bodies.", exists=True, dir_okay=False
        ),
    ] = None,
    journal: JournalFolder = None,
    archive: Archive = None,
    begin: Begin = None,
    end: End = None,
    where: Where = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Also print the last value of this number of addresses.")
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder for the last value of each address, as Parquet."),
    ] = None,
    config: ConfigFile = None,
    master: Master = None,
    conf: SparkOption = None,
    as_json: AsJson = False,
) -> None:
    """Print the schema of a route's messages, with captures as columns and a JSON body as a struct."""
    check_span(begin, end)
    mappings = mappings_of(files or [], config)
    spark = start_session("schema", master, conf, archive=archive)
    from gateway.pipeline.failures import convert_spark_errors
    from gateway.pipeline.jobs import schema as job
    from gateway.pipeline.progress import progress as watched
    from gateway.pipeline.traffic.loader import RowSelection, traffic

    candidate = candidate_of(mappings, config)
    job.route_of(candidate, route)
    with convert_spark_errors(), watched(spark, "schema", progress):
        rows = traffic(
            spark,
            recorded_in(journal, archive, config),
            job.COLUMNS,
            RowSelection(begin, end, where),
            archive=archive,
        )
        table = job.table(rows, candidate, route, _body(json_schema, rows, candidate, route))
        typer.echo(table.schema.json() if as_json else _ddl(table))
        newest = job.last_values(table)
        if out is not None:
            from gateway.pipeline.stores import check_unoccupied, hadoop_of, place_of, spark_writes

            place = check_unoccupied(place_of(out, hadoop_of(spark)))
            newest.write.mode("overwrite").parquet(spark_writes(spark, place))
        if last is not None:
            words = [f"`{name}`" for name in newest.columns]
            lines = newest.orderBy("address").limit(last).selectExpr(f"to_json(struct({', '.join(words)}))")
            for (text,) in lines.collect():
                typer.echo(text)


def _body(file: Path | None, rows: DataFrame, candidate: CandidateMapping, route: str) -> DataType | None:
    from gateway.pipeline.jobs import schema as job

    if file is not None:
        return job.from_json_schema(file.read_text(encoding="utf-8"))
    return job.infer_type(job.table(rows, candidate, route, None))


def _ddl(table: DataFrame) -> str:
    return ",\n".join(f"{field.name} {field.dataType.simpleString()}" for field in table.schema.fields)
