"""What `private` of routes says is taken out of messages before the journal has them.

A rule is about a message, not about a row: what one route must not tell, no other row of the same message may
tell either. So a route goes by its own rules and by those of every route that could take the same message;
and a row of the message's own world by those of the routes at its address. Whoever has no such routes has no
redactor, and pays nothing.

A body that rules look into has to be JSON. One that is not is withheld: what cannot be read cannot be known
to be harmless. One that is larger than the journal has them is not looked into, and left out.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from gateway.errors import RemoteProtocolError
from gateway.mapping.patterns import witness
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.mapping.schema import Truncate
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, PropertySet, Value, property_set, string
from gateway.model.spooled import Body, Spooled, Withheld
from gateway.store.journal.entries import octets_of

HASH_OCTETS: Final = 16  # of the digest; two values of a billion are alike by chance once in 10^20
SENDERS_MAX: Final = 10_000  # remembered; there is one for each connection
ANY_KEY: Final = "*"
SENDER_FIELDS: Final = {"client": "client", "user": "user", "remote_address": "address"}
SHOWN_OCTETS_MAX: Final = 65_536  # of bodies that rules look into when people see messages
KEY_OCTETS: Final = 32
LEFT_OUT: Final = object()


def _malformed(_: bytes) -> Properties:
    raise RemoteProtocolError("malformed", reason=0)


MALFORMED: Final = PropertySet("model", b"", _malformed)
Action = str | Truncate
"""`drop`, `hash`, or how much is kept."""


Rules = tuple[tuple[str, Action], ...]


class Step(NamedTuple):
    """A rule that looks into a body: through these keys, and what is done there."""

    path: tuple[str, ...]
    action: Action


class Redactor:
    """Takes out of messages what some rules say. `redacted` and `withheld` count messages, and bodies that
    could not be looked into."""

    def __init__(self, rules: Iterable[tuple[str, Action]], key: bytes, body_octets_max: int) -> None:
        """`body_octets_max`: of larger bodies the journal has the size alone."""
        self._key = key
        self._body_octets_max = body_octets_max
        self._fields: list[Step] = []
        self._body: Action | None = None
        self._sender: list[tuple[str, Action]] = []
        self._headers: dict[str, list[Action]] = {}
        self._properties: list[tuple[str, Action]] = []
        self._senders: dict[Sender, Sender] = {}
        self.redacted = self.withheld = 0
        for what, action in rules:
            head, _, rest = what.partition(".")
            if what == "body":
                self._body = _stronger(self._body, action)
            elif head == "body":
                self._fields.append(Step(tuple(rest.split(".")), action))
            elif head == "headers":
                self._headers.setdefault(rest, []).append(action)
            elif head == "properties":
                self._properties.append((rest, action))
            else:
                self._sender.append((SENDER_FIELDS[what], action))

    def __call__(self, message: Message) -> Message:
        """The message as the journal may have it."""
        self.redacted += 1
        return Message(
            message.address,
            self._bodied(message.body),
            self._set(message.property_set),
            message.assurance,
            message.durable,
            message.retain,
            message.expires,
            message.hops,
            self._who(message.sender),
        )

    def _bodied(self, body: Body) -> Body:
        if isinstance(body, Spooled):  # of which the journal has only the size
            return body
        if self._body == "drop" or (self._fields and len(body) > self._body_octets_max):
            return Withheld(len(body))
        if self._fields and body:
            told = self._looked_into(body)
            if told is None:
                self.withheld += 1
                return Withheld(len(body))
            body = told
        if isinstance(self._body, Truncate):
            return body[: self._body.truncate]
        return body if self._body is None else self._hash(body).encode()

    def _looked_into(self, body: bytes) -> bytes | None:
        """The body as the rules leave it; None: it is no JSON, or nested more deeply than can be written."""
        try:
            found = orjson.loads(body)
            if not isinstance(found, dict | list):
                return None
            for path, action in self._fields:
                self._walk(found, path, action)
            return orjson.dumps(found)
        except (orjson.JSONDecodeError, orjson.JSONEncodeError):
            return None

    def _walk(self, found: Any, path: tuple[str, ...], action: Action) -> None:
        """Do it at the end of the path, in each element of the lists on the way, however deep these are."""
        left = [found]
        while left:
            one = left.pop()
            if isinstance(one, list):
                left += one
            elif isinstance(one, dict):
                self._at(one, path, action)

    def _at(self, found: dict[str, Any], path: tuple[str, ...], action: Action) -> None:
        name, rest = path[0], path[1:]
        for key in list(found) if name == ANY_KEY else [name] if name in found else []:
            if rest:
                self._walk(found[key], rest, action)
                continue
            made = self._value(found[key], action)
            if made is LEFT_OUT:
                del found[key]
            else:
                found[key] = made

    def _value(self, value: Any, action: Action) -> Any:
        if isinstance(action, Truncate):
            return value[: action.truncate] if isinstance(value, str) else LEFT_OUT
        if action == "drop":
            return LEFT_OUT
        if isinstance(value, bytes):
            return self._hash(value)
        return self._hash(octets_of(value) if isinstance(value, str) else orjson.dumps(value, default=str))

    def _hash(self, octets: bytes) -> str:
        return hmac.digest(self._key, octets, "sha256")[:HASH_OCTETS].hex()

    def _text(self, text: str, action: Action) -> str:
        made = self._value(text, action) if text else ""
        return "" if made is LEFT_OUT else str(made)

    def _who(self, sender: Sender) -> Sender:
        if not self._sender:
            return sender
        found = self._senders.get(sender)
        if found is None:
            if len(self._senders) >= SENDERS_MAX:
                self._senders.clear()
            texts = sender.to_dict()
            for name, action in self._sender:
                texts[name] = self._text(texts[name], action)
            found = Sender(texts["endpoint"], texts["client"], texts["user"], texts["address"])
            self._senders[sender] = found
        return found

    def _set(self, found: PropertySet) -> PropertySet:
        """The same for the same set, by whose identity the journal knows it."""
        if not self._headers and not self._properties:
            return found
        made: PropertySet | None = found.forms.get(self)
        if made is None:
            try:
                made = property_set(self._told(found.properties))
            except RemoteProtocolError:  # the journal records that they are malformed, and nothing of them
                made = MALFORMED
            found.forms[self] = made
        return made

    def _told(self, properties: Properties) -> Properties:
        for name, action in self._properties:
            value = getattr(properties, name)
            if value is None:
                continue
            made = self._value(value, action)
            if made is not LEFT_OUT and name == "correlation":
                made = made.encode()
            changed: dict[str, Any] = {name: None if made is LEFT_OUT else made}
            properties = replace(properties, **changed)
        headers = []
        for name, value in properties.headers:
            kept: Value | None = value
            for action in self._headers.get(name, ()):
                if kept is not None:
                    made = self._value(kept.value, action)
                    kept = None if made is LEFT_OUT else string(made)
            if kept is not None:
                headers.append((name, kept))
        return replace(properties, headers=tuple(headers))


def _stronger(one: Action | None, other: Action) -> Action:
    """Of two rules for the whole body: nothing is less than a hash, and a hash less than a beginning."""
    if one is None or one == other:
        return other
    if "drop" in (one, other):
        return "drop"
    if "hash" in (one, other):
        return "hash"
    assert isinstance(one, Truncate)
    assert isinstance(other, Truncate)
    return min(one, other, key=lambda action: action.truncate)


class Redactors:
    """The redactors of the routes of one mapping."""

    def __init__(
        self, routes: Sequence[Route], key: bytes, body_octets_max: int, before: Redactors | None = None
    ) -> None:
        """`before`: those of the mapping before, whose counts go on."""
        self._key = key
        self._body_octets_max = body_octets_max
        self._were = (0, 0) if before is None else (before.redacted, before.withheld)
        self._made: dict[tuple[tuple[str, Action], ...], Redactor] = {}
        private = [route for route in routes if route.rule.private]
        self._by_route: dict[str, Redactor] = {}
        self._rules: dict[str, tuple[tuple[str, Action], ...]] = {}
        for route in routes if private else ():
            rules = [
                rule
                for one in private
                if one is route or _meet(one, route)
                for rule in one.rule.private.items()
            ]
            if rules:
                told = tuple(dict.fromkeys(rules))
                self._rules[route.name] = told
                self._by_route[route.name] = self._redactor(told)

    def __bool__(self) -> bool:
        return bool(self._by_route)

    @property
    def redacted(self) -> int:
        """Messages of which something was taken out."""
        return self._were[0] + sum([one.redacted for one in self._made.values()])

    @property
    def withheld(self) -> int:
        """Bodies that could not be looked into."""
        return self._were[1] + sum([one.withheld for one in self._made.values()])

    def of(self, route: Route) -> Redactor | None:
        """That of a route's rows."""
        return self._by_route.get(route.name)

    def at(self, routes: Iterable[Route]) -> Redactor | None:
        """That of messages which could take all of these routes."""
        rules = [rule for route in routes for rule in self._rules.get(route.name, ())]
        return self._redactor(tuple(dict.fromkeys(rules))) if rules else None

    def _redactor(self, rules: tuple[tuple[str, Action], ...]) -> Redactor:
        found = self._made.get(rules)
        if found is None:
            found = self._made[rules] = Redactor(rules, self._key, self._body_octets_max)
        return found


class PrivateFields:
    """What people see of messages: without what `private` of routes says, whether there is a journal or not.

    A message goes by the rules of the route that it took, and of every private route that could take it. Of
    one that has crossed a route already the first address is not known: it goes by all of its source's.
    """

    def __init__(self, router: Callable[[], Router], key: bytes = b"") -> None:
        """`router` returns the one in force; `key` is that of hashes, empty: one of this process."""
        self._router = router
        self._key = key or secrets.token_bytes(KEY_OCTETS)
        self._known: Router | None = None
        self._private: list[Route] = []
        self._of_routes: dict[str, Rules] = {}
        self._made: dict[Rules, Redactor] = {}

    def hide(self, route: str, message: Message) -> Message:
        """Return the message without its private fields. `route`: the name of the one that it took, or ""."""
        router = self._router()
        if router is not self._known:
            self._known = router
            self._private = [one for one in (*router.routes, *router.answers) if one.rule.private]
            self._of_routes, self._made = {}, {}
        if not self._private:
            return message
        rules = self._rules_of(router, route) if route else None
        if rules is None:
            rules = _rules(one for one in self._private if _could_take(one, message))
        if not rules:
            return message
        found = self._made.get(rules)
        if found is None:
            found = self._made[rules] = Redactor(rules, self._key, SHOWN_OCTETS_MAX)
        return found(message)

    def _rules_of(self, router: Router, name: str) -> Rules | None:
        """Return the rules of a route's messages; None: there is no such route any more."""
        if name not in self._of_routes:
            route = next((one for one in (*router.routes, *router.answers) if one.name == name), None)
            if route is None:
                return None
            private = [one for one in self._private if one is route or _meet(one, route)]
            self._of_routes[name] = _rules(private)
        return self._of_routes[name]


def _rules(routes: Iterable[Route]) -> Rules:
    return tuple(dict.fromkeys(rule for route in routes for rule in route.rule.private.items()))


def _could_take(route: Route, message: Message) -> bool:
    """Return True unless it is certain that the route does not take the message."""
    if route.source != message.sender.endpoint:
        return False
    if message.hops or message.address.protocol != route.pattern.dialect.name or route.pattern.queue:
        return True
    return route.pattern.match(message.address, "") is not None


def _meet(one: Route, other: Route) -> bool:
    """Whether there may be a message that could take both."""
    return one.source == other.source and witness(one.pattern, other.pattern) is not None
