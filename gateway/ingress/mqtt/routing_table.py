"""Cache of routing entries by topic, shared by all clients of a listener that have equal rights.

A change of a subscription removes only topics that its filter may match. When a fleet connects, each device
with its own topic, the entries of the others therefore remain. A topic that a route leads back into the topic
tree depends on filters that do not match the topic itself, so it is removed on any change. Other changes of
routing empty the cache.
"""

from __future__ import annotations

from gateway.broker.dispatcher import Dispatcher
from gateway.broker.routing import NOWHERE, Namespace, RoutingEntry, RoutingPlan
from gateway.model.address import Address
from gateway.model.caches import make_room

TABLES_MAX = 10_000  # rules with {client_id} give each client its own table
EVERYBODY = object()  # key of the entries that apply without regard to rights
WILDCARDS = frozenset("+#")
TOPIC_BYTES_MAX = 512  # longer topics are not cached: 100 000 topics of 64 KiB would use too much memory


class DeniedEntry(RoutingEntry):
    """Entry without targets, for a topic to which the client may not publish because of `rule`."""

    __slots__ = ("rule",)

    def __init__(self, address: Address, rule: str) -> None:
        super().__init__(address, NOWHERE)
        self.rule = rule


class RoutingTable:
    """Cached routing entries of one listener by topic, in a separate table for each set of rights.

    Clients with equal rights (their `key`) share a table. If the tables together are full, the large ones
    lose their oldest entries: a client that publishes to many topics hardly affects others.
    """

    __slots__ = (
        "_added",
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
        """Create an empty cache of at most `most` topics in all tables together.

        `endpoint` is the listener's name, `namespace` the namespace in which its clients publish.
        """
        self.dispatcher = dispatcher
        self._endpoint = endpoint
        self._namespace = namespace
        self._most = most
        self._generation = -1
        self._added = 0  # entries when they were counted last, and those cached since
        self._tables: dict[object, dict[bytes, RoutingEntry]] = {}
        self._through: set[bytes] = set()
        self._last = NOWHERE  # plan of the last entry, which the next entry mostly has too
        self._leads_back = False

    def of(self, key: object) -> dict[bytes, RoutingEntry]:
        """Return the table of entries for the rights with this key, after removing stale entries.

        Connections call it again when `dispatcher.generation` has changed.
        """
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
        """Remove every entry. The tables remain, as connections refer to them."""
        for entries in self._tables.values():
            entries.clear()
        self._through.clear()

    def _forget(self, filters: list[list[str]]) -> None:
        """Remove from all tables the topics that may match one of the filters, given as lists of levels.

        Topics with a route that publishes to this listener again are removed, too, because any filter may
        match the topic to which the route leads.
        """
        for entries in self._tables.values():
            for topic in self._through:
                entries.pop(topic, None)
            _forget_matching(filters, entries)
        self._through.clear()

    def resolve(self, address: Address, entries: dict[bytes, RoutingEntry]) -> RoutingEntry:
        """Return the routing entry of a topic after caching it in `entries`."""
        entry = self.dispatcher.entry(self._endpoint, self._namespace, address)
        self.cache_entry(entry, entries)
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
        """Return True if a route of the plan publishes to a topic of this listener."""
        namespaces = self.dispatcher.namespaces
        return any(
            namespaces.get(branch.route.target_endpoint) is self._namespace for branch in plan.branches
        )

    def find(self, address: Address) -> RoutingEntry:
        """Return the routing entry of a topic, without checking a client's rights."""
        shared = self.of(EVERYBODY)
        return shared.get(address.wire) or self.resolve(address, shared)

    def cache_entry(self, entry: RoutingEntry, entries: dict[bytes, RoutingEntry]) -> None:
        """Cache an entry in the table `entries`, unless its topic is too long."""
        if len(entry.address.wire) > TOPIC_BYTES_MAX:
            return
        if len(entries) >= self._most:
            make_room(entries, self._most)
        if self._added >= self._most:
            self._shrink()
        self._added += 1
        entries[entry.address.wire] = entry

    def _shrink(self) -> None:
        """Count the entries of all tables and, if there are too many, remove some of the oldest entries.

        Tables with less than half the average number of entries lose none. In total, at least one in 2 * PART
        of the entries is removed.
        """
        tables = [entries for entries in self._tables.values() if entries]
        self._added = sum(map(len, tables))
        if self._added < self._most:
            return
        few = self._added // (2 * len(tables))
        for entries in tables:
            if len(entries) > few:
                make_room(entries, len(entries))
        self._added = sum(map(len, tables))


def _forget_matching(filters: list[list[str]], entries: dict[bytes, RoutingEntry]) -> None:
    """Remove from `entries` each topic that one of the topic filters (lists of levels) may match.

    Some topics that match no filter may be removed as well.
    """
    below: set[bytes] = set()
    for pattern in filters:
        prefix_length = 0
        while prefix_length < len(pattern) and pattern[prefix_length] not in WILDCARDS:
            prefix_length += 1
        if not prefix_length:
            entries.clear()
            return
        begin = "/".join(pattern[:prefix_length]).encode()
        entries.pop(begin, None)
        if prefix_length < len(pattern):
            below.add(begin + b"/")
    if below and entries:  # one pass over the topics for all filters
        begins = tuple(below)
        for topic in [topic for topic in entries if topic.startswith(begins)]:
            del entries[topic]
