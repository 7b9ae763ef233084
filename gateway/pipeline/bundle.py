"""Files that Spark executors need, for spark-submit: the gateway's code and its dependencies.

The code is a zip, since `--py-files` accepts no wheel. Dependencies have C extensions, which Python cannot
import from a zip; they are an archive that Spark unpacks beside each executor, to be named in its PYTHONPATH.
The archive is packed from the distributions installed on this machine, so the executors need the same version
of Python and the same processor architecture. Neither file contains Spark, which the cluster has.
"""

from __future__ import annotations

import gzip
import io
import platform
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, NamedTuple

from gateway import __version__
from gateway.errors import PipelineError

OF_THE_CLUSTER: Final = frozenset({"pyspark", "py4j"})
OF_OURS: Final = "gateway"
EXTRA: Final = "pipeline"
EXTRAS_HERE: Final = ("hdfs", "registry")
"""Extras that executors need as well, if installed here, to read stores. Databases are written by the
driver."""
ENVIRONMENT: Final = "environment"
"""Folder beside each executor into which Spark unpacks the dependencies."""
# Earliest time that a zip can store, so that equal files give equal archives.
MOMENT: Final = (1980, 1, 1, 0, 0, 0)
SUBMIT: Final = '''"""What spark-submit runs: the commands of `gateway pipeline`, with the same arguments."""

import sys

from gateway.cli import main

sys.argv.insert(1, "pipeline")
main()
'''
_NAME: Final = re.compile(r"^([A-Za-z0-9._-]+)(?:\[([^\]]*)\])?")
_MARKER: Final = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


class Bundle(NamedTuple):
    """Paths of the files for spark-submit: the program, the gateway's code, and its dependencies.

    `environment`, the archive of dependencies, is None if it was not requested.
    """

    submit: Path
    code: Path
    environment: Path | None


def write(folder: Path, *, environment: bool) -> Bundle:
    """Write the files for spark-submit into `folder`, and return their paths.

    The archive of dependencies is written only if `environment` is True. Raises PipelineError if a dependency
    is not installed here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    submit = folder / "submit.py"
    submit.write_text(SUBMIT, encoding="utf-8")
    return Bundle(submit, write_code(folder), write_environment(folder) if environment else None)


def write_code(folder: Path) -> Path:
    """Write the code as gateway-VERSION.zip for `--py-files`, and return the path.

    Compiled modules are left out, because they cannot be imported from a zip.
    """
    path = folder / f"{OF_OURS}-{__version__}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, source in sorted(_below(files(OF_OURS), OF_OURS)):
            archive.writestr(zipfile.ZipInfo(name, MOMENT), source.read_bytes(), zipfile.ZIP_DEFLATED)
    return path


def _below(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for found in folder.iterdir():
        name = f"{prefix}/{found.name}"
        if found.is_dir():
            if found.name != "__pycache__":
                yield from _below(found, name)
        elif not found.name.endswith((".so", ".pyc", ".pyd")):
            yield name, found


def write_environment(folder: Path) -> Path:
    """Write an archive for `--archives` with the dependencies of the gateway and of its extra `pipeline`.

    Dependencies of its extras `hdfs` and `registry` are included if they are installed. Return the path.
    Raises PipelineError if a dependency is not installed.
    """
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.machine()}"
    path = folder / f"{OF_OURS}-{__version__}-{tag}.tar.gz"
    with (
        path.open("wb") as file,
        gzip.GzipFile(path.name, "wb", compresslevel=1, fileobj=file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for found in sorted(_needed(), key=lambda one: one.name):
            _add(archive, found)
    return path


def _add(archive: tarfile.TarFile, found: Distribution) -> None:
    for file in sorted(found.files or ()):
        if ".." in file.parts or file.suffix == ".pyc" or "tests" in file.parts:
            continue  # Programs, and files that Python creates again.
        data = Path(str(found.locate_file(file))).read_bytes()
        info = tarfile.TarInfo(str(file))
        info.size = len(data)
        info.mode = 0o755 if file.suffix == ".so" else 0o644
        archive.addfile(info, io.BytesIO(data))


def _needed() -> list[Distribution]:
    """Return the distributions that the gateway needs on a cluster, including its extra `pipeline`.

    Distributions that the cluster itself provides are left out.
    """
    found: dict[str, Distribution] = {}
    ours = _installed(OF_OURS)
    waiting = [*_requirements(ours, EXTRA)]
    for extra in EXTRAS_HERE:
        waiting += [one for one in _requirements(ours, extra) if _is_installed(one.name)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        name, extras = waiting.pop()
        if name in OF_THE_CLUSTER:
            continue
        found[name] = _installed(name)
        for extra in ("", *extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += _requirements(found[name], extra)
    return list(found.values())


class Requirement(NamedTuple):
    """Python distribution that another distribution requires, and those of its extras that are required."""

    name: str
    extras: tuple[str, ...] = ()


def _requirements(of: Distribution, extra: str = "") -> Iterator[Requirement]:
    """Yield the distributions that the distribution `of` requires, including those of its extra `extra`.

    Requirements for another system or version of Python are skipped, unless they are installed.
    """
    for text in of.requires or ():
        stated = _NAME.match(text)
        marker = _MARKER.search(text)
        if stated is None or (marker is not None and marker[1] != extra):
            continue
        name = re.sub(r"[-_.]+", "-", stated[1]).lower()
        if ";" in text and (marker is None or "python_version" in text) and not _is_installed(name):
            continue
        yield Requirement(name, tuple(filter(None, (stated[2] or "").replace(" ", "").split(","))))


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _installed(name: str) -> Distribution:
    try:
        return distribution(name)
    except PackageNotFoundError as error:
        raise PipelineError(
            f"{name} is not installed here, and executors need it: pip install 'gateway[{EXTRA}]'"
        ) from error
