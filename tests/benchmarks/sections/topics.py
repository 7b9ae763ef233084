"""Topic matching: what a topic costs that is looked up for the first time, among few subscriptions and many.

Half of the subscriptions have wildcards, the others are devices' own; a topic is matched by the same handful
of filters whatever there is besides, so that the figures may differ by the memory's caches alone. For
retained messages it is the other way round: a filter is asked that finds ten topics.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Final

from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX, PIECE_STEPS_MAX, RetainedTopics
from gateway.broker.topics import Trie
from gateway.model.message import Message
from gateway.protocols.mqtt.dialect import topic_address
from tests.benchmarks.report import Figure, median

FEW: Final = 1_000
MANY: Final = 100_000
RATIO: Final = 0.5  # many may cost at most twice as much as few
ROUND_SECS: Final = 0.05
MATCHES: Final = 7
RETAINED: Final = 10
CALLS: Final = 50


def _levels(number: int) -> list[str]:
    return ["plant", f"line{number % 100}", f"machine{number}", "temperature"]


def _trie(count: int) -> Trie[int]:
    trie: Trie[int] = Trie("+", "#")
    for number in range(count - MATCHES + 1):
        pattern = _levels(number)
        if number and number % 3 == 0:
            pattern[3] = "+"
        if number and number % 5 == 0:
            pattern = [*pattern[:3], "#"]
        if number and number % 7 == 0:
            pattern[1] = "+"
        trie.add(pattern, number)
    for at, pattern in enumerate((["#"], ["plant", "#"], ["+"] * 4, ["plant", "+", "+", "temperature"])):
        trie.add(pattern, -1 - at)
    trie.add(["plant", "line0", "machine0", "+"], -5)
    trie.add(["+", "line0", "#"], -6)
    return trie


def _retained(count: int) -> RetainedTopics:
    retained = RetainedTopics(messages_max=count)
    for number in range(count):
        retained.set_retained(Message(topic_address(f"plant/line{number // 10}/machine{number % 10}"), b"x"))
    return retained


def _find(retained: RetainedTopics, pattern: list[str]) -> list[Message]:
    """The first piece of what a subscription is sent."""
    return retained.find(pattern, None, PIECE_MESSAGES_MAX, PIECE_STEPS_MAX)[0]


def _micros(works: tuple[Callable[[], object], ...], seconds: float, repeat: int) -> list[float]:
    """The median of µs per call of each; they take turns."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(max(3, round(seconds * repeat / ROUND_SECS / len(works)))):
        for work, found in zip(works, times, strict=True):
            work()
            count, begin = 0, time.perf_counter()
            while (spent := time.perf_counter() - begin) < ROUND_SECS:
                for _ in range(CALLS):
                    work()
                count += CALLS
            found.append(spent / count * 1e6)
    return [median(one) for one in times]


def measure(seconds: float, repeat: int) -> list[Figure]:
    """µs of a look-up among 100 000, and beside it among 1 000."""
    topic, wanted = _levels(0), ["plant", "line7", "+"]
    many, few = _trie(MANY), _trie(FEW)
    assert [len(many), len(few)] == [MANY, FEW]
    assert len(many.match(topic)) == len(few.match(topic)) == MATCHES
    crowd, handful = _retained(MANY), _retained(FEW)
    assert len(_find(crowd, wanted)) == len(_find(handful, wanted)) == RETAINED
    rows = (
        (
            f"a topic that {MATCHES} subscriptions match",
            (partial(many.match, topic), partial(few.match, topic)),
        ),
        (
            f"a filter that {RETAINED} retained match",
            (partial(_find, crowd, wanted), partial(_find, handful, wanted)),
        ),
    )
    figures = []
    for what, works in rows:
        most, least = _micros(works, seconds / len(rows), repeat)
        figures.append(Figure(what, "us/look-up", most, least, least / most, RATIO))
    return figures
