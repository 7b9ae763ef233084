"""The event loop's clock for tests that have no event loop."""

from __future__ import annotations

import time

import pytest
import trio

from gateway import clock
from gateway.model.times import Monotonic


@pytest.fixture(autouse=True)
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is a loop its clock counts, as always; a test that has none is given another."""

    def now() -> Monotonic:
        try:
            return Monotonic(trio.current_time())
        except RuntimeError:
            return Monotonic(time.monotonic())

    monkeypatch.setattr(clock, "now", now)
