"""Process of a single gateway: it runs the event loop, tunes the cycle collector, returns an exit code."""

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
    """Run a gateway until it is stopped. Return the exit code of the process.

    `started` is called with the gateway when all its listeners are open.
    """
    raise_descriptors()
    tune_collector()
    gateway = Gateway(settings)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            running: Gateway = await nursery.start(gateway.run)
            started(running)

    freeze_objects()
    return run_loop(main)


def run_loop(main: Callable[[], Awaitable[object]]) -> int:
    """Run `main` in an event loop. Return the exit code of the process.

    A GatewayError, which the user can correct, is printed to standard error, and the exit code is 1.
    """
    code = 0
    try:
        trio.run(main)
    except* GatewayError as group:
        for error in _leaves(group):
            print(f"error: {error}", file=sys.stderr)
        code = 1
    return code


def tune_collector() -> None:
    """Make Python's cycle collector run rarely.

    Messages are freed by reference counting; only closed connections leave cycles. With Python's default
    thresholds the collector would examine all waiting messages repeatedly, which would take a third of the
    CPU time with a full queue, and a quarter of the time to read ten thousand routes.
    """
    gc.set_threshold(100_000, 20, 100)


def freeze_objects() -> None:
    """Exclude all present objects from cycle collection, because they exist until the process ends."""
    gc.collect()
    gc.freeze()


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """Return the errors in an exception group and in the groups nested in it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
