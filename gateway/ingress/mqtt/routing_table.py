"""What topics lead to, for all that may do the same: kept until something changes that a topic depends on.

Of a subscription that came or went only the topics are forgotten that its filter may match: a fleet that
connects, each device with a topic of its own, does not make the others be looked up again. A topic that a
route leads back into the topic tree depends on filters that it does not match itself, and is forgotten with
any of them.
"""

from __future__ import annotations

from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import NOWHERE, Namespace, RoutingEntry, RoutingPlan
from gateway.model.address import Address
from gateway.model.caches import make_room

TABLES_MAX = 10_000  # rules with {client_id} give each client one of its own
EVERYBODY = object()  # the key of what topics lead to, whoever may publish to them
WILDCARDS = frozenset("+#")
TOPIC_OCTETS_MAX = 512  # a longer topic is looked up each time: a hundred thousand of 64 KiB are no cache


class DeniedEntry(RoutingEntry):
    """A topic that its publisher may not publish to, by `rule`."""

    __slots__ = ("rule",)

    def __init__(self, address: Address, rule: str) -> None:
        super().__init__(address, NOWHERE)
        self.rule = rule


class RoutingTable:
    """The entries of one listener, by rights (their `key`) and topic."""

    __slots__ = (
        "_endpoint",
        "_generation",
        "_last",
        "_leads_back",
        "_most",
        "_namespace",
        "_tables",
        "_through",
        "dispatcher",
    )

    def __init__(self, endpoint: str, dispatcher: Dispatcher, namespace: Namespace, most: int) -> None:
        """At most `most` topics are kept for the same rights."""
        self.dispatcher = dispatcher
        self._endpoint = endpoint
        self._namespace = namespace
        self._most = most
        self._generation = -1
        self._tables: dict[object, dict[bytes, RoutingEntry]] = {}
        self._through: set[bytes] = set()
        self._last = NOWHERE  # the plan of the last entry, which mostly is that of the next, too
        self._leads_back = False

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
            make_room(self._tables, TABLES_MAX)
            found = self._tables[key] = {}
        return found

    def forget(self) -> None:
        """Every topic; connections hold these very tables."""
        for entries in self._tables.values():
            entries.clear()
        self._through.clear()

    def _forget(self, filters: list[list[str]]) -> None:
        for entries in self._tables.values():
            for topic in self._through:
                entries.pop(topic, None)
            _forget_matching(filters, entries)
        self._through.clear()

    def resolve(self, address: Address, entries: dict[bytes, RoutingEntry]) -> RoutingEntry:
        """Find out where a topic leads, and keep it among `entries`."""
        entry = self.dispatcher.entry(self._endpoint, self._namespace, address)
        self.keep(entry, entries)
        plan = entry.plan
        if plan is not self._last:
            self._last, self._leads_back = plan, self._returns(plan)
        if self._leads_back:
            if len(self._through) >= self._most:
                self._forget([])
            if address.wire in entries:
                self._through.add(address.wire)
        return entry

    def _returns(self, plan: RoutingPlan) -> bool:
        """Whether a route of the plan leads back into the topic tree."""
        namespaces = self.dispatcher.namespaces
        return any(
            namespaces.get(branch.route.target_endpoint) is self._namespace for branch in plan.branches
        )

    def find(self, address: Address) -> RoutingEntry:
        """Where a topic leads, for whoever may publish to it: that does not depend on who it is."""
        shared = self.of(EVERYBODY)
        return shared.get(address.wire) or self.resolve(address, shared)

    def keep(self, entry: RoutingEntry, entries: dict[bytes, RoutingEntry]) -> None:
        """Keep an entry, if its topic is not too long."""
        if len(entry.address.wire) > TOPIC_OCTETS_MAX:
            return
        if len(entries) >= self._most:
            make_room(entries, self._most)
        entries[entry.address.wire] = entry


def _forget_matching(filters: list[list[str]], entries: dict[bytes, RoutingEntry]) -> None:
    """Forget every topic that one of the filters (its levels) may match, and perhaps some more."""
    below: set[bytes] = set()
    for pattern in filters:
        named = 0
        while named < len(pattern) and pattern[named] not in WILDCARDS:
            named += 1
        if not named:
            entries.clear()
            return
        begin = "/".join(pattern[:named]).encode()
        entries.pop(begin, None)
        if named < len(pattern):
            below.add(begin + b"/")
    if below and entries:  # one look at each topic, however many filters there are
        begins = tuple(below)
        for topic in [topic for topic in entries if topic.startswith(begins)]:
            del entries[topic]
