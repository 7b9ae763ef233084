"""Room in a dictionary that remembers what has been worked out.

Emptied whole, it would be as if everything came for the first time, again and again where there is more than
it may hold. So those that were put in first go, some at a time: that costs nothing that could be measured.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, TypeVar

K = TypeVar("K")
V = TypeVar("V")
PART: Final = 16  # of what is remembered; a sixteenth goes at once


def make_room(cache: dict[K, V], most: int) -> None:
    """Before something is put in: it will then remember `most` at the most."""
    if len(cache) >= most:
        for key in list(islice(cache, max(len(cache) - most + 1, most // PART))):
            del cache[key]
