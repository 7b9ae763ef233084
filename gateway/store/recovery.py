"""Recovery at the start from stored things that this process cannot restore.

Such a thing stays in the store unchanged, for a gateway that can restore it. This gateway starts without it,
counts it and logs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.containment import contained


@contextmanager
def contain_failure(kind: str, name: Any) -> Iterator[None]:
    """Log an error in restoring one record, so that the restart continues with the others."""
    try:
        yield
    except Exception as error:
        contained("startup", error, kind=kind, thing=repr(name)[:200])
