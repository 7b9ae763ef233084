"""How operators choose among very many things, and look at them or remove them without anybody else waiting.

A choice is a set of words (`client`, `idle_longer_than`, ...), in a query or in a JSON object. A `*` in a
text stands for any run of characters, unless `exact` is said: clients choose names, and `*` is one. Lists
come in pages, ordered by key: `next` of one page is `after` of the next one. Whatever walks over all that
there is does so in slices, between which the loop turns.
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
from gateway.operations import Operation, Words
from gateway.store.store import Store

SHOWN: Final = 100
SHOWN_MAX: Final = 1_000
SLICE: Final = 500  # things that are looked at between two turns of the loop: about a millisecond
COST_MAX: Final = 200  # and what is removed between two, in subscriptions or the like
DISK_SECS: Final = 100.0  # fifty thousand sessions are much to write; the command line waits for 120

PASSING: Final = frozenset(("idle_secs", "expires_secs", "oldest_secs"))  # they only say that time passes

SHAPES: Final[Mapping[Any, str]] = {str: "a text", float: "a number of seconds", bool: "true or false"}

T = TypeVar("T")


class Page(NamedTuple):
    """So many match in all; those `shown`, in order of key; the `next` page begins behind this key."""

    matching: int
    shown: list[Any]
    next: str | None

    def answer(self) -> Response:
        """As JSON. That time passes changes no ETag: it is a weak one where rows say how long ago is what."""
        document = {"total": self.matching, "items": self.shown, "next": self.next}
        if not any(isinstance(row, dict) and not PASSING.isdisjoint(row) for row in self.shown[:1]):
            return answer(document)
        lasting = [{word: row[word] for word in row.keys() - PASSING} for row in self.shown]
        octets = orjson.dumps({**document, "items": lasting}, option=orjson.OPT_SORT_KEYS)
        return answer(document, headers={"ETag": f"W/{tag_of(octets)}"})


async def query_of(request: Request, words: Words) -> tuple[dict[str, Any], int, str]:
    """The choice in a query, how many to show, and behind which key. Raises BadChoiceError."""
    given: dict[str, Any] = dict(request.query_params)
    try:
        count = min(max(int(given.pop("count", SHOWN)), 0), SHOWN_MAX)
    except ValueError:
        raise BadChoiceError("count is a number") from None
    after = given.pop("after", "")
    for word, value in given.items():
        kind = words[word].kind if word in words else None
        if kind is float:
            try:
                given[word] = float(value)
            except ValueError:
                raise BadChoiceError(f"{word} is a number") from None
        elif kind is bool:
            given[word] = {"true": True, "false": False}.get(value)
    return _checked(given, words), count, after


async def removal_of(request: Request, operation: Operation) -> dict[str, Any]:
    """The choice in a body, of which the operation's flags alone are none. Raises BadChoiceError."""
    given = await choice_of(request)
    if not isinstance(given, dict):
        raise BadChoiceError("give a JSON object")
    chosen = _checked(given, operation.words)
    everything = chosen.pop("all", None)
    if everything is False or (everything is None) == chosen.keys().isdisjoint(operation.choice):
        raise BadChoiceError(f'give some of {", ".join(operation.choice)}; or {{"all": true}}')
    return chosen


def _checked(given: Mapping[str, Any], words: Words) -> dict[str, Any]:
    if unknown := given.keys() - words.keys():
        raise BadChoiceError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(words)}")
    for word, value in given.items():
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
    return dict(given)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a text matches; each `*` in the pattern stands for any run of characters. In linear time."""
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


def named(wanted: Mapping[str, Any], word: str) -> Callable[[str], bool]:
    """Whether a text is what this word of a choice says: a pattern, or with `exact` the text itself."""
    said: str | None = wanted.get(word)
    if said is None:
        return lambda _: True
    return said.__eq__ if wanted.get("exact") else matcher(said)


async def slices(things: Iterable[T]) -> AsyncIterator[list[T]]:
    """The things, some at a time; the loop turns in between, so they may be gone when their turn comes."""
    left = iter(things)
    while some := list(islice(left, SLICE)):
        yield some
        await trio.lowlevel.checkpoint()


async def page_of(
    things: Iterable[T],
    chosen: Callable[[T], bool],
    key: Callable[[T], str],
    show: Callable[[T], Any],
    count: int,
    after: str,
) -> Page:
    """A page of those of the `things` that are chosen."""
    return await page_of_slices(slices(things), chosen, key, show, count, after)


async def page_of_slices(
    things: AsyncIterator[list[T]],
    chosen: Callable[[T], bool],
    key: Callable[[T], str],
    show: Callable[[T], Any],
    count: int,
    after: str,
) -> Page:
    """Return a page as `page_of` does, of things that come some at a time."""
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
    return Page(matching, [show(one) for one in first], key(first[-1]) if more else None)


class Pace:
    """Lets the loop turn after so much has been removed. `flush` ends a wake-up."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._spent = 0

    async def spend(self, cost: int) -> None:
        """Something was removed that took about so much."""
        self._spent += cost
        if self._spent >= COST_MAX:
            self._spent = 0
            self._flush()
            await trio.lowlevel.checkpoint()


async def on_disk(store: Store | None, flush: Callable[[], None], secs: float = DISK_SECS) -> None:
    """Return when all that was done is on disk. Raises UnavailableError when the disk does not take it."""
    if store is None:
        flush()
        return
    told: list[Outcome] = []
    there = trio.Event()

    def then(outcome: Outcome) -> None:
        told.append(outcome)
        there.set()

    store.after_commit(then)
    flush()
    store.flush()
    with trio.move_on_after(secs):
        await there.wait()
    if not told:
        raise UnavailableError(f"the disk has not answered for {secs:g} s")
    if told[0] is not ACCEPTED:
        raise UnavailableError(f"they are gone from the disk when it takes that: {told[0].text}")
