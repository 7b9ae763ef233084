"""A standalone cluster of Spark on this machine: a master, and two workers that share as little as they can.

Each worker has an address, a working folder and Pythons of its own: a bare one, for which all has to come
with what is submitted, and one that has what the gateway depends on, and not the gateway. To unpack all that
takes an executor seconds, so one of the tests does it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pyarrow

from gateway.pipeline.bundle import ENVIRONMENT, Bundle, write
from gateway.pipeline.session import java
from tests.interop.java import QUICK, spark_classes
from tests.needs import needed
from tests.pipeline.killing import PATIENCE_SECS, ROOT

MASTER: Final = "127.0.0.1"
DRIVER: Final = "127.0.0.4"
WORKERS: Final = ("127.0.0.2", "127.0.0.3")
NO_REST: Final = {"SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false"}
EQUIPPED: Final = "python-with-dependencies"
EXECUTOR: Final = b"CoarseGrainedExecutorBackend"
OPTIONS: Final = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.driver.host": DRIVER,
    "spark.driver.bindAddress": DRIVER,
    "spark.ui.enabled": "false",
}


def until(done: Callable[[], Any], what: str) -> None:
    """Wait; AssertionError when it takes too long."""
    deadline = time.monotonic() + PATIENCE_SECS
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@needed("Spark")
class Cluster:
    """Starts with `with`. `url` is what `--master` wants; `quick`: executors are, see interop/java.py."""

    def __init__(self, folder: Path, *, quick: bool = False) -> None:
        import pyspark

        java_options = " ".join((*QUICK, *spark_classes()))
        self._options = OPTIONS | ({"spark.executor.extraJavaOptions": java_options} if quick else {})
        self._folder = folder
        self._home = Path(pyspark.__file__).parent
        self._started: list[subprocess.Popen[bytes]] = []
        self.bundle: Bundle = write(folder / "bundle", environment=True)
        self.url = ""

    def __enter__(self) -> Cluster:
        java()
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self) -> None:
        with socket.socket() as free:
            free.bind((MASTER, 0))
            port = free.getsockname()[1]
        self.url = f"spark://{MASTER}:{port}"
        where = ("--host", MASTER, "--port", str(port), "--webui-port", "0")
        self._start("master", MASTER, "master.Master", *where)
        self._wait("master", b"I have been elected leader")
        for address in WORKERS:
            place = self._folder / address
            subprocess.run((sys.executable, "-m", "venv", "--without-pip", str(place / "python")), check=True)
            packages = Path(pyarrow.__file__).parents[1]
            bare = place / "python" / "bin"
            _program(bare / EQUIPPED, f'PYTHONPATH="$PYTHONPATH:{packages}" exec "{bare / "python3"}" "$@"')
            where = ("--host", address, "--cores", "1", "--memory", "1g", "--webui-port", "0")
            self._start(
                address, address, "worker.Worker", *where, "--work-dir", str(place / "work"), self.url
            )
        for address in WORKERS:
            self._wait(address, b"Successfully registered with master")

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            process.terminate()  # a worker ends its executors
        for process in self._started:
            process.wait(60)

    def _start(self, name: str, address: str, program: str, *arguments: str) -> None:
        place = self._folder / name
        place.mkdir(exist_ok=True)
        paths = f"{place / 'python' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": paths, "SPARK_DAEMON_MEMORY": "192m", "SPARK_LOCAL_IP": address}
        command = (str(self._home / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}")
        with (place / "log").open("wb") as said:
            self._started.append(
                subprocess.Popen(
                    (*command, *arguments),
                    cwd=place,
                    env=plain() | own | NO_REST,
                    stdout=said,
                    stderr=said,
                )
            )

    def _wait(self, name: str, text: bytes) -> None:
        log = self._folder / name / "log"
        until(lambda: text in log.read_bytes(), f"{name} does not start")

    def submit(self, program: Path, *arguments: str) -> tuple[str, ...]:
        """The command of spark-submit for a driver with the code that `gateway pipeline bundle` has made,
        where Pythons have the rest."""
        return (
            *(str(self._home / "bin" / "spark-submit"), "--master", self.url),
            *("--py-files", str(self.bundle.code), *_confs(self._options), str(program), *arguments),
        )

    def documented(self, *arguments: str) -> tuple[str, ...]:
        """The line that the guide has, which submits the program of the bundle; Pythons are bare."""
        own = self._options | {"spark.executorEnv.PYTHONPATH": ENVIRONMENT}
        return (
            *(str(self._home / "bin" / "spark-submit"), "--master", self.url),
            *("--py-files", str(self.bundle.code)),
            *("--archives", f"{self.bundle.environment}#{ENVIRONMENT}"),
            *(*_confs(own), str(self.bundle.submit), *arguments),
        )

    def command(self, *arguments: str) -> tuple[str, ...]:
        """Return a command of `gateway pipeline` that is a driver and hands its code over, for Pythons that
        have the rest."""
        own = _confs(self._options)
        return (sys.executable, "-m", "gateway", "pipeline", *arguments, "--master", self.url, *own)

    def environment(self, python: str = "python3") -> dict[str, str]:
        """Of a driver: an environment of Python that is activated, with Spark's workers in the Python of this
        name, which is there on all machines."""
        here = self._folder / "driver" / "bin"
        here.mkdir(parents=True, exist_ok=True)
        _program(here / EQUIPPED, f'exec "{sys.executable}" "$@"')
        paths = os.pathsep.join((str(here), str(Path(sys.executable).parent), os.environ["PATH"]))
        return plain() | {"PATH": paths, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": python}

    def executors(self) -> list[int]:
        """The executors that run now."""
        return [pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            return EXECUTOR in command and Path(f"/proc/{pid}/cwd").readlink().is_relative_to(self._folder)
        except OSError:  # it has ended
            return False

    def kill_an_executor(self) -> None:
        """With SIGKILL, as a machine that is gone."""
        until(self.executors, "no executor starts")
        os.kill(self.executors()[0], signal.SIGKILL)


def plain() -> dict[str, str]:
    """The environment without what says where Python looks for things."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYSPARK"))}


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _confs(options: dict[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in ("--conf", f"{key}={value}")]
