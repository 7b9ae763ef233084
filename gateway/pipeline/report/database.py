"""Rates in a PostgreSQL table, for Grafana and other SQL clients.

The table `gateway_rates` is created if missing, in the first schema of the connection's search path. A window
that is written again replaces itself, so a repeated job changes nothing. URL and variables are libpq's: the
password may be in PGPASSWORD or a password file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Any, Final

from gateway.errors import PipelineError

SCHEMES: Final = ("postgresql://", "postgres://")
TABLE: Final = "gateway_rates"
CONNECT_SECS: Final = 10
ROWS_AT_A_TIME: Final = 10_000
KEYS: Final = {
    "begin": "timestamptz",
    "end": "timestamptz",
    "route": "text",
    "source_protocol": "text",
    "target_protocol": "text",
    "client": "text",
}
VALUES: Final = {
    "messages": "bigint",
    "body_bytes": "bigint",
    "frames": "bigint",
    "released": "bigint",
    "rejected": "bigint",
    "p50_ms": "double precision",
    "p95_ms": "double precision",
    "p99_ms": "double precision",
    "max_ms": "double precision",
}
NAMES: Final = (*KEYS, *VALUES)


def is_database(to: str) -> bool:
    """Return True if `to` is the URL of a database and not a folder."""
    return to.startswith(SCHEMES)


def put(url: str, rows: Iterable[Any]) -> int:
    """Write message rates into the table of the database at `url`. Return the number of rows.

    `rows` have the columns in NAMES; `client` may be missing. Raises PipelineError if the database is
    unreachable or refuses the rows.
    """
    try:
        import psycopg
    except ImportError as error:
        raise PipelineError("PostgreSQL needs psycopg: pip install 'gateway[postgresql]'") from error
    try:
        with psycopg.connect(url, connect_timeout=CONNECT_SECS) as connection, connection.cursor() as cursor:
            cursor.execute(_create_statement())
            count = 0
            for some in _pieces(rows):
                cursor.executemany(_upsert(), some)
                count += len(some)
            return count
    except psycopg.Error as error:
        raise PipelineError(f"the database did not accept the rates: {str(error).strip()}") from error


def _pieces(rows: Iterable[Any]) -> Iterator[Sequence[tuple[Any, ...]]]:
    values = (tuple(map(partial(_value, row.asDict()), NAMES)) for row in rows)
    while some := list(islice(values, ROWS_AT_A_TIME)):
        yield some


def _value(row: dict[str, Any], name: str) -> Any:
    """Return the value of a row's column `name` for the database.

    A time from Spark, which has no zone, gets this machine's zone.
    """
    value = row.get(name, "" if name in KEYS else None)
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _create_statement() -> str:
    columns = [f'"{name}" {kind} NOT NULL' for name, kind in KEYS.items()]
    columns += [f'"{name}" {kind}' for name, kind in VALUES.items()]
    return f"CREATE TABLE IF NOT EXISTS {TABLE} ({', '.join(columns)}, PRIMARY KEY ({_list(KEYS)}))"


def _upsert() -> str:
    places = ", ".join(["%s"] * len(NAMES))
    changed = ", ".join(f'"{name}" = excluded."{name}"' for name in VALUES)
    return (
        f"INSERT INTO {TABLE} ({_list(NAMES)}) VALUES ({places})"
        f" ON CONFLICT ({_list(KEYS)}) DO UPDATE SET {changed}"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
