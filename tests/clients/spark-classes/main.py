"""Run what most tests of the pipeline have Spark do, so that Java archives the classes which it loads."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import functions as F

from gateway.pipeline.jobs import archive
from gateway.pipeline.jobs.reconcile import COLUMNS, reconcile
from gateway.pipeline.session import session
from gateway.pipeline.traffic.loader import RowSelection, traffic
from tests.pipeline.journals import written


def main(folder: Path) -> None:
    """Read, archive, reconcile, stream and group the rows of one small journal below `folder`."""
    journal = str(written(folder / "journal", 20))
    spark = session("classes", master="local[2]", options={"spark.sql.shuffle.partitions": "2"})
    spark.range(3).selectExpr("id % 2 AS key").groupBy("key").count().orderBy("key").collect()
    spark.createDataFrame([("m-0",)], "message_id string").write.parquet(str(folder / "rows"))
    received = spark.read.parquet(str(folder / "rows"))
    reconcile(traffic(spark, journal, COLUMNS, RowSelection()), received)
    archive.run(spark, journal, str(folder / "archive"))
    spark.read.parquet(str(folder / "archive")).where("sequence > 3").count()
    stream = spark.readStream.format("gateway_journal").load(journal).withWatermark("received", "1 minute")
    counts = stream.groupBy(F.window("received", "1 second"), "route").count()
    writer = counts.writeStream.format("parquet").trigger(availableNow=True)
    writer.option("checkpointLocation", str(folder / "checkpoint")).start(
        str(folder / "counts")
    ).awaitTermination()
    java = spark.sparkContext._gateway.proc
    spark.stop()
    java.stdin.close()
    java.wait()  # It writes the archive.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
