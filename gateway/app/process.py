"""The process around a gateway: its event loop, the cycle collector, the exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable

import trio

from gateway.app.descriptors import raise_descriptors
from gateway.app.gateway import Gateway
from gateway.errors import GatewayError
from gateway.settings import Settings


def run(settings: Settings, started: Callable[[Gateway], None]) -> int:
    """Run a gateway until it is told to stop; `started` is called when it serves. Returns the exit code."""
    raise_descriptors()
    gateway = Gateway(settings)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            running: Gateway = await nursery.start(gateway.run)
            started(running)

    tune_collector()
    return run_loop(main)


def run_loop(main: Callable[[], Awaitable[object]]) -> int:
    """Run `main` in an event loop; what the user can mend is told. Returns the exit code."""
    code = 0
    try:
        trio.run(main)
    except* GatewayError as group:
        for error in _leaves(group):
            print(f"error: {error}", file=sys.stderr)
        code = 1
    return code


def tune_collector() -> None:
    """Messages are freed by reference counting; the cycle collector only finds what protocols leave behind.

    With Python's defaults it walks every waiting message again and again: a third of all time in a full
    queue.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors of a group and of the groups in it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
