"""Selection among very many objects, and paging through them without delaying other clients.

A request selects objects by filters (`client`, `idle_longer_than`, ...), in its query or in a JSON object;
the code calls these filters `choice`. A `*` in a text stands for any characters, unless `exact` is given,
because clients choose names that may contain `*`. Lists are paged and sorted by a key: `next` of one page is
`after` of the following page. Every loop over all objects is divided into slices, between which the event
loop runs other tasks.
"""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from itertools import islice
from math import isfinite
from typing import Any, Final, Generic, NamedTuple, TypeVar

import orjson
import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.responses import BadChoiceError, UnavailableError, etag_of, json_body, json_response
from gateway.broker.queue import Queue
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.operations import ApiOperation, Words
from gateway.store.store import Store

SHOWN: Final = 100
SHOWN_MAX: Final = 1_000
SLICE: Final = 500  # Objects examined between two turns of the event loop, in about a millisecond.
COST_MAX: Final = 200  # Cost of removals between two turns, in subscriptions or similar units.
LOAD_SECS: Final = 5.0  # For a slow disk; then only messages in memory are shown.
DISK_SECS: Final = 100.0  # Fifty thousand sessions take long to write; the command line waits for 120 s.

# Fields that change merely because time passes.
PASSING: Final = frozenset(("idle_secs", "expires_secs", "oldest_secs"))

SHAPES: Final[Mapping[Any, str]] = {str: "a text", float: "a number of seconds", bool: "true or false"}

T = TypeVar("T")


class ListPage(NamedTuple):
    """Page of a list.

    `matching` is the number of all selected objects, `rows` are the JSON objects on this page in the order of
    their keys, and `next` is the key after which the next page begins, None on the last page.
    """

    matching: int
    rows: list[Any]
    next: str | None

    def to_response(self) -> Response:
        """Return the page as a JSON response.

        If rows have fields that change with time alone (PASSING), the response has a weak ETag that ignores
        them.
        """
        document = {"total": self.matching, "items": self.rows, "next": self.next}
        if not any(isinstance(row, dict) and not PASSING.isdisjoint(row) for row in self.rows[:1]):
            return json_response(document)
        lasting = [{word: row[word] for word in row.keys() - PASSING} for row in self.rows]
        data = orjson.dumps({**document, "items": lasting}, option=orjson.OPT_SORT_KEYS)
        return json_response(document, headers={"ETag": f"W/{etag_of(data)}"})


async def query_of(request: Request, words: Words) -> tuple[dict[str, Any], int, str]:
    """Parse the query of a request for a list. Return the filters, the page size and a sort key.

    The filters are a dictionary of parameter names and values; `words` are the permitted ones. The page has
    the objects whose sort keys are greater than the returned key; "" requests the first page. Raises
    BadChoiceError for an invalid query.
    """
    choice: dict[str, Any] = dict(request.query_params)
    try:
        count = min(max(int(choice.pop("count", SHOWN)), 0), SHOWN_MAX)
    except ValueError:
        raise BadChoiceError("count: must be a number") from None
    after = choice.pop("after", "")
    for word, value in choice.items():
        kind = words[word].kind if word in words else None
        if kind is float:
            try:
                choice[word] = float(value)
            except ValueError:
                raise BadChoiceError(f"{word}: must be a number") from None
        elif kind is bool:
            choice[word] = {"true": True, "false": False}.get(value)
    return checked_choice(choice, words), count, after


async def removal_of(request: Request, operation: ApiOperation) -> dict[str, Any]:
    """Parse the JSON body of a request that removes objects, and return the filters that select the objects.

    The body must have at least one filter, or `all: true`, which is not returned. Raises BadChoiceError
    otherwise.
    """
    choice = await json_body(request)
    if not isinstance(choice, dict):
        raise BadChoiceError("the body must be a JSON object")
    chosen = checked_choice(choice, operation.words)
    everything = chosen.pop("all", None)
    if everything is False or (everything is None) == chosen.keys().isdisjoint(operation.choice):
        raise BadChoiceError(f'give some of {", ".join(operation.choice)}; or {{"all": true}}')
    return chosen


def checked_choice(choice: Mapping[str, Any], words: Words) -> dict[str, Any]:
    """Return a copy of the filters in `choice`.

    Raises BadChoiceError if a filter is not in `words`, or has a value that is not permitted.
    """
    if unknown := choice.keys() - words.keys():
        raise BadChoiceError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(words)}")
    for word, value in choice.items():
        kind, texts = words[word].kind, words[word].texts
        if texts is not None:
            if value not in texts:
                raise BadChoiceError(f"{word}: must be one of {', '.join(texts)}, not {value!r}")
            continue
        if kind is float:
            good = type(value) in (int, float) and isfinite(value) and value >= 0
        else:
            good = type(value) is kind
        if not good:
            raise BadChoiceError(f"{word}: must be {SHAPES[kind]}")
    return dict(choice)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that returns True for texts that match `pattern`, in linear time.

    In the pattern, `*` stands for any characters; all other characters stand for themselves.
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


def name_matcher(choice: Mapping[str, Any], word: str) -> Callable[[str], bool]:
    """Return a function that returns True for the names that the filter `word` of `choice` selects.

    The filter is a pattern in which `*` stands for any characters, or the exact name if the filter `exact` is
    True. All names are selected if `choice` has no filter `word`.
    """
    pattern: str | None = choice.get(word)
    if pattern is None:
        return lambda _: True
    return pattern.__eq__ if choice.get("exact") else matcher(pattern)


async def slices(things: Iterable[T]) -> AsyncIterator[list[T]]:
    """Yield `things` in lists of at most SLICE objects, and let the event loop run after each list.

    Objects may be removed meanwhile, also from a list that was yielded.
    """
    iterator = iter(things)
    while some := list(islice(iterator, SLICE)):
        yield some
        await trio.lowlevel.checkpoint()


async def page_of(
    things: Iterable[T] | AsyncIterator[list[T]],
    chosen: Callable[[T], bool],
    key: Callable[[T], str],
    show: Callable[[T], Any],
    count: int,
    after: str,
) -> ListPage:
    """Return the page of a list that begins after the sort key `after`; "" stands for the first page.

    `things` are all objects, or an iterator that yields them in lists; the page has those for which `chosen`
    returns True. `key` returns the sort key of an object, `show` its JSON object. The page has at most
    `count` objects.
    """
    matching = behind = 0
    first: list[T] = []
    async for some in things if isinstance(things, AsyncIterator) else slices(things):
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
    """Division of a long series of removals into parts, between which the event loop runs other tasks.

    `flush` passes the changes to the store and writes to sockets; it is called after each part.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._spent = 0

    async def spend(self, cost: int) -> None:
        """Add the cost of a removal. At a total of COST_MAX, flush and let the event loop run other tasks."""
        self._spent += cost
        if self._spent >= COST_MAX:
            self._spent = 0
            self._flush()
            await trio.lowlevel.checkpoint()


class CallbackFuture(Generic[T]):
    """Waiter for a value that arrives by one call of a callback, such as the outcome of a message.

    The method `set` is the callback; `wait` waits for the value and returns it.
    """

    def __init__(self) -> None:
        self._value: T | None = None
        self._there = trio.Event()

    def set(self, value: T) -> None:
        """Store the value for `wait`. This method is the callback."""
        self._value = value
        self._there.set()

    async def wait(self, secs: float) -> T | None:
        """Wait at most `secs` seconds. Return the value, or None if the callback has not been called."""
        with trio.move_on_after(secs):
            await self._there.wait()
        return self._value


async def load_messages(queue: Queue) -> bool:
    """Wait at most LOAD_SECS seconds until a queue has read messages from the disk.

    Return True if it has read them, and False if the time is over or no messages are being read.
    """
    if not queue.loading or queue.storage is None:
        return False
    there = trio.Event()
    queue.storage.when_loaded(there.set)
    with trio.move_on_after(LOAD_SECS):
        await there.wait()
    return there.is_set()


async def wait_until_durable(store: Store | None, flush: Callable[[], None]) -> None:
    """Flush all changes, and wait at most DISK_SECS seconds until they are on disk.

    Raises UnavailableError if they are not stored by then. Without a store do not wait.
    """
    if store is None:
        flush()
        return
    result = CallbackFuture[Outcome]()
    store.after_commit(result.set)
    flush()
    store.flush()
    outcome = await result.wait(DISK_SECS)
    if outcome is None:
        raise UnavailableError(f"the disk has not completed the write within {DISK_SECS:g} s")
    if outcome is not ACCEPTED:
        raise UnavailableError(f"the changes are not on disk yet: {outcome.text}")
