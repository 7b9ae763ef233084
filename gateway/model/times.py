"""Two kinds of time, told apart by their types: that of the event loop's clock, and that of the wall clock.

The loop's clock begins anywhere, goes on evenly and means nothing outside of this process; the wall clock is
UTC and may be set. To subtract or compare one with the other is always wrong, and was once not seen: so each
is a type of its own, which `mypy` does not let near the other, nor near a number of whatever seconds. At run
time both are plain floats. `gateway/clock.py` reads both clocks, and nothing else does for times that are
kept or compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Monotonic", "WallTime"]

if TYPE_CHECKING:
    from typing import Never

    # What is inherited from float serves whoever is only given `now`: a protocol's machine keeps one clock.
    class Monotonic(float):
        """A time of the event loop's clock, in seconds."""

        def __add__(self, seconds: float) -> Monotonic: ...
        def __sub__(self, since: Monotonic) -> float: ...  # type: ignore[override]
        def __rsub__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __radd__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __lt__(self, other: Monotonic) -> bool: ...  # type: ignore[override]
        def __le__(self, other: Monotonic) -> bool: ...  # type: ignore[override]
        def __gt__(self, other: Monotonic) -> bool: ...  # type: ignore[override]
        def __ge__(self, other: Monotonic) -> bool: ...  # type: ignore[override]

    class WallTime(float):
        """UTC, in seconds since 1970."""

        def __add__(self, seconds: float) -> WallTime: ...
        def __sub__(self, since: WallTime) -> float: ...  # type: ignore[override]
        def __rsub__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __radd__(self, other: Never) -> Never: ...  # type: ignore[override]
        def __lt__(self, other: WallTime) -> bool: ...  # type: ignore[override]
        def __le__(self, other: WallTime) -> bool: ...  # type: ignore[override]
        def __gt__(self, other: WallTime) -> bool: ...  # type: ignore[override]
        def __ge__(self, other: WallTime) -> bool: ...  # type: ignore[override]
else:
    Monotonic = WallTime = float
