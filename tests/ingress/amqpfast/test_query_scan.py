"""The identifiers of a QUERY: how many there are, and which are listed, without a connection."""

from __future__ import annotations

import random

from gateway.broker.priorities import PriorityQueue
from gateway.ingress.amqpfast.query_scan import (
    INDEXED_MAX,
    LISTED_MAX,
    ListedIdentifiers,
    PositionSet,
    QueryScan,
)
from gateway.model.message import Message
from gateway.protocols.amqpfast.dialect import fast_address

MESSAGE = Message(fast_address("queue", "q"), b"x")


def filled(count: int) -> PriorityQueue:
    queue = PriorityQueue("q", lambda message: 0)
    queue.put([MESSAGE] * count)
    return queue


def scan(queue: PriorityQueue, index: ListedIdentifiers, above: int) -> tuple[list[int], bool, int]:
    """The identifiers of a QUERY whose turns have time for one message, if there are more, and the turns."""
    one = QueryScan(((queue, *found) for found in queue.browse()), None, index, above)
    turns = 1
    while not one.scan(lambda: True):
        turns += 1
    return *one.result(), turns


def paged(queue: PriorityQueue, index: ListedIdentifiers) -> list[int]:
    """All identifiers, as a client requests them: each time those behind the last."""
    found: list[int] = []
    more = True
    while more:
        one = QueryScan(((queue, *row) for row in queue.browse()), None, index, found[-1] if found else 0)
        assert one.scan(lambda: False)
        listed, more = one.result()
        found += listed
        assert len(found) <= len(queue)
    return found


def test_a_client_that_pages_through_more_than_are_stored_reaches_the_end() -> None:
    count = INDEXED_MAX + LISTED_MAX + 5
    queue, index = filled(count), ListedIdentifiers(1)
    assert paged(queue, index) == list(range(1, count + 1))
    assert len(index) == INDEXED_MAX + 1  # the forgotten ones are one range
    assert paged(queue, index.renewed()) == list(range(count + 1, 2 * count + 1))
    few = ListedIdentifiers(1)
    few.enter(queue, 7)
    assert few.renewed() is few


def test_positions_are_ranges() -> None:
    chance = random.Random(1)
    order, found = list(range(200)), PositionSet()
    chance.shuffle(order)
    for count, position in enumerate(order, 1):
        assert position not in found
        found.add(position)
        there = sorted(order[:count])
        assert [one for one in range(-1, 201) if one in found] == there
        assert len(found) == sum(one - 1 not in there for one in there)
    assert len(found) == 1


def test_the_oldest_identifiers_are_forgotten() -> None:
    queue, index = filled(INDEXED_MAX + 3), ListedIdentifiers(1)
    for position in range(INDEXED_MAX + 3):
        assert index.enter(queue, position) == position + 1
    assert len(index) == INDEXED_MAX + 1
    assert [index.find(number) is None for number in (1, 3, 4, INDEXED_MAX + 3)] == [True, True, False, False]
    assert [index.number_of(queue, position) for position in (2, 3)] == [None, 4]


def test_a_list_has_a_length_and_the_next_query_goes_on() -> None:
    queue, index = filled(LISTED_MAX + 5), ListedIdentifiers(1)
    assert scan(queue, index, 0) == (list(range(1, LISTED_MAX + 1)), True, LISTED_MAX + 6)
    assert len(index) == LISTED_MAX
    assert scan(queue, index, LISTED_MAX)[:2] == (list(range(LISTED_MAX + 1, LISTED_MAX + 6)), False)
    assert scan(queue, index, LISTED_MAX + 3)[:2] == ([LISTED_MAX + 4, LISTED_MAX + 5], False)
    assert scan(queue, index, 3)[:2] == (list(range(4, LISTED_MAX + 4)), True)
