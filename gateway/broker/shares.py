"""Limits that prevent one user or address from occupying all of a resource.

`UserQuotas` has the limits of each user for what users define or store; the mechanism is in model/shares.py.
Definitions (queues, exchanges, bindings, subscriptions, sessions) are also counted in bytes, because users
choose the size of their names and arguments. Open channels and handles, with the identifiers of messages
listed on them, are counted in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Final

import structlog

from gateway.access import console_tokens
from gateway.model.properties import Headers, Value, ValueType
from gateway.model.shares import NO_LIMIT, UserShares, always
from gateway.settings.limits import Limits

CHANNEL_BYTES: Final = 1_200  # bytes of an open channel, without what it stores for its messages
HANDLE_BYTES: Final = 1_200  # bytes of an open AMQP/Fast handle, in addition to its name
IDENTIFIER_BYTES: Final = 256  # bytes of an identifier under which a QUERY has listed a message
ENTRY_BYTES: Final = 256  # bytes of an argument, in addition to its name and value
LEVEL_BYTES: Final = 200  # bytes of a level of a topic filter, in addition to its text
LEVELS_FEW: Final = 10  # levels that are counted by their text alone, because most filters share them
LISTENERS_MAX: Final = 20  # event streams of the HTTP interface
TAPS_MAX: Final = 5  # streams of messages among those
UNSENT_BYTES_MAX: Final = 16 * 1024 * 1024  # of HTTP responses that one user has not read, beyond the last
WILLS_BYTES_MAX: Final = 64 * 1024 * 1024  # of refused wills, which wait in memory
SHARE: Final = 0.9  # of the total, unless configured: another holder always gets in

log = structlog.get_logger(limited=True)


def share_of(total: int, configured: int) -> int:
    """Return how many of `total` objects, such as sessions, one user or address may have.

    `configured` is the number from the configuration; 0 means the default part of `total`.
    """
    return configured or ceil(total * SHARE)


class Shares:
    """Number of objects of each holder (user or address), with the holder that has most of them.

    The largest holder is found in constant time.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._holders: dict[int, dict[str, None]] = {}  # by count
        self._most = 0

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, holder: str) -> int:
        return self._counts.get(holder, 0)

    @property
    def largest(self) -> str | None:
        """One of the holders with the largest count; None if there is no holder."""
        return next(iter(self._holders[self._most])) if self._most else None

    def add(self, holder: str) -> None:
        """Increase the count of a holder by one."""
        count = self._counts.get(holder, 0)
        self._move(holder, count, count + 1)
        self._most = max(self._most, count + 1)

    def remove(self, holder: str) -> None:
        """Decrease the count of a holder by one."""
        count = self._counts[holder]
        self._move(holder, count, count - 1)
        if self._most not in self._holders:
            self._most -= 1

    def _move(self, holder: str, before: int, after: int) -> None:
        if before:
            same = self._holders[before]
            del same[holder]
            if not same:
                del self._holders[before]
        if after:
            self._counts[holder] = after
            self._holders.setdefault(after, {})[holder] = None
        else:
            del self._counts[holder]


class UserQuotas:
    """Limits for each user of the resources that all users share, such as stored messages."""

    def __init__(
        self,
        limits: Limits,
        *,
        definition_bytes_max: int = NO_LIMIT,
        console_sessions_max: int = 1_000,
        several: Callable[[], bool] = always,
    ) -> None:
        """Create the per-user limits.

        While `several` returns False, there is one user, who may use all of a resource, except for
        definitions. `definition_bytes_max` limits the bytes of all definitions (queues, exchanges, bindings,
        subscriptions) together, and also those of the channels and handles of connections.
        `console_sessions_max` limits the sessions of the console.
        """
        shares_of_definitions = partial(
            UserShares,
            bytes_max=definition_bytes_max,
            user_share=limits.definitions_per_user_share,
            bytes_option="limits.definitions_bytes_max",
            share_option="limits.definitions_per_user_share",
        )
        self.definitions = shares_of_definitions("definitions")
        self.opened = shares_of_definitions("channels and handles")
        self._share = limits.user_share
        self._several = several
        self.retained = self._shares(
            "retained messages",
            ("limits.retained_messages_max", limits.retained_messages_max),
            ("limits.retained_bytes_max", limits.retained_bytes_max),
        )
        self.spool = self._shares(
            "spooled bodies", byte_count=("limits.spool_bytes_max", limits.spool_bytes_max)
        )
        self.transfers = self._shares(
            "broken-off transfers",
            ("limits.fast_partials_max", limits.fast_partials_max),
            ("limits.fast_partial_bytes_max", limits.fast_partial_bytes_max),
        )
        of_letters = (
            ("limits.dead_letters_max", limits.dead_letters_max),
            ("limits.dead_letters_bytes_max", limits.dead_letters_bytes_max),
        )
        self.letters = self._shares("dead letters", *of_letters)
        self.common_letters = self._shares("dead letters of all replicas", *of_letters)
        self.ended = self._shares(
            "ended sessions",
            ("limits.sessions_max", limits.sessions_max),
            ("limits.ended_sessions_bytes_max", limits.ended_sessions_bytes_max),
        )
        self.wills = self._shares(
            "waiting wills", ("limits.sessions_max", limits.sessions_max), ("the places", WILLS_BYTES_MAX)
        )
        self.streams = self._shares("event streams", ("the places", LISTENERS_MAX))
        self.taps = self._shares("message streams", ("the places", TAPS_MAX))
        self.console = self._shares("console sessions", ("http.sessions_max", console_sessions_max))
        self.tokens = self._shares("console tokens", ("the places", console_tokens.TOKENS_MAX))
        self.responses = UserShares(
            "unsent responses", bytes_max=UNSENT_BYTES_MAX, share_option="what may be unread"
        )
        # Of all of them only what was refused; each has its own limits.
        self.outboxes = self._shares("outbox messages")
        self.waiting = self._shares("waiting messages")
        self._logged_counts: dict[str, tuple[int, int]] = {}

    def outbox(self) -> UserShares:
        """Return new per-user limits for the messages of one outbox. The outbox sets the limits."""
        return self._shares("outbox messages", refusals=self.outboxes)

    def waiting_in(self, count_max: int, bytes_max: int) -> UserShares:
        """Return new per-user limits for the messages that wait at one link or paused route.

        `count_max` and `bytes_max` are the limits for all users together.
        """
        return self._shares("waiting messages", ("", count_max), ("", bytes_max), refusals=self.waiting)

    def waiting_death_shares(self) -> UserShares:
        """Return new per-user limits for the messages of a virtual host that wait to be routed.

        They wait as dead letters, or because an exchange delays them. The virtual host sets the limits.
        """
        return self._shares("waiting messages", refusals=self.waiting)

    def all(self) -> tuple[UserShares, ...]:
        """Return the per-user limits and usage of all kinds of resources."""
        return (
            self.definitions,
            self.opened,
            self.retained,
            self.spool,
            self.transfers,
            self.letters,
            self.common_letters,
            self.ended,
            self.wills,
            self.streams,
            self.taps,
            self.console,
            self.tokens,
            self.responses,
            self.outboxes,
            self.waiting,
        )

    def refusal_counts(self) -> dict[str, int]:
        """Return how often something was refused because a user exceeded a quota, by resource."""
        return {shares.resource.replace(" ", "_"): shares.refused for shares in self.all()}

    def evicted_counts(self) -> dict[str, int]:
        """Return how many objects (messages, sessions) were deleted in favour of newer ones, by resource."""
        return {shares.resource.replace(" ", "_"): shares.evicted_count for shares in self.all()}

    def tick(self) -> None:
        """Log for each resource how many objects were refused or replaced since the last call."""
        for shares in self.all():
            refused, evicted_count = self._logged_counts.get(shares.resource, (0, 0))
            if shares.refused > refused:
                log.warning(
                    "user quota reached",
                    resource=shares.resource,
                    user=shares.last_user.lstrip("\0"),
                    limit=shares.last_limit,
                    refused_count=shares.refused - refused,
                )
            if shares.evicted_count > evicted_count:
                log.warning(
                    "user quota evicted entries",
                    resource=shares.resource,
                    user=shares.last_user,
                    entries=shares.evicted_count - evicted_count,
                )
            self._logged_counts[shares.resource] = (shares.refused, shares.evicted_count)

    def _shares(
        self,
        resource: str,
        count: tuple[str, int] = ("", NO_LIMIT),
        byte_count: tuple[str, int] = ("", NO_LIMIT),
        *,
        refusals: UserShares | None = None,
    ) -> UserShares:
        return UserShares(
            resource,
            count_max=count[1],
            bytes_max=byte_count[1],
            user_share=self._share,
            count_option=count[0],
            bytes_option=byte_count[0],
            applies=self._several,
            refusals=refusals,
        )


def text_bytes(*texts: str) -> int:
    """Return the bytes that a queue, exchange, binding or subscription with these texts occupies.

    Both memory and the store are counted.
    """
    return 2 * sum([len(text.encode()) for text in texts])


def filter_bytes(topic_filter: str) -> int:
    """Return the size in bytes that a subscription with this topic filter occupies."""
    deep = max(topic_filter.count("/") + 1 - LEVELS_FEW, 0)
    return text_bytes(topic_filter) + LEVEL_BYTES * deep


def argument_bytes(arguments: Headers) -> int:
    """Return the size in bytes of the arguments of a queue, exchange or binding, including nested ones."""
    return sum([ENTRY_BYTES + text_bytes(name) + _value_bytes(value) for name, value in arguments])


def argument_count(arguments: Headers) -> int:
    """Return the number of arguments, including nested ones."""
    return sum([1 + _nested_count(value) for _, value in arguments])


def _value_bytes(value: Value) -> int:
    content = value.value
    if value.type is ValueType.TABLE:
        return argument_bytes(content)
    if value.type is ValueType.ARRAY:
        return sum([ENTRY_BYTES + _value_bytes(one) for one in content])
    if isinstance(content, str):
        return text_bytes(content)
    return 2 * len(content) if isinstance(content, bytes) else 0


def _nested_count(value: Value) -> int:
    if value.type is ValueType.TABLE:
        return argument_count(value.value)
    return sum([1 + _nested_count(one) for one in value.value]) if value.type is ValueType.ARRAY else 0
