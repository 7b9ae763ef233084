"""What topics lead to, for all that may do the same: kept until something changes that a topic depends on.

Of a subscription that came or went only the topics are forgotten that its filter may match: a fleet that
connects, each device with a topic of its own, does not make the others be looked up again. A topic that a
route leads back into the topic tree depends on filters that it does not match itself, and is forgotten with
any of them.
"""

from __future__ import annotations

from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import NOWHERE, Namespace, RoutingEntry
from gateway.model.address import Address

TABLES_MAX = 10_000  # rules with {client_id} give each client one of its own
EVERYBODY = object()  # the key of what topics lead to, whoever may publish to them
WILDCARDS = frozenset("+#")
TOPIC_OCTETS_MAX = 1_024  # a longer topic is looked up each time: ten thousand of 64 KiB are no cache


class DeniedEntry(RoutingEntry):
    """A topic that its publisher may not publish to, by `rule`."""

    __slots__ = ("rule",)

    def __init__(self, address: Address, rule: str) -> None:
        super().__init__(address, NOWHERE)
        self.rule = rule


class RoutingTable:
    """The entries of one listener, by rights (their `key`) and topic."""

    __slots__ = ("_endpoint", "_generation", "_most", "_namespace", "_tables", "_through", "dispatcher")

    def __init__(self, endpoint: str, dispatcher: Dispatcher, namespace: Namespace, most: int) -> None:
        """At most `most` topics are kept for the same rights."""
        self.dispatcher = dispatcher
        self._endpoint = endpoint
        self._namespace = namespace
        self._most = most
        self._generation = -1
        self._tables: dict[object, dict[bytes, RoutingEntry]] = {}
        self._through: set[bytes] = set()

    def of(self, key: object) -> dict[bytes, RoutingEntry]:
        """The entries for those rights, without stale ones; asked for when `dispatcher.generation` moves."""
        if self._generation != self.dispatcher.generation:
            filters = self.dispatcher.filters_since(self._generation)
            self._generation = self.dispatcher.generation
            if filters is None:
                self._tables.clear()
                self._through.clear()
            else:
                self._forget(filters)
        found = self._tables.get(key)
        if found is None:
            if len(self._tables) >= TABLES_MAX:
                self._tables.clear()
            found = self._tables[key] = {}
        return found

    def _forget(self, filters: list[list[str]]) -> None:
        for entries in self._tables.values():
            for topic in self._through:
                entries.pop(topic, None)
            for pattern in filters:
                _forget_matching(pattern, entries)
        self._through.clear()

    def resolve(self, address: Address, entries: dict[bytes, RoutingEntry]) -> RoutingEntry:
        """Find out where a topic leads, and keep it among `entries`."""
        entry = self.dispatcher.entry(self._endpoint, self._namespace, address)
        self.keep(entry, entries)
        namespaces = self.dispatcher.namespaces
        if any(
            namespaces.get(branch.route.target_endpoint) is self._namespace for branch in entry.plan.branches
        ):
            if len(self._through) >= self._most:
                self._forget([])
            if address.wire in entries:
                self._through.add(address.wire)
        return entry

    def find(self, address: Address) -> RoutingEntry:
        """Where a topic leads, for whoever may publish to it: that does not depend on who it is."""
        shared = self.of(EVERYBODY)
        return shared.get(address.wire) or self.resolve(address, shared)

    def keep(self, entry: RoutingEntry, entries: dict[bytes, RoutingEntry]) -> None:
        """Keep an entry, if its topic is not too long."""
        if len(entry.address.wire) > TOPIC_OCTETS_MAX:
            return
        if len(entries) >= self._most:
            entries.clear()
        entries[entry.address.wire] = entry


def _forget_matching(pattern: list[str], entries: dict[bytes, RoutingEntry]) -> None:
    """Forget every topic that the filter (its levels) may match, and perhaps some more."""
    named = 0
    while named < len(pattern) and pattern[named] not in WILDCARDS:
        named += 1
    begin = "/".join(pattern[:named]).encode()
    if not named:
        entries.clear()
        return
    entries.pop(begin, None)
    if named < len(pattern):
        below = begin + b"/"
        for topic in [topic for topic in entries if topic.startswith(below)]:
            del entries[topic]
