"""The archive of Spark's classes that `make peers` builds is one that Java accepts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyspark

from tests.clients.builds import NotBuiltError, built
from tests.conftest import missing
from tests.interop.java import QUICK, spark_classes


def test_spark_maps_its_classes_and_does_not_load_them() -> None:
    try:
        built("spark-classes")
    except NotBuiltError as error:
        missing(str(error))
    home = Path(pyspark.__file__).parent
    options = " ".join((*QUICK, *spark_classes(), "-Xlog:class+load:stdout"))
    done = subprocess.run(
        (home / "bin/spark-submit", "--version"),
        env=os.environ | {"SPARK_HOME": str(home), "SPARK_SUBMIT_OPTS": options},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = [line for line in done.stdout.splitlines() if "org.apache.spark.deploy.SparkSubmit " in line]
    assert [line.rpartition("source: ")[2] for line in loaded] == ["shared objects file (top)"], (
        "The archive is of another Java: remove .peers/spark-classes, and run make peers."
    )
