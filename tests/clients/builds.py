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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent
BUILT: Final = HERE.parents[1] / ".peers"
STAMP: Final = ".sources"
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
    "java": Build("java", ("java", "javac", "mvn"), java),
    "kube-score": Build("../deploy/tools/kube-score", ("go",), go_tool),
    "rumqttc": Build("rust/rumqttc", ("cargo",), rust),
    "spark": Build("spark", ("java", "mvn"), jars),
}


def built(name: str) -> Path:
    """The folder with what was built of the sources as they are; raises NotBuiltError."""
    folder, build = BUILT / name, BUILDS[name]
    if missing := [tool for tool in build.tools if shutil.which(tool) is None]:
        raise NotBuiltError(f"{name} needs {', '.join(missing)}")
    stamp = folder / STAMP
    if not stamp.exists() or stamp.read_text() != _digest(HERE / build.sources):
        raise NotBuiltError(f"{name} is not built: run make peers")
    return folder


def build(name: str) -> None:
    """Make it unless it is there; raises NotBuiltError."""
    try:
        built(name)
        return
    except NotBuiltError as error:
        if "make peers" not in str(error):
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
    failed = []
    with ThreadPoolExecutor(2) as threads:
        for name, future in [(name, threads.submit(build, name)) for name in BUILDS]:
            try:
                future.result()
            except NotBuiltError as error:
                failed.append(name)
                print(f"not built, and needed by some tests: {error}", file=sys.stderr)
    return 1 if failed and os.environ.get("CI") == "true" else 0


if __name__ == "__main__":
    sys.exit(main())
