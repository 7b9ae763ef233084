"""Job `lineage`: list the mapping files by which the rows of a journal were routed.

A row has the version of its mapping file, which is the beginning of the digest of its text. The gateway
stores each such text beside the journal, and `ship` copies them.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from gateway.pipeline.stores import StoreFolder
from gateway.store.journal.mappings import folders_of, versions
from gateway.store.journal.reader import JournalReader

VERSIONS = "version string, file string, text string"


def mappings(spark: SparkSession, journal: StoreFolder) -> DataFrame:
    """Return the stored mapping files of a journal: version, file name and text.

    A row's `mapping_version` is equal to `version`.
    """
    found = {}
    root = journal.path()
    shards = JournalReader(root).shards() if root.is_dir() else ()
    for folder in folders_of(root, shards):
        for one in versions(folder):
            with one.path.open("rb") as file:
                found[one.version, one.name] = file.read(one.path.stat().st_size).decode()
    return spark.createDataFrame([(*named, text) for named, text in found.items()], VERSIONS)


def lineage(rows: DataFrame, files: DataFrame) -> DataFrame:
    """Return one row for each route and mapping version in `rows`, which have the journal's columns.

    The row has the number of journal rows, and the first and last time of receipt. It also has the name and
    text of the mapping file, if they are in `files`.
    """
    used = rows.where("route <> ''").groupBy("route", F.col("mapping_version").alias("version"))
    counted = used.agg(
        F.count("*").alias("rows"), F.min("received").alias("first"), F.max("received").alias("last")
    )
    versions = F.broadcast(files)
    found = counted.join(versions, "version", "left").orderBy("first", "route")
    return found.select("route", "version", "file", "first", "last", "rows", "text")
