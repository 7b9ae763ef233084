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
    "spark.driver.memory": "1g",
    "spark.sql.streaming.stopTimeout": "60s",
}


@pytest.fixture(scope="session")
@needed("Spark")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session, with the gateway's formats, on two cores."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    try:
        from gateway.pipeline.session import session

        found = session(
            "tests", master="local[2]", options=OPTIONS | {"spark.sql.warehouse.dir": str(warehouse)}
        )
    except (ImportError, PipelineError) as error:
        missing(str(error))
        raise
    yield found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # py4j leaves its sockets to the collector
        found.stop()


@pytest.fixture
def journal(tmp_path: Path) -> Callable[..., Path]:
    """Writes a journal of numbered messages with the real writer; see tests/pipeline/journals.py."""
    from tests.pipeline.journals import written

    def make(count: int = 10, **also: object) -> Path:
        return written(tmp_path / "journal", count, **also)  # type: ignore[arg-type]

    return make
