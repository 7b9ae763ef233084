"""What topics lead to, for each user: kept until something changes that a topic depends on.

Of a subscription that came or went only the topics are forgotten that its filter may match: a fleet that
connects, each device with a topic of its own, does not make the others be looked up again. A topic that a
route leads back into the topic tree depends on filters that it does not match itself, and is forgotten with
any of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.access.principal import Principal
from gateway.broker.dispatcher import Dispatcher, Namespace, RoutingEntry
from gateway.errors import RemoteProtocolError
from gateway.ingress.mqtt.publish_checks import topic_refusal
from gateway.model.address import Address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.octets import decode_topic
from gateway.protocols.mqtt.spec import ReasonCode

if TYPE_CHECKING:
    from gateway.ingress.mqtt.ingress import MqttIngress

WILDCARDS = frozenset("+#")
TOPIC_OCTETS_MAX = 1_024  # a longer topic is looked up each time: ten thousand of 64 KiB are no cache


class RoutingTable:
    """The entries of one listener, by user and topic."""

    __slots__ = ("_endpoint", "_generation", "_most", "_namespace", "_through", "_users", "dispatcher")

    def __init__(self, endpoint: str, dispatcher: Dispatcher, namespace: Namespace, most: int) -> None:
        """At most `most` topics are kept for a user."""
        self.dispatcher = dispatcher
        self._endpoint = endpoint
        self._namespace = namespace
        self._most = most
        self._generation = -1
        self._users: dict[str, dict[bytes, RoutingEntry]] = {}
        self._through: set[bytes] = set()

    def of(self, user: str) -> dict[bytes, RoutingEntry]:
        """The entries of a user, without stale ones; asked for when `dispatcher.generation` moves."""
        if self._generation != self.dispatcher.generation:
            filters = self.dispatcher.filters_since(self._generation)
            self._generation = self.dispatcher.generation
            if filters is None:
                self._users.clear()
                self._through.clear()
            else:
                self._forget(filters)
        return self._users.setdefault(user, {})

    def _forget(self, filters: list[list[str]]) -> None:
        for entries in self._users.values():
            for topic in self._through:
                entries.pop(topic, None)
            for pattern in filters:
                _forget_matching(pattern, entries)
        self._through.clear()

    def resolve(self, address: Address, entries: dict[bytes, RoutingEntry]) -> RoutingEntry:
        """Find out where a topic leads, and keep it among the `entries` of a user."""
        entry = self.dispatcher.entry(self._endpoint, self._namespace, address)
        self.keep(entry, entries)
        namespaces = self.dispatcher.namespaces
        if any(
            namespaces.get(branch.resolved.route.target_endpoint) is self._namespace
            for branch in entry.branches
        ):
            if len(self._through) >= self._most:
                self._forget([])
            if address.wire in entries:
                self._through.add(address.wire)
        return entry

    def keep(self, entry: RoutingEntry, entries: dict[bytes, RoutingEntry]) -> None:
        """Keep an entry among those of a user, if its topic is not too long."""
        if len(entry.address.wire) > TOPIC_OCTETS_MAX:
            return
        if len(entries) >= self._most:
            entries.clear()
        entries[entry.address.wire] = entry


def first_seen(
    ingress: MqttIngress, principal: Principal | None, topic: bytes, entries: dict[bytes, RoutingEntry]
) -> RoutingEntry:
    """A topic seen for the first time: check it, ask for permission, find out where it leads. One to which
    nothing may be published leads nowhere; `MqttIngress.unclaimed` says why."""
    name = decode_topic(topic)
    address = topic_address(name, topic)
    assert principal is not None
    if not ingress.may_publish(principal, address):
        raise RemoteProtocolError(f"not allowed to publish to {name!r}", reason=ReasonCode.NOT_AUTHORIZED)
    if topic_refusal(name, ingress.limits.topic_levels_max) is not None:
        nowhere = RoutingEntry(address, None, (), ())
        ingress.entries.keep(nowhere, entries)
        return nowhere
    return ingress.entries.resolve(address, entries)


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
