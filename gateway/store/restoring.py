"""What an earlier process has left, and this one cannot make again.

That stays in the store as it is, for a gateway that can; this one starts without it, counts it and says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.containment import contained


@contextmanager
def set_aside(kind: str, name: Any) -> Iterator[None]:
    """Around what makes one thing again: whatever goes wrong, the rest goes on."""
    try:
        yield
    except Exception as error:
        contained("startup", error, kind=kind, thing=repr(name)[:200])
