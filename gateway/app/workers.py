"""Several gateways on one machine that share the listeners' ports, and the process that has started them.

That process, the supervisor, serves no client. It holds the ports, so that they are nobody else's while a
worker begins anew; starts the workers and starts again those that end, or do not answer SILENT_MAX times;
hands on SIGHUP, and SIGTERM to all; and answers for all of them over HTTP. A worker is the same program with
another order (control.py): what goes wrong in one is none of the others' business. Each reads the
configuration itself, so one that is started again has it as it is then.
"""

from __future__ import annotations

import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

import structlog
import trio

from gateway import clock
from gateway.admin.workers import WorkersState, serve_workers
from gateway.app.control import Lines, Order, Question
from gateway.app.mappings import MappingFiles
from gateway.app.memory import SHARE, available
from gateway.app.process import run_loop
from gateway.containment import contained
from gateway.errors import ConfigurationError, GatewayError
from gateway.ingress.sockets import place_at, reserved
from gateway.settings import Settings
from gateway.telemetry.merging import MergedMetrics

log = structlog.get_logger()

ASK_SECS: Final = 1.0  # between two looks at each worker
ANSWER_SECS: Final = 5.0
SILENT_MAX: Final = 10  # of its questions in a row that a worker leaves unanswered; then it is killed
AGAIN_SECS_MIN: Final = 0.5
AGAIN_SECS_MAX: Final = 30.0
STABLE_SECS: Final = 10.0  # who has served for so long is started again after the shortest wait
KILL_SECS: Final = 10.0  # after drain_timeout_secs
UNANSWERED: Final = "does not answer"
DIED: Final = "died"
SILENT: Final = "silent"


class WorkerFailed(GatewayError):
    """A worker has ended before it ever served; it has said why itself."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__(f"worker {number} did not start")
        self.code = code


class Worker:
    """One worker through all of its lives."""

    def __init__(self, number: int, command: Sequence[str], order: Order) -> None:
        self.number = number
        self.serving = trio.Event()  # for the first time
        self.restarts: Counter[str] = Counter()
        self.reasons: list[str] = []  # why it is not ready
        self.started = False  # this life accepts clients
        self._command = command
        self._order = order
        self._process: trio.Process | None = None
        self._lines: Lines | None = None
        self._questions = 0
        self._asking = trio.Lock()
        self._unanswered = 0

    @property
    def up(self) -> bool:
        """It accepts clients, and answers."""
        return self.started and self.reasons != [UNANSWERED]

    def signal(self, number: signal.Signals) -> bool:
        """Send it a signal; False: it does not run."""
        process = self._process
        if process is None or process.poll() is not None:
            return False
        process.send_signal(number)
        return True

    async def run(self, stopping: trio.Event) -> None:
        """Keep it running until `stopping`, and until it has ended then. Raises WorkerFailed when its first
        life ends before it has served."""
        pause = AGAIN_SECS_MIN
        while True:
            began = clock.now()
            code, why = await self._live(stopping)
            if stopping.is_set():
                return
            if not self.serving.is_set():
                raise WorkerFailed(self.number, code)
            if clock.now() - began > STABLE_SECS:
                pause = AGAIN_SECS_MIN
            wait = pause * (0.5 + random.random() / 2)
            pause = min(pause * 2, AGAIN_SECS_MAX)
            self.restarts[why] += 1
            log.error(
                "a worker has ended, it is started again",
                worker=self.number,
                code=code,
                why=why,
                in_secs=round(wait, 2),
            )
            with trio.move_on_after(wait):
                await stopping.wait()
                return

    async def _live(self, stopping: trio.Event) -> tuple[int, str]:
        """One life: its exit code, and why it is to be started again."""
        ours, its = socket.socketpair()
        with its:
            # In a group of its own: Ctrl-C is the supervisor's to hand on.
            try:
                process = await trio.lowlevel.open_process(self._command, stdin=its, process_group=0)
            except OSError as error:  # no memory, or no process more: the others go on
                ours.close()
                log.error("a worker cannot be started", worker=self.number, error=str(error))
                return 1, DIED
        self._process = process
        log.info("a worker is started", worker=self.number, pid=process.pid)
        lines = self._lines = Lines(ours)
        if stopping.is_set():  # while it was started
            process.terminate()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look_after, lines)
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

    async def _look_after(self, lines: Lines) -> None:
        try:
            await self._ask_on(lines)
        except Exception as error:  # whatever it says, the others are served
            contained("timer", error, worker=self.number)
        self.signal(signal.SIGKILL)

    async def _ask_on(self, lines: Lines) -> None:
        """Say which it is, hear that it serves, and ask how it is, until it does not answer any more."""
        with suppress(trio.BrokenResourceError):
            await lines.send(**self._order._asdict())
        if await lines.receive() is None:
            await trio.sleep(ANSWER_SECS)  # in which it ends by itself
            return
        self.started = True
        self.serving.set()
        while self._unanswered < SILENT_MAX:
            found = await self.ask("reasons")
            self._unanswered = self._unanswered + 1 if found is None else 0
            self.reasons = [UNANSWERED] if found is None else found
            await trio.sleep(ASK_SECS)
        log.error("a worker does not answer, it is killed", worker=self.number)

    async def stop(self) -> None:
        """Have it drain. It is told by its lines: whoever stops all processes of a service has sent it a
        signal already, and another one would end it at once."""
        if await self.ask("stop") is None:
            self.signal(signal.SIGTERM)

    async def ask(self, question: Question) -> Any:
        """What it answers; None: nothing within ANSWER_SECS, or it does not serve."""
        lines = self._lines
        if lines is None or not self.started:
            return None
        with trio.move_on_after(ANSWER_SECS):
            async with self._asking:
                self._questions += 1
                try:
                    await lines.send(number=self._questions, question=question)
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    return None
                while (answer := await lines.receive()) is not None:
                    if answer["number"] == self._questions:  # others are late
                        return answer["answer"]
        return None


class Supervisor:
    """All workers of a configuration."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigurationError when a port cannot be had, and for mapping files that cannot be used."""
        self.settings = settings
        MappingFiles(settings, b"").read()  # so that this is told once
        self.http_port = 0
        self._held = ExitStack()  # sockets that hold the ports
        self.places: dict[str, tuple[str, int]] = {}
        with ExitStack() as undo:
            undo.callback(self._held.close)
            for name, given in settings.listeners.items():
                try:
                    sockets = reserved(given.host, given.port)
                except OSError as error:
                    raise ConfigurationError(
                        f"listeners.{name}: cannot listen on {place_at(given.host, given.port)}:"
                        f" {error.strerror or error}"
                    ) from error
                for sock in sockets:
                    self._held.enter_context(sock)
                port = int(sockets[0].getsockname()[1])
                self.places[name] = place_at(given.host, port), port
            undo.pop_all()
        ports = {name: port for name, (_, port) in self.places.items()}
        memory = settings.limits.memory_bytes_max or int(available() * SHARE)
        command = [sys.executable, "-m", "gateway", "run", "--worker"]
        if settings.file is not None:
            command += ["--config", str(settings.file)]
        numbers = range(1, settings.workers + 1)
        self.workers = [Worker(number, command, Order(number, ports, memory)) for number in numbers]
        self._metrics = MergedMetrics()
        self._stopping = trio.Event()

    async def run(self, started: Callable[[Supervisor], None], *, signals: bool = True) -> None:
        """Serve until `stop`, or SIGTERM or SIGINT; `started` is called when all workers serve. Raises
        WorkerFailed, and ConfigurationError when HTTP cannot listen."""
        http = self.settings.http
        with self._held:
            async with trio.open_nursery() as nursery:
                if signals:
                    await nursery.start(self._watch_signals)
                nursery.start_soon(self._end_workers)
                if http.enabled:
                    state = WorkersState(self.reasons, self.exposed, self.consoles, http.scrape_token_file)
                    self.http_port = await nursery.start(serve_workers, http, state)
                async with trio.open_nursery() as lives:
                    for worker in self.workers:
                        lives.start_soon(worker.run, self._stopping)
                    nursery.start_soon(self._tell_started, started)
                nursery.cancel_scope.cancel()
        log.info("stopped")

    def stop(self) -> None:
        """Have all drain and leave."""
        self._stopping.set()

    async def _tell_started(self, started: Callable[[Supervisor], None]) -> None:
        for worker in self.workers:
            await worker.serving.wait()
        log.info("started", workers=len(self.workers), http=self.http_port or None)
        started(self)

    @property
    def consoles(self) -> str:
        """Where those of the workers are."""
        port = self.settings.http.port
        if not port:
            return "at ports that their logs say"
        return f"worker 1 at port {port + 1}, worker {len(self.workers)} at port {port + len(self.workers)}"

    # What HTTP asks.

    def reasons(self) -> list[str]:
        """Why no clients should be sent here: of a worker that does not accept any nothing is said while
        others do."""
        serving = [worker for worker in self.workers if worker.started]
        found = [f"worker {one.number}: {reason}" for one in serving for reason in one.reasons]
        if not serving:
            found = ["no worker serves"]
        return ["draining", *found] if self._stopping.is_set() else found

    async def exposed(self, accept: str) -> tuple[bytes, str]:
        """The metrics of all."""
        pages: dict[int, str] = {}

        async def ask(worker: Worker) -> None:
            page = await worker.ask("metrics")
            if page is not None:
                pages[worker.number] = page

        async with trio.open_nursery() as nursery:
            for worker in self.workers:
                nursery.start_soon(ask, worker)
        return self._metrics.exposed(pages, self._rows(), accept)

    def _rows(self) -> Iterator[tuple[str, Sequence[str], float]]:
        for worker in self.workers:
            number = str(worker.number)
            yield "gateway_worker_up", (number,), int(worker.up)
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
        """Have all read their mappings and rules again."""
        for worker in self.workers:
            if worker.started:  # another one is just reading the files anyway
                worker.signal(signal.SIGHUP)

    async def _end_workers(self) -> None:
        """They drain by themselves, within their time."""
        await self._stopping.wait()
        async with trio.open_nursery() as nursery:
            for worker in self.workers:
                nursery.start_soon(worker.stop)
        await trio.sleep(self.settings.drain_timeout_secs + KILL_SECS)
        for worker in self.workers:
            if worker.signal(signal.SIGKILL):
                log.error("a worker has not stopped in time, it is killed", worker=worker.number)


def run_workers(settings: Settings, started: Callable[[Supervisor], None]) -> int:
    """Run all workers until they are told to stop. Returns the exit code."""
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
