"""How much may be wrong: so many, or so many of a hundred."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

from gateway.errors import PipelineError

WORD: Final = re.compile(r"(\d+(?:\.\d+)?)(%?)")


class Tolerance(NamedTuple):
    """A number of messages, or the percent of all."""

    number: float
    percent: bool

    @classmethod
    def read(cls, text: str) -> Self:
        """`3` or `0.1%`. Raises PipelineError."""
        found = WORD.fullmatch(text.strip())
        if found is None or (not found[2] and "." in found[1]):
            raise PipelineError(f"a tolerance is a whole number, or percent as 0.1%, not {text!r}")
        return cls(float(found[1]), bool(found[2]))

    def allows(self, wrong: int, of: int) -> bool:
        """Whether `wrong` of so many are no more than that. Of nothing, nothing may be wrong by percent."""
        return wrong <= (self.number * of / 100 if self.percent else self.number)
