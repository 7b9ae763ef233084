"""Fair shares: how many of something each holder has, so that nobody has all of it."""

from __future__ import annotations

from math import ceil
from typing import Final

SHARE: Final = 0.9  # of all, unless the configuration says how many: somebody else always gets in


def share_of(total: int, given: int) -> int:
    """How many of `total` one holder may have; `said` is the option, 0: nothing was said."""
    return given or ceil(total * SHARE)


class Shares:
    """Counts by holder. Who has most is known without looking through them: it only ever moves by one."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._holders: dict[int, dict[str, None]] = {}  # by count
        self._most = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, holder: str) -> int:
        return self._counts.get(holder, 0)

    @property
    def largest(self) -> str | None:
        """A holder that has as many as any; None: nobody has anything."""
        return next(iter(self._holders[self._most])) if self._most else None

    def add(self, holder: str) -> None:
        """It has one more."""
        count = self._counts.get(holder, 0)
        self._move(holder, count, count + 1)
        self._most = max(self._most, count + 1)

    def remove(self, holder: str) -> None:
        """It has one less."""
        count = self._counts[holder]
        self._move(holder, count, count - 1)
        if self._most not in self._holders:
            self._most -= 1

    def _move(self, holder: str, before: int, after: int) -> None:
        if before:
            same = self._holders[before]
            del same[holder]
            if not same:
                del self._holders[before]
        if after:
            self._counts[holder] = after
            self._holders.setdefault(after, {})[holder] = None
        else:
            del self._counts[holder]
