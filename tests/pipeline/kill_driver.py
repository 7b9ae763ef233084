"""A driver that is meant to be killed: the journal as a stream into a sink, in small micro-batches.

    python -m tests.pipeline.kill_driver JOURNAL FOLDER [finish] [--format FORMAT] [--jars JARS]

Or by spark-submit. `finish` reads to the end of the journal, and prints what has arrived as JSON.
"""

from __future__ import annotations

import argparse
import json

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from gateway.pipeline.session import session, submitted


def main(given: argparse.Namespace) -> None:
    """Run until killed, or finish."""
    master = None if submitted() else "local[2]"
    own = {"spark.driver.memory": "512m"} | ({"spark.jars": given.jars} if given.jars else {})
    spark = session("kills", master=master, options=own, formats=[given.format])
    options = {
        "startingOffsets": "earliest",
        "columns": "shard,sequence,body",
        "maxOffsetsPerTrigger": "50000" if given.finish else "700",
        "minPartitions": "2",
    }
    writer = (
        spark.readStream.format("gateway_journal")
        .options(**options)
        .load(given.journal)
        .writeStream.format(given.format)
        .option("checkpointLocation", f"{given.folder}/checkpoint")
    )
    sink = f"{given.folder}/sink"
    if not given.finish:
        writer.trigger(processingTime="0 seconds").start(sink).awaitTermination()
    writer.trigger(availableNow=True).start(sink).awaitTermination()
    print(json.dumps(arrived(spark.read.format(given.format).load(sink))))


def arrived(rows: DataFrame) -> dict[str, int]:
    """How many rows there are, and how many different ones."""
    found = rows.agg(
        F.count("*").alias("rows"),
        F.countDistinct("shard", "sequence").alias("distinct"),
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.countDistinct("body").alias("bodies"),
    )
    (row,) = found.collect()
    return dict(row.asDict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("journal")
    parser.add_argument("folder")
    parser.add_argument("finish", nargs="?", choices=["finish"])
    parser.add_argument("--format", default="parquet")
    parser.add_argument("--jars", default="")
    main(parser.parse_args())
