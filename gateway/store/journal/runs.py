"""Runs of equal objects: the messages of a connection in one wake-up have one sender, often one address too.

Then a look-up for each run is enough, if the runs are found for less than the look-ups cost. One look at all
that messages may differ in, the first difference ends it, finds the runs of those that differ in their bodies
only. For objects that are the same or not there is a shorter way: to look where a run should end, and to
count, which takes a tenth of the time of looking at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from operator import is_, length_hint
from typing import Final, Generic, NamedTuple, TypeVar

from gateway.model.message import Message
from gateway.store.journal.format import Buffer, Repeated

RUN: Final = 32  # as long a run is looked up faster once than for each message (measured)
RUN_ALIKE: Final = 8  # so many messages for each run pay for the look at all of them (measured)
SLACK: Final = 64  # rows that are looked at before that is held against them
SAMPLED: Final = 13  # one of so many is looked at; a prime, for clients send eights and hundreds
Kind = TypeVar("Kind")


class Runs(NamedTuple, Generic[Kind]):
    """Objects, and for how many rows each of them stands. `lengths` None: for one."""

    objects: list[Kind]
    lengths: Sequence[int] | None


def alike_in(messages: list[Message]) -> Runs[Message]:
    """The first message of each run that differs in its bodies only; all of them when runs are short."""
    if len(messages) <= RUN_ALIKE:
        return Runs(messages, None)
    one = messages[0]
    firsts, begins = [one], [0]
    sender, address, found, expires = one.sender, one.address, one.property_set, one.expires
    assurance, durable, retain, hops = one.assurance, one.durable, one.retain, one.hops
    count = len(messages)
    left = iter(messages)
    for one in left:
        if (
            one.sender is sender
            and one.address is address
            and one.property_set is found
            and one.assurance is assurance
            and one.durable is durable
            and one.retain is retain
            and one.hops is hops
            and one.expires == expires
        ):
            continue
        at = count - length_hint(left) - 1
        if len(firsts) * RUN_ALIKE > at + SLACK:
            return Runs(messages, None)
        firsts.append(one)
        begins.append(at)
        sender, address, found, expires = one.sender, one.address, one.property_set, one.expires
        assurance, durable, retain, hops = one.assurance, one.durable, one.retain, one.hops
    if len(firsts) * 2 > count:
        return Runs(messages, None)
    begins.append(count)
    return Runs(firsts, [end - begin for begin, end in pairwise(begins)])


def chained(several: Sequence[Runs[Kind]]) -> Runs[Kind]:
    """All of them, one behind the other."""
    if len(several) == 1:
        return several[0]
    objects = list(chain.from_iterable([one.objects for one in several]))
    if all(one.lengths is None for one in several):
        return Runs(objects, None)
    lengths = [[1] * len(one.objects) if one.lengths is None else one.lengths for one in several]
    return Runs(objects, list(chain.from_iterable(lengths)))


def lengths_of(several: Sequence[tuple[Sequence[int] | None, int]]) -> Sequence[int] | None:
    """The lengths of runs, one behind the other; with each how many there are, for None: of one row each."""
    if all(lengths is None for lengths, _ in several):
        return None
    return list(chain.from_iterable([[1] * count if known is None else known for known, count in several]))


def spread(runs: Runs[Kind]) -> list[Kind]:
    """The objects as they stand in the rows."""
    if runs.lengths is None:
        return runs.objects
    return list(chain.from_iterable(map(repeat, runs.objects, runs.lengths)))


def repeated(values: bytes, width: int, lengths: Sequence[int] | None) -> Buffer:
    """Values of `width` octets, each as often as its run is long."""
    return values if lengths is None else Repeated(values, width, lengths)


def runs_of(objects: list[Kind]) -> Runs[Kind]:
    """The same objects that stand together; each for itself when a sample says that it does not pay.

    A run is taken to be as long as the one before, or else its end is found by halving; counting tells
    whether that was right. A long run may come as several.
    """
    sample = list(map(is_, objects[:-1:SAMPLED], objects[1::SAMPLED]))
    if RUN * sum(sample) <= (RUN - 1) * len(sample):
        return Runs(objects, None)
    found, lengths = [], []
    at, end, length = 0, len(objects), RUN
    while at < end:
        one = objects[at]
        high = at + length
        if high > end or objects[high - 1] is not one or (high < end and objects[high] is one):
            length = _end_of_run(objects, at, length) - at
        while objects[at : at + length].count(one) != length:
            length >>= 1
        found.append(one)
        lengths.append(length)
        at += length
    return Runs(found, lengths)


def _end_of_run(objects: list[Kind], at: int, length: int) -> int:
    """Where the run that begins at `at` ends if it is one whenever both its ends are the same."""
    one, end = objects[at], len(objects)
    low, high = at, at + length
    while high < end and objects[high] is one:
        length <<= 1
        low, high = high, high + length
    high = min(high, end)
    while high - low > 1:
        middle = (low + high) >> 1
        if objects[middle] is one:
            low = middle
        else:
            high = middle
    return high
