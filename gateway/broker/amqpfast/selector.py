"""Selectors of the Java Message Service: conditional expressions of SQL-92 over a message's properties.

  NAME = 'text' AND (PRIORITY > 4 OR weight BETWEEN 1 AND 2.5) AND kind NOT LIKE 'a!_%' ESCAPE '!'

A text is parsed once into nested functions. Logic has three values: an unknown result (a missing name,
incompatible types, a division by zero, a number of more than 64 bits) is None, neither true nor false. A
message is selected only by True.

No selector can block the event loop for long. Length and depth are limited when the text is parsed, and
chains (`a + a + ...`, `... OR ... OR ...`) are loops, not nested calls. The cost that depends on the message
is the length of texts: an evaluation has a limited number of steps (about 5 ns each), and selects nothing
when they are used up. LIKE never backtracks further than its last `%`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from gateway.errors import GatewayError

SELECTOR_BYTES_MAX: Final = 4_096  # it is evaluated for each message
DEPTH_MAX: Final = 40  # of parentheses and signs: parsing and evaluation are recursive
DIGITS_MAX: Final = 18
INTEGER_MAX: Final = (1 << 63) - 1  # without a limit, products would grow without end
STEPS_MAX: Final = 250_000  # of one evaluation
COMPARED: Final = 64  # characters that are compared in one step
LITERAL_COST: Final = 100  # a search for a longer text costs no more than this
LITERALS_COMPARED: Final = 8  # characters of a literal that are compared in one step


class PropertyLookup(Protocol):
    """Object that returns properties of a message by name."""

    def get(self, name: str, /) -> Any:
        """Return a str, int, float or bool, or None if the message has no property of this name."""


class TooManySteps(Exception):
    """Error of an evaluation that has used all its steps (units of work, see the module)."""


class SelectorEvaluation:
    """State of one evaluation: the properties of the message, and how many steps of work remain."""

    __slots__ = ("properties", "steps_left")

    def __init__(self, properties: PropertyLookup) -> None:
        self.properties = properties
        self.steps_left = STEPS_MAX

    def check(self, steps: int) -> None:
        """Raise TooManySteps if an operation that needs `steps` steps of work is not allowed any more."""
        if steps > STEPS_MAX or self.steps_left < 0:
            raise TooManySteps


Value = Callable[[SelectorEvaluation], Any]

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
    """Error of a text that is not a valid selector. It contains the position and the reason."""


class _Term(NamedTuple):
    """Parsed part of a selector.

    `value` is the function that evaluates the part. `may_be_truth` is True if the result may be a truth
    value, and `is_truth` if it is always one.
    """

    value: Value
    may_be_truth: bool
    is_truth: bool = False


def compile_selector(text: str) -> Callable[[PropertyLookup], bool]:
    """Parse a selector. Return its predicate, a function of the properties of a message by name.

    Raises SelectorRefused if the text is not a valid selector.
    """
    if len(text.encode()) > SELECTOR_BYTES_MAX:
        raise SelectorRefused(f"a selector has at most {SELECTOR_BYTES_MAX} bytes")
    value = _SelectorParser(text).parse()

    def selects(properties: PropertyLookup) -> bool:
        try:
            return value(SelectorEvaluation(properties)) is True
        except TooManySteps:
            return False

    return selects


class _SelectorParser:
    """Recursive descent parser for the text of one selector."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        self._at = 0
        self._depth = 0
        at = 0
        while True:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise SelectorRefused(f"syntax error at character {at + 1}: {text[at : at + 20]!r}")
            kind = found.lastgroup
            word = found[kind]
            if kind == "word" and word.upper() in _RESERVED:
                kind, word = "sign", word.upper()
            self._tokens.append((kind, word, found.start(kind) + 1))
            at = found.end()
            if kind == "end":
                return

    def parse(self) -> Value:
        """Parse the whole text. Return the function that evaluates it; raises SelectorRefused."""
        found = self._truth(self._parse_or())
        if self._peek()[0] != "end":
            raise self._fault()
        return found

    # Tokens.

    def _peek(self) -> tuple[str, str, int]:
        return self._tokens[self._at]

    def _next_token(self) -> tuple[str, str, int]:
        found = self._tokens[self._at]
        self._at += 1
        return found

    def _accept(self, *signs: str) -> str:
        """Skip the next token if it is one of the operators or brackets `signs`, and return it.

        Otherwise return "".
        """
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
        return SelectorRefused(f"{'the end' if kind == 'end' else repr(word)} at character {at}: {why}")

    def _text(self) -> str:
        kind, word, _ = self._peek()
        if kind != "text":
            raise self._fault("a text in quotes is expected")
        self._at += 1
        return word[1:-1].replace("''", "'")

    def _truth(self, term: _Term) -> Value:
        if not term.may_be_truth:
            raise self._fault("the expression before it is not a condition")
        return term.value

    def _plain(self, term: _Term) -> Value:
        if term.is_truth:
            raise self._fault("the expression before it is a condition, not a value")
        return term.value

    # Logic.

    def _parse_or(self) -> _Term:
        found = self._parse_and()
        parts = [found]
        while self._accept("OR"):
            parts.append(self._parse_and())
        return found if len(parts) == 1 else self._logical_term(parts, True)

    def _parse_and(self) -> _Term:
        found = self._parse_not()
        parts = [found]
        while self._accept("AND"):
            parts.append(self._parse_not())
        return found if len(parts) == 1 else self._logical_term(parts, False)

    def _logical_term(self, parts: list[_Term], by: bool) -> _Term:
        return _Term(_chain([self._truth(part) for part in parts], by), True, True)

    def _parse_not(self) -> _Term:
        if not self._accept("NOT"):
            return self._predicate()
        self._deeper()
        inner = self._truth(self._parse_not())
        self._depth -= 1
        return _Term(_not(inner), True, True)

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._fault(f"nested deeper than {DEPTH_MAX}")

    # Conditions.

    def _predicate(self) -> _Term:
        """Parse a comparison, BETWEEN, IN, LIKE, IS NULL, or a single value."""
        term = self._sum()
        if sign := self._accept(*_COMPARE):
            return _Term(_compare(sign, term.value, self._sum().value), True, True)
        if self._accept("IS"):
            is_null = not self._accept("NOT")
            self._expect("NULL")
            operand = self._plain(term)
            return _Term(lambda evaluation: (operand(evaluation) is None) is is_null, True, True)
        negated = bool(self._accept("NOT"))
        if self._accept("BETWEEN"):
            found = self._parse_between(self._plain(term))
        elif self._accept("IN"):
            found = self._parse_in(self._plain(term))
        elif self._accept("LIKE"):
            found = self._parse_like(self._plain(term))
        elif negated:
            raise self._fault("BETWEEN, IN or LIKE is expected")
        else:
            return term
        return _Term(_not(found) if negated else found, True, True)

    def _parse_between(self, value: Value) -> Value:
        low = self._plain(self._sum())
        self._expect("AND")
        high = self._plain(self._sum())
        return _chain([_compare(">=", value, low), _compare("<=", value, high)], False)

    def _parse_in(self, value: Value) -> Value:
        self._expect("(")
        texts = {self._text()}
        while self._accept(","):
            texts.add(self._text())
        self._expect(")")

        def evaluate(evaluation: SelectorEvaluation) -> bool | None:
            found = value(evaluation)
            if not isinstance(found, str):
                return None
            return len(found) <= SELECTOR_BYTES_MAX and found in texts

        return evaluate

    def _parse_like(self, value: Value) -> Value:
        pattern = self._text()
        escape = self._text() if self._accept("ESCAPE") else ""
        if len(escape) > 1:
            raise self._fault("ESCAPE must be one character")
        pieces = _pieces(pattern, escape)
        if pieces is None:
            raise self._fault("the escape character ends the pattern")
        like_pieces = pieces

        def evaluate(evaluation: SelectorEvaluation) -> bool | None:
            found = value(evaluation)
            return _matches(found, like_pieces, evaluation) if isinstance(found, str) else None

        return evaluate

    # Values.

    def _sum(self) -> _Term:
        return self._parse_chain(self._product, "+", "-")

    def _product(self) -> _Term:
        return self._parse_chain(self._factor, "*", "/")

    def _parse_chain(self, part: Callable[[], _Term], *signs: str) -> _Term:
        first = part()
        more = []
        while sign := self._accept(*signs):
            more.append((sign, self._plain(part())))
        return _Term(_arithmetic(self._plain(first), more), False) if more else first

    def _factor(self) -> _Term:
        sign = self._accept("+", "-", "(")
        if not sign:
            return self._atom()
        self._deeper()
        if sign == "(":
            found = self._parse_or()
            self._expect(")")
        else:
            inner = self._plain(self._factor())
            found = _Term(_arithmetic(_constant(0), [(sign, inner)]), False)
        self._depth -= 1
        return found

    def _atom(self) -> _Term:
        """Parse a literal or a name."""
        kind, word, _ = self._peek()
        if kind == "text":
            return _Term(_constant(self._text()), False)
        if kind == "number":
            if len(word) > DIGITS_MAX:
                raise self._fault(f"a number has at most {DIGITS_MAX} digits")
            self._next_token()
            return _Term(_constant(int(word) if word.isdigit() else float(word)), False)
        if kind == "word":
            self._next_token()
            return _Term(lambda evaluation: evaluation.properties.get(word), True)
        if truth := self._accept("TRUE", "FALSE"):
            return _Term(_constant(truth == "TRUE"), True)
        raise self._fault("a value is expected")


def _constant(value: Any) -> Value:
    return lambda evaluation: value


def _chain(parts: list[Value], by: bool) -> Value:
    """Return the function that evaluates `parts` joined by OR (`by` is True) or AND (`by` is False).

    One True decides an OR, and one False an AND. The function returns None if no part decides and a part is
    unknown.
    """

    def decide(evaluation: SelectorEvaluation) -> bool | None:
        open_ = False
        for part in parts:
            found: object = part(evaluation)
            if found is by:
                return by
            if found is not (not by):
                open_ = True
        return None if open_ else not by

    return decide


def _not(inner: Value) -> Value:
    def evaluate(evaluation: SelectorEvaluation) -> bool | None:
        found = inner(evaluation)
        return not found if isinstance(found, bool) else None

    return evaluate


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _compare(sign: str, one: Value, other: Value) -> Value:
    ask = _COMPARE[sign]
    equality = sign in ("=", "<>")

    def compare(evaluation: SelectorEvaluation) -> bool | None:
        left, right = one(evaluation), other(evaluation)
        if _is_number(left) and _is_number(right):
            return ask(left, right)
        # Texts and truth values can be equal but have no order; values of different types are never equal.
        if left is None or right is None or not equality or type(left) is not type(right):
            return None
        if isinstance(left, str):
            evaluation.steps_left -= len(left) // COMPARED
            evaluation.check(0)
        return ask(left, right)

    return compare


def _arithmetic(first: Value, more: list[tuple[str, Value]]) -> Value:
    def evaluate(evaluation: SelectorEvaluation) -> int | float | None:
        found = first(evaluation)
        for sign, part in more:
            found = _calculate(sign, found, part(evaluation))
            if found is None:
                return None
        return found  # type: ignore[no-any-return]

    return evaluate


def _calculate(sign: str, left: Any, right: Any) -> Any:
    """Return the result of an arithmetic operation (`sign` is its operator).

    Returns None if there is no result, for example for a division by zero.
    """
    if not _is_number(left) or not _is_number(right):
        return None
    try:
        if sign == "+":
            found = left + right
        elif sign == "-":
            found = left - right
        elif sign == "*":
            found = left * right
        elif isinstance(left, int) and isinstance(right, int):
            whole = abs(left) // abs(right)  # rounds towards zero, as in Java
            found = whole if (left < 0) == (right < 0) else -whole
        else:
            found = left / right
    except ArithmeticError:
        return None
    return None if isinstance(found, int) and abs(found) > INTEGER_MAX else found


# LIKE.


class _LikePiece(NamedTuple):
    """Part of a LIKE pattern between two `%`, which matches `size` characters.

    `parts` are literal texts with their offsets; any character may be between them. `search` is a regular
    expression that finds the piece.
    """

    parts: list[tuple[int, str]]
    size: int
    search: re.Pattern[str] | None  # None if the piece is one literal text

    def fits(self, text: str, at: int) -> bool:
        """Return True if the piece matches the text at index `at`.

        The caller checks that the text is long enough.
        """
        return all(text.startswith(part, at + offset) for offset, part in self.parts)

    def find(self, text: str, at: int, end: int, evaluation: SelectorEvaluation) -> int:
        """Return the first index between `at` and `end` at which the piece matches, or -1.

        The work is subtracted from the steps of `evaluation`. Raises TooManySteps.
        """
        if self.search is None:
            each = min(self.size, LITERAL_COST)
            evaluation.check((end - at) * each // LITERALS_COMPARED)
            place = text.find(self.parts[0][1] if self.parts else "", at, end)
            evaluation.steps_left -= ((end if place < 0 else place) - at) * each // LITERALS_COMPARED
        else:
            evaluation.check((end - at) * self.size)
            found = self.search.search(text, at, end)
            place = -1 if found is None else found.start()
            evaluation.steps_left -= ((end if place < 0 else place) - at) * self.size
        return place


def _pieces(pattern: str, escape: str) -> list[_LikePiece] | None:
    """Split a LIKE pattern at each `%` into pieces.

    Return None if the escape character is its last character.
    """
    pieces: list[list[str]] = [[]]  # "" stands for any character
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            escaped = next(characters, None)
            if escaped is None:
                return None
            pieces[-1].append(escaped)
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append("" if character == "_" else character)
    last = len(pieces) - 1
    return [_piece(characters, 0 < at < last) for at, characters in enumerate(pieces)]


def _piece(characters: list[str], searched: bool) -> _LikePiece:
    parts: list[tuple[int, str]] = []
    for at, character in enumerate(characters):
        if character and at and characters[at - 1]:
            offset, text = parts[-1]
            parts[-1] = (offset, text + character)
        elif character:
            parts.append((at, character))
    search = None
    if searched and "" in characters:
        search = re.compile("".join(re.escape(one) or "." for one in characters), re.DOTALL)
    return _LikePiece(parts, len(characters), search)


def _matches(text: str, pieces: list[_LikePiece], evaluation: SelectorEvaluation) -> bool:
    """Return True if `text` consists of the pieces in order, with any text between them."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return len(text) == first.size and first.fits(text, 0)
    at, end = first.size, len(text) - last.size
    if end < at or not first.fits(text, 0) or not last.fits(text, end):
        return False
    for piece in pieces[1:-1]:
        place = piece.find(text, at, end, evaluation)
        if place < 0:
            return False
        at = place + piece.size
    return True
