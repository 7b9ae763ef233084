"""Recovery at the start from stored records that this process cannot restore.

Such a record stays in the store unchanged, for a gateway that can restore it. This gateway starts without it,
counts the error and logs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.containment import contained


@contextmanager
def contain_failure(kind: str, name: Any) -> Iterator[None]:
    """Log and suppress an exception raised in the `with` block, which restores one stored record.

    So a record that cannot be restored does not prevent the start. `kind` and `name` identify the record in
    the log.
    """
    try:
        yield
    except Exception as error:
        contained("startup", error, kind=kind, thing=repr(name)[:200])
