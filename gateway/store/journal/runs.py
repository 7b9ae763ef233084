"""Runs of equal objects, such as the sender or the address of consecutive messages of a connection.

One look-up for each run is enough, if finding the runs costs less than the look-ups. `alike_in` compares
messages in everything but their bodies, and gives up early if the runs are short. `runs_of` compares objects
by identity: it checks where a run should end and counts, which takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise, repeat
from operator import is_, length_hint
from typing import Final, Generic, NamedTuple, TypeVar

from gateway.model.message import Message
from gateway.store.journal.format import Buffer, Repeated

# From this length on, one look-up for each run is faster than one for each message (measured).
RUN: Final = 32
RUN_ALIKE: Final = 8  # messages for each run from which comparing all of them is worthwhile (measured)
SLACK: Final = 64  # messages compared before the result is judged
SAMPLED: Final = 13  # sampling interval; a prime, because clients send eights and hundreds
Kind = TypeVar("Kind")


class Runs(NamedTuple, Generic[Kind]):
    """Objects with run lengths: `objects[k]` stands for `lengths[k]` consecutive rows of a column.

    `lengths` is None if each object stands for one row.
    """

    objects: list[Kind]
    lengths: Sequence[int] | None


def alike_in(messages: list[Message]) -> Runs[Message]:
    """Return messages as runs of messages that differ only in bodies; each run has its first message.

    If most runs are short, every message is returned as a run of one.
    """
    if len(messages) <= RUN_ALIKE:
        return Runs(messages, None)
    one = messages[0]
    firsts, begins = [one], [0]
    sender, address, found, expires = one.sender, one.address, one.property_set, one.expires
    assurance, durable, retain, hops = one.assurance, one.durable, one.retain, one.hops
    count = len(messages)
    iterator = iter(messages)
    for one in iterator:
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
        at = count - length_hint(iterator) - 1
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
    """Return the concatenation of several lists of runs."""
    if len(several) == 1:
        return several[0]
    objects = list(chain.from_iterable([one.objects for one in several]))
    if all(one.lengths is None for one in several):
        return Runs(objects, None)
    lengths = [[1] * len(one.objects) if one.lengths is None else one.lengths for one in several]
    return Runs(objects, list(chain.from_iterable(lengths)))


def lengths_of(several: Sequence[tuple[Sequence[int] | None, int]]) -> Sequence[int] | None:
    """Return the concatenation of several lists of run lengths, or None if every run has one row.

    Each item of `several` has a list of lengths (None: all 1) and the number of its runs.
    """
    if all(lengths is None for lengths, _ in several):
        return None
    return list(chain.from_iterable([[1] * count if known is None else known for known, count in several]))


def spread(runs: Runs[Kind]) -> list[Kind]:
    """Return a list with one object for each row: each object is repeated for the length of its run."""
    if runs.lengths is None:
        return runs.objects
    return list(chain.from_iterable(map(repeat, runs.objects, runs.lengths)))


def repeat_values(values: bytes, width: int, lengths: Sequence[int] | None) -> Buffer:
    """Return a buffer in which value k is repeated `lengths[k]` times; None repeats no value.

    `values` has values of `width` bytes each.
    """
    return values if lengths is None else Repeated(values, width, lengths)


def runs_of(objects: list[Kind]) -> Runs[Kind]:
    """Return the runs of identical objects. If a sample shows only short runs, each object is a run.

    A run is first assumed to be as long as the one before; otherwise its end is found by bisection. Counting
    verifies the assumption. A long run may be returned as several.
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
    """Return the index behind the run that begins at index `at`; `length` is the first guess of its length.

    Searches by doubling and bisection, and assumes that objects between two identical ones are identical,
    too.
    """
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
