"""What the routes of an AMQP/Fast link want from its server: destinations to consume, alone or by prefix.

A pattern with wildcards means everything that begins with what stands before them, for the server knows no
more than that; which routes a message takes is decided when it is here. A destination that another prefix
includes is not asked for by itself: its messages would come twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from gateway.mapping.router import Subscriptions
from gateway.protocols.amqpfast.spec import SHORT_STRING_MAX

RETRY_SECS_MIN: Final = 1.0
IDENTIFIER: Final = "gateway."
SURVEY_SECS: Final = 10.0  # how often a prefix of queues is looked through
SURVEY_SECS_MAX: Final = 600.0  # when to consume it anew was no use
DOUBT_SECS: Final = 1.0  # what is still there after this was not on its way


def is_prefix(name: str) -> bool:
    """Whether a subscription's name stands for all that begin with it."""
    return not name or name.endswith(".")


class Source:
    """One destination, or prefix of destinations. `identifier` is that of its durable subscription, or ""."""

    __slots__ = ("identifier", "name", "prefix", "retry_at", "service", "settled", "wait", "why")

    def __init__(self, service: str, name: str, *, durable: bool) -> None:
        self.service = service
        self.name = name
        self.prefix = is_prefix(name)
        self.identifier = _identifier(name) if durable and service == "topic" else ""
        self.settled = False  # the server has answered on this connection, one way or the other
        self.why = ""  # it does not let us consume it, and we try again at
        self.retry_at = 0.0
        self.wait = RETRY_SECS_MIN

    @property
    def key(self) -> tuple[str, str]:
        return self.service, self.name


class Survey:
    """Looks for queues that were made after the prefix that they begin with was consumed.

    A CONSUME covers the queues of its time, and nothing tells of new ones (3.5.2.3). But a message that waits
    for a while although the window is open must be in a queue that is not consumed: then the prefix has to be
    consumed anew. `handle` is the one to ask on.
    """

    __slots__ = ("_at", "_doubtful", "_wait", "asked", "handle")

    def __init__(self, handle: int, now: float) -> None:
        self.handle = handle
        self.asked = False  # the answer is awaited
        self._wait = SURVEY_SECS
        self._at = now + SURVEY_SECS
        self._doubtful = False

    def due(self, now: float) -> bool:
        """Whether it is time to ask."""
        return not self.asked and now >= self._at

    def answered(self, *, waits: bool, now: float) -> bool:
        """Whether something waits was the answer; True: the prefix has to be consumed anew."""
        self.asked = False
        if not waits:
            self._wait, self._doubtful, self._at = SURVEY_SECS, False, now + SURVEY_SECS
            return False
        self._doubtful = not self._doubtful
        if self._doubtful:
            self._at = now + DOUBT_SECS
            return False
        self._wait = min(self._wait * 2, SURVEY_SECS_MAX)
        self._at = now + self._wait
        return True


def _identifier(name: str) -> str:
    given = IDENTIFIER + name
    if len(given.encode()) <= SHORT_STRING_MAX:
        return given
    return IDENTIFIER + hashlib.sha256(name.encode()).hexdigest()


def _covered(key: tuple[str, str], keys: Iterable[tuple[str, str]]) -> bool:
    service, name = key
    return any(
        other != key and other[0] == service and is_prefix(other[1]) and name.startswith(other[1])
        for other in keys
    )


class Sources:
    """All sources of a link. It outlives connections; `connected` begins a new round."""

    def __init__(self, *, durable: bool, wait_max: float) -> None:
        self._durable = durable
        self._wait_max = wait_max
        self._sources: dict[tuple[str, str], Source] = {}
        self._left_behind: list[Source] = []

    @property
    def surveyed(self) -> bool:
        """Every source has been answered for on this connection."""
        return all(source.settled for source in self._sources.values())

    def want(self, subscriptions: Subscriptions) -> tuple[list[Source], list[Source]]:
        """The mapping changed: returns the sources that are new, and those that are not wanted any more."""
        given = subscriptions.prefixes
        before = self._sources
        self._sources = {
            key: before.get(key) or Source(*key, durable=self._durable)
            for key in given
            if not _covered(key, given)
        }
        fresh = [source for key, source in self._sources.items() if key not in before]
        return fresh, [source for key, source in before.items() if key not in self._sources]

    def leave_behind(self, gone: list[Source]) -> None:
        """Nobody is there to be told that these are not wanted any more."""
        self._left_behind += [source for source in gone if source.identifier]

    def left_behind(self) -> list[Source]:
        """Durable subscriptions of ours that nobody wants any more, once."""
        left, self._left_behind = self._left_behind, []
        return [source for source in left if source.key not in self._sources]

    def in_force(self, source: Source) -> bool:
        """Whether the mapping of today asks for it."""
        return self._sources.get(source.key) is source

    def connected(self) -> list[Source]:
        """A connection stands: all that has to be asked for."""
        for source in self._sources.values():
            source.settled = False
            source.wait = RETRY_SECS_MIN
            source.retry_at = 0.0
        return list(self._sources.values())

    def due(self, now: float) -> list[Source]:
        """Those that were refused, and whose turn it is again."""
        found = [one for one in self._sources.values() if one.retry_at and one.retry_at <= now]
        for source in found:
            source.retry_at = 0.0
        return found

    def met(self, source: Source) -> None:
        """The server lets us consume it."""
        source.settled = True
        source.why = ""
        source.retry_at = 0.0

    def failed(self, source: Source, why: str, now: float) -> bool:
        """The server does not, or not any more; returns whether the reason is news."""
        news = source.why != why
        source.settled = True
        source.why = why
        source.retry_at = now + source.wait
        source.wait = min(source.wait * 2, self._wait_max)
        return news
