"""Much of this room is tested without an event loop."""

from __future__ import annotations

from tests.clocks import loop_clock

__all__ = ["loop_clock"]
