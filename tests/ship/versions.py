"""Tests and compiled wheels with every version of Python that the package names: `make versions`.

For each version there is a clone of the current commit in `build/versions`, with an environment of the lock.
In it run the tests that need no other program. Then a compiled wheel is built and installed into a second
environment, whose gateway starts and accepts a message at QoS 1. A version without an interpreter is skipped
with a line that says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

from tests.interop.gateway_process import GatewayProcess

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "versions"
PREFIX: Final = "Programming Language :: Python :: 3."
RUNTIME_ENDS: Final = (
    "# Traces",
    "# What builds it",
    "# What compiles it",
)  # parts that a user does not need


def versions() -> list[str]:
    """Return the versions that the package's classifiers name, such as `3.11`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [f"3.{one.removeprefix(PREFIX)}" for one in project["classifiers"] if one.startswith(PREFIX)]


def interpreter_of(version: str) -> str | None:
    """Return a working interpreter: of the search path, of pyenv, or of PYTHONS (paths with colons)."""
    named = [one for one in os.environ.get("PYTHONS", "").split(":") if one]
    pyenv = sorted(map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))
    for candidate in (*named, *pyenv, shutil.which(f"python{version}")):
        if candidate is None:
            continue
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run((candidate, "-c", program), capture_output=True, text=True, check=False)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return candidate
    return None


def run(*words: str | Path, within: Path = ROOT, **variables: str) -> None:
    """Run a program. Raises CalledProcessError if it fails."""
    subprocess.run(tuple(map(str, words)), cwd=within, check=True, env=os.environ | variables)


def environment(folder: Path, interpreter: str, requirements: str) -> Path:
    """Create an environment with some requirements of the lock. Return its folder of programs."""
    run(interpreter, "-m", "venv", folder)
    pip = (str(folder / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check", "install")
    subprocess.run((*pip, "--require-hashes", "-r", "/dev/stdin"), input=requirements, text=True, check=True)
    return folder / "bin"


def runtime() -> str:
    """Return the first part of the lock, which the gateway needs to run."""
    lock = (ROOT / "requirements.lock").read_text()
    return lock[: min(lock.index(heading) for heading in RUNTIME_ENDS)]


def check(version: str, interpreter: str, *, wheel: bool) -> None:
    """Run the tests of a version, and try its wheel. Raises CalledProcessError or AssertionError."""
    folder = BUILD / version
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    run("git", "clone", "-q", ROOT, source)
    programs = environment(source / ".venv", interpreter, (ROOT / "requirements.lock").read_text())
    pip = (programs / "python", "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-build-isolation", "-e", ".", within=source)
    pytest = (programs / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile")
    run(*pytest, "-m", "not needs", within=source, PYTHONPATH=str(source))
    if not wheel:
        return
    build = ("wheel", "--no-deps", "--no-build-isolation", "-w", folder / "dist", ".")
    run(*pip, *build, within=source, HATCH_BUILD_HOOK_ENABLE_CUSTOM="1")
    user = environment(folder / "user", interpreter, runtime())
    (built,) = (folder / "dist").glob("*.whl")
    run(user / "python", "-m", "pip", "-q", "install", "--no-deps", built)
    said = subprocess.run((user / "gateway", "version"), capture_output=True, text=True, check=True).stdout
    assert f", compiled (Python {version}." in said, said
    gateway = GatewayProcess(folder / "run")
    gateway.program = (str(user / "gateway"),)
    gateway.python_path = ()
    with gateway:
        url = f"mqtt://127.0.0.1:{gateway.port('mqtt')}"
        run(user / "gateway", "publish", url, "--topic", "smoke", "-m", "hello", within=folder)
        assert gateway.terminate() == 0


def main() -> None:
    """Check the versions, and exit with 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="make versions", description=__doc__)
    parser.add_argument(
        "--no-wheel", action="store_true", help="build no compiled wheels, which take minutes"
    )
    parser.add_argument("versions", nargs="*", help="versions such as 3.13; default: all")
    given = parser.parse_args()
    failed = []
    for version in given.versions or versions():
        interpreter = interpreter_of(version)
        if interpreter is None:
            print(f"Python {version}: skipped, no interpreter found; name one in PYTHONS", flush=True)
            continue
        print(f"Python {version}: {interpreter}", flush=True)
        try:
            check(version, interpreter, wheel=not given.no_wheel)
        except (subprocess.CalledProcessError, AssertionError) as error:
            failed.append(version)
            print(f"Python {version}: failed: {error}", flush=True)
        else:
            print(f"Python {version}: passed", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
