"""Is a history of concurrent calls linearizable? (Lowe's just-in-time linearization, for one object)

A history is what calls returned and when they began and ended. It is linearizable if each call can be given
one moment between its begin and its end so that, in the order of these moments, a sequential object would
have returned the same. The check goes through begins and ends in order of time, and keeps all states in which
the object may be: with each, which of the calls on their way have had their moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Final, NamedTuple

State = Hashable
OPEN_MAX: Final = 32  # calls at a time: what is to be tried doubles with each
HAD: Final = (1 << OPEN_MAX) - 1


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
    search = _Search(calls, step)
    configurations = {search.configuration(initial, 0)}
    for _, ends, number in sorted(events):
        if not ends:
            search.begin(number)
            continue
        configurations = search.with_moment(configurations, number)
        if not configurations:
            return calls[number]
    return None


class _Search:
    """The open calls of a history, and the states that have been met.

    A configuration is one integer, because there may be millions: a bit for each open call that has had its
    moment, and above them the number of a state. Bits are used again.
    """

    def __init__(self, calls: list[Call], step: Step) -> None:
        self._calls = calls
        self._step = step
        self._bits: dict[int, int] = {}  # of open calls
        self._states: list[State] = []
        self._numbers: dict[State, int] = {}

    def configuration(self, state: State, had: int) -> int:
        number = self._numbers.setdefault(state, len(self._states))
        if number == len(self._states):
            self._states.append(state)
        return number << OPEN_MAX | had

    def begin(self, number: int) -> None:
        """Give a call that begins a bit of its own."""
        used = set(self._bits.values())
        self._bits[number] = next(bit for bit in range(OPEN_MAX) if bit not in used)

    def with_moment(self, configurations: set[int], number: int) -> set[int]:
        """Return all configurations in which this call has had its moment, after others if need be. The call
        is not open any more."""
        own = 1 << self._bits[number]
        found = set()
        known = set(configurations)
        stack = list(configurations)
        while stack:
            one = stack.pop()
            if one & own:
                found.add(one ^ own)
                continue
            state = self._states[one >> OPEN_MAX]
            for other, bit in self._bits.items():
                if one >> bit & 1:
                    continue
                after = self._step(state, self._calls[other])
                if after is None:
                    continue
                new = self.configuration(after, one & HAD | 1 << bit)
                if new not in known:
                    known.add(new)
                    stack.append(new)
        del self._bits[number]
        return found
