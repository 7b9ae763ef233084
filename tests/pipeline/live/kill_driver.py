"""A driver that is meant to be killed: a queue of a broker as a stream into Parquet, in small micro-batches.

python -m tests.pipeline.live.kill_driver URL PASSWORD_FILE QUEUE FOLDER
"""

from __future__ import annotations

import sys

from gateway.pipeline.session import session


def main(url: str, password_file: str, queue: str, folder: str) -> None:
    """Run until killed."""
    spark = session("kills", master="local[2]", options={"spark.driver.memory": "512m"})
    given = {"url": url, "passwordFile": password_file, "queues": queue, "maxMessagesPerTrigger": "10"}
    rows = spark.readStream.format("gateway_amqp").options(**given).load()
    writer = rows.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    writer.trigger(processingTime="0 seconds").start(f"{folder}/rows").awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
