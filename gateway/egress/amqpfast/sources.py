"""Sources that the routes of an AMQP/Fast link need: destinations to consume, alone or by prefix.

A pattern with wildcards is consumed as the prefix before its first wildcard, because the server knows only
prefixes; the routes of a message are determined when it has arrived. A destination that another prefix
includes is not consumed by itself: its messages would arrive twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from gateway.mapping.router import Subscriptions
from gateway.protocols.amqpfast.spec import SHORT_STRING_MAX

RETRY_SECS_MIN: Final = 1.0
IDENTIFIER: Final = "gateway."
SURVEY_SECS: Final = 10.0  # how often a prefix of queues is browsed
SURVEY_SECS_MAX: Final = 600.0  # the longest interval, when consuming again did not help
DOUBT_SECS: Final = 1.0  # a message that still waits after this was not in flight


def is_prefix(name: str) -> bool:
    """Return True if a subscription to `name` includes all destinations whose names begin with `name`."""
    return not name or name.endswith(".")


class LinkSource:
    """Source of a link: a destination, or all destinations whose names begin with a prefix.

    `identifier` is that of its durable subscription, or "".
    """

    __slots__ = ("identifier", "name", "prefix", "retry_at", "service", "settled", "wait", "why")

    def __init__(self, service: str, name: str, *, durable: bool) -> None:
        self.service = service
        self.name = name
        self.prefix = is_prefix(name)
        self.identifier = _identifier(name) if durable and service == "topic" else ""
        self.settled = False  # True if the server has replied on this connection, positively or not
        self.why = ""  # the server's reason for the refusal, "" if it allows to consume
        self.retry_at = 0.0
        self.wait = RETRY_SECS_MIN

    @property
    def key(self) -> tuple[str, str]:
        """Service and name, which identify the source within the link."""
        return self.service, self.name


class Survey:
    """Periodic check for queues that were created after their prefix was consumed.

    A CONSUME covers the queues that exist at the time, and the server does not announce new ones (3.5.2.3).
    But a message that waits for a while although the window is open must be in a queue that is not consumed.
    Then the prefix has to be consumed again. `handle` is the number of the handle for QUERY.
    """

    __slots__ = ("_at", "_doubtful", "_wait", "awaits_reply", "handle")

    def __init__(self, handle: int, now: float) -> None:
        self.handle = handle
        self.awaits_reply = False  # True while a query is unanswered
        self._wait = SURVEY_SECS
        self._at = now + SURVEY_SECS
        self._doubtful = False

    def is_due(self, now: float) -> bool:
        """Return True if it is time for the next query.

        `now` is in loop-clock seconds.
        """
        return not self.awaits_reply and now >= self._at

    def process_reply(self, *, waits: bool, now: float) -> bool:
        """Process the reply to a query. Return True if the prefix has to be consumed again.

        `waits` is True if a message waits. `now` is in loop-clock seconds.
        """
        self.awaits_reply = False
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
    identifier = IDENTIFIER + name
    if len(identifier.encode()) <= SHORT_STRING_MAX:
        return identifier
    return IDENTIFIER + hashlib.sha256(name.encode()).hexdigest()


def _covered(key: tuple[str, str], keys: Iterable[tuple[str, str]]) -> bool:
    service, name = key
    return any(
        other != key and other[0] == service and is_prefix(other[1]) and name.startswith(other[1])
        for other in keys
    )


class LinkSources:
    """All sources of a link.

    The object outlives connections; `connected` prepares it for a new one.
    """

    def __init__(self, *, durable: bool, wait_max: float) -> None:
        self._durable = durable
        self._wait_max = wait_max
        self._sources: dict[tuple[str, str], LinkSource] = {}
        self._left_behind: list[LinkSource] = []  # whose durable subscriptions may exist, and are not needed

    @property
    def surveyed(self) -> bool:
        """True if the server has accepted or refused consumption from every source on this connection."""
        return all(source.settled for source in self._sources.values())

    def set_needs(self, subscriptions: Subscriptions) -> tuple[list[LinkSource], list[LinkSource]]:
        """Set the sources that a changed mapping requires.

        Return the new sources and those that are no longer needed.
        """
        prefixes = subscriptions.prefixes
        before = self._sources
        self._sources = {
            key: before.get(key) or LinkSource(*key, durable=self._durable)
            for key in prefixes
            if not _covered(key, prefixes)
        }
        fresh = [source for key, source in self._sources.items() if key not in before]
        return fresh, [source for key, source in before.items() if key not in self._sources]

    def add_obsolete(self, obsolete: list[LinkSource]) -> None:
        """Store sources whose durable subscriptions have to be cancelled, until `mark_cancelled`."""
        self._left_behind += [source for source in obsolete if source.identifier]

    def obsolete(self) -> list[LinkSource]:
        """Return the stored sources, after removing those that the mapping has come to need again."""
        self._left_behind = [one for one in self._left_behind if one.key not in self._sources]
        return list(self._left_behind)

    def mark_cancelled(self, source: LinkSource) -> None:
        """Forget a stored source: the server has cancelled its durable subscription, or has none."""
        if source in self._left_behind:
            self._left_behind.remove(source)

    def is_current(self, source: LinkSource) -> bool:
        """Return True if the current mapping needs the source."""
        return self._sources.get(source.key) is source

    def connected(self) -> list[LinkSource]:
        """Reset the states of all sources for a new connection. Return all, to be consumed on it."""
        for source in self._sources.values():
            source.settled = False
            source.wait = RETRY_SECS_MIN
            source.retry_at = 0.0
        return list(self._sources.values())

    def take_due(self, now: float) -> list[LinkSource]:
        """Return the refused sources whose retry is due, and mark them as being retried.

        `now` is in loop-clock seconds.
        """
        found = [one for one in self._sources.values() if one.retry_at and one.retry_at <= now]
        for source in found:
            source.retry_at = 0.0
        return found

    def mark_met(self, source: LinkSource) -> None:
        """Record that the server accepts the link as consumer of a source."""
        source.settled = True
        source.why = ""
        source.retry_at = 0.0

    def mark_failed(self, source: LinkSource, why: str, now: float) -> bool:
        """Record why the server refuses a source, and when to retry it.

        Return True if the reason is new. `now` is in loop-clock seconds.
        """
        news = source.why != why
        source.settled = True
        source.why = why
        source.retry_at = now + source.wait
        source.wait = min(source.wait * 2, self._wait_max)
        return news
