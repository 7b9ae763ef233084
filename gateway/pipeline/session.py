"""Spark sessions, and how the gateway's formats get into one.

On a laptop `session` starts Spark itself; under spark-submit it takes what was submitted; and with a master
of another machine it starts a driver there, and hands the gateway's own code to its executors. A session of
somebody else's gets the formats by `register`, and stays as it is otherwise. What has to be installed is
looked at first, for what Spark says of a missing Java or a wrong Python does not tell what to do.
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
from gateway.pipeline.failures import speak_plainly
from gateway.pipeline.journal.source import JournalSource
from gateway.pipeline.stores import hadoop_of, place_of

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
}
"""What the formats need of a session; it may be set in a running one."""

OURS: Final = {"spark.sql.session.timeZone": "UTC"}
"""What a session of ours has besides."""

STARTING: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    # Spark joins them to what is worth a task, 64 MiB; of fewer each would grow with the rows.
    "spark.sql.adaptive.coalescePartitions.initialPartitionNum": "64",
}
"""What it has when it is started here, and not submitted; the caller's options win."""

ALONE: Final = {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
"""And when nobody on another machine has to reach it."""

PROBE: Final = "import pyspark, gateway.pipeline.journal.source, gateway.pipeline.live.sink"
PROBE_SECS_MAX: Final = 60.0


def submitted() -> bool:
    """Whether spark-submit started this process; it decides the master and the rest then."""
    return "PYSPARK_GATEWAY_PORT" in os.environ


def session(
    name: str,
    *,
    master: str | None = None,
    options: Mapping[str, str] | None = None,
    formats: Iterable[str] = (),
    archive: str | None = None,
) -> SparkSession:
    """The session of this process with the gateway's formats, started when there is none.

    `name` is shown in Spark's pages; `master`: for instance `local[2]`; None: what was submitted, else all
    cores of this machine; `formats`: of tables that are wanted, and that of `archive`, if it is one. Their
    packages are fetched where nothing is submitted and no jars are named. Raises PipelineError: Java is
    missing, or nobody answers where the archive is.
    """
    chosen = OPTIONS | OURS
    builder = SparkSession.builder.appName(name)
    given = dict(options or {})
    wanted = {one for one in formats if one in TABLES}
    fresh = not submitted() and SparkContext._active_spark_context is None
    if archive is not None and fresh and not is_table_name(archive):
        found = format_at(place_of(archive, hadoop_in(given)))
        wanted |= set() if found is None else {found.name}
    chosen |= table_options(wanted, pyspark.__version__, given, fetch=fresh)
    here = not submitted() and is_local(master)
    if not submitted():
        java()
        chosen |= STARTING
        builder = builder.master(master or "local[*]")
        if here:
            _let_workers_import()
            chosen |= ALONE
    elif master is not None:
        builder = builder.master(master)
    for key, value in (chosen | given).items():
        builder = builder.config(key, value)
    spark = _started(builder, fetched=(chosen | given).get("spark.jars.packages"))
    spark.sparkContext.setLogLevel("ERROR")
    if not submitted() and not here:
        _hand_over_code(spark)
    return register(spark)


def _started(builder: SparkSession.Builder, *, fetched: str | None) -> SparkSession:
    try:
        return builder.getOrCreate()
    except PySparkRuntimeError as error:
        advice = "; what it has written says why"
        if fetched is not None:
            advice += f". It was to fetch {fetched}: where that is not reached, name the jars with spark.jars"
        raise PipelineError(f"Spark did not start{advice}") from error


def hadoop_in(options: Mapping[str, str]) -> dict[str, str]:
    """The options of Hadoop among Spark's."""
    prefix = "spark.hadoop."
    return {key.removeprefix(prefix): value for key, value in options.items() if key.startswith(prefix)}


def is_local(master: str | None) -> bool:
    """Whether everything of a session with this master runs on this machine, in one process of Java."""
    return master is None or master.partition("[")[0] == "local"


def register(spark: SparkSession) -> SparkSession:
    """Give a session the gateway's formats; its time zone and all else stay as they are. Repeating it does no
    harm. Raises PipelineError: the Python that Spark starts for its workers has no gateway."""
    _look_at_workers(spark)
    for key, value in OPTIONS.items():
        spark.conf.set(key, value)
    hadoop = hadoop_of(spark)
    with _active(spark):
        for place in FORMATS:
            module, _, name = place.partition(":")
            found = getattr(import_module(module), name)
            spark.dataSource.register(found.of(hadoop) if found is JournalSource else found)
    speak_plainly()
    return spark


@contextmanager
def _active(spark: SparkSession) -> Iterator[None]:
    """Make it the active session for the block: Spark asks that one whether a format is there already, and
    where `spark` is a newSession() of it, it is."""
    jvm = getattr(spark, "_jvm", None)
    if jvm is None:  # of Spark Connect: each has a session of its own at the server
        yield
        return
    known = SparkSession._get_j_spark_session_class(jvm)
    before = known.getActiveSession()
    known.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            known.setActiveSession(before.get())
        else:
            known.clearActiveSession()


def _hand_over_code(spark: SparkSession) -> None:
    """Executors elsewhere get this very gateway; what it depends on their Python has."""
    spark.sparkContext.addPyFile(str(_code()))


@cache
def _code() -> Path:
    """The code, for as long as this process runs: executors that start later fetch it, too."""
    folder = tempfile.mkdtemp(prefix="gateway-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_code(Path(folder))


def _look_at_workers(spark: SparkSession) -> None:
    """Spark runs what plans a source in a Python that it starts beside the driver; what it says of one
    without a gateway is a traceback of forty lines."""
    context = getattr(spark, "_sc", None)
    if context is None:
        return  # of Spark Connect: the server has the Python
    program = context.pythonExec
    found = shutil.which(program)
    if found is not None and Path(found).absolute() == Path(sys.executable).absolute():
        return
    wrong = _why_not(found, program)
    if wrong is not None:
        raise PipelineError(
            f"Spark's workers would run {program}, and {wrong}: activate the environment of the gateway"
            f" before Spark is started, or set PYSPARK_PYTHON={sys.executable} (on a cluster: a Python that"
            " every machine has under that name)"
        )


@cache
def _why_not(found: str | None, program: str) -> str | None:
    """Why this Python cannot be a worker of ours; None: it can."""
    if found is None:
        return "there is no such program here"
    spark = find_spec("pyspark")
    assert spark is not None
    assert spark.origin is not None
    shipped = [path for path in sys.path if path.endswith((".zip", ".egg", ".jar"))]  # by --py-files
    shipped += map(str, Path(spark.origin).parent.glob("python/lib/*.zip"))  # as Spark does
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
    said = done.stderr.strip().rpartition("\n")[2] or f"it ended with code {done.returncode}"
    return f"{found} has not what it needs ({said})"


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
