"""Exchanges: where a published message goes, by key, by pattern, by header, or everywhere.

`route` adds the destinations of one message to a set. An exchange may be bound to others, in chains and
circles of any length, so the walk is a loop over those that it has seen. What nothing is bound for goes to
the alternate exchange, which is looked up by name when that happens. Only a headers exchange looks into the
message. Bindings are found by their destination, too: one that goes takes no look at the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from gateway.broker.queue import Queue
from gateway.broker.topics import Trie
from gateway.model.message import Message
from gateway.model.properties import Headers

TYPES: Final = ("direct", "fanout", "topic", "headers")


class Wanted(NamedTuple):
    """What a headers binding asks for: all of these or any; a value of None: that the header is there."""

    all: bool
    headers: tuple[tuple[str, Any], ...]

    def fits(self, headers: dict[str, Any]) -> bool:
        """Whether a message with these headers is meant."""
        for name, value in self.headers:
            hit = name in headers and (value is None or bool(headers[name] == value))
            if hit is not self.all:
                return hit
        return self.all


class Exchange:
    """One exchange and its bindings. `kind` is one of TYPES; `find` looks up its alternate by name."""

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        durable: bool,
        auto_delete: bool = False,
        internal: bool = False,
        alternate: str | None = None,
        find: Callable[[str], Exchange | None] = lambda name: None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.alternate = alternate
        self._find = find
        self.bindings: dict[tuple[Queue | Exchange, str, Headers], None] = {}
        self.bound: dict[Exchange, None] = {}  # those that this one is bound to
        self._to: dict[Queue | Exchange, dict[str, dict[Headers, None]]] = {}  # keys, arguments
        self._exchanges: dict[Exchange, None] = {}  # among the destinations
        self._keys: dict[str, dict[Queue | Exchange, None]] = {}
        self._patterns: Trie[Queue | Exchange] = Trie("*", "#")
        self._wanted: dict[tuple[Queue | Exchange, str, Headers], Wanted] = {}

    def bind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Add a binding; False: it was there."""
        binding = (destination, key, arguments)
        if binding in self.bindings:
            return False
        self.bindings[binding] = None
        self._to.setdefault(destination, {}).setdefault(key, {})[arguments] = None
        if isinstance(destination, Exchange):
            self._exchanges[destination] = None
            destination.bound[self] = None
        if self.kind == "topic":
            self._patterns.add(key.split("."), destination)
        elif self.kind == "direct":
            self._keys.setdefault(key, {})[destination] = None
        elif self.kind == "headers":
            self._wanted[binding] = wanted(arguments)
        return True

    def unbind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Remove a binding; False: it was not there."""
        if (destination, key, arguments) not in self.bindings:
            return False
        del self.bindings[destination, key, arguments]
        self._wanted.pop((destination, key, arguments), None)
        keys = self._to[destination]
        del keys[key][arguments]
        if keys[key]:
            return True  # the same key is still bound with other arguments
        del keys[key]
        if not keys:
            del self._to[destination]
            if isinstance(destination, Exchange):
                del self._exchanges[destination]
                del destination.bound[self]
        if self.kind == "topic":
            self._patterns.remove(key.split("."), destination)
        elif self.kind == "direct":
            del self._keys[key][destination]
            if not self._keys[key]:
                del self._keys[key]
        return True

    def unbind_all(self, destination: Queue | Exchange) -> list[tuple[str, Headers]]:
        """Remove every binding to `destination`; returns their keys and arguments."""
        keys = self._to.get(destination, {})
        gone = [(key, arguments) for key, several in keys.items() for arguments in several]
        for key, arguments in gone:
            self.unbind(destination, key, arguments)
        return gone

    def leads_to(self, destination: Queue | Exchange) -> bool:
        """Whether anything is bound to `destination`."""
        return destination in self._to

    @property
    def selective(self) -> bool:
        """True: the address alone does not decide, for a headers exchange is here or behind."""
        seen: set[Exchange] = {self}
        left: list[Exchange] = [self]
        while left:
            exchange = left.pop()
            if exchange.kind == "headers":
                return True
            other = exchange._alternate()
            for further in (*exchange._exchanges, *(() if other is None else (other,))):
                if further not in seen:
                    seen.add(further)
                    left.append(further)
        return False

    def _alternate(self) -> Exchange | None:
        return None if self.alternate is None else self._find(self.alternate)

    def route(self, keys: Sequence[str], message: Message | None) -> dict[Queue, None]:
        """The queues that a message goes to: each exchange on the way looks at all of its keys. `message` is
        None when only they are known.
        """
        found: dict[Queue, None] = {}
        seen: set[Exchange] = {self}
        left: list[Exchange] = [self]
        headers: dict[str, Any] | None = None
        while left:
            exchange = left.pop()
            if headers is None and exchange.kind == "headers":
                headers = _headers_of(message)
            destinations = exchange._destinations(keys, headers)
            if not destinations and (other := exchange._alternate()) is not None:
                destinations = (other,)
            for destination in destinations:
                if isinstance(destination, Queue):
                    found[destination] = None
                elif destination not in seen:
                    seen.add(destination)
                    left.append(destination)
        return found

    def _destinations(
        self, keys: Sequence[str], headers: dict[str, Any] | None
    ) -> Collection[Queue | Exchange]:
        """What is bound for any of the keys, or for these headers."""
        if self.kind == "fanout":
            return self._to
        if self.kind != "headers":
            if len(keys) == 1:
                return self._bound_for(keys[0])
            return {destination: None for key in keys for destination in self._bound_for(key)}
        found: dict[Queue | Exchange, None] = {}
        for (destination, _, _), asked in self._wanted.items():
            if destination not in found and asked.fits(headers or {}):
                found[destination] = None
        return found

    def _bound_for(self, key: str) -> Collection[Queue | Exchange]:
        """What is bound to a direct or topic exchange for a key."""
        if self.kind == "direct":
            return self._keys.get(key, ())
        return self._patterns.match(key.split("."))


def _headers_of(message: Message | None) -> dict[str, Any]:
    """The headers of a message. Raises RemoteProtocolError when its sender malformed them."""
    if message is None:
        return {}
    return {name: value.value for name, value in message.properties.headers}


def wanted(arguments: Headers) -> Wanted:
    """What the arguments of a headers binding ask for. `x-match`: all (default), any, all-with-x, any-with-x.

    Other arguments that begin with `x-` take no part, except with the `-with-x` forms. An argument without a
    value (void) matches a header that is merely there.
    """
    mode = "all"
    asked = []
    for name, value in arguments:
        if name == "x-match":
            mode = str(value.value)
        else:
            asked.append((name, value.value))
    if not mode.endswith("-with-x"):
        asked = [pair for pair in asked if not pair[0].startswith("x-")]
    return Wanted(mode.startswith("all"), tuple(asked))
