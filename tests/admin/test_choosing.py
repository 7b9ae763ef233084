"""How operators choose among very many things: patterns, words, pages, and turns for everybody else."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
import trio
from starlette.requests import Request

from gateway.admin import selection
from gateway.admin.responses import BadChoiceError, UnavailableError
from gateway.admin.selection import (
    RemovalPace,
    matcher,
    name_matcher,
    page_of,
    query_of,
    removal_of,
    wait_until_durable,
)
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.operations import ApiOperation, OperationWord

WORDS = {
    "client": OperationWord(str, "By client id."),
    "idle_longer_than": OperationWord(float, "Unused for more than so many seconds."),
    "empty": OperationWord(bool, "Without messages."),
    "kind": OperationWord(("listener", "link"), "By kind."),
}
REMOVE = ApiOperation(
    "POST",
    "/things/remove",
    "Remove things",
    WORDS,
    {"in_use": OperationWord(bool, "Also those.")},
    removes=True,
)


@pytest.mark.parametrize(
    "pattern, matching, others",
    [
        ("", [""], ["a"]),
        ("*", ["", "a", "*"], []),
        ("a", ["a"], ["", "ab", "ba"]),
        ("a*", ["a", "ab", "a\n"], ["ba", ""]),
        ("*a", ["a", "ba"], ["ab"]),
        ("a*a", ["aa", "aba"], ["a", "ab"]),
        ("a*b*c", ["abc", "a.b.c", "abbcc", "abcbc"], ["acb", "ab", "abcd"]),
        ("**", ["", "x"], []),
        ("[a]?.*", ["[a]?."], ["a", "ax."]),
        ("ü*ß", ["üß", "üxß"], ["uß"]),
    ],
)
def test_a_star_stands_for_any_text(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = matcher(pattern)
    assert [text for text in (*matching, *others) if matches(text)] == matching


def test_many_stars_take_no_longer() -> None:
    assert not matcher("*a" * 2_000 + "b")("a" * 100_000)


@pytest.mark.parametrize(
    "wanted, matching",
    [
        ({}, ["*", "a*", "ab"]),
        ({"client": "a*"}, ["a*", "ab"]),
        ({"client": "a*", "exact": False}, ["a*", "ab"]),
        ({"client": "a*", "exact": True}, ["a*"]),
        ({"client": "*", "exact": True}, ["*"]),
        ({"exact": True}, ["*", "a*", "ab"]),
    ],
)
def test_a_star_is_a_star_where_that_is_said(wanted: dict[str, Any], matching: list[str]) -> None:
    matches = name_matcher(wanted, "client")
    assert [text for text in ("*", "a*", "ab") if matches(text)] == matching


def asked(query: str) -> Request:
    return Request({"type": "http", "method": "GET", "headers": [], "query_string": query.encode()})


def told(document: Any) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": orjson.dumps(document), "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


async def test_a_query() -> None:
    assert await query_of(asked(""), WORDS) == ({}, 100, "")
    query = "client=a%2A&idle_longer_than=1.5&empty=false&count=5000&after=%C3%A9"
    wanted = {"client": "a*", "idle_longer_than": 1.5, "empty": False}
    assert await query_of(asked("kind=link"), WORDS) == ({"kind": "link"}, 100, "")
    assert await query_of(asked(query), WORDS) == (wanted, 1_000, "é")


@pytest.mark.parametrize(
    "query",
    [
        "count=x",
        "kind=zebra",
        "kind=",
        "other=1",
        "empty=yes",
        "idle_longer_than=x",
        "idle_longer_than=-1",
        "idle_longer_than=nan",
    ],
)
async def test_a_query_that_is_none(query: str) -> None:
    with pytest.raises(BadChoiceError):
        await query_of(asked(query), WORDS)


@pytest.mark.parametrize(
    "document, chosen",
    [
        ({"client": "a"}, {"client": "a"}),
        ({"idle_longer_than": 3, "in_use": True}, {"idle_longer_than": 3, "in_use": True}),
        ({"all": True}, {}),
        ({"all": True, "in_use": True}, {"in_use": True}),
    ],
)
async def test_a_removal(document: Any, chosen: dict[str, Any]) -> None:
    assert await removal_of(told(document), REMOVE) == chosen


@pytest.mark.parametrize(
    "document",
    [
        *([], "all", {}, {"in_use": True}, {"all": False}, {"all": 1}, {"all": True, "client": "a"}),
        *({"kind": "zebra"}, {"kind": ["link"]}, {"kind": None}),
        *({"client": 1}, {"client": None}, {"idle_longer_than": "1"}, {"idle_longer_than": True}),
        *({"idle_longer_than": -1}, {"empty": 0}, {"Client": "a"}, {"client": "a", "count": 1}),
    ],
)
async def test_a_removal_that_chooses_nothing(document: Any) -> None:
    with pytest.raises(BadChoiceError):
        await removal_of(told(document), REMOVE)


async def test_pages_follow_one_another() -> None:
    things = [f"{number:04}" for number in reversed(range(2_345))]
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await page_of(things, lambda one: one != "0007", str, str, 1_000, after)
        assert page.matching == 2_344
        found += page.rows
        after = page.next
    assert found == sorted(set(things) - {"0007"})
    assert await page_of(things, lambda one: False, str, str, 10, "") == (0, [], None)
    assert await page_of(things, lambda one: True, str, str, 0, "") == (2_345, [], None)


async def test_the_loop_turns_between_slices_and_removals() -> None:
    turns = flushes = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    def flush() -> None:
        nonlocal flushes
        flushes += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        await page_of(range(selection.SLICE * 10), lambda one: True, str, str, 10, "")
        assert turns >= 9
        turns = 0
        pace = RemovalPace(flush)
        for _ in range(selection.COST_MAX):
            await pace.spend(10)
        assert flushes == 10
        assert turns >= 9
        nursery.cancel_scope.cancel()


class Disk:
    """A store that answers so, or not at all."""

    def __init__(self, outcome: Outcome | None) -> None:
        self.outcome = outcome

    def after_commit(self, done: Any) -> None:
        if self.outcome is not None:
            done(self.outcome)

    def flush(self) -> None:
        pass


async def test_the_answer_waits_for_the_disk(autojump_clock: trio.testing.MockClock) -> None:
    disk: Any = Disk(ACCEPTED)
    await wait_until_durable(disk, disk.flush)
    disk.outcome = Outcome(Verdict.RELEASED, Reason.STORE, "it is full")
    with pytest.raises(UnavailableError, match="not on disk yet: it is full"):
        await wait_until_durable(disk, disk.flush)
    disk.outcome = None
    with pytest.raises(UnavailableError, match="not completed the write within 100 s"):
        await wait_until_durable(disk, disk.flush)
