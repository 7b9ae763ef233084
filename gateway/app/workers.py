"""Supervisor of several gateways on one machine that share the listeners' ports.

The supervisor serves no MQTT or AMQP client. It reserves the ports while a worker restarts; starts the
workers, and restarts those that end or do not reply to SILENT_MAX requests; forwards SIGHUP and SIGTERM to
all; and serves combined health and metrics over HTTP. A worker is the same program with a `WorkerOrder`
(`gateway/app/control.py`); a fault of one does not affect the others. Each worker reads the configuration
itself, so a restarted worker uses the present one.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import structlog
import trio

from gateway import chance, clock
from gateway.admin.workers import WorkersState, serve_workers
from gateway.app.control import JsonLines, WorkerOrder, WorkerRequest
from gateway.app.mappings import MappingFiles
from gateway.app.memory import SHARE, available
from gateway.app.process import run_loop
from gateway.containment import contained
from gateway.errors import ConfigurationError, GatewayError
from gateway.ingress.sockets import place_at, reserve_port
from gateway.settings import Settings
from gateway.telemetry.worker_metrics import MergedMetrics

log = structlog.get_logger()

REQUEST_SECS: Final = 1.0  # Interval between two checks of each worker.
ANSWER_SECS: Final = 5.0
SILENT_MAX: Final = 10  # Unanswered requests in a row after which a worker is killed.
RESTART_SECS_MIN: Final = 0.5
RESTART_SECS_MAX: Final = 30.0
STABLE_SECS: Final = 10.0  # A worker that has served this long is restarted after the shortest wait.
KILL_SECS: Final = 10.0  # In addition to drain_timeout_secs.
UNANSWERED: Final = "not responding"
DIED: Final = "died"
SILENT: Final = "silent"


class WorkerFailed(GatewayError):
    """Error for a worker that has ended before it served clients.

    The worker itself has printed the reason. `code` is its exit code.
    """

    def __init__(self, number: int, code: int) -> None:
        super().__init__(f"worker {number} did not start")
        self.code = code


class Worker:
    """One worker as its supervisor manages it: the present process, the readiness, and the restarts."""

    def __init__(self, number: int, command: Sequence[str], order: WorkerOrder) -> None:
        self.number = number
        self.serving = trio.Event()  # Set when the worker serves for the first time.
        self.restarts: Counter[str] = Counter()
        self.reasons: list[str] = []  # Reasons why the worker is not ready.
        self.started = False  # True while the present process accepts clients.
        self._command = command
        self._order = order
        self._process: trio.Process | None = None
        self._lines: JsonLines | None = None
        self._request_count = 0
        self._request_lock = trio.Lock()
        self._unanswered = 0

    @property
    def is_up(self) -> bool:
        """True if the worker accepts clients and replies to the supervisor."""
        return self.started and self.reasons != [UNANSWERED]

    def signal(self, number: signal.Signals) -> bool:
        """Send a signal to the worker's process. Return False if no process runs."""
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.send_signal(number)
        return True

    async def run(self, stopping: trio.Event) -> None:
        """Run the worker, and restart it whenever it ends. Return when it has ended after `stopping` is set.

        Raises WorkerFailed if its first process ends before it has served clients.
        """
        pause = RESTART_SECS_MIN
        while True:
            began = clock.now()
            code, why = await self._run_process(stopping)
            if stopping.is_set():
                return
            if not self.serving.is_set():
                raise WorkerFailed(self.number, code)
            if clock.now() - began > STABLE_SECS:
                pause = RESTART_SECS_MIN
            wait = pause * (0.5 + chance.random() / 2)
            pause = min(pause * 2, RESTART_SECS_MAX)
            self.restarts[why] += 1
            log.error(
                "worker ended, restarting",
                worker=self.number,
                exit_code=code,
                why=why,
                restart_in_secs=round(wait, 2),
            )
            with trio.move_on_after(wait):
                await stopping.wait()
                return

    async def _run_process(self, stopping: trio.Event) -> tuple[int, str]:
        """Run one process of the worker until it ends. Return its exit code and the reason for its end.

        The reason is DIED, or SILENT if the process was killed because it did not reply to requests.
        """
        ours, its = socket.socketpair()
        with its:
            # In a process group of its own: the supervisor forwards Ctrl-C.
            try:
                process = await trio.lowlevel.open_process(self._command, stdin=its, process_group=0)
            except OSError as error:  # No memory or no process left: the other workers continue.
                ours.close()
                log.error("worker start failed", worker=self.number, error=str(error))
                return 1, DIED
        self._process = process
        log.info("worker started", worker=self.number, pid=process.pid)
        lines = self._lines = JsonLines(ours)
        if stopping.is_set():  # Set while the process was started.
            process.terminate()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._supervise, lines)
                await process.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.started = False
            why = SILENT if self._unanswered >= SILENT_MAX else DIED
            self._unanswered = 0
            self.reasons = []
            self._lines = None
            lines.close()
            if process.returncode is None:
                process.kill()
                with trio.CancelScope(shield=True):
                    await process.wait()
        code = process.returncode
        assert code is not None
        return code, why

    async def _supervise(self, lines: JsonLines) -> None:
        """Exchange messages with the process until it ends or no longer replies, and then kill it."""
        try:
            await self._poll(lines)
        except Exception as error:  # An invalid reply must not affect other workers.
            contained("timer", error, worker=self.number)
        self.signal(signal.SIGKILL)

    async def _poll(self, lines: JsonLines) -> None:
        """Send the worker's settings, wait until it serves, then request its readiness every REQUEST_SECS.

        Returns when the process has ended, or has not replied to SILENT_MAX requests in a row.
        """
        with suppress(trio.BrokenResourceError):
            await lines.send(**self._order._asdict())
        if await lines.receive() is None:
            await trio.sleep(ANSWER_SECS)  # The process ends by itself meanwhile.
            return
        self.started = True
        self.serving.set()
        while self._unanswered < SILENT_MAX:
            found = await self.request("reasons")
            self._unanswered = self._unanswered + 1 if found is None else 0
            self.reasons = [UNANSWERED] if found is None else found
            await trio.sleep(REQUEST_SECS)
        log.error("worker unresponsive, killed", worker=self.number)

    async def stop(self) -> None:
        """Request draining over the socket; send SIGTERM only if the worker does not reply.

        A signal could be the worker's second one, because a service manager that stops all processes has
        already sent one. A second signal ends the process without draining.
        """
        if await self.request("stop") is None:
            self.signal(signal.SIGTERM)

    async def request(self, name: WorkerRequest) -> Any:
        """Send the request `name` to the worker, and return its reply.

        Return None if the worker does not reply within ANSWER_SECS, or does not serve.
        """
        lines = self._lines
        if lines is None or not self.started:
            return None
        with trio.move_on_after(ANSWER_SECS):
            async with self._request_lock:
                self._request_count += 1
                try:
                    await lines.send(number=self._request_count, request=name)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return None
                while (reply := await lines.receive()) is not None:
                    if reply["number"] == self._request_count:  # Skips late replies to earlier requests.
                        return reply["reply"]
        return None


class Supervisor:
    """Parent of all worker processes, which also serves their metrics and readiness over HTTP."""

    def __init__(self, settings: Settings) -> None:
        """Reserve the ports of all listeners, and prepare the workers.

        Raises ConfigurationError when a port is not available, and for invalid mapping files.
        """
        self.settings = settings
        MappingFiles(settings, b"").read()  # So that an error is reported once.
        self.http_port = 0
        self._sockets = ExitStack()  # Sockets that reserve the ports.
        self.places: dict[str, tuple[str, int]] = {}
        with ExitStack() as undo:
            undo.callback(self._sockets.close)
            for name, options in settings.listeners.items():
                try:
                    sockets = reserve_port(options.host, options.port)
                except OSError as error:
                    raise ConfigurationError(
                        f"listeners.{name}: cannot listen on {place_at(options.host, options.port)}:"
                        f" {error.strerror or error}"
                    ) from error
                for sock in sockets:
                    self._sockets.enter_context(sock)
                port = int(sockets[0].getsockname()[1])
                self.places[name] = place_at(options.host, port), port
            undo.pop_all()
        ports = {name: port for name, (_, port) in self.places.items()}
        memory = settings.limits.memory_bytes_max or int(available() * SHARE)
        command = [sys.executable, "-m", "gateway", "run", "--worker"]
        if settings.file is not None:
            command += ["--config", str(settings.file)]
        numbers = range(1, settings.workers + 1)
        self.workers = [Worker(number, command, WorkerOrder(number, ports, memory)) for number in numbers]
        self._metrics = MergedMetrics()
        self._stopping = trio.Event()

    async def run(self, started: Callable[[Supervisor], None], *, signals: bool = True) -> None:
        """Run all workers until `stop` is called, or SIGTERM or SIGINT arrives.

        `started` is called when all workers serve. Raises WorkerFailed if a worker ends before it has served,
        and ConfigurationError if the HTTP server cannot listen.
        """
        http = self.settings.http
        with self._sockets:
            async with trio.open_nursery() as nursery:
                if signals:
                    await nursery.start(self._watch_signals)
                nursery.start_soon(self._end_workers)
                if http.enabled:
                    state = WorkersState(self.reasons, self.exposition, self.consoles, http.scrape_token_file)
                    self.http_port = await nursery.start(serve_workers, http, state)
                async with trio.open_nursery() as lives:
                    for worker in self.workers:
                        lives.start_soon(worker.run, self._stopping)
                    nursery.start_soon(self._report_started, started)
                nursery.cancel_scope.cancel()
        log.info("stopped")

    def stop(self) -> None:
        """Begin to drain and stop all workers. `run` returns when they have ended."""
        self._stopping.set()

    async def _report_started(self, started: Callable[[Supervisor], None]) -> None:
        for worker in self.workers:
            await worker.serving.wait()
        log.info("started", workers=len(self.workers), http=self.http_port or None)
        started(self)

    @property
    def consoles(self) -> str:
        """Text for users that names the HTTP ports of the workers' consoles."""
        port = self.settings.http.port
        if not port:
            return "at the ports in their logs"
        return f"worker 1 at port {port + 1}, worker {len(self.workers)} at port {port + len(self.workers)}"

    # Sources of the HTTP server.

    def reasons(self) -> list[str]:
        """Return the reasons why the gateway is not ready on this machine.

        An empty list means that it is ready. A worker that does not accept clients is ignored as long as
        another worker does.
        """
        serving = [worker for worker in self.workers if worker.started]
        found = [f"worker {one.number}: {reason}" for one in serving for reason in one.reasons]
        if not serving:
            found = ["no worker is serving"]
        return ["draining", *found] if self._stopping.is_set() else found

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return the combined metrics of all workers as bytes, and their content type.

        `accept` is the value of the HTTP header `Accept`, which selects the format.
        """
        pages: dict[int, str] = {}

        async def request_page(worker: Worker) -> None:
            page = await worker.request("metrics")
            if page is not None:
                pages[worker.number] = page

        async with trio.open_nursery() as nursery:
            for worker in self.workers:
                nursery.start_soon(request_page, worker)
        return self._metrics.exposition(pages, self._rows(), accept)

    def _rows(self) -> Iterator[tuple[str, Sequence[str], float]]:
        for worker in self.workers:
            number = str(worker.number)
            yield "gateway_worker_up", (number,), int(worker.is_up)
            for why in (DIED, SILENT):
                yield "gateway_worker_restarts", (number, why), worker.restarts[why]

    # Signals.

    async def _watch_signals(self, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as received:
            task_status.started()
            async for number in received:
                if number == signal.SIGHUP:
                    self.reload()
                else:
                    log.info("stopping", signal=signal.Signals(number).name)
                    self.stop()

    def reload(self) -> None:
        """Send SIGHUP to all workers, which read mappings, users and roles again."""
        for worker in self.workers:
            if worker.started:  # A worker that is starting reads the files anyway.
                worker.signal(signal.SIGHUP)

    async def _end_workers(self) -> None:
        """Wait until `stop` is called, then make all workers drain.

        Kill the workers that have not ended within the drain timeout plus KILL_SECS.
        """
        await self._stopping.wait()
        async with trio.open_nursery() as nursery:
            for worker in self.workers:
                nursery.start_soon(worker.stop)
        await trio.sleep(self.settings.drain_timeout_secs + KILL_SECS)
        for worker in self.workers:
            if worker.signal(signal.SIGKILL):
                log.error("worker not stopped in time, killed", worker=worker.number)


def run_workers(settings: Settings, started: Callable[[Supervisor], None]) -> int:
    """Run all workers until they are stopped. Return the highest exit code.

    `started` is called when all workers serve.
    """
    supervisor = Supervisor(settings)
    failed: list[int] = []

    async def main() -> None:
        try:
            await supervisor.run(started)
        except* WorkerFailed as group:
            failed.extend(error.code for error in group.exceptions if isinstance(error, WorkerFailed))
            raise

    code = run_loop(main)
    return max([code, *failed])
