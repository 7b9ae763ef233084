"""Hashes of passwords that cost next to nothing to make and to compare with: a hash says how dear it is."""

from __future__ import annotations

from functools import cache
from typing import Final

import argon2

_QUICK: Final = argon2.PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


@cache
def hashed(password: str) -> str:
    """An argon2id hash, as `users` wants it."""
    return _QUICK.hash(password)
