"""Source of random numbers that decide behaviour: jitter of retries, and which messages are traced.

A test seeds the source and gets the same numbers again. Secrets and identifiers that must not be guessed come
from `secrets`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

source: Final = Random()

random: Final[Callable[[], float]] = source.random
"""Return a random number from 0 up to, but not including, 1."""
