"""A gateway as a process of its own, which can be killed and started again on the same folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import yaml

from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.servers import free_ports
from tests.interop.state_database import with_state
from tests.interop.wrong_clock import Clock
from tests.interop.zygote import IDLE_REPORT, Forked, started
from tests.needs import needed, refuse_alone

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_SECS: Final = 30.0
POLL_SECS: Final = 0.01
PROGRAM: Final = (sys.executable, "-c", "from gateway.cli import main; main()")
UNFORKED: Final = """
from tests.interop.zygote import prepare
prepare({clock!r})
from gateway.cli import main
main()
"""
"""Program of a gateway that is started as it would be forked."""
ANNOUNCED: Final = re.compile(r"^  (\S+) +\S+(?: with TLS)? on \S*:(\d+)$|page +http://localhost:(\d+)/")


def environment() -> dict[str, str]:
    """Ours, without what would configure the gateway."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GATEWAY_")}


@needed("processes")
class GatewayProcess:
    """`gateway run` on a folder with the configuration; listeners on ports that a restart keeps.

    `more` are keys of gateway.yaml; the store stands in `folder` unless they say otherwise.
    """

    def __init__(self, folder: Path, **more: Any) -> None:
        refuse_alone("a gateway as a process")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        mqtt, amqp, fast = free_ports(3)
        own: dict[str, Any] = {
            "listeners": {
                "mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt},
                "amqp091": {"protocol": "amqp091", "host": LOOPBACK, "port": amqp},
                "amqpfast": {
                    "protocol": "amqpfast",
                    "host": LOOPBACK,
                    "port": fast,
                    "negotiation_pause_secs": 0.0,  # which has tests of its own
                },
            },
            "http": {"enabled": False},
            "log": {"format": "auto"},  # JSON, for nobody sees it, and the banner with the ports
            "store": {"path": str(folder / "data")},
        }
        self.configuration = own | more
        self.ports: dict[str, int] = {}
        self.python_path: tuple[Path, ...] = (ROOT,)
        self.program: tuple[str, ...] | None = None  # instead of the gateway of this checkout
        self.is_forked = True  # unless its environment is read by what starts Python
        self.clock: Clock | None = None  # by which the gateway of this checkout reads the time
        self.variables: dict[str, str] = {}  # of its environment, for another program
        self._process: subprocess.Popen[str] | Forked | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Return when every listener is open. AssertionError with the log when it does not come to that."""
        file = self.folder / "gateway.yaml"
        broker = with_state(self.configuration.get("broker", {}))
        file.write_text(yaml.safe_dump(self.configuration | ({"broker": broker} if broker else {})))
        with (self.folder / "log").open("ab") as log:
            self._process = self._started(("run", "--config", str(file)), log)
        try:
            self.ports = self._announced(self._process)
        except BaseException:
            self.kill()
            raise

    def _started(self, arguments: tuple[str, ...], log: BinaryIO) -> subprocess.Popen[str] | Forked:
        if self.program is None and self.python_path == (ROOT,):
            clock = "" if self.clock is None else str(self.clock.file)
            if self.is_forked:
                return started(list(arguments), self.folder, self._environment(), log.fileno(), clock=clock)
            program: tuple[str, ...] = (sys.executable, "-c", UNFORKED.format(clock=clock))
        else:
            assert self.clock is None, "another program reads the right time"
            program = self.program or PROGRAM
        return subprocess.Popen(
            (*program, *arguments),
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )

    @property
    def worker_pids(self) -> dict[int, int]:
        """Of the workers that were started last, by their numbers."""
        lines = [json.loads(line) for line in self.log.splitlines() if "worker started" in line]
        return {line["worker"]: line["pid"] for line in lines}

    def command(self, *words: str) -> str:
        """What another command of the gateway says and complains about, run as this process is."""
        done = subprocess.run(
            (*PROGRAM, *words),
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECS,
            check=False,
        )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(map(str, self.python_path))
        return environment() | {"PYTHONPATH": path} | self.variables

    def _announced(self, process: subprocess.Popen[str] | Forked) -> dict[str, int]:
        assert process.stdout is not None
        giving_up = threading.Timer(PATIENCE_SECS, process.kill)
        giving_up.start()
        found = {}
        try:
            for line in process.stdout:
                if match := ANNOUNCED.search(line.rstrip()):
                    found[match[1] or "http"] = int(match[2] or match[3])
                elif found and not line.strip():
                    return found
        finally:
            giving_up.cancel()
        if found:
            return found
        raise AssertionError(f"the gateway did not start: {self.log}")

    def port(self, listener: str) -> int:
        """The port of a listener, or of `http`."""
        return self.ports[listener]

    @property
    def process(self) -> subprocess.Popen[str] | Forked:
        """The process that runs."""
        assert self._process is not None
        return self._process

    @property
    def log(self) -> str:
        """What it has logged, over all its lives."""
        return (self.folder / "log").read_text()

    def idle_report(self) -> list[str]:
        """Return what waits in the gateway, a line each (tests/idle.py); empty if nothing does.

        Only a gateway of this checkout can be asked: another program has no such signal.
        """
        is_ours = self.program is None and self.python_path == (ROOT,)
        if not is_ours or self.configuration.get("workers", 1) > 1:
            return []
        file = self.folder / IDLE_REPORT
        file.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR2)
        end = time.monotonic() + PATIENCE_SECS
        while not file.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                return ["the gateway did not answer"]
            time.sleep(POLL_SECS)
        lines: list[str] = json.loads(file.read_text())
        return lines

    def await_idle(self, seconds: float = 10.0) -> list[str]:
        """Return [] when nothing waits in the gateway any more; after that many seconds, what still does."""
        end = time.monotonic() + seconds
        while (report := self.idle_report()) and time.monotonic() < end:
            time.sleep(POLL_SECS)
        return report

    def kill(self) -> None:
        """SIGKILL; a second time does nothing."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def terminate(self) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_SECS)
        self._end()
        return code

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def _end(self) -> None:
        process = self.process
        process.wait(PATIENCE_SECS)
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
