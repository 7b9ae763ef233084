"""The gateway of a simulation as a process: it starts, is stopped or crashes, and starts again.

The objects are those of `gateway run`; only sockets, time and the store's thread are replaced.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import trio
import trio.testing

from gateway.app import Gateway
from gateway.app import gateway as gateway_module
from gateway.app.mappings import MappingFiles
from gateway.clock import SteadyClock
from gateway.settings import Settings
from gateway.transport.socket_loop import LOOP
from tests.simulation.disk import Disk
from tests.simulation.network import VirtualSocketLoop
from tests.simulation.virtual_clock import VirtualClock, within_process

STOP_SECS_MAX: Final = 60.0


async def _computed(work: Callable[[], Any]) -> Any:
    """Return the result of a computation, which needs no thread here."""
    await trio.lowlevel.checkpoint()
    return work()


async def _run_here(work: Callable[..., Any], *given: Any, **_: Any) -> Any:
    """Return the result of blocking work, such as the end of a large body's file."""
    return await _computed(partial(work, *given))


async def _watch(files: MappingFiles, changed: Callable[[], Awaitable[object]]) -> None:
    """Wait for ever: the simulation reloads when the seed says so."""
    await trio.sleep_forever()


@contextmanager
def without_threads() -> Iterator[None]:
    """Replace what would use threads of its own."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(gateway_module, "computed", _computed))
        stack.enter_context(patch.object(trio.to_thread, "run_sync", _run_here))
        stack.enter_context(patch.object(MappingFiles, "watch", _watch))
        yield


class VirtualProcess:
    """One gateway after the other, with one folder and one network."""

    def __init__(
        self,
        settings: Settings,
        disk: Disk,
        network: VirtualSocketLoop,
        clock: VirtualClock,
        nursery: trio.Nursery,
    ) -> None:
        self.gateway: Gateway
        self.running = False
        self._settings = settings
        self._disk = disk
        self._network = network
        self._clock = clock
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._utc = SteadyClock()

    def active(self) -> AbstractContextManager[None]:
        """Have what runs within the block belong to this process."""
        return within_process(self._utc)

    async def start(self) -> None:
        """Start a gateway; returns when it listens."""
        LOOP.set(self._network)  # type: ignore[arg-type]
        self._utc = SteadyClock()  # begins with the wall clock
        self._ended = trio.Event()
        self._scope = trio.CancelScope()
        with self.active():
            self.gateway = await self._nursery.start(self._run)
        await trio.testing.wait_all_tasks_blocked()  # each poller watches its sockets
        self.running = True

    async def _run(self, task_status: trio.TaskStatus[Gateway] = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with self._scope:
                gateway = Gateway(self._settings)
                await gateway.run(task_status=task_status, signals=False)
        finally:
            self.running = False
            self._ended.set()

    async def crash(self) -> None:
        """Kill the process: what is not on disk is gone."""
        copy = self._disk.crash()
        self._network.crash()
        self._scope.cancel()
        await self._ended.wait()
        self._network.calls.clear()
        self._disk.restore(copy)

    async def stop(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Send SIGTERM, and await `turn` until the process has ended."""
        with self.active():
            self.gateway.stop()
        until = self._clock.at + STOP_SECS_MAX
        while not self._ended.is_set():
            assert self._clock.at < until, "the gateway does not stop"
            await turn()
