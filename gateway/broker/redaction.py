"""Redaction: removal of fields that routes declare `private`, before messages get into the journal.

A rule concerns a message, not a row: a field that one route hides must not be in another row of the same
message. A route therefore applies its own rules and those of every route that could take the same message; a
row without a route applies those of the routes at its address. Routes without such rules have no redactor and
no cost. A body that rules examine must be JSON. One that is not is hidden entirely, because unreadable
content cannot be known to be harmless. One that is larger than the journal's limit is not examined, and left
out.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from gateway.broker.amqp091.dead_letter_routing import HISTORY
from gateway.errors import RemoteProtocolError
from gateway.mapping.patterns import witness
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.mapping.schema import Truncate
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, PropertySet, Value, property_set, string
from gateway.model.spooled_bodies import Body, Spooled, WithheldBody
from gateway.store.journal.entries import bytes_of

# Bytes of the digest; two of a billion values collide with a probability of 1 in 10^20.
HASH_BYTES: Final = 16
SENDERS_MAX: Final = 10_000  # cached; there is one for each connection
ANY_KEY: Final = "*"
SENDER_FIELDS: Final = {"client": "client", "user": "user", "remote_address": "address"}
SHOWN_BYTES_MAX: Final = 65_536  # bytes of bodies that rules examine when people see messages
KEY_BYTES: Final = 32
LEFT_OUT: Final = object()


def _malformed(_: bytes) -> Properties:
    raise RemoteProtocolError("malformed", reason=0)


MALFORMED: Final = PropertySet("model", b"", _malformed)
Action = str | Truncate
"""Action of a rule: `drop`, `hash`, or the length to which a value is truncated."""


Rules = tuple[tuple[str, Action], ...]


class RedactionStep(NamedTuple):
    """Rule for a field in a JSON body.

    `path` has the keys that lead to the field, and `action` is what happens to it.
    """

    path: tuple[str, ...]
    action: Action


class Redactor:
    """Function that returns a message without the fields that some rules hide.

    `redacted` counts messages, and `withheld` counts bodies that could not be parsed.
    """

    def __init__(self, rules: Iterable[tuple[str, Action]], key: bytes, body_bytes_max: int) -> None:
        """Create a redactor for rules of (field, action); `key` is the key of hashes.

        A body of more than `body_bytes_max` bytes is not examined but replaced by its size.
        """
        self._key = key
        self._body_bytes_max = body_bytes_max
        self._fields: list[RedactionStep] = []
        self._body: Action | None = None
        self._sender: list[tuple[str, Action]] = []
        self._headers: dict[str, list[Action]] = {}
        self._properties: list[tuple[str, Action]] = []
        self._senders: dict[Sender, Sender] = {}
        self.redacted = self.withheld = 0
        for field, action in rules:
            head, _, rest = field.partition(".")
            if field == "body":
                self._body = _stronger(self._body, action)
            elif head == "body":
                self._fields.append(RedactionStep(tuple(rest.split(".")), action))
            elif head == "headers":
                self._headers.setdefault(rest, []).append(action)
            elif head == "properties":
                self._properties.append((rest, action))
            else:
                self._sender.append((SENDER_FIELDS[field], action))

    def __call__(self, message: Message) -> Message:
        """Return a copy of the message in which private fields are removed, hashed or truncated."""
        self.redacted += 1
        return Message(
            message.address,
            self._redact_body(message.body),
            self._redact_set(message.property_set),
            message.assurance,
            message.durable,
            message.retain,
            message.expires,
            message.hops,
            self._redact_sender(message.sender),
        )

    def _redact_body(self, body: Body) -> Body:
        """Return a body as the rules require.

        The result is the body itself, a body with hidden fields, a hash, the beginning of the body, or only
        its size.
        """
        if isinstance(body, Spooled):  # the journal has only its size; to people it is not examined either
            return WithheldBody(len(body)) if self._body is not None or self._fields else body
        if self._body == "drop" or (self._fields and len(body) > self._body_bytes_max):
            return WithheldBody(len(body))
        if self._fields and body:
            redacted = self._redact_json(body)
            if redacted is None:
                self.withheld += 1
                return WithheldBody(len(body))
            body = redacted
        if isinstance(self._body, Truncate):
            return body[: self._body.truncate]
        return body if self._body is None else self._hash(body).encode()

    def _redact_json(self, body: bytes) -> bytes | None:
        """Parse a JSON body, and return it with its private fields removed, hashed or truncated.

        Returns None if the body is not a JSON object or array, or is nested too deeply.
        """
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
        """Apply an action to the field at the end of `path` in `found`, a parsed JSON body.

        Lists on the way are searched in all their elements, however deeply they are nested.
        """
        stack = [found]
        while stack:
            one = stack.pop()
            if isinstance(one, list):
                stack += one
            elif isinstance(one, dict):
                self._redact_at(one, path, action)

    def _redact_at(self, found: dict[str, Any], path: tuple[str, ...], action: Action) -> None:
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
        return self._hash(bytes_of(value) if isinstance(value, str) else orjson.dumps(value, default=str))

    def _hash(self, data: bytes) -> str:
        return hmac.digest(self._key, data, "sha256")[:HASH_BYTES].hex()

    def _text(self, text: str, action: Action) -> str:
        made = self._value(text, action) if text else ""
        return "" if made is LEFT_OUT else str(made)

    def _redact_sender(self, sender: Sender) -> Sender:
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

    def _redact_set(self, found: PropertySet) -> PropertySet:
        """Return a property set with its private fields removed, hashed or truncated.

        Equal sets have the same object as result, because the journal compares identities.
        """
        if not self._headers and not self._properties:
            return found
        made: PropertySet | None = found.forms.get(self)
        if made is None:
            try:
                made = property_set(self._redact_properties(found.properties))
            except RemoteProtocolError:  # the journal records that they are malformed, and nothing of them
                made = MALFORMED
            found.forms[self] = made
        return made

    def _redact_properties(self, properties: Properties) -> Properties:
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
            result: Value | None = value
            for action in self._headers.get(name, ()):
                if result is not None:
                    made = self._value(result.value, action)
                    result = None if made is LEFT_OUT else string(made)
            if result is not None:
                headers.append((name, result))
        return replace(properties, headers=tuple(headers))


def _stronger(one: Action | None, other: Action) -> Action:
    """Return the stronger of two actions on a whole body.

    `drop` is stronger than `hash`, which is stronger than truncation; of two truncations the shorter result
    is stronger.
    """
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
    """Redactors of all routes in one mapping."""

    def __init__(
        self, routes: Sequence[Route], key: bytes, body_bytes_max: int, before: Redactors | None = None
    ) -> None:
        """Build the redactors of the routes.

        `key` is the key of hashes. `before` are the redactors of the previous mapping, whose counts continue.
        """
        self._key = key
        self._body_bytes_max = body_bytes_max
        self._were = (0, 0) if before is None else (before.redacted, before.withheld_count)
        self._made: dict[tuple[tuple[str, Action], ...], Redactor] = {}
        private = [route for route in routes if route.rule.private]
        self._by_route: dict[str, Redactor] = {}
        self._rules: dict[str, tuple[tuple[str, Action], ...]] = {}
        for route in routes if private else ():
            rules = [
                rule
                for one in private
                if one is route or _can_overlap(one, route)
                for rule in one.rule.private.items()
            ]
            if rules:
                unique = tuple(dict.fromkeys(rules))
                self._rules[route.name] = unique
                self._by_route[route.name] = self._redactor(unique)

    def __bool__(self) -> bool:
        return bool(self._by_route)

    @property
    def redacted(self) -> int:
        """Number of messages in which a field was hidden or changed."""
        return self._were[0] + sum([one.redacted for one in self._made.values()])

    @property
    def withheld_count(self) -> int:
        """Number of bodies that were hidden entirely, because they could not be parsed."""
        return self._were[1] + sum([one.withheld for one in self._made.values()])

    def of(self, route: Route) -> Redactor | None:
        """Return the redactor for the journal rows of a route, or None if nothing is hidden."""
        return self._by_route.get(route.name)

    def for_routes(self, routes: Iterable[Route]) -> Redactor | None:
        """Return the redactor with the rules of all these routes, any of which may take a message.

        Returns None if nothing is hidden.
        """
        rules = [rule for route in routes for rule in self._rules.get(route.name, ())]
        return self._redactor(tuple(dict.fromkeys(rules))) if rules else None

    def _redactor(self, rules: tuple[tuple[str, Action], ...]) -> Redactor:
        found = self._made.get(rules)
        if found is None:
            found = self._made[rules] = Redactor(rules, self._key, self._body_bytes_max)
        return found


class PrivateFields:
    """Redaction of messages that are shown to people, whether there is a journal or not.

    A message is redacted by the rules of the route that it took, and of every private route that could take
    it. The original address of a message that has crossed a route, or died in a queue, is unknown: then all
    rules for its source apply.
    """

    def __init__(self, router: Callable[[], Router], key: bytes = b"") -> None:
        """Create the redaction.

        `router` returns the router in force. `key` is the key of hashes; b"" means a random one.
        """
        self._router = router
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._last_router: Router | None = None
        self._private: list[Route] = []
        self._of_routes: dict[str, Rules] = {}
        self._made: dict[Rules, Redactor] = {}

    def hide(self, route: str, message: Message) -> Message:
        """Return a copy of the message without its private fields.

        `route` is the name of the route that it took, or "" if it took none.
        """
        router = self._router()
        if router is not self._last_router:
            self._last_router = router
            self._private = [one for one in (*router.routes, *router.answers) if one.rule.private]
            self._of_routes, self._made = {}, {}
        if not self._private:
            return message
        rules = self._rules_of(router, route) if route else None
        if rules is None:
            rules = _rules(one for one in self._private if _could_take(one, message))
        elif _has_died(message):
            of_source = _rules(one for one in self._private if one.source == message.sender.endpoint)
            rules = tuple(dict.fromkeys((*rules, *of_source)))
        if not rules:
            return message
        found = self._made.get(rules)
        if found is None:
            found = self._made[rules] = Redactor(rules, self._key, SHOWN_BYTES_MAX)
        return found(message)

    def _rules_of(self, router: Router, name: str) -> Rules | None:
        """Return the rules for messages of the route with this name; None if it no longer exists."""
        if name not in self._of_routes:
            route = next((one for one in (*router.routes, *router.answers) if one.name == name), None)
            if route is None:
                return None
            private = [one for one in self._private if one is route or _can_overlap(one, route)]
            self._of_routes[name] = _rules(private)
        return self._of_routes[name]


def _rules(routes: Iterable[Route]) -> Rules:
    return tuple(dict.fromkeys(rule for route in routes for rule in route.rule.private.items()))


def _could_take(route: Route, message: Message) -> bool:
    """Return False only if it is certain that the route does not take the message."""
    if route.source != message.sender.endpoint:
        return False
    if message.hops or message.address.protocol != route.pattern.dialect.name or route.pattern.queue:
        return True
    return route.pattern.match(message.address, "") is not None or _has_died(message)


def _has_died(message: Message) -> bool:
    """Return True if the message may be a dead letter of a queue.

    Then its original address is unknown.
    """
    try:
        return any(name == HISTORY for name, _ in message.properties.headers)
    except RemoteProtocolError:
        return True


def _can_overlap(one: Route, other: Route) -> bool:
    """Return True if there can be a message that takes both routes."""
    return one.source == other.source and witness(one.pattern, other.pattern) is not None
