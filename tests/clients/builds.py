"""Builds the programs of tests/clients/ in other languages, and Go's tools, into .peers/, for `make peers`.

Needs only the standard library. What is built is kept until its sources change: exact versions are among
them, so that nothing else is fetched, and at test time nothing at all. Where a toolchain is missing, that is
said, and the tests that need it are skipped; under CI=true it is an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
BUILT: Final = ROOT / ".peers"
STAMP: Final = ".sources"
SPARK_CLASSES: Final = "classes.jsa"
BUILD_SECS_MAX: Final = 600.0


class NotBuiltError(Exception):
    """The toolchain is missing, the build failed, or the sources have changed since."""


class Build(NamedTuple):
    """`sources` is a folder of tests/clients/; what `make` runs finds a copy of it where it works."""

    sources: str
    tools: tuple[str, ...]
    make: Callable[[Path], None]


def run(folder: Path, *command: str, **environment: str) -> None:
    """Raises NotBuiltError with the end of what it wrote."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=BUILD_SECS_MAX,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuiltError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise NotBuiltError(f"{' '.join(command)}:\n{(done.stdout + done.stderr)[-3_000:]}")


def node(folder: Path) -> None:
    run(folder, "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")


def java(folder: Path) -> None:
    """Maven fetches what the programs need; compiling them does not need it."""
    run(folder, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")
    sources = sorted(map(str, (folder / "src").glob("*.java")))
    run(
        folder,
        "javac",
        "-parameters",
        "-Werror",
        "-Xlint:all,-processing",
        "-cp",
        "jars/*",
        "-d",
        "classes",
        *sources,
    )


def jars(folder: Path) -> None:
    """What Maven keeps of it outside of this checkout is not fetched again."""
    run(folder, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars")


def other_spark(folder: Path) -> None:
    """An environment with the Spark of requirements.txt, and all else out of this checkout's; and jars."""
    environment, ours = folder / "environment", ROOT / ".venv/bin/python"
    run(folder, str(ours), "-m", "venv", "--without-pip", str(environment))
    into = ("--python", str(environment / "bin/python"), "--disable-pip-version-check")
    run(folder, str(ours), "-m", "pip", *into, "install", "-q", "--no-deps", "-r", "requirements.txt")
    (packages,) = environment.glob("lib/python*/site-packages")
    others = (ROOT / ".venv").resolve() / packages.relative_to(environment)
    (packages / "others.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    jars(folder)


def spark_classes(folder: Path) -> None:
    """An archive of the classes of Spark that the tests use: loading costs a session 5 s without."""
    options = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit={folder / SPARK_CLASSES}"
    python = str(ROOT / ".venv/bin/python")
    with tempfile.TemporaryDirectory() as place:
        run(folder, python, "main.py", place, PYTHONPATH=str(ROOT), SPARK_SUBMIT_OPTS=options)
    if not (folder / SPARK_CLASSES).exists():
        raise NotBuiltError("Java has written no archive of Spark's classes")


def go(folder: Path) -> None:
    """What is fetched is what go.sum has the digests of."""
    run(folder, "go", "build", "-mod=readonly", "-trimpath", "-o", "main", ".", CGO_ENABLED="0")


def go_tool(folder: Path) -> None:
    """The one that go.mod names."""
    packages = [
        line.split()[1] for line in (folder / "go.mod").read_text().splitlines() if line[:5] == "tool "
    ]
    run(folder, "go", "build", "-mod=readonly", "-trimpath", "-o", "main", *packages, CGO_ENABLED="0")


def rust(folder: Path) -> None:
    """What is fetched is what Cargo.lock has the digests of; nothing is kept but the program."""
    run(folder, "cargo", "build", "--locked", "--quiet", "--target-dir", "target")
    (folder / "target/debug" / f"{folder.stem}-program").rename(folder / "main")
    shutil.rmtree(folder / "target")


BUILDS: Final = {
    "amqp-connection-manager": Build("node/amqp-connection-manager", ("node", "npm"), node),
    "autopaho": Build("go/autopaho", ("go",), go),
    "hdfs": Build("hdfs", ("java", "mvn"), jars),
    "helm": Build("../deploy/tools/helm", ("go",), go_tool),
    "iceberg": Build("iceberg", ("java", "mvn"), other_spark),
    "java": Build("java", ("java", "javac", "mvn"), java),
    "kube-score": Build("../deploy/tools/kube-score", ("go",), go_tool),
    "rumqttc": Build("rust/rumqttc", ("cargo",), rust),
    "spark": Build("spark", ("java", "mvn"), jars),
    "spark-classes": Build("spark-classes", ("java",), spark_classes),
}

ASKED_FOR: Final = frozenset({"iceberg"})
"""What only `make iceberg` needs: another Spark has 500 MB."""


def built(name: str) -> Path:
    """The folder with what was built of the sources as they are; raises NotBuiltError."""
    folder, build = BUILT / name, BUILDS[name]
    if missing := [tool for tool in build.tools if shutil.which(tool) is None]:
        raise NotBuiltError(f"{name} needs {', '.join(missing)}")
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text() != _digest(HERE / build.sources):
        raise NotBuiltError(f"{name} is not built: run make {name if name in ASKED_FOR else 'peers'}")
    return folder


def build(name: str) -> None:
    """Make it unless it is there; raises NotBuiltError."""
    try:
        built(name)
        return
    except NotBuiltError as error:
        if "run make" not in str(error):
            raise
    sources = HERE / BUILDS[name].sources
    folder, place = BUILT / f"{name}.new", BUILT / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sources, folder)
    BUILDS[name].make(folder)
    (folder / STAMP).write_text(_digest(sources))
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)


def _digest(folder: Path) -> str:
    """Another one for other names or contents."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return found.hexdigest()


def main() -> int:
    """Those that are named, else all that `make test` needs."""
    names, failed = sys.argv[1:] or [name for name in BUILDS if name not in ASKED_FOR], []
    with ThreadPoolExecutor(2) as threads:
        for name, future in [(name, threads.submit(build, name)) for name in names]:
            try:
                future.result()
            except NotBuiltError as error:
                failed.append(name)
                print(f"not built, and needed by some tests: {error}", file=sys.stderr)
    return 1 if failed and os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main())
