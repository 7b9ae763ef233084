"""Selectors of the Java Message Service: the conditional expressions of SQL-92 over what a message says.

    NAME = 'text' AND (PRIORITY > 4 OR weight BETWEEN 1 AND 2.5) AND kind NOT LIKE 'a!_%' ESCAPE '!'

A text is parsed once into nested functions. Logic has three values: what cannot be said (a name that is not
there, types that do not go together, a division by zero) is None, neither true nor false, and a message is
selected only by True. Depth and length are bounded, and LIKE never looks back further than its last `%`, so
that no selector can hold up the loop for long.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from gateway.errors import GatewayError

SELECTOR_OCTETS_MAX: Final = 4_096  # it is looked at for each message
DEPTH_MAX: Final = 40  # of parentheses and signs: parsing and evaluating are recursive
DIGITS_MAX: Final = 18


class Known(Protocol):
    """What a message says, by name."""

    def get(self, name: str, /) -> Any:
        """A str, int, float or bool; None when it says nothing under this name."""


Value = Callable[[Known], Any]

_TOKEN: Final = re.compile(
    r"""\s*(?:
    (?P<text>'(?:[^']|'')*')
    |(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?)(?![A-Za-z0-9_$.])
    |(?P<word>[A-Za-z_$\#][A-Za-z0-9_$\#]*)
    |(?P<sign><>|<=|>=|[=<>()+\-*/,])
    |(?P<end>\Z)
    )""",
    re.VERBOSE,
)
_RESERVED: Final = frozenset(
    ("AND", "OR", "NOT", "BETWEEN", "IN", "LIKE", "ESCAPE", "IS", "NULL", "TRUE", "FALSE")
)
_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


class SelectorRefused(GatewayError):
    """A text that is no selector; the message says where and why."""


class _Term(NamedTuple):
    """A parsed part: how to evaluate it, and whether it can be (`truth`) or is (`only`) a truth value."""

    value: Value
    truth: bool
    only: bool = False


def compile_selector(text: str) -> Callable[[Known], bool]:
    """The predicate of a selector over names and their values (str, int, float or bool).

    Raises SelectorRefused.
    """
    if len(text.encode()) > SELECTOR_OCTETS_MAX:
        raise SelectorRefused(f"a selector has at most {SELECTOR_OCTETS_MAX} octets")
    value = _Parser(text).parse()
    return lambda known: value(known) is True


class _Parser:
    """Recursive descent over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        self._at = 0
        self._depth = 0
        at = 0
        while True:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise SelectorRefused(f"{text[at : at + 20]!r} at {at + 1} is not understood")
            kind = found.lastgroup
            word = found[kind]
            if kind == "word" and word.upper() in _RESERVED:
                kind, word = "sign", word.upper()
            self._tokens.append((kind, word, found.start(kind) + 1))
            at = found.end()
            if kind == "end":
                return

    def parse(self) -> Value:
        """The whole text."""
        found = self._truth(self._either())
        if self._peek()[0] != "end":
            raise self._fault()
        return found

    # Tokens.

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._at]

    def _next(self) -> tuple[str, str, int]:
        found = self._tokens[self._at]
        self._at += 1
        return found

    def _accept(self, *signs: str) -> str:
        """The sign that comes next, if it is one of these; else ""."""
        kind, word, _ = self._peek()
        if kind == "sign" and word in signs:
            self._at += 1
            return word
        return ""

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise self._fault(f"{sign} is expected")

    def _fault(self, why: str = "not expected here") -> SelectorRefused:
        kind, word, at = self._peek()
        return SelectorRefused(f"{'the end' if kind == 'end' else repr(word)} at {at}: {why}")

    def _text(self) -> str:
        kind, word, _ = self._peek()
        if kind != "text":
            raise self._fault("a text in quotes is expected")
        self._at += 1
        return word[1:-1].replace("''", "'")

    def _truth(self, term: _Term) -> Value:
        if not term.truth:
            raise self._fault("what stands before it is no condition")
        return term.value

    def _plain(self, term: _Term) -> Value:
        if term.only:
            raise self._fault("what stands before it is a condition, not a value")
        return term.value

    # Logic.

    def _either(self) -> _Term:
        found = self._both()
        while self._accept("OR"):
            found = _Term(_or(self._truth(found), self._truth(self._both())), True, True)
        return found

    def _both(self) -> _Term:
        found = self._negated()
        while self._accept("AND"):
            found = _Term(_and(self._truth(found), self._truth(self._negated())), True, True)
        return found

    def _negated(self) -> _Term:
        if not self._accept("NOT"):
            return self._predicate()
        self._deeper()
        inner = self._truth(self._negated())
        self._depth -= 1
        return _Term(_not(inner), True, True)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._fault(f"nested deeper than {DEPTH_MAX}")

    # Conditions.

    def _predicate(self) -> _Term:
        term = self._sum()
        if sign := self._accept(*_COMPARE):
            return _Term(_compare(sign, term.value, self._sum().value), True, True)
        if self._accept("IS"):
            wanted = not self._accept("NOT")
            self._expect("NULL")
            left = self._plain(term)
            return _Term(lambda known: (left(known) is None) is wanted, True, True)
        negated = bool(self._accept("NOT"))
        if self._accept("BETWEEN"):
            found = self._between(self._plain(term))
        elif self._accept("IN"):
            found = self._in(self._plain(term))
        elif self._accept("LIKE"):
            found = self._like(self._plain(term))
        elif negated:
            raise self._fault("BETWEEN, IN or LIKE is expected")
        else:
            return term
        return _Term(_not(found) if negated else found, True, True)

    def _between(self, value: Value) -> Value:
        low = self._plain(self._sum())
        self._expect("AND")
        high = self._plain(self._sum())
        return _and(_compare(">=", value, low), _compare("<=", value, high))

    def _in(self, value: Value) -> Value:
        self._expect("(")
        texts = {self._text()}
        while self._accept(","):
            texts.add(self._text())
        self._expect(")")

        def look(known: Known) -> bool | None:
            found = value(known)
            return found in texts if isinstance(found, str) else None

        return look

    def _like(self, value: Value) -> Value:
        pattern = self._text()
        escape = self._text() if self._accept("ESCAPE") else ""
        if len(escape) > 1:
            raise self._fault("ESCAPE is one character")
        pieces = _pieces(pattern, escape)
        if pieces is None:
            raise self._fault("the escape character ends the pattern")
        wanted = pieces

        def look(known: Known) -> bool | None:
            found = value(known)
            return _matches(found, wanted) if isinstance(found, str) else None

        return look

    # Values.

    def _sum(self) -> _Term:
        found = self._product()
        while sign := self._accept("+", "-"):
            found = _Term(_reckon(sign, self._plain(found), self._plain(self._product())), False)
        return found

    def _product(self) -> _Term:
        found = self._factor()
        while sign := self._accept("*", "/"):
            found = _Term(_reckon(sign, self._plain(found), self._plain(self._factor())), False)
        return found

    def _factor(self) -> _Term:
        sign = self._accept("+", "-", "(")
        if not sign:
            return self._atom()
        self._deeper()
        if sign == "(":
            found = self._either()
            self._expect(")")
        else:
            inner = self._plain(self._factor())
            found = _Term(_reckon(sign, _constant(0), inner), False)
        self._depth -= 1
        return found

    def _atom(self) -> _Term:
        kind, word, _ = self._peek()
        if kind == "text":
            return _Term(_constant(self._text()), False)
        if kind == "number":
            if len(word) > DIGITS_MAX:
                raise self._fault(f"a number has at most {DIGITS_MAX} digits")
            self._next()
            return _Term(_constant(int(word) if word.isdigit() else float(word)), False)
        if kind == "word":
            self._next()
            return _Term(lambda known: known.get(word), True)
        if truth := self._accept("TRUE", "FALSE"):
            return _Term(_constant(truth == "TRUE"), True)
        raise self._fault("a value is expected")


def _constant(value: Any) -> Value:
    return lambda known: value


def _or(one: Value, other: Value) -> Value:
    def either(known: Known) -> bool | None:
        left = one(known)
        if left is True:
            return True
        right = other(known)
        return True if right is True else False if left is False and right is False else None

    return either


def _and(one: Value, other: Value) -> Value:
    def both(known: Known) -> bool | None:
        left = one(known)
        if left is False:
            return False
        right = other(known)
        return False if right is False else True if left is True and right is True else None

    return both


def _not(inner: Value) -> Value:
    def negated(known: Known) -> bool | None:
        found = inner(known)
        return not found if isinstance(found, bool) else None

    return negated


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compare(sign: str, one: Value, other: Value) -> Value:
    ask = _COMPARE[sign]
    equality = sign in ("=", "<>")

    def compare(known: Known) -> bool | None:
        left, right = one(known), other(known)
        if _is_number(left) and _is_number(right):
            return ask(left, right)
        # Texts and truths are the same or not, and have no order; different types are never the same.
        if left is None or right is None or not equality or type(left) is not type(right):
            return None
        return ask(left, right)

    return compare


def _reckon(sign: str, one: Value, other: Value) -> Value:
    def reckon(known: Known) -> int | float | None:
        left, right = one(known), other(known)
        if not _is_number(left) or not _is_number(right):
            return None
        try:
            if sign == "+":
                return left + right  # type: ignore[no-any-return]
            if sign == "-":
                return left - right  # type: ignore[no-any-return]
            if sign == "*":
                return left * right  # type: ignore[no-any-return]
            if isinstance(left, int) and isinstance(right, int):
                whole = abs(left) // abs(right)  # towards zero, as in Java
                return whole if (left < 0) == (right < 0) else -whole
            return left / right  # type: ignore[no-any-return]
        except ArithmeticError:
            return None

    return reckon


# LIKE: what stands between the `%`, each of a fixed length, and the length.
_Piece = tuple[re.Pattern[str], int]


def _pieces(pattern: str, escape: str) -> list[_Piece] | None:
    """The pieces of a pattern; None when the escape character is its last."""
    pieces: list[list[str]] = [[]]
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            escaped = next(characters, None)
            if escaped is None:
                return None
            pieces[-1].append(re.escape(escaped))
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append("." if character == "_" else re.escape(character))
    return [(re.compile("".join(piece), re.DOTALL), len(piece)) for piece in pieces]


def _matches(text: str, pieces: list[_Piece]) -> bool:
    """Whether `text` is the pieces in order with anything between them."""
    (first, at), (last, last_size) = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return len(text) == at and first.match(text) is not None
    end = len(text) - last_size
    if end < at or first.match(text) is None or last.match(text, end) is None:
        return False
    for piece, _ in pieces[1:-1]:
        found = piece.search(text, at, end)
        if found is None:
            return False
        at = found.end()
    return True
