"""Tolerance of faults: a number, or a percentage."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

from gateway.errors import PipelineError

WORD: Final = re.compile(r"(\d+(?:\.\d+)?)(%?)")


class Tolerance(NamedTuple):
    """Tolerated number of faulty messages or, if `percent` is True, percentage of all messages."""

    number: float
    percent: bool

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a tolerance such as `3` or `0.1%`. Raises PipelineError for any other text."""
        found = WORD.fullmatch(text.strip())
        if found is None or (not found[2] and "." in found[1]):
            raise PipelineError(f"a tolerance must be an integer, or a percentage such as 0.1%, not {text!r}")
        return cls(float(found[1]), bool(found[2]))

    def allows(self, wrong: int, of: int) -> bool:
        """Return True if `wrong` faulty messages out of `of` messages are within the tolerance.

        If the tolerance is a percentage, no fault is tolerated when `of` is 0.
        """
        return wrong <= (self.number * of / 100 if self.percent else self.number)
