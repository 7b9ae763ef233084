"""Options of the journal source, named as in Spark's Kafka source where that has them.

| option | default | |
|---|---|---|
| `path` | | the journal's folder, as every worker sees it, or a URI |
| `columns` | all | column names separated by commas; Spark does not tell a source which ones it needs |
| `routes`, `protocols` | all | only rows of these routes ("": none) and source protocols |
| `shards` | all | only these shards, and none that appears later; names separated by commas, or JSON |
| `startingOffsets` | `earliest`; of a stream `latest` | or JSON: `{"0": 123}`; -2: earliest, -1: latest |
| `startingTimestamp` | | milliseconds since 1970 or ISO 8601: from the first row received then or later |
| `endingOffsets`, `endingTimestamp` | `latest` | the row before which a batch ends |
| `maxOffsetsPerTrigger` | all | rows in a micro-batch, divided by the rows that wait in each shard |
| `minPartitions` | 1 | minimum number of tasks |
| `partitionBytes` | 64 MiB | bytes of blocks in a task |
| `receivedFrom`, `receivedBefore` | all | rows received then or later, or before: ISO 8601 or milliseconds |
| `only` | all | JSON: `{"client": ["a", "b"]}`: only rows with one of these texts in a coded column |
| `failOnDataLoss` | `true` | `false`: continue where rows were deleted by retention or are damaged |

Offsets are sequence numbers by shard, those of the next row. Unknown options are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Final

from gateway.errors import PipelineError
from gateway.pipeline.stores import Hadoop, StoreFolder, place_of
from gateway.store.journal.columns import COLUMNS
from gateway.store.journal.format import ColumnKind

CODED: Final = frozenset(column.name for column in COLUMNS if column.kind is ColumnKind.CODED)
"""Columns whose texts repeat, so that whole blocks can be skipped by them."""

EARLIEST: Final = -2
LATEST: Final = -1
NAMES: Final = (
    "path",
    "columns",
    "routes",
    "protocols",
    "shards",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "partitionBytes",
    "failOnDataLoss",
    "receivedFrom",
    "receivedBefore",
    "only",
)
PARTITION_BYTES: Final = 64 * 1_048_576  # Each task costs as much as reading some 20 MiB.

Offsets = dict[str, int]
"""Number of the next row, by shard."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Start or end of a read, from which a row number for each shard is derived.

    If `at_us` (microseconds UTC) is set, the row is the first one received at that time or later. Otherwise
    the row number is that in `offsets`, or `otherwise` (EARLIEST or LATEST) for a shard that is not in
    `offsets`.
    """

    otherwise: int
    offsets: Mapping[str, int]
    at_us: int | None = None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Parsed options of one read of the journal by Spark's `load`."""

    folder: StoreFolder
    routes: frozenset[str] | None
    protocols: frozenset[str] | None
    shards: frozenset[str] | None
    start: Bound
    end: Bound
    rows_max: int | None
    partitions_min: int
    partition_bytes: int
    fail: bool
    received: tuple[int | None, int | None]
    """First microsecond UTC, and the one before which rows must have been received."""
    only: Mapping[str, frozenset[str]]
    """Permitted texts by column."""


def options_of(options: Mapping[str, str], *, stream: bool, hadoop: Hadoop | None = None) -> LoadOptions:
    """Parse the options of the journal source; `hadoop` has the options for stores.

    Names are case-insensitive. `stream` is True for a streaming query. Raises PipelineError with the invalid
    option and the reason.
    """
    names_by_key = {name.lower(): name for name in NAMES}
    stated = {key.lower(): value for key, value in options.items()}
    for key in stated:
        if key not in names_by_key:
            close = get_close_matches(key, names_by_key, n=1)
            hint = f"; did you mean {names_by_key[close[0]]}?" if close else f"; known: {', '.join(NAMES)}"
            raise PipelineError(f"gateway_journal has no option {key}{hint}")
    path = stated.get("path")
    if not path:
        raise PipelineError("gateway_journal needs the journal's folder: load(folder) or option path")
    if stream and ("endingoffsets" in stated or "endingtimestamp" in stated):
        raise PipelineError("a stream has no end: endingOffsets and endingTimestamp are for batches")
    return LoadOptions(
        folder=place_of(path, hadoop),
        routes=_set(stated.get("routes")),
        protocols=_set(stated.get("protocols")),
        shards=_shards(stated.get("shards")),
        start=_bound(stated, "starting", LATEST if stream else EARLIEST),
        end=_bound(stated, "ending", LATEST),
        rows_max=_number(stated, "maxOffsetsPerTrigger", None),
        partitions_min=_number(stated, "minPartitions", 1) or 1,
        partition_bytes=_number(stated, "partitionBytes", PARTITION_BYTES) or PARTITION_BYTES,
        fail=_truth(stated, "failOnDataLoss", "true"),
        received=(_time(stated, "receivedFrom"), _time(stated, "receivedBefore")),
        only=_only(stated.get("only")),
    )


def columns_of(options: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the names of the columns that the options request. None selects all columns."""
    return _names({key.lower(): value for key, value in options.items()}.get("columns"))


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(name.strip() for name in text.split(",") if name.strip())


def _set(text: str | None) -> frozenset[str] | None:
    return None if text is None else frozenset(name.strip() for name in text.split(","))


def _shards(text: str | None) -> frozenset[str] | None:
    if text is None or not text.startswith("["):
        return _set(text)
    wrong = f'shards is names with commas, or JSON as in ["host-1/0"], not {text!r}'
    try:
        names = json.loads(text)
    except ValueError as error:
        raise PipelineError(wrong) from error
    if not all(isinstance(name, str) for name in names):
        raise PipelineError(wrong)
    return frozenset(names)


def _time(stated: Mapping[str, str], name: str) -> int | None:
    text = stated.get(name.lower())
    return None if text is None else _microseconds(text, name)


def _only(text: str | None) -> dict[str, frozenset[str]]:
    wrong = f'only is JSON as in {{"client": ["a", "b"]}}, of the columns {", ".join(sorted(CODED))}'
    try:
        stated = json.loads(text or "{}")
        found = {name: frozenset(texts) for name, texts in stated.items() if isinstance(texts, list)}
    except (ValueError, AttributeError, TypeError) as error:
        raise PipelineError(f"{wrong}, not {text!r}") from error
    right = all(isinstance(one, str) for texts in found.values() for one in texts)
    if not right or found.keys() != stated.keys() or not found.keys() <= CODED:
        raise PipelineError(f"{wrong}, not {text!r}")
    return found


def _number(stated: Mapping[str, str], name: str, otherwise: int | None) -> int | None:
    text = stated.get(name.lower())
    if text is None:
        return otherwise
    if not text.isdecimal() or not int(text):
        raise PipelineError(f"{name}: must be an integer from 1, not {text!r}")
    return int(text)


def _truth(stated: Mapping[str, str], name: str, otherwise: str) -> bool:
    text = stated.get(name.lower(), otherwise).lower()
    if text not in ("true", "false"):
        raise PipelineError(f"{name}: must be true or false, not {text!r}")
    return text == "true"


def _bound(stated: Mapping[str, str], which: str, otherwise: int) -> Bound:
    """Parse the options for one bound of a read, such as `startingOffsets` and `startingTimestamp`.

    `stated` has the options by lower-case name. `which` is `starting` or `ending`. `otherwise` (EARLIEST or
    LATEST) applies if neither option is given.
    """
    time = stated.get(f"{which}timestamp")
    text = stated.get(f"{which}offsets")
    if time is not None and text is not None:
        raise PipelineError(f"give {which}Offsets or {which}Timestamp, not both")
    if time is not None:
        return Bound(otherwise, {}, _microseconds(time, f"{which}Timestamp"))
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text is None or text.lower() in words:
        return Bound(otherwise if text is None else words[text.lower()], {})
    return Bound(otherwise, _offsets(text, f"{which}Offsets"))


def _offsets(text: str, name: str) -> Offsets:
    wrong = f'{name} is earliest, latest, or numbers by shard as in {{"0": 123}}, not {text!r}'
    try:
        stated = json.loads(text)
    except ValueError as error:
        raise PipelineError(wrong) from error
    if not isinstance(stated, dict):
        raise PipelineError(wrong)
    for number in stated.values():
        if not isinstance(number, int) or isinstance(number, bool) or number < EARLIEST:
            raise PipelineError(wrong)
    return stated


def _microseconds(text: str, name: str) -> int:
    if text.isdecimal():
        return int(text) * 1_000
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise PipelineError(f"{name} is milliseconds since 1970 or ISO 8601, not {text!r}") from error
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    return microseconds_of(time)


def microseconds_of(time: datetime) -> int:
    """Convert a time to microseconds since 1970 UTC, without rounding."""
    elapsed = time - datetime(1970, 1, 1, tzinfo=UTC)
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
