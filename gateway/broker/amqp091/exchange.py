"""Exchanges: where a published message goes, by key, by pattern, by header, or everywhere.

`route` adds the destinations of one message to a set. An exchange may be bound to another, so a walk keeps
the exchanges that it has seen. What nothing is bound for goes to the alternate exchange, which is looked up
by name when that happens. Only a headers exchange looks into the message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from gateway.broker.queue import Queue
from gateway.broker.topics import Trie
from gateway.model.message import Message
from gateway.model.properties import Headers

TYPES: Final = ("direct", "fanout", "topic", "headers")


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
        self._keys: dict[str, dict[Queue | Exchange, None]] = {}
        self._patterns: Trie[Queue | Exchange] = Trie("*", "#")

    def bind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Add a binding; False: it was there."""
        binding = (destination, key, arguments)
        if binding in self.bindings:
            return False
        self.bindings[binding] = None
        if self.kind == "topic":
            self._patterns.add(key.split("."), destination)
        elif self.kind == "direct":
            self._keys.setdefault(key, {})[destination] = None
        return True

    def unbind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Remove a binding; False: it was not there."""
        if (destination, key, arguments) not in self.bindings:
            return False
        del self.bindings[destination, key, arguments]
        if any(other == (destination, key) for other in ((to, by) for to, by, _ in self.bindings)):
            return True  # the same key is still bound with other arguments
        if self.kind == "topic":
            self._patterns.remove(key.split("."), destination)
        elif self.kind == "direct":
            del self._keys[key][destination]
            if not self._keys[key]:
                del self._keys[key]
        return True

    def unbind_all(self, destination: Queue | Exchange) -> list[tuple[str, Headers]]:
        """Remove every binding to `destination`; returns their keys and arguments."""
        gone = [(key, arguments) for to, key, arguments in self.bindings if to is destination]
        for key, arguments in gone:
            self.unbind(destination, key, arguments)
        return gone

    @property
    def selective(self) -> bool:
        """True: the address alone does not decide."""
        return any(exchange.kind == "headers" for exchange in self._reached(set()))

    def _reached(self, seen: set[Exchange]) -> set[Exchange]:
        """This exchange and all that it leads to, added to `seen`."""
        seen.add(self)
        further = [destination for destination, _, _ in self.bindings if isinstance(destination, Exchange)]
        if (other := self._alternate()) is not None:
            further.append(other)
        for exchange in further:
            if exchange not in seen:
                exchange._reached(seen)
        return seen

    def _alternate(self) -> Exchange | None:
        return None if self.alternate is None else self._find(self.alternate)

    def route(self, key: str, message: Message | None, found: dict[Queue, None], seen: set[Exchange]) -> None:
        """Add the queues that a message with `key` goes to. `message` is None when only the key is known."""
        seen.add(self)
        destinations = self._destinations(key, message)
        if not destinations and (other := self._alternate()) is not None and other not in seen:
            other.route(key, message, found, seen)
        for destination in destinations:
            if isinstance(destination, Queue):
                found[destination] = None
            elif destination not in seen:
                destination.route(key, message, found, seen)

    def _destinations(self, key: str, message: Message | None) -> dict[Queue | Exchange, None]:
        if self.kind == "direct":
            return self._keys.get(key, {})
        if self.kind == "topic":
            return self._patterns.match(key.split("."))
        if self.kind == "fanout":
            return {destination: None for destination, _, _ in self.bindings}
        headers = {} if message is None else {name: value.value for name, value in message.properties.headers}
        return {to: None for to, _, arguments in self.bindings if headers_match(arguments, headers)}


def headers_match(arguments: Headers, headers: dict[str, Any]) -> bool:
    """Does a headers binding match? `x-match`: all (default), any, all-with-x, any-with-x.

    Other arguments that begin with `x-` take no part, except with the `-with-x` forms. An argument without a
    value (void) matches a header that is merely there.
    """
    mode = "all"
    wanted = []
    for name, value in arguments:
        if name == "x-match":
            mode = str(value.value)
        else:
            wanted.append((name, value.value))
    if not mode.endswith("-with-x"):
        wanted = [pair for pair in wanted if not pair[0].startswith("x-")]
    hits = [name in headers and (value is None or headers[name] == value) for name, value in wanted]
    return all(hits) if mode.startswith("all") else any(hits)
