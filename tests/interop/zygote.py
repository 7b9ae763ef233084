"""Gateways as processes that need not be imported again.

Importing the gateway takes some seconds of two busy cores, starting one that is imported a tenth of it. So a
process for each run of tests imports it once and forks: what comes of it is a process as good as any, with
arguments, environment, folder and files of its own. That the command itself starts is for the tests of the
command line to show (tests/cli), and for everything that is given another program (gateway_process.py).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Final, NoReturn, TextIO

import trio

ROOT: Final = Path(__file__).resolve().parents[2]
REQUEST_BYTES_MAX: Final = 1_048_576
IMPORTED: Final = (
    *("gateway.app.process", "gateway.cli.run", "gateway.cli.welcome", "gateway.telemetry.logs"),
    *("tests.idle", "tests.interop.wrong_clock"),
)
IDLE_REPORT: Final = "idle.json"  # in the folder of the process: what SIGUSR2 makes it write


class Forked:
    """What `subprocess.Popen` offers, of a process that is the zygote's child."""

    def __init__(self, pid: int, exited: int, stdout: TextIO) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._exited = exited

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with suppress(TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select((self._exited,), (), (), timeout)[0]:
                raise TimeoutExpired("gateway", timeout or 0.0)
            code = os.read(self._exited, 16)
            os.close(self._exited)
            assert code, "the process that starts gateways is gone"
            self.returncode = int(code)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing is sent to a process that has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)


def started(
    arguments: list[str], folder: Path, environment: dict[str, str], stderr: int, *, clock: str = ""
) -> Forked:
    """Run `gateway ARGUMENTS` in a folder, by the wrong clock in the file `clock` if there is one.

    What the gateway writes to standard output is to be read.
    """
    request = {
        "arguments": arguments,
        "folder": str(folder),
        "environment": environment,
        "clock": clock,
    }
    stdout, written = os.pipe()
    exited, exits = os.pipe()
    zygote = _zygote()
    try:
        socket.send_fds(zygote, [json.dumps(request).encode()], [written, stderr, exits])
    finally:
        os.close(written)
        os.close(exits)
    pid = zygote.recv(16)
    assert pid, "the process that starts gateways has ended: see what it said on standard error"
    return Forked(int(pid), exited, os.fdopen(stdout))


@cache
def _zygote() -> socket.socket:
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = f"from {__name__} import serve; serve({its.fileno()})"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with its:
        process = Popen((sys.executable, "-c", program), cwd=ROOT, env=environment, pass_fds=(its.fileno(),))
    atexit.register(_ended, process, ours)
    return ours


def _ended(process: Popen[bytes], ours: socket.socket) -> None:
    ours.close()
    process.wait()


# What follows runs in the zygote.


def serve(descriptor: int) -> None:
    """Fork for each request until nobody can send one any more."""
    for name in IMPORTED:
        importlib.import_module(name)
    # A thread would not be in the child, and what it holds would be held there for ever.
    assert len(os.listdir("/proc/self/task")) == 1
    asked = socket.socket(fileno=descriptor)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and these end this process
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select((asked.fileno(), woken), (), ())
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
        if asked.fileno() in ready:
            request, files, _, _ = socket.recv_fds(asked, REQUEST_BYTES_MAX, 3)
            if not request:
                return
            stdout, stderr, exits = files
            if not (pid := os.fork()):
                _become(
                    json.loads(request),
                    stdout,
                    stderr,
                    (asked.detach(), woken, wakes, *running.values(), exits),
                )
            running[pid] = exits
            os.close(stdout)
            os.close(stderr)
            asked.send(b"%d" % pid)


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        exits = running.pop(pid)
        with suppress(BrokenPipeError):  # nobody wants to know
            os.write(exits, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(exits)


def _become(request: dict[str, Any], stdout: int, stderr: int, others: tuple[int, ...]) -> NoReturn:
    """Be the gateway."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in others:
        os.close(descriptor)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(request["folder"])
    # What is drawn when Trio is imported says where its clock begins and which task is next.
    trio._core._run._r.seed()
    random.seed()
    prepare(request["clock"])
    sys.argv[:] = ["gateway", *request["arguments"]]
    main = importlib.import_module("gateway.cli").main
    sys.exit(main())


def prepare(clock: str) -> None:
    """Make this process, before it becomes a gateway, able to report what waits in it, and go by the wrong
    clock in the file `clock` if there is one."""
    signal.signal(signal.SIGUSR2, write_idle_report)
    if clock:
        importlib.import_module("tests.interop.wrong_clock").follow(clock)
    readers = importlib.import_module("gateway.clock")
    readers.SteadyClock.__init__(readers._steady)  # its UTC begins with this process, not with the zygote


def write_idle_report(*_: object) -> None:
    """Write what waits in the gateway of this process, as a JSON list of lines (tests/idle.py)."""
    gateway_type = importlib.import_module("gateway.app").Gateway
    idle_report = importlib.import_module("tests.idle").idle_report
    lines = [line for one in gc.get_objects() if isinstance(one, gateway_type) for line in idle_report(one)]
    unfinished = Path(f"{IDLE_REPORT}.part")
    unfinished.write_text(json.dumps(lines))
    unfinished.rename(IDLE_REPORT)
