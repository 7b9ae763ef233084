"""Conditions of routes: the CEL expression `when`, which is true for the messages that cross.

Each expression is compiled once. The names in it determine what is prepared: names from the address alone are
evaluated once per address; the body is parsed only if the expression names `body`, the headers only if it
names `headers`. An expression never breaks a route: if it has no value (a body that is not JSON, a missing
field, types that do not compare, more steps than one message may take), it is false, and counted. A part that
cannot be read is an error in the expression, and as in CEL `true || error` is true and `false && error` is
false: if the other properties of a message are decisive, its body is not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from decimal import Decimal
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from gateway.errors import MappingError, RemoteProtocolError
from gateway.mapping.expressions import STEPS_MAX, TEXT_PIECE, Expression, UnsupportedExpression
from gateway.mapping.patterns import WORDS_OF_MESSAGE, WORDS_OF_SENDER
from gateway.mapping.templates import unknown_name
from gateway.model.message import Message
from gateway.model.properties import Headers, Value, ValueType

if TYPE_CHECKING:
    import cel

CONDITION_BODY_MAX: Final = 1_048_576  # bytes; parsing more would delay every connection of the poller
CONDITION_VALUES_MAX: Final = 3_000  # in body and headers: each is copied for the evaluation, some 4 µs
HEADERS_DEPTH_MAX: Final = 100  # nested tables and arrays in headers, which `plain_value` recurses into

FAULT: Final = re.compile(r"ERROR: <input>:(\d+):(\d+): (?:Syntax error: )?(.*?)(?: expecting \{.*)?$", re.M)
PER_MESSAGE: Final = frozenset((*WORDS_OF_MESSAGE, *WORDS_OF_SENDER))
# fmt: off
FUNCTIONS: Final = frozenset((
    "size", "contains", "startsWith", "endsWith", "matches",
    "int", "uint", "double", "string", "bytes", "timestamp", "duration", "type", "dyn",
    "getFullYear", "getMonth", "getDate", "getDayOfMonth", "getDayOfWeek", "getDayOfYear",
    "getHours", "getMinutes", "getSeconds", "getMilliseconds",
))
# fmt: on


class ExpressionError(MappingError):
    """Error in the text of a CEL expression.

    `inner` has line and column within this text, both starting at 1.
    """

    def __init__(self, reason: str, line: int, column: int) -> None:
        super().__init__(reason)
        self.inner = line, column


class ConditionCounters(Protocol):
    """Counters of the messages for which the expression `when` had no value.

    `unparsable` counts messages whose body is not JSON, `undecided` those with another cause, such as a
    missing field.
    """

    unparsable: int
    undecided: int


class Condition:
    """Compiled CEL expression of the key `when`.

    `known_names` are the variables to which it may refer. Raises MappingError if the text is not CEL, has an
    unknown name, or could take too many steps.
    """

    __slots__ = (
        "_body",
        "_cost",
        "_headers",
        "_program",
        "_steps_max",
        "_words",
        "names",
        "per_message",
        "text",
    )

    def __init__(self, text: str, known_names: Iterable[str], steps_max: int = STEPS_MAX) -> None:
        """Compile `text`. An evaluation may take at most `steps_max` steps of about 0.2 µs."""
        self.text = text
        self._program, self._cost = _compiled(text)
        used = self._program.references()
        options = {*known_names, *PER_MESSAGE}
        self.names = frozenset(used["variables"]) & self._cost.names
        for name in sorted(self.names - options):
            raise MappingError(unknown_name(name, options))
        for name in used["functions"]:
            if name.isidentifier() and not name.startswith("_") and name not in FUNCTIONS:
                near = get_close_matches(name, sorted(FUNCTIONS), 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise MappingError(f"unknown function {name!r}{hint}")
        self._steps_max = steps_max
        if not self._cost.steps(1) <= steps_max:
            raise MappingError("evaluating it takes too many steps")
        self.per_message = not self.names.isdisjoint(PER_MESSAGE)
        self._body = "body" in self.names
        self._headers = "headers" in self.names
        self._words = tuple(self.names & PER_MESSAGE - {"body", "headers"})

    def type_error(self) -> str:
        """Return a text about the first comparison of a variable with a literal of another type, or "".

        Such a comparison can never be true.
        """
        for name, kind, literal in self._cost.compared:
            own = _KINDS.get(name, "text")
            if own in (kind, "any") or literal == "null":
                continue
            correction = f"{name} == {'1' if own == 'number' else 'true'}, without quotes"
            if own == "text":
                correction = f'{name} == "{literal}"'
                correction += f", or int({name}) == {literal}" if kind == "number" else ""
            kinds = f"{name} is a {_SHOWN[own]}, and {literal} a {_SHOWN[kind]}"
            return f"{kinds}, which cannot be compared: write {correction}"
        return ""

    def fixed(self, values: dict[str, str]) -> dict[str, Any]:
        """Return those `values` to which the expression refers. Pass the result to `holds`.

        `values` has the variables that depend only on the address, by name.
        """
        return {name: text for name, text in values.items() if name in self.names}

    def constant(self) -> bool | None:
        """Return the value of an expression that refers to no variable; return None for other expressions."""
        return None if self.names else bool(self._evaluated({}))

    def _evaluated(self, variables: dict[str, Any]) -> bool | None:
        """Evaluate the expression. Return None if it has no value, for example because a field is missing."""
        try:
            return self._program.execute(variables) is True
        except Exception:  # a dozen builtin types, and each means that the expression has no value
            return None
        except BaseException as error:
            if not _is_panic(error):
                raise
            return None

    def holds(self, message: Message, fixed: dict[str, Any], counts: ConditionCounters) -> bool:
        """Return True if the expression is true for `message`. Never raises.

        `fixed` has the values of variables that depend only on the message's address. If the expression has
        no value, increment a counter in `counts`, and return False.
        """
        variables = dict(fixed)
        unparsable = False
        for word in self._words:
            with suppress(RemoteProtocolError):
                variables[word] = _WORDS[word](message)
        size = sum([len(text) for text in variables.values() if type(text) is str]) // TEXT_PIECE + 1
        if self._headers:
            with suppress(RemoteProtocolError, ValueError):
                headers = message.properties.headers
                size += _size_of_headers(headers)
                variables["headers"] = plain_headers(headers)
        if self._body:
            try:
                variables["body"], more = _read_body(message.body)
                size += more
            except ValueError:
                unparsable = True
        found = self._evaluated(variables) if self._cost.steps(size) <= self._steps_max else None
        if found is None and unparsable:
            counts.unparsable += 1
        elif found is None:
            counts.undecided += 1
        return found is True


def _compiled(text: str) -> tuple[cel.Program, Expression]:
    """Compile the text of a CEL expression. Return the program, and an Expression with its costs.

    Raises MappingError. A text that is too long or too deeply nested is refused before it reaches the CEL
    library, whose stack would overflow.
    """
    import cel  # takes 100 ms of every start, and most mappings have no condition

    cost = None
    with suppress(UnsupportedExpression):
        cost = Expression(text)
    try:
        program = cel.compile(text)
    except ValueError as misread:
        raise _misread(str(misread)) from misread
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise MappingError("not a CEL expression that the gateway can compile") from None
    if cost is None:
        raise MappingError("CEL expression not supported: the cost of evaluating it is unknown")
    return program, cost


def _misread(report: str) -> MappingError:
    """Return the error for the first fault in `report`, an error text of the CEL library.

    It is an ExpressionError if `report` has a position, otherwise a MappingError.
    """
    found = FAULT.search(report)
    if found is None:
        return MappingError(f"not a CEL expression: {report.splitlines()[0]}")
    line, column, reason = found.groups()
    reason = reason.replace("'<EOF>'", "the end")
    for pattern, meant in _MEANT:
        if re.match(pattern, reason):
            reason = meant
    return ExpressionError(f"not a CEL expression: {reason}", int(line), int(column))


_WRITE_SIGNS: Final = "write && for and, || for or, ! for not"
_MEANT: Final = (
    ("token recognition error at: '=~", 'write name.matches("pattern")'),
    ("token recognition error at: '=[^=~]", "to compare write ==, not ="),
    ("token recognition error at: '[&|]", _WRITE_SIGNS),
    ("mismatched input '(?i:and|or)'", _WRITE_SIGNS),
    ("extraneous input .* expecting <EOF>", f"the expression is complete before this text; {_WRITE_SIGNS}"),
)
"""Beginnings of the CEL library's error texts, and what the author of the expression has to write instead."""


def _is_panic(error: BaseException) -> bool:
    """Return True if `error` is a panic of the CEL library, which is written in Rust.

    A panic is a BaseException but not an Exception, and its class cannot be imported.
    """
    return type(error).__name__ == "PanicException"


def _read_body(body: bytes) -> tuple[Any, int]:
    """Parse a JSON body. Return its value and its size, in the unit that `Expression.steps` takes.

    Raises ValueError if the body is too large, has too many values, or is not JSON.
    """
    if len(body) > CONDITION_BODY_MAX:
        raise ValueError
    found = orjson.loads(body)
    values = 1 + body.count(b",") + body.count(b"[") + body.count(b"{")  # at most: also counts those in texts
    if values > CONDITION_VALUES_MAX:
        values = _count_values(found)
    return found, values + len(body) // TEXT_PIECE


def _count_values(body: Any) -> int:
    """Count the values in a parsed body. Raises ValueError if there are more than CONDITION_VALUES_MAX."""
    count = 1
    stack = [body]
    while stack:
        one = stack.pop()
        if isinstance(one, dict):
            inner = list(one.values())
        elif isinstance(one, list):
            inner = one
        else:
            continue
        count += len(inner)
        if count > CONDITION_VALUES_MAX:
            raise ValueError
        stack += inner
    return count


def _size_of_headers(headers: Headers) -> int:
    """Return the size of headers, in the unit that `Expression.steps` takes.

    Raises ValueError if there are too many values, or if tables are nested too deeply.
    """
    count = byte_count = 0
    stack = [(value, 1) for _, value in headers]
    while stack:
        (kind, content), depth = stack.pop()
        count += 1
        if count + len(stack) > CONDITION_VALUES_MAX or depth > HEADERS_DEPTH_MAX:
            raise ValueError
        if kind is ValueType.TABLE:
            stack += [(value, depth + 1) for _, value in content]
        elif kind is ValueType.ARRAY:
            stack += [(value, depth + 1) for value in content]
        elif isinstance(content, str | bytes):
            byte_count += len(content)
    return count + byte_count // TEXT_PIECE


_WORDS: Final[dict[str, Callable[[Message], Any]]] = {
    "qos": lambda message: message.assurance,
    "retain": lambda message: message.retain,
    "durable": lambda message: message.durable,
    "size": lambda message: len(message.body),
    "content_type": lambda message: message.properties.content_type or "",
    "client_id": lambda message: message.sender.client,
    "user": lambda message: message.sender.user,
}


_KINDS: Final = {
    "qos": "number",
    "size": "number",
    "retain": "word",
    "durable": "word",
    "body": "any",
    "headers": "any",
}
"""Kinds of names, as `Expression.compared` has them for literals; all other names are texts."""
_SHOWN: Final = {"text": "text", "number": "number", "word": "truth value"}


def plain_headers(headers: Headers) -> dict[str, Any]:
    """Convert headers to a dict for expressions. The values of a repeated name become a list."""
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
    """Convert a header's value to plain Python: tables to dicts, arrays to lists, decimals to floats."""
    kind, content = value
    if kind is ValueType.TABLE:
        return plain_headers(content)
    if kind is ValueType.ARRAY:
        return [plain_value(item) for item in content]
    return float(content) if isinstance(content, Decimal) else content
