"""Exchanges, which route a published message to destinations by key, pattern, header, or to all.

`route` collects the destinations of one message in a set. An exchange may be bound to others, in chains and
circles of any length, so the search is a loop that remembers the visited ones. A message without destination
goes to the alternate exchange, which is looked up by name at that moment. Only headers exchanges, those that
hash a header or property, and delaying ones examine the message; a delaying exchange routes like the type in
its arguments. Bindings are stored by destination, so that deleting a destination removes all its bindings
without examining others; outdated entries of an index are ignored, and removed in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from gateway.broker.amqp091.arguments import ALTERNATE, DELAYED, DELAYED_TYPE, HASH
from gateway.broker.amqp091.consistent_hash import DESTINATION_STEPS, HashedPart, HashRing
from gateway.broker.amqp091.delays import DelayedMessages, delay_of
from gateway.broker.amqp091.header_index import HeaderConditions, HeaderIndex, comparable, parse_conditions
from gateway.broker.matching_steps import EXCHANGE_STEPS, MatchingSteps, pattern_steps
from gateway.broker.queue import Queue
from gateway.broker.topics import Trie
from gateway.model.message import Message
from gateway.model.properties import Headers, Value, ValueType

Keys = dict[str, dict[Headers, str | None]]
"""Bindings of one destination: by key and arguments, the user who made each; None: the configuration."""


class Exchange:
    """Exchange with its bindings.

    `kind` is one of EXCHANGE_TYPES. `find` returns the exchange of a name, and is used for the alternate
    exchange.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        durable: bool,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Headers = (),
        find: Callable[[str], Exchange | None] = lambda name: None,
        user: str | None = None,
        steps: MatchingSteps | None = None,
    ) -> None:
        """Create an exchange without bindings.

        `arguments` are those that have an effect. `user` is the user who declared it; None for the
        configuration or a built-in exchange. `steps` counts how many comparisons the bindings of a virtual
        host add to a message.
        """
        by_name = dict(arguments)
        self.name = name
        self.user = user
        self.kind = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments = arguments
        self.alternate: str | None = by_name[ALTERNATE].value if ALTERNATE in by_name else None
        self.delayed: DelayedMessages | None = None  # of an exchange of type DELAYED
        self._how: str = by_name[DELAYED_TYPE].value if kind == DELAYED else kind
        self._hashed = HashedPart(arguments)
        self._ring: HashRing[Queue | Exchange] = HashRing()
        # True if more than the address of a message determines its destinations.
        self._looks = kind == DELAYED or self._how == "headers" or not self._hashed.is_key
        self._find = find
        self.bound: dict[Exchange, None] = {}  # exchanges to which this one is bound
        self._to: dict[Queue | Exchange, Keys] = {}
        self._exchanges: dict[Exchange, None] = {}  # exchanges among the destinations
        self._keys: dict[str, dict[Queue | Exchange, None]] = {}
        self._patterns: Trie[Queue | Exchange] = Trie("*", "#")
        self._conditions: dict[
            tuple[Queue | Exchange, str, Headers], tuple[HeaderConditions, str | None]
        ] = {}
        self._index: HeaderIndex[Queue | Exchange] = HeaderIndex()
        self._steps = MatchingSteps() if steps is None else steps
        self._own_steps: dict[str | None, int] = {}  # by the user who has made the bindings
        # Who bound a destination first, and its steps; only destinations that cost each message steps.
        self._destination_steps: dict[Queue | Exchange, tuple[str | None, int]] = {}
        self._pattern_users: dict[tuple[Queue | Exchange, str], str | None] = {}  # of patterns with steps
        self.sweeping = False  # True while further calls of `sweep` are scheduled
        self._unswept: list[tuple[Queue | Exchange, Keys]] = []  # to be swept

    def apply_policy(self, alternate: str | None) -> None:
        """Set the alternate exchange to that of a policy (None: no policy has one).

        Does nothing if the exchange was declared with an alternate exchange.
        """
        if all(name != ALTERNATE for name, _ in self.arguments):
            self.alternate = alternate

    @property
    def destinations(self) -> list[Queue | Exchange]:
        """Queues and exchanges that are bound to this exchange."""
        return list(self._to)

    @property
    def owning_user(self) -> str | None:
        """Name of the user who declared the exchange; None for the configuration or a built-in one."""
        return self.user

    @property
    def is_topic(self) -> bool:
        """True if the keys of bindings are patterns, to which topic permissions apply."""
        return self._how == "topic"

    @property
    def matches_headers(self) -> bool:
        """True if the arguments of bindings are conditions on headers."""
        return self._how == "headers"

    @property
    def is_weighted(self) -> bool:
        """True if the keys of bindings are weights of the destinations (`x-consistent-hash`)."""
        return self._how == HASH

    @property
    def has_no_bindings(self) -> bool:
        """True if nothing is bound to the exchange."""
        return not self._to

    def bind(
        self, destination: Queue | Exchange, key: str, arguments: Headers, user: str | None = None
    ) -> bool:
        """Add a binding for `user`, None for the configuration. Return False if it exists already."""
        several = self._to.setdefault(destination, {}).setdefault(key, {})
        if arguments in several:
            return False
        several[arguments] = user
        if isinstance(destination, Exchange) and destination not in self._exchanges:
            self._exchanges[destination] = None
            destination.bound[self] = None
            self._charge(destination, user, EXCHANGE_STEPS)
        if self._how == "topic":
            if len(several) == 1:
                pattern = words(key)
                self._patterns.add(pattern, destination)
                if steps := pattern_steps(pattern, "*", "#"):
                    self._pattern_users[destination, key] = user
                    self._add_steps(user, steps)
        elif self._how == "direct":
            self._keys.setdefault(key, {})[destination] = None
        elif self._how == HASH:
            if len(several) == 1 and self._ring.add(destination, _unique_name(destination), key):
                self._charge(destination, user, DESTINATION_STEPS)
        elif self._how == "headers":
            conditions = parse_conditions(arguments)
            self._conditions[destination, key, arguments] = (conditions, user)
            self._add_steps(user, self._index.add(conditions, destination, user))
        return True

    def unbind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Remove a binding. Return False if there is none."""
        keys = self._to.get(destination, {})
        if arguments not in keys.get(key, ()):
            return False
        self._remove_conditions(destination, key, arguments)
        del keys[key][arguments]
        if keys[key]:
            return True  # the same key is bound with other arguments
        del keys[key]
        if not keys:
            self._remove_destination(destination)
        self._forget(destination, key)
        return True

    def unbind_all(self, destination: Queue | Exchange) -> Keys:
        """Remove the bindings of `destination`, because it or this exchange is deleted. Return them by key.

        `destination` must never be bound to this exchange again. Its keys stay in the indexes until `sweep`
        removes them.
        """
        keys = self._to.get(destination, {})
        if keys:
            self._remove_destination(destination)
            self._unswept.append((destination, keys))
        return keys

    def sweep(self, most: int) -> bool:
        """Remove up to `most` keys of deleted destinations from the indexes.

        Return True if some are left.
        """
        while self._unswept:
            destination, keys = self._unswept[-1]
            while keys:
                if not most:
                    return True
                most -= 1
                key, several = keys.popitem()
                for arguments in several:
                    self._remove_conditions(destination, key, arguments)
                self._forget(destination, key)
            self._unswept.pop()
        return False

    def _remove_destination(self, destination: Queue | Exchange) -> None:
        """Remove a destination that has no bindings left."""
        del self._to[destination]
        if self._how == HASH:
            self._ring.drop(destination)
        if destination in self._destination_steps:
            user, steps = self._destination_steps.pop(destination)
            self._add_steps(user, -steps)
        if isinstance(destination, Exchange):
            del self._exchanges[destination]
            del destination.bound[self]

    def _forget(self, destination: Queue | Exchange, key: str) -> None:
        """Remove a destination's bindings with this key from the index, whatever their arguments."""
        if self._how == "topic":
            pattern = words(key)
            self._patterns.remove(pattern, destination)
            if steps := pattern_steps(pattern, "*", "#"):
                self._add_steps(self._pattern_users.pop((destination, key)), -steps)
        elif self._how == HASH:
            self._ring.remove(destination, key)
        elif self._how == "direct":
            del self._keys[key][destination]
            if not self._keys[key]:
                del self._keys[key]

    def _remove_conditions(self, destination: Queue | Exchange, key: str, arguments: Headers) -> None:
        """Remove a binding from the index of header conditions, if this is a headers exchange."""
        if self._how == "headers":
            conditions, user = self._conditions.pop((destination, key, arguments))
            self._add_steps(user, -self._index.remove(conditions, destination, user))

    def _charge(self, destination: Queue | Exchange, user: str | None, steps: int) -> None:
        """Add `steps` to the comparisons that the bindings of `destination` need for each message.

        They count towards the limit of the user who bound the destination first; `user` is used only if
        nobody has bound it before.
        """
        first, before = self._destination_steps.get(destination, (user, 0))
        self._destination_steps[destination] = (first, before + steps)
        self._add_steps(first, steps)

    def _add_steps(self, user: str | None, steps: int) -> None:
        if steps:
            self._own_steps[user] = self._own_steps.get(user, 0) + steps
            self._steps.add(user, steps)

    def release_steps(self) -> None:
        """Subtract the comparisons of all bindings from those of their users: the exchange is deleted."""
        for user, steps in self._own_steps.items():
            self._steps.add(user, -steps)
        self._own_steps = {}
        self._steps = MatchingSteps()

    def bindings(self) -> Iterator[tuple[Queue | Exchange, str, Headers]]:
        """Yield every binding as (destination, key, arguments).

        Bindings may be added or removed during the iteration.
        """
        for destination, keys in list(self._to.items()):
            for key, several in list(keys.items()):
                for arguments in list(several):
                    yield destination, key, arguments

    def has_binding(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Return True if this binding exists."""
        return arguments in self._to.get(destination, {}).get(key, ())

    def binder(self, destination: Queue | Exchange, key: str, arguments: Headers) -> str | None:
        """Return the user who made a binding; None for the configuration.

        Raises KeyError if there is no such binding.
        """
        return self._to[destination][key][arguments]

    def leads_to(self, destination: Queue | Exchange) -> bool:
        """Return True if `destination` is bound to this exchange."""
        return destination in self._to

    @property
    def selective(self) -> bool:
        """True if the address of a message alone does not determine its queues.

        This exchange, or one to which it leads, examines other parts of the message.
        """
        if not self._exchanges and self.alternate is None:
            return self._looks
        visited: set[Exchange] = {self}
        to_visit: list[Exchange] = [self]
        while to_visit:
            exchange = to_visit.pop()
            if exchange._looks:
                return True
            other = exchange._alternate()
            for further in (*exchange._exchanges, *(() if other is None else (other,))):
                if further not in visited:
                    visited.add(further)
                    to_visit.append(further)
        return False

    def _alternate(self) -> Exchange | None:
        return None if self.alternate is None else self._find(self.alternate)

    def route(self, keys: Sequence[str], message: Message | None) -> dict[Queue, None]:
        """Return the queues that get a message with these routing keys.

        Each exchange on the way uses all of the keys. `message` is None if only the keys are known. For an
        exchange that delays the message, the result has its queue of delayed messages.
        """
        if not self._exchanges and not self._unswept and self.alternate is None and not self._looks:
            return {one: None for one in self._destinations(keys, None, None) if isinstance(one, Queue)}
        found: dict[Queue, None] = {}
        visited: set[Exchange] = {self}
        to_visit: list[Exchange] = [self]
        headers: dict[str, Any] | None = None
        while to_visit:
            exchange = to_visit.pop()
            if exchange.delayed is not None and message is not None and delay_of(message.properties.headers):
                found[exchange.delayed] = None
                continue
            if headers is None and exchange._how == "headers":
                headers = _headers_of(message)
            destinations = exchange._destinations(keys, headers, message)
            if exchange._unswept:
                destinations = [one for one in destinations if one in exchange._to]
            if not destinations and (other := exchange._alternate()) is not None:
                destinations = (other,)
            for destination in destinations:
                if isinstance(destination, Queue):
                    found[destination] = None
                elif destination not in visited:
                    visited.add(destination)
                    to_visit.append(destination)
        return found

    def _destinations(
        self, keys: Sequence[str], headers: dict[str, Any] | None, message: Message | None
    ) -> Collection[Queue | Exchange]:
        """Return the destinations whose bindings match one of the keys, or the headers.

        An exchange of type `x-consistent-hash` has at most one for each message.
        """
        if self._how == "fanout":
            return self._to
        if self._how == HASH:
            return self._ring.choose(self._hashed.of(keys[0], message))
        if self._how != "headers":
            if len(keys) == 1:
                return self._matching_destinations(keys[0])
            return {destination: None for key in keys for destination in self._matching_destinations(key)}
        return self._index.match(headers or {})

    def _matching_destinations(self, key: str) -> Collection[Queue | Exchange]:
        """Return the destinations of a direct or topic exchange whose bindings match a key."""
        if self._how == "direct":
            return self._keys.get(key, ())
        return self._patterns.match(words(key))


def _unique_name(destination: Queue | Exchange) -> str:
    return f"{'exchange' if isinstance(destination, Exchange) else 'queue'} {destination.name}"


def words(key: str) -> list[str]:
    """Return the words of a routing key or of a binding pattern; an empty text has none."""
    return key.split(".") if key else []


def _headers_of(message: Message | None) -> dict[str, Any]:
    """Return the headers of a message by name; none if `message` is None.

    Raises RemoteProtocolError if its sender malformed them.
    """
    if message is None:
        return {}
    found: dict[str, Any] = {}
    several: dict[str, list[Value]] = {}  # a list of texts is one header for each text
    for name, value in message.properties.headers:
        if name in found:
            several.setdefault(name, []).append(value)
        else:
            found[name] = value
    for name, others in several.items():
        found[name] = Value(ValueType.ARRAY, (found[name], *others))
    return {name: comparable(value) for name, value in found.items()}
