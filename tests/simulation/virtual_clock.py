"""Time and chance of a simulation: they advance, jump and repeat only as the seed says."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from random import Random
from typing import Any, Final
from unittest.mock import patch

import trio
from trio._core import _run

from gateway import chance, clock

FAR_SECS: Final = 1e9
BEGAN_AT: Final = 1_000.0  # of the clock that cannot be set
BEGAN_UTC: Final = 1_800_000_000.0


_process: Final[ContextVar[clock.SteadyClock]] = ContextVar("clock of a process")


class ProcessClock:
    """UTC of the process whose task or step runs, in place of `clock.SteadyClock`."""

    def utc(self) -> float:
        """Return UTC of the present process."""
        return _process.get().utc()


@contextmanager
def within_process(steady: clock.SteadyClock) -> Iterator[None]:
    """Have the gateway's UTC be that of one process within the block, and in tasks that it starts."""
    token = _process.set(steady)
    try:
        yield
    finally:
        _process.reset(token)


class VirtualClock(trio.abc.Clock):
    """Clock of Trio and of the gateway: `at` in seconds, and how far the wall clock was set."""

    def __init__(self) -> None:
        self.at = BEGAN_AT
        self.wall_ahead = 0.0

    def start_clock(self) -> None:
        """Do nothing: only `pass_time` advances the clock."""

    def current_time(self) -> float:
        """Return the time of the event loop."""
        return self.at

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Return 0 for a deadline that is over: no other one comes by itself."""
        return 0.0 if deadline <= self.at else FAR_SECS

    def utc(self) -> float:
        """Return the wall clock's time."""
        return BEGAN_UTC + self.at - BEGAN_AT + self.wall_ahead

    def pass_time(self, seconds: float) -> None:
        """Let time pass by all clocks."""
        self.at += seconds


def _seeded(random: Random) -> dict[str, Any]:
    """Return replacements of the functions of `secrets`."""

    def token_bytes(count: int | None = None) -> bytes:
        return random.randbytes(32 if count is None else count)

    def token_hex(count: int | None = None) -> str:
        return token_bytes(count).hex()

    return {"token_bytes": token_bytes, "token_hex": token_hex, "token_urlsafe": token_hex}


@contextmanager
def virtual_time(seed: str) -> Iterator[VirtualClock]:
    """Replace all clocks and random numbers of this process within the block."""
    virtual = VirtualClock()
    readers: dict[str, Any] = {
        "BOOT_TIME": None,
        "monotonic": virtual.current_time,
        "perf_counter": virtual.current_time,
        "thread_time": virtual.current_time,
        "unix_time": virtual.utc,
        "unix_time_ns": lambda: int(virtual.utc() * 1e9),
    }
    chances, order = chance.source.getstate(), _run._r.getstate()
    with ExitStack() as stack:
        for name, reader in readers.items():
            stack.enter_context(patch.object(clock, name, reader))
        stack.enter_context(patch.object(clock, "_steady", ProcessClock()))
        for name, function in _seeded(Random(f"secrets {seed}")).items():
            stack.enter_context(patch.object(secrets, name, function))
        stack.enter_context(patch.object(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        chance.source.seed(f"chance {seed}")
        _run._r.seed(f"tasks {seed}")
        try:
            yield virtual
        finally:
            chance.source.setstate(chances)
            _run._r.setstate(order)
