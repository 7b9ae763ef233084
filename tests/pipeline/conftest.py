"""One Spark session for all tests of the pipeline: to start one takes longer than most of them.

Without Java or the extra the tests are skipped, or fail under CI=true.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from gateway.errors import PipelineError
from tests.cli.conftest import run
from tests.clients.builds import NotBuiltError, built
from tests.conftest import missing
from tests.needs import needed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run"]
CHECKPOINTS: Final = "org.apache.spark.sql.execution.streaming.checkpointing"
OPTIONS: Final = {
    # A micro-batch of nothing takes 130 ms with these and 200 ms without; nothing of ours depends on them.
    "spark.sql.streaming.checkpointFileManagerClass": f"{CHECKPOINTS}.FileSystemBasedCheckpointFileManager",
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "2",
    # For its pages, which are off, Spark describes each plan after each of its stages, and in detail.
    "spark.sql.ui.explainMode": "simple",
    "spark.driver.memory": "1g",
    "spark.sql.streaming.stopTimeout": "60s",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.vacuum.parallelDelete.enabled": "false",
}


def tables_of() -> tuple[list[str], str]:
    """The formats of tables that the tests have with this Spark, and which build has their jars."""
    from pyspark import __version__

    return (["delta", "iceberg"], "iceberg") if __version__.startswith("4.1.") else (["delta"], "spark")


@pytest.fixture(scope="session")
@needed("Spark")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session, with the gateway's formats, on two cores."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    own = {"spark.sql.warehouse.dir": str(warehouse)}
    formats, build = tables_of()
    try:  # what needs them asks for them, see `tables`
        own["spark.jars"] = ",".join(map(str, (built(build) / "jars").glob("*.jar")))
    except NotBuiltError:
        formats = []
    try:
        from gateway.pipeline.session import session

        found = session("tests", master="local[2]", options=OPTIONS | own, formats=formats)
    except (ImportError, PipelineError) as error:
        missing(str(error))
        raise
    yield found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # py4j leaves its sockets to the collector
        found.stop()


@pytest.fixture(scope="session")
def streams(spark: SparkSession) -> SparkSession:
    """The session, when its Spark has what the streams of sources in Python need."""
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need Spark 4.2")
    return spark


@pytest.fixture(scope="session")
def tables(spark: SparkSession) -> SparkSession:
    """The session, which has a format of tables and, with the Spark that is pinned, S3."""
    try:
        built(tables_of()[1])
    except NotBuiltError as error:
        missing(str(error))
    return spark


@pytest.fixture(scope="session")
@needed("an S3 server")
def s3(tables: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of an empty bucket that the session reaches."""
    from gateway.pipeline.session import register
    from tests.pipeline.servers import S3

    with S3(tmp_path_factory.mktemp("s3")) as server:
        for name, value in server.options.items():
            tables.conf.set(name, value)
        register(tables)
        yield server.uri


@pytest.fixture(scope="session")
@needed("HDFS")
def hdfs(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URI of a cluster of HDFS."""
    from tests.pipeline.servers import Hdfs

    try:
        jars = built("hdfs") / "jars"
    except NotBuiltError as error:
        missing(str(error))
        raise
    with Hdfs(tmp_path_factory.mktemp("hdfs"), jars) as server:
        yield server.uri


@pytest.fixture
def journal(tmp_path: Path) -> Callable[..., Path]:
    """Writes a journal of numbered messages with the real writer; see tests/pipeline/journals.py."""
    from tests.pipeline.journals import written

    def make(count: int = 10, **also: object) -> Path:
        return written(tmp_path / "journal", count, **also)  # type: ignore[arg-type]

    return make
