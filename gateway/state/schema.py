"""Versioned migrations of the schema, the same files for both databases.

A file `NNNN_name.sql` takes the schema from version NNNN - 1 to NNNN. `{C}` is the collation of bytes and
`{bytes}` the type of bytes; the text after a line `-- only postgresql` is for that database alone.

Two versions of the gateway run side by side during an update. So a migration only expands: the program of the
version before must work with the new schema, which means new tables, and new columns that are null or have a
default. Columns that are unused are dropped one release later, when the schema contracts.

A line `-- works with N` states the oldest program that works with the schema: one that knows the migrations
until N. The database stores it, so an older program may still start, and one that is too old refuses. Without
such a line only programs that know the migration start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final, NamedTuple

from gateway.errors import StoreError

ONLY_POSTGRESQL: Final = "-- only postgresql\n"
WORKS_WITH: Final = re.compile(r"^-- works with (\d+)$", re.MULTILINE)
VERSIONS: Final = (
    "CREATE TABLE IF NOT EXISTS schema_version (version integer NOT NULL, works_with integer)",
    "SELECT version, works_with FROM schema_version ORDER BY version",
)
Migrations = tuple[str, ...]
Applied = Sequence[tuple[int, int | None]]
"""Versions that a database has, and the oldest program that each works with, or None if unknown."""


def load_migrations() -> Migrations:
    """Return the SQL texts of all migrations, sorted by version."""
    found = sorted(
        (one for one in files("gateway.state").joinpath("migrations").iterdir() if one.name.endswith(".sql")),
        key=lambda one: one.name,
    )
    return tuple(one.read_text(encoding="utf-8") for one in found)


class MigrationStep(NamedTuple):
    """Migration that a database lacks: its version and statements.

    `works_with` is the version of the oldest program that works with the migrated schema.
    """

    version: int
    works_with: int
    statements: list[str]


def missing_steps(applied: Applied, migrations: Migrations, *, postgresql: bool) -> Iterator[MigrationStep]:
    """Yield each migration that a database lacks, in order.

    `applied` has the database's migrations with the oldest programs that work with them. Raises StoreError if
    the database has a later migration that this program does not work with.
    """
    newest_version = len(migrations)
    if any(version > newest_version and (works or version) > newest_version for version, works in applied):
        raise StoreError(
            f"the schema of the state has version {applied[-1][0]}, but this gateway knows only "
            f"{newest_version}: a newer gateway has upgraded it. Start the newer gateway"
        )
    begin = max((version for version, _ in applied), default=0)
    for number, text in enumerate(migrations[begin:], start=begin + 1):
        found = WORKS_WITH.search(text)
        both, _, only = text.partition(ONLY_POSTGRESQL)
        text = both + only if postgresql else both
        collation, blob = ('COLLATE "C"', "bytea") if postgresql else ("", "BLOB")
        text = text.replace("{C}", collation).replace("{bytes}", blob)
        statements = [one for one in map(str.strip, text.split(";\n")) if one]
        yield MigrationStep(number, number if found is None else int(found[1]), statements)
