"""Programs of others' frameworks and libraries, run the same way against the gateway and its measure.

A program gets where to connect as its argument, and prints a line for each step that it has seen done. These
lines are compared with those that it prints where RabbitMQ or Mosquitto answers. It prints CUT where it wants
its connections closed from the other side; how that is done is said by whoever runs it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from gateway.app.clients import connected
from tests.clients.builds import NotBuiltError, built
from tests.conftest import missing
from tests.interop.gateway_fixture import Running
from tests.interop.java import QUICK
from tests.interop.servers import RabbitMQ

HERE: Final = Path(__file__).resolve().parent
CUT: Final = "cut me off"
DONE: Final = "done"
PROGRAM_SECS_MAX: Final = 140.0


def program(name: str) -> Path:
    """The folder with what `make peers` has built; the test is skipped where it has not."""
    try:
        return built(name)
    except NotBuiltError as error:
        missing(str(error))
        raise


def java(name: str) -> list[str]:
    """The command for a main of java/src."""
    place = program("java")
    return ["java", *QUICK, "-cp", f"{place}/classes:{place}/jars/*", name]


def said(command: Sequence[str | Path], cut: Callable[[], None], *, folder: Path | None = None) -> list[str]:
    """The lines of a program that ends well, DONE the last of them; AssertionError with all it said else."""
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            list(map(str, command)),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        giving_up = threading.Timer(PROGRAM_SECS_MAX, _end, (process,))
        giving_up.start()
        lines: list[str] = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if lines[-1] == CUT:
                    cut()
            code = process.wait()
        finally:
            giving_up.cancel()
            _end(process)
        complaints.seek(0)
        whole = "\n".join((*lines, complaints.read()[-5_000:]))
    assert code == 0, f"it ended with {code}:\n{whole}"
    assert lines[-1:] == [DONE], whole
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """The whole of its process group, if any of it is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def cut_by_gateway(gateway: Running) -> Callable[[], None]:
    """Closes as `gateway clients disconnect` does: AMQP 0-9-1 is told 320."""

    def cut() -> None:
        for one in list(connected(gateway.gateway.listeners)):
            one.dismiss()
        gateway.gateway.writes.flush()

    return lambda: gateway.ask(cut)


def cut_by_rabbitmq(rabbitmq: RabbitMQ) -> Callable[[], None]:
    """Closes every connection, with 320."""

    def cut() -> None:
        rabbitmq.control("close_all_connections", "the test wants it")

    return cut


def on_both(command: Sequence[str | Path], gateway: Running, rabbitmq: RabbitMQ) -> None:
    """Run an AMQP 0-9-1 program against RabbitMQ and the gateway; AssertionError where they differ."""
    theirs = said([*command, rabbitmq.url], cut_by_rabbitmq(rabbitmq))
    ours = said([*command, gateway.amqp_url], cut_by_gateway(gateway))
    assert ours == theirs
