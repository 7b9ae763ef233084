"""What is measured: our gateway and RabbitMQ, each in processes of its own on free loopback ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self

import psycopg
import yaml

from tests.benchmarks.load import cpu_secs
from tests.interop import servers
from tests.interop.servers import LOOPBACK, PostgreSQL, RabbitMQ, amqp_answers, free_ports, mqtt_answers

START_SECS_MAX: Final = 30.0
STOP_SECS_MAX: Final = 20.0
POLL_SECS: Final = 0.05
CHECKOUT: Final = Path(__file__).resolve().parents[2]
PROGRAM: Final = (sys.executable, "-c", "from gateway.cli import main; main()", "run", "--config")


class SubjectError(Exception):
    """The gateway did not start, or did not end as it should."""


class Subject(Protocol):
    """A server with both protocols."""

    name: str
    mqtt_port: int
    amqp_port: int
    pid: int

    def cpu(self) -> float:
        """Processor seconds that it has used."""

    def rss(self) -> int:
        """Bytes of memory that it occupies."""

    def __enter__(self) -> Self:
        """Start it."""

    def __exit__(self, *_: object) -> None:
        """Stop it."""


def rss_bytes(pid: int) -> int:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Process:
    """What does the work of a subject."""

    pid: int

    def cpu(self) -> float:
        """Processor seconds that it has used."""
        return cpu_secs(self.pid)

    def rss(self) -> int:
        """Bytes of memory that it occupies."""
        return rss_bytes(self.pid)


class Gateway(Process):
    """Our gateway: `gateway run` with a configuration of its own. `more` is merged into that."""

    name = "gateway"

    def __init__(self, folder: Path, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.mqtt_port, self.amqp_port, self.fast_port = free_ports(3)
        self.pid = 0
        listeners = {
            "mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": self.mqtt_port},
            "amqp091": {"protocol": "amqp091", "host": LOOPBACK, "port": self.amqp_port},
            "amqpfast": {"protocol": "amqpfast", "host": LOOPBACK, "port": self.fast_port},
        }
        own: dict[str, Any] = {
            "listeners": listeners,
            "http": {"enabled": False},
            "log": {"level": "warning"},
            "store": {"enabled": False},
        }
        self._file = folder / "gateway.yaml"
        self._file.write_text(yaml.safe_dump(own | more))
        self._log = folder / "gateway.out"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                (*PROGRAM, str(self._file)),
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._process = process
        self.pid = process.pid
        deadline = time.monotonic() + START_SECS_MAX
        try:
            while not self._answers():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SubjectError(f"the gateway did not start:\n{self._log.read_text()[-2_000:]}")
                time.sleep(POLL_SECS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        return mqtt_answers(self.mqtt_port) and amqp_answers(self.amqp_port)

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def said(self) -> str:
        """What it has logged: warnings and errors only."""
        return self._log.read_text()


class Replica(Gateway):
    """One of several gateways over the RabbitMQ at `port` and the PostgreSQL at `state`, with a listener for
    MQTT."""

    name = "replica"

    def __init__(
        self,
        folder: Path,
        port: int,
        state: str,
        limits: dict[str, Any] | None = None,
        *,
        workers: int = 1,
        **broker: Any,
    ) -> None:
        (mqtt_port,) = free_ports(1)
        engine = {
            "engine": "rabbitmq",
            "urls": [f"amqp://guest:guest@{LOOPBACK}:{port}/"],
            "postgresql": {"url": state},
            **broker,
        }
        listeners = {
            "mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": mqtt_port},
        }
        more = {} if limits is None else {"limits": limits}
        super().__init__(
            folder, broker=engine, listeners=listeners, replica=folder.name, workers=workers, **more
        )
        self.mqtt_port = mqtt_port

    def _answers(self) -> bool:
        return mqtt_answers(self.mqtt_port)


class Workers(Replica):
    """`count` workers with one port."""

    name = "workers"

    def __init__(self, folder: Path, port: int, state: str, count: int, **broker: Any) -> None:
        super().__init__(folder, port, state, workers=count, **broker)

    def _pids(self) -> list[int]:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()  # a child is that of the thread that started it
        children = [pid for task in tasks for pid in (task / "children").read_text().split()]
        return [self.pid, *map(int, children)]

    def cpu(self) -> float:
        """Processor seconds that they have used, and who has started them."""
        return sum(map(cpu_secs, self._pids()))

    def rss(self) -> int:
        """Bytes of memory that all occupy."""
        return sum(map(rss_bytes, self._pids()))


class StateServer(PostgreSQL):
    """An empty PostgreSQL that waits for the disk at each commit."""

    def __init__(self) -> None:
        super().__init__(fsync=True)

    def database_bytes(self) -> int:
        """Return the size of its database on disk."""
        with psycopg.connect(self.url) as connection:
            connection.execute("CHECKPOINT")
            row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
        assert row is not None
        return int(row[0])


class Rabbit(Process):
    """RabbitMQ with its MQTT plugin, otherwise as it comes; `pid` is that of its Erlang machine."""

    name = "RabbitMQ"

    def __init__(self, folder: Path, lines: Sequence[str] = ()) -> None:
        """`lines` of its configuration."""
        self._broker = RabbitMQ(folder, mqtt=True, lines=lines)
        self.mqtt_port, self.amqp_port = self._broker.mqtt_port, self._broker.port
        self.pid = 0

    def version(self) -> str:
        """Such as 3.10.8."""
        return self._broker.control("version").strip()

    def queues(self) -> int:
        """How many it has."""
        return len(self._broker.control("-q", "list_queues", "name", "--no-table-headers").splitlines())

    def __enter__(self) -> Self:
        self._broker.start()
        try:
            self.pid = int(self._broker.control("eval", "os:getpid().").strip().strip('"'))
        except BaseException:
            self._broker.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.stop()


class Mosquitto(Process):
    """Mosquitto without persistence, otherwise as it comes; its limits on what is in flight are lifted."""

    name = "Mosquitto"

    def __init__(self, folder: Path) -> None:
        lines = ("max_queued_messages 0", "max_inflight_messages 0", "set_tcp_nodelay true")
        self._broker = servers.Mosquitto(folder, lines)
        self.mqtt_port = self._broker.port
        self.amqp_port = 0
        self.pid = 0

    def __enter__(self) -> Self:
        self._broker.start()
        self.pid = self._broker.pid
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.stop()
