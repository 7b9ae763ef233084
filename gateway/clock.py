"""The two clocks, read: see `gateway/model/times.py` for why they are told apart."""

from __future__ import annotations

import time

import trio

from gateway.model.times import Monotonic, WallTime


def now() -> Monotonic:
    """The event loop's clock: a number of seconds that means nothing outside of this run of it."""
    return Monotonic(trio.current_time())


def utc() -> WallTime:
    """The wall clock."""
    return WallTime(time.time())
