"""Spark sessions, and how the gateway's formats get into one.

On a laptop `session` starts Spark itself; under spark-submit it takes what was submitted. A session of
somebody else's becomes ours by `register`. What has to be installed is looked at first, for Spark's own
messages about a missing Java do not say what to do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from gateway.errors import PipelineError

FORMATS: Final[tuple[str, ...]] = (
    "gateway.pipeline.journal.source:JournalSource",
    "gateway.pipeline.live.source:MqttSource",
    "gateway.pipeline.live.source:AmqpSource",
    "gateway.pipeline.live.source:FastSource",
    "gateway.pipeline.live.sink:PublishSource",
)
"""The data sources, `module:class`; a class's name() is its format."""

JAVA_MIN: Final = 17
OPTIONS: Final = {
    # Without it Spark refuses a source that takes filters, rather than not to push them.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
}
"""What every session of ours has; these may be set in a running session."""

STARTING: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "8",
}
"""What a session has besides when it is started here, and not submitted; the caller's options win."""


def submitted() -> bool:
    """Whether spark-submit started this process; it decides the master and the rest then."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def session(
    name: str, *, master: str | None = None, options: Mapping[str, str] | None = None
) -> SparkSession:
    """The session of this process with the gateway's formats, started when there is none.

    `name` is shown in Spark's pages; `master`: for instance `local[2]`; None: what was submitted, else all
    cores of this machine. Raises PipelineError when Java is missing.
    """
    chosen = dict(OPTIONS)
    builder = SparkSession.builder.appName(name)
    if not submitted():
        java()
        _let_workers_import()
        builder = builder.master(master or "local[*]")
        chosen |= STARTING
        chosen["spark.driver.host"] = "127.0.0.1"
    elif master is not None:
        builder = builder.master(master)
    for key, value in (chosen | dict(options or {})).items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return register(spark)


def register(spark: SparkSession) -> SparkSession:
    """Give a session the gateway's formats. Repeating it does no harm."""
    for key, value in OPTIONS.items():
        spark.conf.set(key, value)
    for place in FORMATS:
        module, _, name = place.partition(":")
        spark.dataSource.register(getattr(import_module(module), name))
    return spark


def java() -> str:
    """The Java program that Spark will start. Raises PipelineError: there is none, or it is too old."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    wanted = f"Spark needs Java {JAVA_MIN} or newer"
    advice = "install it (Debian: apt-get install default-jre-headless) or set JAVA_HOME"
    if found is None or not os.access(found, os.X_OK):
        where = f"{found} is no program" if found else "there is no java in PATH"
        raise PipelineError(f"{wanted}, and {where}; {advice}")
    done = subprocess.run((found, "-version"), capture_output=True, text=True, check=False)
    version = done.stderr.partition('"')[2].partition('"')[0]
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < JAVA_MIN:
        raise PipelineError(f"{wanted}, and {found} is of version {version or 'unknown'}; {advice}")
    return found


def _let_workers_import() -> None:
    """Spark's Python workers on this machine run this interpreter and find this very gateway."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spec = find_spec("gateway")
    assert spec is not None
    assert spec.origin is not None
    root = str(Path(spec.origin).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
