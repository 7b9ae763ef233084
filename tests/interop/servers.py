"""Real servers for tests and benchmarks: RabbitMQ, Mosquitto and PostgreSQL from Debian's packages.

Each runs in a folder of its own on free loopback ports, beside whatever else the machine runs, and as any
user including root. `stop()` and `start()` are an outage: ports and data stay. A broker's processes form one
process group, which `stop()` ends and waits for. `start()` returns when the broker answers its protocol.

RabbitMQ is launched by the script in its library folder (the one in /usr/sbin insists on a system user). Its
port mapper, epmd, would outlive it as a daemon; so it is started first, in the foreground, as our own child.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Final, Self

from tests.needs import needed, refuse_alone

LOOPBACK: Final = "127.0.0.1"
START_SECS_MAX: Final = 90.0
STOP_SECS_MAX: Final = 30.0
POLL_SECS: Final = 0.05
TCP_TIME_WAIT: Final = "06"
TCP_LISTEN: Final = "0A"
RABBITMQ_SCRIPTS: Final = "/usr/lib/rabbitmq/lib"
ALSO_SEARCHED: Final = ("/usr/sbin", "/usr/bin", "/usr/local/sbin")


class PeerMissingError(Exception):
    """The program is not installed on this machine."""


class BrokerError(Exception):
    """The broker did not start; the text ends with what it last wrote."""


PORTS_FIRST: Final = 10_000
PORTS_EACH: Final = 2_500  # of each process of a test run, so that two never take each other's
BLOCKS: Final = 9
_given: set[int] = set()


@cache
def _first_port() -> int:
    """The first of the ports that are this process's alone: it has them for as long as it lives, for the
    system knows the name of a block only once. Where many test, the last ones share."""
    for number in random.sample(range(BLOCKS), BLOCKS):
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0gateway-tests-ports-{number}")
            except OSError:
                continue
            claim.detach()
            return PORTS_FIRST + PORTS_EACH * number
    return PORTS_FIRST + PORTS_EACH * random.randrange(BLOCKS)


def free_ports(count: int) -> list[int]:
    """`count` TCP ports that nothing on the loopback interface is bound to, and that were not given before.

    They are below those that the system gives to outgoing connections, so that a server which is stopped and
    started again finds its port free.
    """
    found: list[int] = []
    first = _first_port()
    if len(_given) + count > PORTS_EACH // 2:
        _given.clear()  # who had the first of them is long gone
    while len(found) < count:
        port = random.randrange(first, first + PORTS_EACH)
        with socket.socket() as one:
            if port in _given:
                continue
            try:
                one.bind((LOOPBACK, port))
            except OSError:
                continue
        _given.add(port)
        found.append(port)
    return found


@needed("programs")
def program(name: str) -> str:
    """The path of an installed program; raises PeerMissingError."""
    refuse_alone(name)
    found = shutil.which(name) or shutil.which(name, path=os.pathsep.join(ALSO_SEARCHED))
    if found is None:
        raise PeerMissingError(f"{name} is not installed")
    return found


def rabbitmq_script(name: str) -> str:
    """A script of the newest RabbitMQ in its library folder; raises PeerMissingError."""
    found = sorted(Path(RABBITMQ_SCRIPTS).glob(f"rabbitmq_server-*/sbin/{name}"))
    if not found:
        raise PeerMissingError("rabbitmq-server is not installed")
    return str(found[-1])


def answers(port: int, request: bytes, expected: bytes) -> bool:
    """Whether the peer on `port` answers `request` with data that begin with `expected`."""
    try:
        with socket.create_connection((LOOPBACK, port), timeout=2.0) as stream:
            stream.sendall(request)
            return stream.recv(len(expected)) == expected
    except OSError:
        return False


def mqtt_answers(port: int) -> bool:
    """Whether an MQTT broker accepts a connection."""
    connect = b"\x10\x10\x00\x04MQTT\x04\x02\x00\x0a\x00\x04test"
    return answers(port, connect, b"\x20\x02")


def amqp_answers(port: int) -> bool:
    """Whether an AMQP 0-9-1 broker greets: a method frame on channel 0."""
    return answers(port, b"AMQP\x00\x00\x09\x01", b"\x01\x00\x00")


class _Processes:
    """One process group, started again and again with the same command line."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._command = list(command)
        self._environment = environment
        self._folder = folder
        self._log = folder / f"{Path(command[0]).name}.out"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process, which is running."""
        assert self._process is not None
        return self._process.pid

    def start(self, ready: Callable[[], bool]) -> None:
        """Start, and return when `ready`; raises BrokerError when that takes too long."""
        assert self._process is None or self._process.poll() is not None, "already running"
        with self._log.open("ab") as log:
            self._process = self._launch(log)
        deadline = time.monotonic() + START_SECS_MAX
        while not ready():
            if not self.running or time.monotonic() > deadline:
                self.stop()
                raise BrokerError(f"{self._command[0]} did not start:\n{self._log.read_text()[-2_000:]}")
            time.sleep(POLL_SECS)

    def _launch(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def stop(self, kill: bool = False) -> None:
        """End the whole group: politely, or at once; then wait for it."""
        process, self._process = self._process, None
        if process is None:
            return
        if not kill:
            self._signal(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_SECS_MAX)
            except subprocess.TimeoutExpired:
                kill = True
        self._signal(process.pid, signal.SIGKILL)
        process.wait(STOP_SECS_MAX)

    def wait(self) -> None:
        """Wait for the end of the process, which was asked to end."""
        assert self._process is not None
        self._process.wait(STOP_SECS_MAX)

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        assert self._process is not None
        self._process.send_signal(number)

    @staticmethod
    def _signal(group: int, number: int) -> None:
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return  # all of the group have ended


class _Broker:
    """What both brokers share: start, stop, restart, and leaving nothing behind."""

    def start(self) -> None:
        raise NotImplementedError

    def stop(self, kill: bool = False) -> None:
        raise NotImplementedError

    def restart(self) -> None:
        """An outage from which the broker comes back at the same ports."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@needed("Mosquitto")
class Mosquitto(_Broker):
    """A Mosquitto that anyone may use, without persistence. `lines` are added to its configuration file."""

    def __init__(self, folder: Path, lines: Sequence[str] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._database = folder / "mosquitto.db"
        (self.port,) = free_ports(1)
        configuration = folder / "mosquitto.conf"
        told = (f"listener {self.port} {LOOPBACK}", "allow_anonymous true", "persistence false", *lines)
        account = ("user root",) if os.geteuid() == 0 else ()
        configuration.write_text("\n".join((*account, *told)) + "\n")
        self._processes = _Processes((program("mosquitto"), "-c", str(configuration)), folder)

    @property
    def url(self) -> str:
        return f"mqtt://{LOOPBACK}:{self.port}"

    @property
    def running(self) -> bool:
        return self._processes.running

    @property
    def pid(self) -> int:
        return self._processes.pid

    def start(self) -> None:
        self._processes.start(lambda: mqtt_answers(self.port))

    def stop(self, kill: bool = False) -> None:
        """End it; `kill` gives it no chance to say goodbye."""
        self._processes.stop(kill)

    def save(self) -> None:
        """Return when what it holds now is on disk: with persistence, and its folder as the place of that."""
        before = self._saved()
        self._processes.signal(signal.SIGUSR1)
        deadline = time.monotonic() + STOP_SECS_MAX
        while self._saved() == before:
            if time.monotonic() > deadline:
                raise BrokerError("mosquitto does not save")
            time.sleep(POLL_SECS / 10)

    def _saved(self) -> tuple[int, int]:
        """Something else for each time that it has written its file."""
        if not self._database.exists():
            return 0, 0
        found = self._database.stat()
        return found.st_ino, found.st_mtime_ns

    @property
    def connected(self) -> bool:
        """Whether anything is connected to it still."""
        mine = f":{self.port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(row[1].endswith(mine) and row[3] not in (TCP_LISTEN, TCP_TIME_WAIT) for row in rows)


class PortMapper(_Broker):
    """The epmd by which Erlang's nodes on a machine find each other."""

    def __init__(self, folder: Path, port: int, environment: dict[str, str] | None = None) -> None:
        self.port = port
        command = (program("epmd"), "-address", LOOPBACK, "-port", str(port))
        self._processes = _Processes(command, folder, environment)

    @property
    def running(self) -> bool:
        return self._processes.running

    def start(self) -> None:
        self._processes.start(lambda: _listens(self.port))

    def stop(self, kill: bool = False) -> None:
        self._processes.stop(kill)


@needed("RabbitMQ")
class RabbitMQ(_Broker):
    """A RabbitMQ node with the user guest/guest; with `mqtt`, its MQTT plugin listens on `mqtt_port`, with
    `management` the one that shows it over HTTP on `management_port`.

    `lines` are added to its rabbitmq.conf.
    """

    def __init__(
        self, folder: Path, *, mqtt: bool = False, management: bool = False, lines: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._mqtt = mqtt
        self._management = management
        ports = free_ports(5)
        self.port, self.mqtt_port, self._epmd_port, self._distribution_port, self.management_port = ports
        self.node = f"gateway-test-{os.getpid()}-{self.port}@localhost"
        self.configure(lines)

    def configure(self, lines: Sequence[str] = (), *, epmd_port: int = 0) -> None:
        """Write its files anew. `epmd_port`: it is found by a port mapper that somebody else has started."""
        folder, mqtt = self._folder, self._mqtt
        told = [f"listeners.tcp.1 = {LOOPBACK}:{self.port}", "log.file.level = warning"]
        if mqtt:
            told += [f"mqtt.listeners.tcp.1 = {LOOPBACK}:{self.mqtt_port}", "mqtt.allow_anonymous = true"]
        if self._management:
            told += [f"management.tcp.ip = {LOOPBACK}", f"management.tcp.port = {self.management_port}"]
        (folder / "rabbitmq.conf").write_text("\n".join((*told, *lines)) + "\n")
        plugins = [name for name, on in (("mqtt", mqtt), ("management", self._management)) if on]
        enabled = ",".join(f"rabbitmq_{name}" for name in (*plugins, "consistent_hash_exchange"))
        (folder / "enabled_plugins").write_text(f"[{enabled}].\n")
        (folder / "environment.conf").write_text("")  # instead of the machine's /etc/rabbitmq
        self._epmd_port = epmd_port or self._epmd_port
        self.environment = self._environment()
        self._epmd = None if epmd_port else PortMapper(folder, self._epmd_port, self.environment)
        self._processes = _Processes((rabbitmq_script("rabbitmq-server"),), folder, self.environment)

    def _environment(self) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        kept.pop("NOTIFY_SOCKET", None)
        folder = str(self._folder)
        own = {
            "HOME": folder,  # where Erlang keeps the cookie
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/environment.conf",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/none.config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        return kept | own

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.port}/%2F"

    def segments(self, stream: str) -> list[str]:
        """The names of the segment files of a stream, the oldest first."""
        escaped = stream.replace(".", "_").replace("-", "_")
        found = self._folder.glob(f"mnesia/*/stream/*_{escaped}_*/*.segment")
        return sorted(file.name for file in found)

    @property
    def running(self) -> bool:
        return self._processes.running

    def start(self) -> None:
        if self._epmd is not None and not self._epmd.running:
            self._epmd.start()
        try:
            self._processes.start(self._ready)
        except BaseException:
            if self._epmd is not None:
                self._epmd.stop()
            raise

    def _ready(self) -> bool:
        return amqp_answers(self.port) and (not self._mqtt or mqtt_answers(self.mqtt_port))

    def stop(self, kill: bool = False) -> None:
        """End it and its port mapper; `kill` gives it no chance to say goodbye or write to disk."""
        self._processes.stop(kill)
        if self._epmd is not None:
            self._epmd.stop()

    def save(self) -> None:
        """Return when all that was declared is on disk: what it has answered to last may be lost when it is
        killed, though messages that it has confirmed are not."""
        self.evaluate("mnesia:sync_log()")

    @property
    def queues(self) -> list[str]:
        """The names of all queues."""
        return self._names("amqqueue:get_name(One) || One <- rabbit_amqqueue:list()")

    @property
    def bound(self) -> list[str]:
        """The name of the destination of each binding."""
        return self._names('element(4, One) || One <- rabbit_binding:list(<<"/">>)')

    @property
    def consumed(self) -> list[str]:
        """The name of the queue of each consumer."""
        return self._names(
            'proplists:get_value(queue_name, One) || One <- rabbit_amqqueue:consumers_all(<<"/">>)'
        )

    def _names(self, resources: str) -> list[str]:
        """Return the names of resources, which Erlang computes."""
        return self.evaluate(
            f'[io:format("~ts~n", [element(4, Name)]) || Name <- [{resources}]]'
        ).splitlines()

    def evaluate(self, expression: str) -> str:
        """Evaluate an expression of Erlang in this node, and return what it printed.

        This costs a hundredth of `control`, which starts Erlang first. A node that refuses the connection is
        asked by `control`.
        """
        cookie = (self._folder / ".erlang.cookie").read_text()
        where = ("-address", f"{LOOPBACK}:{self._distribution_port}", "-c", cookie)
        done = subprocess.run(
            (program("erl_call"), *where, "-e", "-fetch_stdout"),
            input=f"{expression}.\n",
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            return self.control("eval", expression + ", ok.").removesuffix("ok\n")
        printed, _, result = done.stdout.rpartition("{ok, ")
        assert result, done.stdout + done.stderr
        return printed

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` against this node (a second or two) and return what it printed."""
        command = [rabbitmq_script("rabbitmqctl"), "--node", self.node, "--quiet", *arguments]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout


@needed("PostgreSQL")
class PostgreSQL(_Broker):
    """An empty PostgreSQL with the superuser `postgres`, who needs no password.

    Under root the server runs as Debian's user `postgres`, so its files are in a temporary folder of that
    user, which `close` removes. With `fsync` a commit waits for the disk, as in production; `options` are
    further settings of the server, `name=value`.
    """

    def __init__(self, *, fsync: bool = False, options: Sequence[str] = ()) -> None:
        (self.port,) = free_ports(1)
        self._programs = _postgresql_programs()
        self._folder = Path(tempfile.mkdtemp(prefix="gateway-postgresql-"))
        self._become: tuple[str, ...] = ()
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres", "postgres")
            self._become = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
        given = (
            f"fsync={'on' if fsync else 'off'}",
            f"listen_addresses={LOOPBACK}",
            "unix_socket_directories=",
            *options,
        )
        settings = [word for one in given for word in ("-c", one)]
        server = str(self._programs / "postgres")
        command = (*self._become, server, "-D", "data", "-p", str(self.port), *settings)
        self._processes = _Processes(command, self._folder)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{LOOPBACK}:{self.port}/postgres"

    @property
    def running(self) -> bool:
        return self._processes.running

    def start(self) -> None:
        """Start it, at first with a new cluster of databases; return when it answers queries."""
        if not (self._folder / "data").exists():
            self._create()
        self._processes.start(self._is_ready)

    def _create(self) -> None:
        given = ("-D", "data", "-U", "postgres", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8")
        self._run("initdb", *given)

    def _run(self, program: str, *given: str) -> None:
        command = (*self._become, str(self._programs / program), *given)
        subprocess.run(command, cwd=self._folder, check=True, capture_output=True)

    def _is_ready(self) -> bool:
        command = (str(self._programs / "pg_isready"), "-q", "-h", LOOPBACK, "-p", str(self.port))
        return subprocess.run(command, check=False).returncode == 0

    def stop(self, kill: bool = False) -> None:
        """Shut it down, which ends its connections; `kill` gives it no chance to write to disk."""
        if self.running:
            # SIGTERM would wait for clients; SIGKILL would leave the server's children alive for a moment.
            self._processes.signal(signal.SIGQUIT if kill else signal.SIGINT)
            self._processes.wait()
        self._processes.stop()

    def freeze(self) -> None:
        """Stop all of its processes: connections stay, and nothing is answered."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Have all of its processes go on."""
        self._signal_all(signal.SIGCONT)

    def kill(self) -> None:
        """End all of its processes at once."""
        self._signal_all(signal.SIGKILL)
        self._processes.wait()
        self._processes.stop()

    def _signal_all(self, number: int) -> None:
        for pid in self._pids():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)

    def _pids(self) -> list[int]:
        """Return the postmaster and its children, which are in sessions of their own."""
        postmaster = self._processes.pid
        found = [postmaster]
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with suppress(OSError):  # it has ended
                    _, _, rest = (folder / "stat").read_text().rpartition(")")
                    if int(rest.split()[1]) == postmaster:
                        found.append(int(folder.name))
        return found

    def close(self) -> None:
        """Stop it and remove its files."""
        if self.running:
            self.thaw()
        self.stop(kill=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        self.close()


@needed("PostgreSQL")
class PostgreSQLPair(_Broker):
    """A PostgreSQL and its standby, which has what the first one has acknowledged (streaming replication that
    commits wait for). `url` finds the one that can be written to."""

    def __init__(self) -> None:
        self.primary = PostgreSQL(options=("synchronous_standby_names=*", "synchronous_commit=on"))
        self.standby = _Standby(self.primary)

    @property
    def url(self) -> str:
        hosts = ",".join(f"{LOOPBACK}:{one.port}" for one in (self.primary, self.standby))
        return f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"

    @property
    def running(self) -> bool:
        return self.primary.running or self.standby.running

    def start(self) -> None:
        """Start both."""
        self.primary.start()
        self.standby.start()

    def lose_primary(self) -> None:
        """Kill the first one with all of its processes, as when its machine is lost."""
        self.primary.kill()

    def promote(self) -> None:
        """Have the standby be the primary; it waits for no standby. Return when it can be written to."""
        self.standby.promote()

    def stop(self, kill: bool = False) -> None:
        """Shut both down."""
        for one in (self.standby, self.primary):
            one.stop(kill)

    def close(self) -> None:
        """Stop both and remove their files."""
        for one in (self.standby, self.primary):
            one.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Standby(PostgreSQL):
    """A copy of a server that follows it."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__()
        self._primary = primary

    def _create(self) -> None:
        self._run("pg_basebackup", "-D", "data", "-R", "-X", "stream", "-c", "fast", "-d", self._primary.url)

    def promote(self) -> None:
        """Follow nobody any more. Return when it can be written to."""
        self._run("pg_ctl", "promote", "-w", "-D", "data")


def _postgresql_programs() -> Path:
    """The folder of the programs of the newest PostgreSQL; raises PeerMissingError."""
    refuse_alone("postgres")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not found:
        raise PeerMissingError("postgres: install postgresql")
    return found[-1].parent


def _listens(port: int) -> bool:
    try:
        socket.create_connection((LOOPBACK, port), timeout=2.0).close()
    except OSError:
        return False
    return True
