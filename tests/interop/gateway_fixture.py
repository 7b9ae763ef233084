"""A whole gateway for tests: in a thread of its own for clients that block, or in the test's own loop.

It listens on free loopback ports, without HTTP. Whatever goes wrong inside, an exception that ends it or a
line logged as an error, fails the test that used it, when the gateway is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar
from unittest.mock import patch

import structlog
import trio

from gateway.app import Gateway, mappings
from gateway.app.retained import retained_messages
from gateway.ingress import listener
from gateway.settings import Http, Limits, Settings, StoreSettings
from tests.configured import make_listener
from tests.idle import await_idle
from tests.needs import needed

LOOPBACK: Final = "127.0.0.1"
START_SECS_MAX: Final = 30.0
STOP_SECS_MAX: Final = 30.0
WATCH_MILLISECONDS: Final = 20
TICK_SECS: Final = 0.1
RETAINS_SECS: Final = 10.0

T = TypeVar("T")


def settings_of(*, limits: Limits | None = None, drain_timeout_secs: float = 2.0, **more: Any) -> Settings:
    """A listener of each protocol on a free port, no HTTP; `more` are settings by name."""
    given: dict[str, Any] = {
        "listeners": {
            "mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
            "amqp091": make_listener(protocol="amqp091", host=LOOPBACK, port=0),
            "amqpfast": make_listener(protocol="amqpfast", host=LOOPBACK, port=0, negotiation_pause_secs=0.0),
        },
        "http": Http(enabled=False),
        "limits": limits or Limits(),
        "drain_timeout_secs": drain_timeout_secs,
        "store": StoreSettings(enabled=False),
    }
    return Settings(**(given | more))


@needed("a gateway")
class Running:
    """A gateway that runs in a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        self.gateway: Gateway
        self._settings = settings
        self._token: trio.lowlevel.TrioToken
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway")

    def start(self) -> None:
        """Return when every listener is open; raises what kept the gateway from starting."""
        self._thread.start()
        assert self._started.wait(START_SECS_MAX), "the gateway did not start"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self.gateway = Gateway(self._settings)
        async with trio.open_nursery() as nursery:
            await nursery.start(_run_quietly, self.gateway)
            self._started.set()

    def port(self, listener: str) -> int:
        """The port that a listener got."""
        return self.gateway.listeners[listener].port

    @property
    def mqtt(self) -> int:
        return self.port("mqtt")

    @property
    def amqp(self) -> int:
        return self.port("amqp091")

    @property
    def amqp_url(self) -> str:
        return f"amqp://guest:guest@{LOOPBACK}:{self.amqp}/%2F"

    @property
    def idle_amqp_url(self) -> str:
        """For a blocking client that nobody calls for minutes: it agrees on no heartbeats."""
        return f"{self.amqp_url}?heartbeat=0"

    def ask(self, question: Callable[..., T]) -> T:
        """Call `question` in the gateway's own loop, between two turns."""
        return trio.from_thread.run_sync(question, trio_token=self._token)

    def await_(self, question: Callable[[], Awaitable[T]]) -> T:
        """The same, of what takes its time there."""
        return trio.from_thread.run(question, trio_token=self._token)

    def until(self, condition: Callable[..., object], seconds: float = 10.0) -> None:
        """Return when `condition` (asked in the gateway's loop) holds; AssertionError when it never does."""

        async def watch() -> bool:
            with trio.move_on_after(seconds):
                while not condition():
                    await trio.sleep(0.01)
                return True
            return bool(condition())

        assert trio.from_thread.run(watch, trio_token=self._token), "it did not come true"

    def retains(self, topic: str) -> bool:
        """Return True if a topic has a retained message, in memory or in the database of replicas."""
        gateway = self.gateway
        where = retained_messages(gateway.mqtt.retained, gateway.state, None, gateway.writes.flush)

        async def look() -> bool:
            found = [one.address.name async for some in where.slices(topic) for one in some]
            return topic in found

        return self.await_(look)

    def until_retains(self, topic: str, there: bool = True) -> None:
        """Return when it has one, or has none; AssertionError when that never holds."""
        deadline = time.monotonic() + RETAINS_SECS
        while self.retains(topic) is not there:
            assert time.monotonic() < deadline, topic
            time.sleep(0.01)

    def check_idle(self) -> None:
        """Fail if something still waits in the gateway, which has nothing left to do (tests/idle.py)."""
        if self._thread.is_alive() and not self.gateway._stopping.is_set():
            self.await_(partial(await_idle, self.gateway))

    def stop(self) -> None:
        """Drain, wait for the end, and raise what went wrong."""
        if self._thread.is_alive():
            with suppress(trio.RunFinishedError):  # it was told before, and ends now
                self.ask(self.gateway.stop)
        self._thread.join(STOP_SECS_MAX)
        assert not self._thread.is_alive(), "the gateway did not stop"
        if self._error is not None:
            raise self._error


async def _run_quietly(
    gateway: Gateway, task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED
) -> None:
    await gateway.run(task_status=task_status, signals=False)


@contextmanager
def no_errors_logged(*, but: str = "") -> Iterator[list[Any]]:
    """Fail when something logs an error (`but`: an event that is expected); yields all that is logged."""
    with structlog.testing.capture_logs() as lines:
        yield lines
    errors = [line for line in lines if line["log_level"] in ("error", "critical") and line["event"] != but]
    assert errors == []


@contextmanager
def quickened() -> Iterator[None]:
    """What is due by the clock comes at once, and stopping waits for nothing."""
    with (
        patch.object(mappings, "WATCH_MILLISECONDS", WATCH_MILLISECONDS),
        patch.object(listener, "TICK_SECS", TICK_SECS),
    ):
        yield


@contextmanager
def running(
    settings: Settings | None = None, *, but: str = "", unrepaired: bool = False
) -> Iterator[Running]:
    """A gateway in a thread; stopped and looked after when the block ends. What it logged is printed, so it
    stands beside a test that fails. `unrepaired`: at the end something is still wrong, and clients wait.
    """
    with no_errors_logged(but=but) as lines, quickened():
        one = Running(settings or settings_of())
        one.start()
        try:
            yield one
            if not unrepaired:
                one.check_idle()
        finally:
            one.stop()
            print(*lines, sep="\n")


@needed("a gateway")
@asynccontextmanager
async def gateway_here(settings: Settings | None = None) -> AsyncIterator[Gateway]:
    """A gateway in the loop of the test itself."""
    with no_errors_logged(), quickened():
        gateway = Gateway(settings or settings_of())
        async with trio.open_nursery() as nursery:
            await nursery.start(_run_quietly, gateway)
            try:
                yield gateway
            finally:
                gateway.stop()
