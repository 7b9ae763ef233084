"""`when`: a CEL expression that says whether a message crosses.

Compiled once. What it refers to decides what is prepared: names from the address alone are settled once per
address; the body is parsed only when the expression says `body`, the headers only when it says `headers`. An
expression never breaks a route: what cannot be decided (a body that is not JSON, a field that is not there,
types that do not compare) is false, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, Final, Protocol

import cel
import orjson

from gateway.errors import MappingError, RemoteProtocolError
from gateway.mapping.patterns import WORDS_OF_MESSAGE, WORDS_OF_SENDER
from gateway.mapping.templates import unknown_name
from gateway.model.message import Message
from gateway.model.properties import Headers, Value, ValueType

CONDITION_BODY_MAX: Final = 1_048_576  # octets; parsing more would hold up every connection of the poller

PER_MESSAGE: Final = frozenset((*WORDS_OF_MESSAGE, *WORDS_OF_SENDER))
# fmt: off
FUNCTIONS: Final = frozenset((
    "size", "contains", "startsWith", "endsWith", "matches",
    "int", "uint", "double", "string", "bytes", "timestamp", "duration", "type", "dyn",
    "getFullYear", "getMonth", "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear",
    "getHours", "getMinutes", "getSeconds", "getMilliseconds",
))
# fmt: on
_BOUND: Final = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\s*\(\s*([A-Za-z_][A-Za-z0-9_]*)\s*,")


class Undecided(Protocol):
    """Who counts what could not be decided."""

    unparsable: int
    undecided: int


class Condition:
    """A compiled expression over `known` names.

    Raises MappingError when the text is not CEL, or names what is not known.
    """

    __slots__ = ("_body", "_headers", "_program", "_words", "names", "per_message", "text")

    def __init__(self, text: str, known: Iterable[str]) -> None:
        self.text = text
        try:
            self._program = cel.compile(text)
        except ValueError as error:
            reason = str(error).partition(": ERROR: ")[2] or error
            raise MappingError(f"not a CEL expression: {reason}") from error
        used = self._program.references()
        options = {*known, *PER_MESSAGE}
        self.names = frozenset(used["variables"]) - set(_BOUND.findall(text))
        for name in sorted(self.names - options):
            raise MappingError(unknown_name(name, options))
        for name in used["functions"]:
            if name.isidentifier() and not name.startswith("_") and name not in FUNCTIONS:
                near = get_close_matches(name, sorted(FUNCTIONS), 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise MappingError(f"unknown function {name!r}{hint}")
        self.per_message = not self.names.isdisjoint(PER_MESSAGE)
        self._body = "body" in self.names
        self._headers = "headers" in self.names
        self._words = tuple(self.names & PER_MESSAGE - {"body", "headers"})

    def fixed(self, values: dict[str, str]) -> dict[str, Any]:
        """The part of `values` that the expression refers to, for `holds`."""
        return {name: text for name, text in values.items() if name in self.names}

    def constant(self) -> bool | None:
        """The value of an expression that refers to nothing; None when it refers to something."""
        if self.names:
            return None
        try:
            return self._program.execute({}) is True
        except Exception:  # as in `holds`: an expression without a value is false
            return False

    def holds(self, message: Message, fixed: dict[str, Any], counts: Undecided) -> bool:
        """Whether the expression is true for `message`; `fixed` comes from its address. Never raises."""
        known = dict(fixed)
        for word in self._words:
            try:
                known[word] = _WORDS[word](message)
            except RemoteProtocolError:
                counts.undecided += 1
                return False
        if self._headers:
            try:
                known["headers"] = plain_headers(message.properties.headers)
            except RemoteProtocolError:
                counts.undecided += 1
                return False
        if self._body:
            body = message.body
            try:
                if len(body) > CONDITION_BODY_MAX:
                    raise ValueError
                known["body"] = orjson.loads(body)
            except ValueError:
                counts.unparsable += 1
                return False
        try:
            return self._program.execute(known) is True
        except Exception:  # a dozen builtin types, and each means that the expression has no value
            counts.undecided += 1
            return False


_WORDS: Final[dict[str, Callable[[Message], Any]]] = {
    "qos": lambda message: message.assurance,
    "retain": lambda message: message.retain,
    "durable": lambda message: message.durable,
    "size": lambda message: len(message.body),
    "content_type": lambda message: message.properties.content_type or "",
    "client_id": lambda message: message.sender.client,
    "user": lambda message: message.sender.user,
}


def plain_headers(headers: Headers) -> dict[str, Any]:
    """Headers as an expression sees them; a repeated name becomes a list."""
    found: dict[str, Any] = {}
    repeated: set[str] = set()
    for name, value in headers:
        plain = plain_value(value)
        if name not in found:
            found[name] = plain
        elif name in repeated:
            found[name].append(plain)
        else:
            found[name] = [found[name], plain]
            repeated.add(name)
    return found


def plain_value(value: Value) -> Any:
    """A header's value without its type: tables as dicts, arrays as lists, decimals as floats."""
    kind, content = value
    if kind is ValueType.TABLE:
        return plain_headers(content)
    if kind is ValueType.ARRAY:
        return [plain_value(item) for item in content]
    return float(content) if isinstance(content, Decimal) else content
