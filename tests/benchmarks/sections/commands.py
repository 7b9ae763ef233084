"""What somebody waits for who tries the gateway: the help of each command, and from `git clone` to the first
message that crosses.

Help is a process of its own each time, and says itself at its end how much memory it had: the system's
account of a child begins with what its parent has. The clone is of this checkout as it is committed;
`make run` installs what it needs from wherever pip finds it, so the network and pip's cache count.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml
from typer.core import TyperGroup
from typer.main import get_command

from gateway.cli import commands
from tests.benchmarks.report import Figure, median
from tests.benchmarks.subjects import CHECKOUT, STOP_SECS_MAX, SubjectError
from tests.interop.servers import LOOPBACK, amqp_answers, free_ports, mqtt_answers

HELP: Final = """
import sys
from gateway.cli import main
try:
    main()
finally:
    with open("/proc/self/status") as status:
        print(*[line.split()[1] for line in status if line.startswith("VmHWM:")], file=sys.stderr)
"""
HELP_SECS_MAX: Final = 0.3
HELP_BYTES_MAX: Final = 40 * 1024 * 1024
HELPS: Final = 3  # of each command, for each repetition that is asked for
READY_SECS_MAX: Final = 900.0
MESSAGE_SECS_MAX: Final = 60.0
POLL_SECS: Final = 0.05


class Cost(NamedTuple):
    """What one process took: by the clock, of a processor, and of memory at most."""

    secs: float
    cpu_secs: float
    byte_count: int


def _lines() -> list[list[str]]:
    """Every command and group, with what stands before it."""
    found: list[list[str]] = [[]]

    def walk(group: Any, path: list[str]) -> None:
        for name, command in sorted(group.commands.items()):
            found.append([*path, name])
            if isinstance(command, TyperGroup):
                walk(command, [*path, name])

    walk(get_command(commands()), [])
    return found


def _help(line: list[str]) -> Cost:
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    asked = (sys.executable, "-c", HELP, *line, "--help")
    done = subprocess.run(asked, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    secs, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SubjectError(f"gateway {' '.join(line)} --help: {done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(secs, used, int(done.stderr) * 1024)


def _helped(line: list[str], repeat: int) -> Figure:
    costs = [_help(line) for _ in range(HELPS * repeat)]
    secs, byte_count = median([one.secs for one in costs]), max(one.byte_count for one in costs)
    ratio = min(HELP_SECS_MAX / secs, HELP_BYTES_MAX / byte_count)
    return Figure(
        " ".join(["gateway", *line, "--help"]),
        "s",
        secs,
        HELP_SECS_MAX,
        ratio=ratio,
        target=1.0,
        more={
            "CPU s": f"{median([one.cpu_secs for one in costs]):.2f}",
            "MB of memory": f"{byte_count / 2**20:.1f}",
        },
    )


def _first_message(folder: Path) -> Figure:
    """From nothing to a message that has crossed, as the README has it."""
    begin = time.perf_counter()
    clone = folder / "gateway"
    subprocess.run(("git", "clone", "-q", "--no-hardlinks", CHECKOUT, clone), check=True)
    cloned = time.perf_counter()
    mqtt, amqp, fast, http = free_ports(4)
    ports = {"mqtt": mqtt, "amqp091": amqp, "amqpfast": fast}
    listeners = {name: {"protocol": name, "host": LOOPBACK, "port": port} for name, port in ports.items()}
    stated = {"listeners": listeners, "http": {"host": LOOPBACK, "port": http}}
    (clone / "gateway.yaml").write_text(yaml.safe_dump(stated))
    log = folder / "make.out"
    with log.open("wb") as out:
        make = subprocess.Popen(
            ("make", "run", f"PYTHON={sys.executable}", "ARGS=--config gateway.yaml"),
            cwd=clone,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not (mqtt_answers(mqtt) and amqp_answers(amqp)):
            if make.poll() is not None or time.perf_counter() - begin > READY_SECS_MAX:
                raise SubjectError(f"make run: {log.read_text()[-2_000:]}")
            time.sleep(POLL_SECS)
        ready = time.perf_counter()
        _crossed(clone / ".venv/bin/gateway", mqtt, amqp)
        end = time.perf_counter()
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGTERM)
            make.wait(STOP_SECS_MAX)
    parts = {"clone": cloned - begin, "install and start": ready - cloned, "the message": end - ready}
    return Figure(
        "from `git clone` to the first message",
        "s",
        end - begin,
        READY_SECS_MAX,
        more={name: f"{secs:.1f}" for name, secs in parts.items()},
    )


def _crossed(gateway: Path, mqtt: int, amqp: int) -> None:
    """A message from MQTT to an AMQP consumer, both by the gateway's own command line. Published until the
    consumer, which says nothing when it has bound its queue, has one."""
    at = f"amqp://guest:guest@{LOOPBACK}:{amqp}"
    asked = (gateway, "subscribe", at, "--exchange", "amq.topic", "--binding-key", "plant.#", "--count", "1")
    consumer = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    deadline = time.perf_counter() + MESSAGE_SECS_MAX
    said = (gateway, "publish", f"mqtt://{LOOPBACK}:{mqtt}", "--topic", "plant/t", "--message", "21.5")
    try:
        while consumer.poll() is None and time.perf_counter() < deadline:
            subprocess.run(said, check=True, stdout=subprocess.DEVNULL)
    finally:
        consumer.kill()
        told = consumer.communicate()[0]
    if "plant.t 21.5" not in told:
        raise SubjectError(f"no message came: {told!r}")


def measure(folder: Path, repeat: int) -> list[Figure]:
    """Help of each command, and the first message once."""
    return [*(_helped(line, repeat) for line in _lines()), _first_message(folder)]
