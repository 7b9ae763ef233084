"""Versioned migrations, the same files for both databases.

A file `NNNN_name.sql` takes the schema from version NNNN - 1 to NNNN. `{C}` is the collation of bytes and
`{bytes}` the type of bytes; what follows a line `-- only postgresql` is for that database alone.

Two versions of the gateway run side by side during an update. So a migration only expands: the program of the
version before must work with the new schema, which means new tables, and new columns that are null or have a
default. What is not used any more is dropped one release later. A program that starts and finds a newer
schema than its own refuses; one that is running when the schema moves on is not disturbed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final

from gateway.errors import StoreError

ONLY_POSTGRESQL: Final = "-- only postgresql\n"
Migrations = tuple[str, ...]


def load_migrations() -> Migrations:
    """Return the texts of the migrations, the first one first."""
    found = sorted(
        (one for one in files("gateway.state").joinpath("migrations").iterdir() if one.name.endswith(".sql")),
        key=lambda one: one.name,
    )
    return tuple(one.read_text(encoding="utf-8") for one in found)


def missing_steps(
    version: int, migrations: Migrations, *, postgresql: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield version and statements of each migration behind `version`. Raises StoreError if the schema is
    newer than the last one."""
    if version > len(migrations):
        raise StoreError(
            f"the schema of the state is version {version}, this gateway knows {len(migrations)}:"
            " a newer gateway has changed it. Start that one"
        )
    for number, text in enumerate(migrations[version:], start=version + 1):
        both, _, only = text.partition(ONLY_POSTGRESQL)
        text = both + only if postgresql else both
        collation, octets = ('COLLATE "C"', "bytea") if postgresql else ("", "BLOB")
        text = text.replace("{C}", collation).replace("{bytes}", octets)
        yield number, [one for one in map(str.strip, text.split(";\n")) if one]
