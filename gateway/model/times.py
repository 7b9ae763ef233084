"""Types of the kinds of time: of the event loop's clock, of leases, and of the wall clock.

The loop's clock has an arbitrary start, advances evenly and means nothing outside this process; that of
leases also advances while the machine sleeps; the wall clock is UTC and may be set. To subtract or compare
one with another is always wrong. So each has a type of its own, which `mypy` does not mix with the others or
with a plain number of seconds. At run time all are plain floats. Only `gateway/clock.py` reads the clocks for
times that are stored or compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["LeaseTime", "Monotonic", "WallTime"]

if TYPE_CHECKING:
    from typing import Never

    # Inherits from float for code that only gets `now`: a protocol machine uses a single clock.
    class Monotonic(float):
        """Time of the event loop's monotonic clock, in seconds."""

        def __add__(self, seconds: float) -> Monotonic: ...
        def __sub__(self, start: Monotonic) -> float: ...  # type: ignore[override]
        def __rsub__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __radd__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __lt__(self, other: Monotonic) -> bool: ...  # type: ignore[override]
        def __le__(self, other: Monotonic) -> bool: ...  # type: ignore[override]
        def __gt__(self, other: Monotonic) -> bool: ...  # type: ignore[override]
        def __ge__(self, other: Monotonic) -> bool: ...  # type: ignore[override]

    class LeaseTime(float):
        """Time in seconds of a clock for leases, which also advances while the machine sleeps."""

        def __add__(self, seconds: float) -> LeaseTime: ...
        def __sub__(self, start: LeaseTime) -> float: ...  # type: ignore[override]
        def __rsub__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __radd__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __lt__(self, other: LeaseTime) -> bool: ...  # type: ignore[override]
        def __le__(self, other: LeaseTime) -> bool: ...  # type: ignore[override]
        def __gt__(self, other: LeaseTime) -> bool: ...  # type: ignore[override]
        def __ge__(self, other: LeaseTime) -> bool: ...  # type: ignore[override]

    class WallTime(float):
        """Time of the wall clock, in seconds since 1970, UTC."""

        def __add__(self, seconds: float) -> WallTime: ...
        def __sub__(self, start: WallTime) -> float: ...  # type: ignore[override]
        def __rsub__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __radd__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __lt__(self, other: WallTime) -> bool: ...  # type: ignore[override]
        def __le__(self, other: WallTime) -> bool: ...  # type: ignore[override]
        def __gt__(self, other: WallTime) -> bool: ...  # type: ignore[override]
        def __ge__(self, other: WallTime) -> bool: ...  # type: ignore[override]
else:
    LeaseTime = Monotonic = WallTime = float
