"""A driver that is meant to be killed: the journal as a stream into Parquet, in small micro-batches.

    python -m tests.pipeline.kill_driver JOURNAL FOLDER [finish]    (or spark-submit)

`finish` reads to the end of the journal, and prints what has arrived as JSON.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import functions as F

from gateway.pipeline.session import session, submitted


def main(journal: str, folder: str, *, finish: bool) -> None:
    """Run until killed, or finish."""
    master = None if submitted() else "local[2]"
    spark = session("kills", master=master, options={"spark.driver.memory": "512m"})
    options = {
        "startingOffsets": "earliest",
        "columns": "shard,sequence,body",
        "maxOffsetsPerTrigger": "50000" if finish else "700",
        "minPartitions": "2",
    }
    writer = (
        spark.readStream.format("gateway_journal")
        .options(**options)
        .load(journal)
        .writeStream.format("parquet")
        .option("checkpointLocation", f"{folder}/checkpoint")
    )
    if not finish:
        writer.trigger(processingTime="0 seconds").start(f"{folder}/sink").awaitTermination()
    writer.trigger(availableNow=True).start(f"{folder}/sink").awaitTermination()
    found = spark.read.parquet(f"{folder}/sink").agg(
        F.count("*").alias("rows"),
        F.countDistinct("shard", "sequence").alias("distinct"),
        F.min("sequence").alias("first"),
        F.max("sequence").alias("last"),
        F.countDistinct("body").alias("bodies"),
    )
    (row,) = found.collect()
    print(json.dumps(row.asDict()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], finish=len(sys.argv) > 3)
