"""Query parameters of lists in RabbitMQ's HTTP API: filter by name, order, page and columns.

`name` is a part of the name or, with `use_regex`, an expression that is found in it. `sort` is a field; `a.b`
is `b` in `a`; rows without it are first. A list is complete, or in pages if the query has `page`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import orjson
from pydantic_core import SchemaError, SchemaValidator, core_schema

PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 500
PATTERN_MAX: Final = 1_000  # characters
SWITCH: Final = {"true": True, "false": False}

Fields = dict[str, Any]


def listed(query: Mapping[str, str], found: Any) -> Any:
    """Return the rows or page of a list, or the columns of an object, that the query selects.

    Raises ValueError.
    """
    columns = [one for one in query.get("columns", "").split(",") if one]
    if not isinstance(found, list):
        return _columns(found, columns)
    rows = _sorted(query, _named(query, found))
    if "page" not in query:
        return [_columns(row, columns) for row in rows] if columns else rows
    page, size = _number(query, "page", 1), _number(query, "page_size", PAGE_SIZE)
    pages = max(-(-len(rows) // size), 1) if size > 0 else 1
    if not 0 < size <= PAGE_SIZE_MAX:
        raise ValueError(f"page_size is 1 to {PAGE_SIZE_MAX}, not {size}")
    if not 0 < page <= pages:
        raise ValueError(f"page is 1 to {pages}, not {page}: there are {len(rows)} rows")
    shown = rows[(page - 1) * size : page * size]
    return {
        "total_count": len(found),
        "filtered_count": len(rows),
        "item_count": len(shown),
        "page": page,
        "page_size": size,
        "page_count": pages,
        "items": [_columns(row, columns) for row in shown],
    }


def _number(query: Mapping[str, str], word: str, absent: int) -> int:
    said = query.get(word, str(absent))
    if not said.isascii() or not said.isdigit() or len(said) > len(str(PAGE_SIZE_MAX)) + 6:
        raise ValueError(f"{word} is a number, not {said!r}")
    return int(said)


def _switch(query: Mapping[str, str], word: str) -> bool:
    said = query.get(word, "false")
    if said not in SWITCH:
        raise ValueError(f"{word} is true or false, not {said!r}")
    return SWITCH[said]


def _named(query: Mapping[str, str], rows: list[Fields]) -> list[Fields]:
    said = query.get("name", "")
    fits = _expression(said) if _switch(query, "use_regex") and said else lambda name: said in name
    return [row for row in rows if fits(str(row.get("name", "")))] if said else rows


def _expression(text: str) -> Callable[[str], bool]:
    """Return a function that returns True if a regular expression matches within a name. Raises ValueError.

    The expression comes from a client, so it must not take long: pydantic's engine compiles it once, matches
    in linear time and does not backtrack.
    """
    if len(text) > PATTERN_MAX:
        raise ValueError(f"name has {PATTERN_MAX} characters at most")
    try:
        found_in = SchemaValidator(core_schema.str_schema(pattern=text, regex_engine="rust-regex"))
    except SchemaError as error:
        raise ValueError(f"name is no regular expression: {text!r}") from error
    return found_in.isinstance_python


def _sorted(query: Mapping[str, str], rows: list[Fields]) -> list[Fields]:
    reverse, field = _switch(query, "sort_reverse"), query.get("sort", "")
    if not field:
        return rows

    def key(row: Fields) -> tuple[int, float, str]:
        value = _at(row, field)
        if value is None:
            return 0, 0.0, ""
        if isinstance(value, int | float):
            return 1, float(value), ""
        return 2, 0.0, value if isinstance(value, str) else orjson.dumps(value).decode()

    return sorted(rows, key=key, reverse=reverse)


def _at(row: Fields, column: str) -> Any:
    value: Any = row
    for step in column.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _columns(row: Fields, columns: Sequence[str]) -> Fields:
    if not columns:
        return row
    made: Fields = {}
    for column in columns:
        value = _at(row, column)
        if value is None:
            continue
        place = made
        *above, last = column.split(".")
        for step in above:
            place = place.setdefault(step, {})
        place[last] = value
    return made
