"""Selection among very many objects, and paging through them without delaying other clients.

A choice is a set of words (`client`, `idle_longer_than`, ...) in a query or a JSON object. A `*` in a text
stands for any characters, unless `exact` is given, because clients choose names that may contain `*`. Lists
are paged and ordered by key: `next` of one page is `after` of the following one. Every walk over all objects
runs in slices, with a turn of the event loop in between.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from itertools import islice
from math import isfinite
from typing import Any, Final, NamedTuple, TypeVar

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.answers import BadChoiceError, UnavailableError, answer, choice_of, tag_of
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.operations import ApiOperation, Words
from gateway.store.store import Store

SHOWN: Final = 100
SHOWN_MAX: Final = 1_000
SLICE: Final = 500  # Objects examined between two turns of the event loop, in about a millisecond.
COST_MAX: Final = 200  # Cost of removals between two turns, in subscriptions or similar units.
DISK_SECS: Final = 100.0  # Fifty thousand sessions take long to write; the command line waits for 120 s.

# Fields that change merely because time passes.
PASSING: Final = frozenset(("idle_secs", "expires_secs", "oldest_secs"))

SHAPES: Final[Mapping[Any, str]] = {str: "a text", float: "a number of seconds", bool: "true or false"}

T = TypeVar("T")


class ListPage(NamedTuple):
    """Page of a list.

    `matching` is the number of all matching objects, `rows` are the rows in order of key, and `next` is the
    key after which the next page begins.
    """

    matching: int
    rows: list[Any]
    next: str | None

    def answer(self) -> Response:
        """Return the page as JSON. Rows with elapsed times have a weak ETag that ignores these."""
        document = {"total": self.matching, "items": self.rows, "next": self.next}
        if not any(isinstance(row, dict) and not PASSING.isdisjoint(row) for row in self.rows[:1]):
            return answer(document)
        lasting = [{word: row[word] for word in row.keys() - PASSING} for row in self.rows]
        data = orjson.dumps({**document, "items": lasting}, option=orjson.OPT_SORT_KEYS)
        return answer(document, headers={"ETag": f"W/{tag_of(data)}"})


async def query_of(request: Request, words: Words) -> tuple[dict[str, Any], int, str]:
    """Return the choice in a query, the number of rows, and the key after which the page begins.

    Raises BadChoiceError for an invalid query.
    """
    choice: dict[str, Any] = dict(request.query_params)
    try:
        count = min(max(int(choice.pop("count", SHOWN)), 0), SHOWN_MAX)
    except ValueError:
        raise BadChoiceError("count is a number") from None
    after = choice.pop("after", "")
    for word, value in choice.items():
        kind = words[word].kind if word in words else None
        if kind is float:
            try:
                choice[word] = float(value)
            except ValueError:
                raise BadChoiceError(f"{word} is a number") from None
        elif kind is bool:
            choice[word] = {"true": True, "false": False}.get(value)
    return _checked(choice, words), count, after


async def removal_of(request: Request, operation: ApiOperation) -> dict[str, Any]:
    """Return what the body of a request selects for removal.

    Raises BadChoiceError unless the body is valid and has either a selection or `all: true`.
    """
    choice = await choice_of(request)
    if not isinstance(choice, dict):
        raise BadChoiceError("give a JSON object")
    chosen = _checked(choice, operation.words)
    everything = chosen.pop("all", None)
    if everything is False or (everything is None) == chosen.keys().isdisjoint(operation.choice):
        raise BadChoiceError(f'give some of {", ".join(operation.choice)}; or {{"all": true}}')
    return chosen


def _checked(choice: Mapping[str, Any], words: Words) -> dict[str, Any]:
    if unknown := choice.keys() - words.keys():
        raise BadChoiceError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(words)}")
    for word, value in choice.items():
        kind, texts = words[word].kind, words[word].texts
        if texts is not None:
            if value not in texts:
                raise BadChoiceError(f"{word} is one of {', '.join(texts)}, not {value!r}")
            continue
        if kind is float:
            good = type(value) in (int, float) and isfinite(value) and value >= 0
        else:
            good = type(value) is kind
        if not good:
            raise BadChoiceError(f"{word} is {SHAPES[kind]}")
    return dict(choice)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that matches texts with a pattern in linear time.

    In the pattern, `*` stands for any characters.
    """
    first, *rest = pattern.split("*")
    if not rest:
        return pattern.__eq__
    *between, last = rest

    def matches(text: str) -> bool:
        if not text.startswith(first):
            return False
        at = len(first)
        for piece in between:
            at = text.find(piece, at)
            if at < 0:
                return False
            at += len(piece)
        return len(text) - at >= len(last) and text.endswith(last)

    return matches


def named(choice: Mapping[str, Any], word: str) -> Callable[[str], bool]:
    """Return a function that matches texts with a word of a choice.

    The word is a pattern, or with `exact` the text itself.
    """
    pattern: str | None = choice.get(word)
    if pattern is None:
        return lambda _: True
    return pattern.__eq__ if choice.get("exact") else matcher(pattern)


async def slices(things: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield the objects in slices, with a turn of the event loop in between.

    Objects may disappear in such a turn.
    """
    iterator = iter(things)
    while some := list(islice(iterator, SLICE)):
        yield some
        await trio.lowlevel.checkpoint()


async def page_of(
    things: Iterable[T],
    chosen: Callable[[T], bool],
    key: Callable[[T], str],
    show: Callable[[T], Any],
    count: int,
    after: str,
) -> ListPage:
    """Return a page of the chosen objects."""
    return await page_of_slices(slices(things), chosen, key, show, count, after)


async def page_of_slices(
    things: AsyncIterator[list[T]],
    chosen: Callable[[T], bool],
    key: Callable[[T], str],
    show: Callable[[T], Any],
    count: int,
    after: str,
) -> ListPage:
    """Return a page as `page_of` does, of objects that arrive in slices."""
    matching = behind = 0
    first: list[T] = []
    async for some in things:
        fitting = [one for one in some if chosen(one)]
        matching += len(fitting)
        if after:
            fitting = [one for one in fitting if key(one) > after]
        behind += len(fitting)
        if fitting and count:
            first = heapq.nsmallest(count, [*first, *fitting], key=key)
    more = behind > len(first) > 0
    return ListPage(matching, [show(one) for one in first], key(first[-1]) if more else None)


class RemovalPace:
    """Pacing of removals: the event loop runs after a certain cost. `flush` ends a wake-up."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._spent = 0

    async def spend(self, cost: int) -> None:
        """Add the cost of one removal, and let the event loop run if it is time."""
        self._spent += cost
        if self._spent >= COST_MAX:
            self._spent = 0
            self._flush()
            await trio.lowlevel.checkpoint()


async def on_disk(store: Store | None, flush: Callable[[], None], secs: float = DISK_SECS) -> None:
    """Wait until all changes are on disk, at most `secs` seconds.

    Raises UnavailableError if the disk does not store them.
    """
    if store is None:
        flush()
        return
    outcomes: list[Outcome] = []
    there = trio.Event()

    def then(outcome: Outcome) -> None:
        outcomes.append(outcome)
        there.set()

    store.after_commit(then)
    flush()
    store.flush()
    with trio.move_on_after(secs):
        await there.wait()
    if not outcomes:
        raise UnavailableError(f"the disk has not responded for {secs:g} s")
    if outcomes[0] is not ACCEPTED:
        raise UnavailableError(f"the changes are not on disk yet: {outcomes[0].text}")
