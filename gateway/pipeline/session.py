"""Spark sessions with the gateway's data sources.

On a laptop `session` starts Spark itself; under spark-submit it uses the submitted options; with a master on
another machine it starts a driver here and sends the gateway's code to the executors. `register` adds the
data sources to an existing session and changes nothing else. Java and Python are checked first, because
Spark's own errors do not say what to do.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pyspark
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from gateway.errors import PipelineError
from gateway.pipeline.archive.tables import FORMATS as TABLES
from gateway.pipeline.archive.tables import format_at, is_table_name
from gateway.pipeline.archive.tables import session_options as table_options
from gateway.pipeline.bundle import write_code
from gateway.pipeline.failures import show_causes_in_notebook
from gateway.pipeline.journal.source import JournalSource
from gateway.pipeline.stores import hadoop_in, hadoop_of, place_of

FORMATS: Final[tuple[str, ...]] = (
    "gateway.pipeline.journal.source:JournalSource",
    "gateway.pipeline.live.source:MqttSource",
    "gateway.pipeline.live.source:LiveAmqpSource",
    "gateway.pipeline.live.source:LiveFastSource",
    "gateway.pipeline.live.sink:PublishSource",
)
"""Data sources as `module:class`; the name() of a class is its format."""

JAVA_MIN: Final = 17
OPTIONS: Final = {
    # Without it Spark refuses a source that supports filters.
    "spark.sql.python.filterPushdown.enabled": "true",
}
"""Session options that the data sources need; they may be set in a running session."""

OURS: Final = {
    "spark.sql.session.timeZone": "UTC",
    # Rows of files and rows of the journal's source then reach an aggregate in one generated function. By
    # default Spark 4.2 copies each row of a union, which takes as much CPU as reading three of its columns.
    "spark.sql.codegen.wholeStage.union.enabled": "true",
}
"""Further options of sessions that `session` creates."""

STARTING: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    # Spark merges them to tasks of 64 MiB; with fewer, each would grow with the rows.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "64",
}
"""Further options of sessions that are started here and not submitted; the caller's options take
precedence."""

ALONE: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""Further options if no other machine has to reach the driver."""

PROBE: Final = "import pyspark, gateway.pipeline.journal.source, gateway.pipeline.live.sink"
PROBE_SECS_MAX: Final = 60.0


def submitted() -> bool:
    """Return True if spark-submit started this process, so that its options determine the master."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def session(
    name: str,
    *,
    master: str | None = None,
    options: Mapping[str, str] | None = None,
    formats: Iterable[str] = (),
    archive: str | None = None,
) -> SparkSession:
    """Return the Spark session of this process with the gateway's data sources; start one if there is none.

    `name` is shown in Spark's pages. `master` is for instance `local[2]`; None means that of spark-submit, or
    else all cores of this machine. `options` are session options. `formats` are the table formats that the
    session must support, in addition to that of `archive` if it is a table. Their packages are downloaded
    unless the job is submitted or jars are named. Raises PipelineError if Java is missing, or the archive's
    store is unreachable.
    """
    chosen = OPTIONS | OURS
    builder = SparkSession.builder.appName(name)
    user_options = dict(options or {})
    table_formats = {one for one in formats if one in TABLES}
    fresh = not submitted() and SparkContext._active_spark_context is None
    if archive is not None and fresh and not is_table_name(archive):
        found = format_at(place_of(archive, hadoop_in(user_options)))
        table_formats |= set() if found is None else {found.name}
    chosen |= table_options(table_formats, pyspark.__version__, user_options, fetch=fresh)
    here = not submitted() and is_local(master)
    if not submitted():
        java()
        chosen |= STARTING
        builder = builder.master(master or "local[*]")
        if here:
            _set_worker_path()
            chosen |= ALONE
    elif master is not None:
        builder = builder.master(master)
    for key, value in (chosen | user_options).items():
        builder = builder.config(key, value)
    spark = _started(builder, fetched=(chosen | user_options).get("spark.jars.packages"))
    spark.sparkContext.setLogLevel("ERROR")
    if not submitted() and not here:
        _send_code(spark)
    return register(spark)


def _started(builder: SparkSession.Builder, *, fetched: str | None) -> SparkSession:
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        advice = "; see its output for the reason"
        if fetched is not None:
            advice += f". It was to fetch {fetched}: where that is not reached, name the jars with spark.jars"
        raise PipelineError(f"Spark did not start{advice}") from error


def is_local(master: str | None) -> bool:
    """Return True if a session with the master `master` runs in one Java process on this machine."""
    return master is None or master.partition("[")[0] == "local"


def register(spark: SparkSession) -> SparkSession:
    """Register the gateway's data sources in a session, and return the session.

    Calling this function again does no harm. Only the few session options that the sources need are set; the
    time zone and all other options are not changed. Raises PipelineError if the Python of Spark's workers
    cannot import the gateway.
    """
    _check_workers(spark)
    for key, value in OPTIONS.items():
        spark.conf.set(key, value)
    hadoop = hadoop_of(spark)
    with _active(spark):
        for place in FORMATS:
            module, _, name = place.partition(":")
            found = getattr(import_module(module), name)
            spark.dataSource.register(found.of(hadoop) if found is JournalSource else found)
    show_causes_in_notebook()
    return spark


@contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make `spark` the active session for the duration of the block.

    Spark checks in the active session if a format is already registered. After `newSession()`, the active
    session can be another one, in which the format exists.
    """
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # Spark Connect: each client has a session of its own at the server.
        yield
        return
    session_class = SparkSession._get_j_spark_session_class(jvm)
    before = session_class.getActiveSession()
    session_class.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            session_class.setActiveSession(before.get())
        else:
            session_class.clearActiveSession()


def _send_code(spark: SparkSession) -> None:
    """Send the gateway's code to Spark's executors. Their Python must have the gateway's dependencies."""
    spark.sparkContext.addPyFile(str(_code()))


@cache
def _code() -> Path:
    """Write a zip file with the gateway's code, and return its path.

    The file is kept until this process ends, because executors may start at any time and need it.
    """
    folder = tempfile.mkdtemp(prefix="gateway-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_code(Path(folder))


def _check_workers(spark: SparkSession) -> None:
    """Raise PipelineError if the Python of Spark's workers cannot import the gateway.

    Spark itself would report this with a traceback of forty lines.
    """
    context = getattr(spark, "_sc", None)
    if context is None:
        return  # Spark Connect: the server has the Python.
    program = context.pythonExec
    found = shutil.which(program)
    if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return
    wrong = _unusable_reason(found, program)
    if wrong is not None:
        raise PipelineError(
            f"Spark's workers would run {program}, and {wrong}: activate the environment of the gateway"
            f" before Spark is started, or set PYSPARK_PYTHON={sys.executable} (on a cluster: a Python that"
            " every machine has under that name)"
        )


@cache
def _unusable_reason(found: str | None, program: str) -> str | None:
    """Return why a Python program cannot run Spark's workers, or None if it can.

    `found` is the path of the program, or None if there is no such program.
    """
    if found is None:
        return "no such program on this machine"
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.origin is not None
    shipped = [path for path in sys.path if path.endswith((".zip", ".egg", ".jar"))]  # Added by --py-files.
    shipped += map(str, Path(spark.origin).parent.glob("python/lib/*.zip"))  # As Spark does.
    paths = os.pathsep.join(filter(None, (*shipped, os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            (found, "-c", PROBE),
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=PROBE_SECS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found} does not run: {error}"
    if not done.returncode:
        return None
    last_line = done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}"
    return f"{found} lacks a dependency ({last_line})"


def java() -> str:
    """Return the Java program that Spark will start. Raises PipelineError if it is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    requirement = f"Spark needs Java {JAVA_MIN} or newer"
    advice = "install it (Debian: apt-get install default-jre-headless) or set JAVA_HOME"
    if found is None or not os.access(found, os.X_OK):
        where = f"{found} is not a program" if found else "java is not in PATH"
        raise PipelineError(f"{requirement}, but {where}; {advice}")
    done = subprocess.run((found, "-version"), capture_output=True, text=True, check=False)
    version = done.stderr.partition('"')[2].partition('"')[0]
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < JAVA_MIN:
        raise PipelineError(f"{requirement}, but {found} has version {version or 'unknown'}; {advice}")
    return found


def _set_worker_path() -> None:
    """Set environment variables so that Spark's Python workers on this machine can import the gateway.

    The workers then use the interpreter and the gateway of this process.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spec = find_spec("gateway")
    assert spec is not None
    assert spec.origin is not None
    root = str(Path(spec.origin).parents[1])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, paths)])
