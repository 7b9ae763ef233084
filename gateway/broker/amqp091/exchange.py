"""Exchanges: where a published message goes, by key, by pattern, by header, or everywhere.

`route` adds the destinations of one message to a set. An exchange may be bound to others, in chains and
circles of any length, so the walk is a loop over those that it has seen. What nothing is bound for goes to
the alternate exchange, which is looked up by name when that happens. Only a headers exchange looks into the
message. Bindings are kept by their destination: one that goes takes all of its own along at once, and takes
no look at the others'. What an index still says of them is passed over, and swept out in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from gateway.broker.queue import Queue
from gateway.broker.topics import Trie
from gateway.model.message import Message
from gateway.model.properties import Headers

TYPES: Final = ("direct", "fanout", "topic", "headers")
Keys = dict[str, dict[Headers, None]]
"""How something is bound: the keys, and with which arguments."""


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
        user: str | None = None,
    ) -> None:
        """`user` has declared it; None: the configuration, or it is built in."""
        self.name = name
        self.user = user
        self.kind = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.alternate = alternate
        self._find = find
        self.bound: dict[Exchange, None] = {}  # those that this one is bound to
        self._to: dict[Queue | Exchange, Keys] = {}
        self._exchanges: dict[Exchange, None] = {}  # among the destinations
        self._keys: dict[str, dict[Queue | Exchange, None]] = {}
        self._patterns: Trie[Queue | Exchange] = Trie("*", "#")
        self._wanted: dict[tuple[Queue | Exchange, str, Headers], Wanted] = {}
        self.sweeping = False  # whoever sweeps will come again
        self._gone: list[tuple[Queue | Exchange, Keys]] = []  # to be swept

    @property
    def destinations(self) -> list[Queue | Exchange]:
        """All that is bound."""
        return list(self._to)

    @property
    def bound_to_nothing(self) -> bool:
        """Nothing leads on from here."""
        return not self._to

    def bind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Add a binding; False: it was there."""
        several = self._to.setdefault(destination, {}).setdefault(key, {})
        if arguments in several:
            return False
        several[arguments] = None
        if isinstance(destination, Exchange):
            self._exchanges[destination] = None
            destination.bound[self] = None
        if self.kind == "topic":
            self._patterns.add(key.split("."), destination)
        elif self.kind == "direct":
            self._keys.setdefault(key, {})[destination] = None
        elif self.kind == "headers":
            self._wanted[destination, key, arguments] = wanted(arguments)
        return True

    def unbind(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Remove a binding; False: it was not there."""
        keys = self._to.get(destination, {})
        if arguments not in keys.get(key, ()):
            return False
        self._wanted.pop((destination, key, arguments), None)
        del keys[key][arguments]
        if keys[key]:
            return True  # the same key is still bound with other arguments
        del keys[key]
        if not keys:
            self._leave(destination)
        self._forget(destination, key)
        return True

    def unbind_all(self, destination: Queue | Exchange) -> Keys:
        """Remove every binding to `destination`, which is never bound again; returns them. `sweep` does the
        rest.
        """
        keys = self._to.get(destination, {})
        if keys:
            self._leave(destination)
            self._gone.append((destination, keys))
        return keys

    def sweep(self, most: int) -> bool:
        """Take up to so many keys of what has gone out of the indexes; True: there are more."""
        while self._gone:
            destination, keys = self._gone[-1]
            while keys:
                if not most:
                    return True
                most -= 1
                key, several = keys.popitem()
                for arguments in several:
                    self._wanted.pop((destination, key, arguments), None)
                self._forget(destination, key)
            self._gone.pop()
        return False

    def _leave(self, destination: Queue | Exchange) -> None:
        """Nothing is bound to it any more."""
        del self._to[destination]
        if isinstance(destination, Exchange):
            del self._exchanges[destination]
            del destination.bound[self]

    def _forget(self, destination: Queue | Exchange, key: str) -> None:
        """It is bound with this key no longer, whatever the arguments."""
        if self.kind == "topic":
            self._patterns.remove(key.split("."), destination)
        elif self.kind == "direct":
            del self._keys[key][destination]
            if not self._keys[key]:
                del self._keys[key]

    def bindings(self) -> Iterator[tuple[Queue | Exchange, str, Headers]]:
        """Every binding: what is bound, the key, and the arguments. What there is may change meanwhile."""
        for destination, keys in list(self._to.items()):
            for key, several in list(keys.items()):
                for arguments in list(several):
                    yield destination, key, arguments

    def binds(self, destination: Queue | Exchange, key: str, arguments: Headers) -> bool:
        """Whether there is this binding."""
        return arguments in self._to.get(destination, {}).get(key, ())

    def leads_to(self, destination: Queue | Exchange) -> bool:
        """Whether anything is bound to `destination`."""
        return destination in self._to

    @property
    def selective(self) -> bool:
        """True: the address alone does not decide, for a headers exchange is here or behind."""
        if not self._exchanges and self.alternate is None:
            return self.kind == "headers"
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
        if not self._exchanges and not self._gone and self.alternate is None and self.kind != "headers":
            return {one: None for one in self._destinations(keys, None) if isinstance(one, Queue)}
        found: dict[Queue, None] = {}
        seen: set[Exchange] = {self}
        left: list[Exchange] = [self]
        headers: dict[str, Any] | None = None
        while left:
            exchange = left.pop()
            if headers is None and exchange.kind == "headers":
                headers = _headers_of(message)
            destinations = exchange._destinations(keys, headers)
            if exchange._gone:
                destinations = [one for one in destinations if one in exchange._to]
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
