"""Is a history of concurrent calls linearizable? (Lowe's just-in-time linearization, for one object)

A history is what calls returned and when they began and ended. It is linearizable if each call can be given
one moment between its begin and its end so that, in the order of these moments, a sequential object would
have returned the same. The check goes through begins and ends in order of time, and keeps all states in which
the object may be: with each, which of the calls on their way have had their moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple

State = Hashable


class Call(NamedTuple):
    """One call: what was asked, what was returned, and when (any growing numbers)."""

    asked: Hashable
    returned: Hashable
    begin: int
    end: int


Step = Callable[[State, Call], State | None]
"""The state after a call that returned what it did; None: from that state it could not have returned that."""


def offence(history: Iterable[Call], step: Step, initial: State) -> Call | None:
    """Return the first call that no order explains; None: the history is linearizable."""
    calls = list(history)
    events = [(call.begin, 0, number) for number, call in enumerate(calls)]
    events += [(call.end, 1, number) for number, call in enumerate(calls)]
    open_calls: set[int] = set()
    configurations: set[tuple[State, frozenset[int]]] = {(initial, frozenset())}
    for _, ends, number in sorted(events):
        if not ends:
            open_calls.add(number)
            continue
        configurations = _with_moment(configurations, number, open_calls, calls, step)
        open_calls.discard(number)
        if not configurations:
            return calls[number]
    return None


def _with_moment(
    configurations: set[tuple[State, frozenset[int]]],
    number: int,
    open_calls: set[int],
    calls: list[Call],
    step: Step,
) -> set[tuple[State, frozenset[int]]]:
    """Return all configurations in which this call has had its moment, after others if need be."""
    found = set()
    known = set(configurations)
    stack = list(configurations)
    while stack:
        state, had = stack.pop()
        if number in had:
            found.add((state, had - {number}))
            continue
        for other in open_calls - had:
            after = step(state, calls[other])
            if after is not None and (after, had | {other}) not in known:
                known.add((after, had | {other}))
                stack.append((after, had | {other}))
    return found
