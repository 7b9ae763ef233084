"""`gateway pipeline lineage`: shows which mapping files routed the messages in journal rows."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.options import ConfigFile
from gateway.cli.pipeline.common import (
    JournalFolder,
    Master,
    SparkOption,
    journal_of,
    progress,
    start_session,
)
from gateway.cli.pipeline.traffic import Archive, Begin, End, Where, check_span, recorded_in
from gateway.cli.tables import table

app = typer.Typer()
WORDS = ("route", "version", "file", "first", "last", "rows")


@app.command()
def lineage(
    journal: JournalFolder = None,
    archive: Archive = None,
    begin: Begin = None,
    end: End = None,
    where: Where = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Folder for the result as Parquet, with the text of each file."),
    ] = None,
    config: ConfigFile = None,
    master: Master = None,
    conf: SparkOption = None,
) -> None:
    """Print for each route which versions of its mapping file routed the rows, and when.

    The versions are stored beside the journal. With --archive the rows are read from the archive.
    """
    check_span(begin, end)
    spark = start_session("lineage", master, conf, archive=archive)
    from gateway.pipeline.failures import convert_spark_errors
    from gateway.pipeline.jobs import lineage as job
    from gateway.pipeline.progress import progress as watched
    from gateway.pipeline.stores import check_unoccupied, hadoop_of, place_of, spark_writes
    from gateway.pipeline.traffic.loader import RowSelection, traffic

    with convert_spark_errors(), watched(spark, "lineage", progress):
        hadoop = hadoop_of(spark)
        folder = journal_of(journal, config)
        rows = traffic(
            spark,
            recorded_in(journal, archive, config),
            ("route", "mapping_version"),
            RowSelection(begin, end, where),
            archive=archive,
        )
        found = job.lineage(rows, job.mappings(spark, place_of(folder, hadoop))).persist()
        if to is not None:
            found.write.mode("overwrite").parquet(spark_writes(spark, check_unoccupied(place_of(to, hadoop))))
        table_rows = [
            tuple("not stored" if row[word] is None else str(row[word]) for word in WORDS)
            for row in found.select(*WORDS).toLocalIterator()
        ]
        found.unpersist()
    typer.echo("\n".join(table(table_rows, WORDS, right=("rows",))) if table_rows else "no row has a route")
