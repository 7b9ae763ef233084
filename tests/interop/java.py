"""How the tests start Java: a program that ends after seconds costs more to compile well than to run."""

from __future__ import annotations

import os
from typing import Final

from tests.clients.builds import SPARK_CLASSES, NotBuiltError, built

# The classes are those of released jars, or compiled by Spark: Java need not prove that they are sound.
UNVERIFIED: Final = ("-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote")
# With one compiler Java has 48 MB for its code, which the session of a hundred tests fills over and over.
ROOM: Final = "-XX:ReservedCodeCacheSize=240m"
QUICK: Final = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto", ROOM, *UNVERIFIED)


def quicken_spark() -> None:
    """What this process starts of Spark from now on, drivers, masters and workers: a session with its first
    job done has cost 6 s of processor time then, and 13 s else. Executors are told by their driver.
    """
    os.environ["SPARK_LAUNCHER_OPTS"] = " ".join(QUICK)
    for name in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
        os.environ[name] = " ".join((*QUICK, *spark_classes()))


def spark_classes() -> tuple[str, ...]:
    """Return the options with which Java maps Spark's classes from the archive that `make peers` has built.

    Java ignores an archive of other jars or of another Java, and would warn of it on its standard output.
    """
    try:
        archive = built("spark-classes") / SPARK_CLASSES
    except NotBuiltError:
        return ()
    return f"-XX:SharedArchiveFile={archive}", "-Xlog:disable", "-Xlog:all=error:stderr"
