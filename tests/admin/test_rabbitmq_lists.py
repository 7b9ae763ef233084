"""Query parameters of RabbitMQ's lists: limits of what a client may require, and turns for other clients."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from gateway.admin import rabbitmq_lists
from gateway.admin.rabbitmq_lists import COLUMNS_MAX, STEPS_MAX, listed

ROWS: list[dict[str, Any]] = [
    {"name": "a" * 240 + str(number), "n": number % 7, "arguments": {"x": number}} for number in range(3_000)
]
COLUMNS = ",".join(["name", "n", "arguments.x", *(f"c{number}.d.e" for number in range(90))])


@pytest.mark.parametrize(
    "query",
    [
        {"columns": ",".join(f"c{number}" for number in range(COLUMNS_MAX + 1))},
        {"columns": "a" + ".a" * STEPS_MAX},
        {"sort": "a" + ".a" * STEPS_MAX},
        {"name": "(a?){1000}" * 20 + "b", "use_regex": "true"},
        {"name": r"\pL{1000}" * 100, "use_regex": "true"},
        {"name": "a" * 1_001, "use_regex": "true"},
        {"name": "(?=a)", "use_regex": "true"},
        {"name": "\udc80", "use_regex": "true"},
    ],
)
async def test_too_much_is_an_error(query: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        await listed(query, ROWS[:5])


async def test_a_column_that_is_named_again_and_again_counts_once() -> None:
    assert await listed({"columns": "a," * 7_500 + "n"}, ROWS[:1]) == [{"n": 0}]
    assert await listed({"columns": "n,,name.x,arguments.x"}, ROWS[1]) == {"n": 1, "arguments": {"x": 1}}


async def test_all_names_together_may_take_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rabbitmq_lists, "MATCH_SECS_MAX", 0.02)
    with pytest.raises(ValueError, match="longer than"):
        await listed({"name": "(.{0,20}){20}x", "use_regex": "true"}, ROWS)
    monkeypatch.setattr(rabbitmq_lists, "MATCH_SECS_MAX", 60.0)
    assert len(await listed({"name": "a[0-9]$", "use_regex": "true"}, ROWS)) == 10


@pytest.mark.parametrize(
    "query",
    [
        {"columns": COLUMNS},
        {"columns": COLUMNS, "page": "1", "page_size": "500"},
        {"name": "(.{0,9}){9}", "use_regex": "true"},
        {"sort": "arguments"},
    ],
)
async def test_other_clients_are_served_in_between(
    query: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rabbitmq_lists, "TURN_SECS", 0.0)
    monkeypatch.setattr(rabbitmq_lists, "MATCH_SECS_MAX", 600.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        found = await listed(query, ROWS)
        nursery.cancel_scope.cancel()
    assert turns > (499 if "page" in query else len(ROWS)) - 2, (
        "one for each row; the order of tasks is random"
    )
    assert len(found["items"] if "page" in query else found) == (500 if "page" in query else len(ROWS))


@pytest.mark.parametrize("reverse", [False, True])
async def test_an_order_is_that_of_one_sort(reverse: bool) -> None:
    rows = [*ROWS, {"name": "none"}, {"n": "text"}, {"n": ["list"]}, {"n": 2.5}, {"n": None}]
    found = await listed({"sort": "n", "sort_reverse": str(reverse).lower()}, rows)

    def key(row: dict[str, Any]) -> tuple[int, float, str]:
        value = row.get("n")
        if value is None:
            return 0, 0.0, ""
        if isinstance(value, int | float):
            return 1, value, ""
        return 2, 0.0, value if isinstance(value, str) else '["list"]'

    assert found == sorted(rows, key=key, reverse=reverse)
    assert await listed({"sort": "arguments.x"}, rows[:3]) == rows[:3]
