"""Query parameters of lists in RabbitMQ's HTTP API: filter by name, order, page and columns.

`name` is a part of the name or, with `use_regex`, an expression that is found in it. `sort` is a field; `a.b`
is the field `b` in the object `a`; rows without this field are first. The response is the whole list, or one
page of it if the query has `page`. However long the parameters take for a row, other clients are served in
between: see `LoopTurns`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Final

import orjson
import trio

from gateway import clock
from gateway.regexes import Regex, RegexError

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 500
PATTERN_MAX: Final = 1_000  # characters
PATTERN_BYTES_MAX: Final = 1 << 16  # memory of an expression: a larger one takes too long for each name
MATCH_SECS_MAX: Final = 1.0  # for all names of a list
COLUMNS_MAX: Final = 100
STEPS_MAX: Final = 8  # in the path of a column; no field is as deep
TURN_SECS: Final = 0.002
CHUNK: Final = 500  # rows that are sorted at once
SORTED_MAX: Final = 1_000  # characters of a text by which rows are sorted
SWITCH: Final = {"true": True, "false": False}

Fields = dict[str, Any]
Path = tuple[str, ...]
"""Keys that lead to a field."""


class LoopTurns:
    """Pauses in a long computation, in which the event loop runs other tasks.

    `spent` is the time in seconds that the computation itself has taken so far.
    """

    def __init__(self) -> None:
        self.spent = 0.0
        self._turn_start = clock.monotonic()

    async def checkpoint(self) -> None:
        """Let the event loop run other tasks if the last pause is at least TURN_SECS seconds ago."""
        elapsed = clock.monotonic() - self._turn_start
        if elapsed >= TURN_SECS:
            self.spent += elapsed
            await trio.lowlevel.checkpoint()
            self._turn_start = clock.monotonic()


async def listed(query: Mapping[str, str], found: Any) -> Any:
    """Apply the parameters in the query of a request to its response.

    `found` is the response: a list of rows, or one object. Return the selected rows, one page of them, or the
    selected columns of the object. Raises ValueError for an invalid parameter.
    """
    columns = _paths(query.get("columns", ""))
    if not isinstance(found, list):
        return _columns(found, columns)
    rows = await _sorted(query, await _named(query, found))
    if "page" not in query:
        return await _selected_columns(rows, columns)
    page, size = _number(query, "page", 1), _number(query, "page_size", PAGE_SIZE)
    pages = max(-(-len(rows) // size), 1) if size > 0 else 1
    if not 0 < size <= PAGE_SIZE_MAX:
        raise ValueError(f"page_size is 1 to {PAGE_SIZE_MAX}, not {size}")
    if not 0 < page <= pages:
        raise ValueError(f"page is 1 to {pages}, not {page}: there are {len(rows)} rows")
    page_rows = rows[(page - 1) * size : page * size]
    return {
        "total_count": len(found),
        "filtered_count": len(rows),
        "item_count": len(page_rows),
        "page": page,
        "page_size": size,
        "page_count": pages,
        "items": await _selected_columns(page_rows, columns),
    }


def _number(query: Mapping[str, str], word: str, absent: int) -> int:
    text = query.get(word, str(absent))
    if not text.isascii() or not text.isdigit() or len(text) > len(str(PAGE_SIZE_MAX)) + 6:
        raise ValueError(f"{word} is a number, not {text!r}")
    return int(text)


def _switch(query: Mapping[str, str], word: str) -> bool:
    text = query.get(word, "false")
    if text not in SWITCH:
        raise ValueError(f"{word} is true or false, not {text!r}")
    return SWITCH[text]


async def _named(query: Mapping[str, str], rows: list[Fields]) -> list[Fields]:
    """Return the rows whose name matches the query parameter `name`.

    Raises ValueError if matching takes too long.
    """
    pattern = query.get("name", "")
    if not _switch(query, "use_regex") or not pattern:
        return [row for row in rows if pattern in str(row.get("name", ""))] if pattern else rows
    expression, found, turns = _expression(pattern), [], LoopTurns()
    for row in rows:
        if expression.search(str(row.get("name", ""))):
            found.append(row)
        await turns.checkpoint()
        if turns.spent > MATCH_SECS_MAX:
            raise ValueError(f"name takes longer than {MATCH_SECS_MAX:g} s to match: {pattern!r}")
    return found


def _expression(text: str) -> Regex:
    """Compile `text`, the regular expression in the query parameter `name`.

    Raises ValueError if the expression is invalid, too long, or needs too much memory.
    """
    if len(text) > PATTERN_MAX:
        raise ValueError(f"name has {PATTERN_MAX} characters at most")
    try:
        return Regex(text, memory_bytes_max=PATTERN_BYTES_MAX)
    except RegexError as error:
        raise ValueError(f"name is no regular expression, or one that takes too long: {text!r}") from error


async def _sorted(query: Mapping[str, str], rows: list[Fields]) -> list[Fields]:
    """Return the rows in the order that the query parameters `sort` and `sort_reverse` define."""
    reverse, path = _switch(query, "sort_reverse"), _path(query.get("sort", ""))
    if not path:
        return rows
    iterator, parts, turns = iter(rows), [], LoopTurns()
    while some := list(islice(iterator, CHUNK)):
        keyed = []
        for row in some:
            keyed.append((_key(_value_at(row, path)), row))
            await turns.checkpoint()
        keyed.sort(key=itemgetter(0), reverse=reverse)
        parts.append(keyed)
    found = []
    for _, row in heapq.merge(*parts, key=itemgetter(0), reverse=reverse):
        found.append(row)
        await turns.checkpoint()
    return found


def _key(value: Any) -> tuple[int, float, str]:
    """Return the sort key of a field's value: missing values are first, then numbers, then texts."""
    if value is None:
        return 0, 0.0, ""
    if isinstance(value, int | float):
        return 1, float(value), ""
    text = value if isinstance(value, str) else orjson.dumps(value).decode()
    return 2, 0.0, text[:SORTED_MAX]


def _paths(columns: str) -> list[Path]:
    """Parse the query parameter `columns`: field names with commas between, as `name,message_stats.publish`.

    Return the path of each field once. Raises ValueError if there are too many.
    """
    names = dict.fromkeys(one for one in columns.split(",") if one)
    if len(names) > COLUMNS_MAX:
        raise ValueError(f"columns has {COLUMNS_MAX} names at most, not {len(names)}")
    return [_path(one) for one in names]


def _path(field: str) -> Path:
    """Split the name of a field, such as `a.b`, into its keys. Return () for "".

    Raises ValueError if there are too many keys.
    """
    if field.count(".") >= STEPS_MAX:
        raise ValueError(f"a field has {STEPS_MAX} parts at most: {field[:100]!r}")
    return tuple(field.split(".")) if field else ()


def _value_at(row: Fields, path: Path) -> Any:
    value: Any = row
    for step in path:
        if not isinstance(value, dict):
            return None
        value = value.get(step)
    return value


async def _selected_columns(rows: list[Fields], columns: Sequence[Path]) -> list[Fields]:
    """Return only the selected columns of each row, or the whole rows if no columns are selected."""
    if not columns:
        return rows
    found, turns = [], LoopTurns()
    for row in rows:
        found.append(_columns(row, columns))
        await turns.checkpoint()
    return found


def _columns(row: Fields, columns: Sequence[Path]) -> Fields:
    """Return an object with only the selected columns of a row, or the row itself if none are selected."""
    if not columns:
        return row
    made: Fields = {}
    for path in columns:
        value = _value_at(row, path)
        if value is None:
            continue
        place = made
        *above, last = path
        for step in above:
            place = place.setdefault(step, {})
        place[last] = value
    return made
