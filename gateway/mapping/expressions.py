"""What a CEL expression can cost, found out before it runs: the library that evaluates it has no limit.

The text is read once more, by a parser that keeps no tree but adds up *steps* (of some 0.2 µs). How many
there will be depends on what a message brings, so the sum is a polynomial in its *size*: the values in its
body and headers, and its texts in pieces of TEXT_PIECE octets. `all`, `exists` and the like are loops. Where
the inner of two goes through what the outer one holds (`body.list.exists(x, x.tags.exists(t, ...))`) both
together see each value once; where it goes through something else the costs multiply.

| | steps |
|---|---|
| an operator, a literal, a call | 1 |
| a turn of a loop | TURN |
| a field or element, a comparison, `+`, `in`, a function | the size of what it copies or reads |
| `map`, `filter` | the size of the result, for each of its elements: it is copied as it grows |
| `matches` | its pattern is compiled each time (so it has to be a literal), and meets each piece of text |

What is too deep, too long or too dear with any message is refused when it is read; the rest says for each
message how dear it would be. Depth and length also keep the library's own recursion within its stack.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.errors import MappingError

EXPRESSION_OCTETS_MAX: Final = 4_096
DEPTH_MAX: Final = 20  # of parentheses, brackets, arguments, conditions: parsing is recursive
STEPS_MAX: Final = 100_000  # of one evaluation: some 20 ms
TEXT_PIECE: Final = 256
TURN: Final = 4
COPY: Final = 2  # of what `map` and `filter` have so far
DEGREE_MAX: Final = 4  # beyond it no message is small enough
PATTERN_OCTETS_MAX: Final = 256

LOOPS: Final = frozenset(("all", "exists", "exists_one", "map", "filter"))
_WORD: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_TOKEN: Final = re.compile(
    rf"""(?:\s|//[^\n]*)*(?:
    (?P<text>[bB]?[rR][bB]?(?:'''(?s:.*?)'''|\"\"\"(?s:.*?)\"\"\"|'[^'\n]*'|"[^"\n]*")
      |[bB]?(?:'''(?s:[^\\]|\\.)*?'''|\"\"\"(?s:[^\\]|\\.)*?\"\"\"|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*"))
    |(?P<number>0[xX][0-9a-fA-F]+[uU]?|\d*\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+[uU]?)
    |(?P<word>{_WORD})
    |(?P<sign>&&|\|\||[<>=!]=|[-+*/%<>!?:.,()\[\]{{}}])
    |(?P<end>\Z)
    )""",
    re.VERBOSE,
)
_CONSTANTS: Final = frozenset(("true", "false", "null"))


class NotUnderstood(Exception):
    """The text is none that this parser knows."""


class Value(NamedTuple):
    """How large a part of an expression can be.

    `level`: the loop whose turns it comes from, 0: from the message; its size is then `weight` times that of
    what the level holds. None: it depends on nothing, and has this size.
    """

    level: int | None
    weight: float


class Cost(NamedTuple):
    """`weight` times the size of the message to the power of `degree`."""

    weight: float
    degree: int

    def times(self, other: Cost) -> Cost:
        """The product."""
        return Cost(self.weight * other.weight, self.degree + other.degree)


class _Loop(NamedTuple):
    name: str
    over: Value
    turns: Cost  # in the whole evaluation
    visits: Cost  # how often it comes by one and the same value of the message

    def lasts(self) -> Cost:
        """How many turns it has each time, if it goes through all that there is."""
        return Cost(self.over.weight, 0 if self.over.level is None else 1)


NOTHING: Final = Value(None, 1.0)  # floats overflow to infinity
ONCE: Final = Cost(1.0, 0)


class Expression:
    """What one text can cost. `names`: those that it takes from outside.

    Raises NotUnderstood, and MappingError for what no message could make cheap enough.
    """

    __slots__ = ("_steps", "names")

    def __init__(self, text: str) -> None:
        found = _Parser(text)
        found.parse()
        self.names = frozenset(found.names)
        self._steps = tuple(found.steps)
        if not self.steps(1) <= STEPS_MAX:  # nor is it a number, when it is beyond all of them
            raise MappingError(
                "it takes too many steps for any message; nest fewer loops, or say what the inner one goes "
                "through by the name of the outer one"
            )

    def steps(self, size: int) -> float:
        """How many steps it takes at most, with a message of this size."""
        total = 0.0
        for weight in reversed(self._steps):
            total = total * size + weight
        return total


class _Parser:
    """Recursive descent; each method reads one production and returns the size of its value."""

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self.steps = [0.0] * (DEGREE_MAX + 1)
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._depth = 0
        self._loops: list[_Loop] = []
        if len(text.encode(errors="replace")) > EXPRESSION_OCTETS_MAX:
            raise MappingError(f"an expression has at most {EXPRESSION_OCTETS_MAX} octets")
        at = 0
        while True:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise NotUnderstood
            kind = found.lastgroup
            self._tokens.append((kind, found[kind]))
            at = found.end()
            if kind == "end":
                return

    def parse(self) -> None:
        """The whole text; what comes out is copied, whatever it is."""
        self._use(self._condition())
        if self._tokens[self._at][0] != "end":
            raise NotUnderstood

    # Tokens.

    def _accept(self, *signs: str) -> str:
        kind, text = self._tokens[self._at]
        if (kind == "sign" or text == "in") and kind != "text" and text in signs:
            self._at += 1
            return text
        return ""

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise NotUnderstood

    def _word(self) -> str:
        kind, text = self._tokens[self._at]
        if kind != "word":
            raise NotUnderstood
        self._at += 1
        return text

    # Costs.

    def _turns(self) -> Cost:
        return self._loops[-1].turns if self._loops else ONCE

    def _between(self, level: int) -> Cost:
        """How many turns the loops inside of `level` have in one of its own."""
        found = ONCE
        for loop in self._loops[level:]:
            found = found.times(loop.lasts())
        return found

    def _uses(self, value: Value) -> Cost:
        """What it costs to read all of a value wherever this place comes by."""
        turns = self._turns().times(Cost(value.weight, value.level is not None))
        if not value.level:
            return turns
        visits = self._loops[value.level - 1].visits.times(self._between(value.level))
        return min(turns, visits.times(Cost(value.weight, 1)), key=lambda cost: (cost.degree, cost.weight))

    def _spend(self, cost: Cost) -> None:
        if cost.degree > DEGREE_MAX:
            raise MappingError("its loops are nested too deep; let each go through what the outer one holds")
        self.steps[cost.degree] += cost.weight

    def _use(self, *values: Value) -> None:
        self._spend(self._turns())
        for value in values:
            self._spend(self._uses(value))

    @staticmethod
    def _joined(values: list[Value]) -> Value:
        """What holds all of these."""
        levels = [value.level for value in values if value.level is not None]
        return Value(min(levels, default=None), sum(value.weight for value in values))

    # Productions, as in the grammar of CEL.

    def _condition(self) -> Value:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise MappingError(f"nested deeper than {DEPTH_MAX}")
        found = self._either()
        if self._accept("?"):
            first = self._either()
            self._expect(":")
            found = self._joined([first, self._condition()])
            self._spend(self._turns())
        self._depth -= 1
        return found

    def _either(self) -> Value:
        """A chain of `||` and `&&`: which binds closer changes no cost."""
        found = self._relation()
        while self._accept("||", "&&"):
            self._spend(self._turns())
            found = self._joined([found, self._relation()])
        return found

    def _relation(self) -> Value:
        found = self._sum()
        while sign := self._accept("<", "<=", ">", ">=", "==", "!=", "in"):
            other = self._sum()
            if sign == "in":
                self._use(other)
            else:  # the smaller one decides how far a comparison goes
                self._use(min(found, other, key=lambda value: (value.level is not None, value.weight)))
            found = NOTHING
        return found

    def _sum(self) -> Value:
        found = self._product()
        while self._accept("+", "-"):
            found = self._joined([found, self._product()])
            self._use(found)
        return found

    def _product(self) -> Value:
        found = self._unary()
        while self._accept("*", "/", "%"):
            self._unary()
            self._spend(self._turns())
            found = NOTHING
        return found

    def _unary(self) -> Value:
        while self._accept("!", "-"):
            self._spend(self._turns())
        found = self._primary()
        while sign := self._accept(".", "["):
            if sign == "[":
                self._condition()
                self._expect("]")
                self._use(found)
            else:
                found = self._selected(found, self._word())
        return found

    def _selected(self, value: Value, name: str) -> Value:
        """A field, a loop or a function of `value`."""
        if not self._accept("("):
            self._use(value)
            return value
        if name in LOOPS:
            return self._loop(value, name)
        return self._called(name, [value])

    def _called(self, name: str, values: list[Value]) -> Value:
        """The arguments of a function, up to the parenthesis that ends them. What it makes is no larger."""
        start = self._at
        values = values + self._listed(")")
        self._use(*values)
        if name == "matches":
            kind, literal = self._tokens[start]
            if kind != "text" or self._at != start + 2:
                raise MappingError("matches: the pattern is one text in quotes")
            compiling, running = _pattern_steps(literal)
            self._spend(self._turns().times(Cost(compiling, 0)))
            self._spend(self._uses(self._joined(values)).times(Cost(running, 0)))
        return self._joined(values) if values else NOTHING

    def _listed(self, end: str) -> list[Value]:
        found: list[Value] = []
        while not self._accept(end):
            found.append(self._condition())
            if not self._accept(","):
                self._expect(end)
                break
        return found

    def _loop(self, over: Value, name: str) -> Value:
        """From behind the parenthesis to behind the one that ends it."""
        bound = self._word()
        self._expect(",")
        outer = self._turns()
        if over.level is None:
            turns = outer.times(Cost(over.weight, 0))
            visits = ONCE
        else:
            turns = self._uses(over)
            visits = self._between(over.level).times(Cost(over.weight, 0))
            if over.level:
                visits = visits.times(self._loops[over.level - 1].visits)
        self._loops.append(_Loop(bound, over, turns, visits))
        self._spend(turns.times(Cost(TURN, 0)))
        parts = self._listed(")")
        level = len(self._loops)
        loop = self._loops.pop()
        if not parts or name not in ("map", "filter"):
            return NOTHING
        found = over if name == "filter" else self._mapped(loop, level, parts[-1])
        self._spend(self._uses(found).times(loop.lasts()).times(Cost(COPY, 0)))
        return found

    @staticmethod
    def _mapped(loop: _Loop, level: int, made: Value) -> Value:
        over = loop.over
        if made.level is None or made.level == level:
            return Value(over.level, over.weight * max(made.weight, 1))
        if over.level is None:
            return Value(made.level, over.weight * made.weight)
        raise MappingError(f"map: what it makes may hold {loop.name!r}, and nothing from outside of it")

    def _primary(self) -> Value:
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "text":
            self._spend(self._turns())
            return Value(None, 1 + len(text) / TEXT_PIECE)
        if kind == "number":
            self._spend(self._turns())
            return NOTHING
        if kind == "word":
            return self._named(text)
        if text == "(":
            found = self._condition()
            self._expect(")")
            return found
        if text == "[":
            return self._made(self._listed("]"))
        if text == "{":
            return self._made(self._entries())
        raise NotUnderstood

    def _made(self, parts: list[Value]) -> Value:
        found = self._joined([NOTHING, *parts])
        self._use(found)
        return found

    def _entries(self) -> list[Value]:
        found: list[Value] = []
        while not self._accept("}"):
            found.append(self._condition())
            self._expect(":")
            found.append(self._condition())
            if not self._accept(","):
                self._expect("}")
                break
        return found

    def _named(self, name: str) -> Value:
        self._spend(self._turns())
        if self._accept("("):
            return self._called(name, [])
        for level in range(len(self._loops), 0, -1):
            loop = self._loops[level - 1]
            if loop.name == name:
                return loop.over if loop.over.level is None else Value(level, 1)
        if name not in _CONSTANTS:
            self.names.add(name)
            return Value(0, 1)
        return NOTHING


# What `matches` costs.

_PIECE: Final = re.compile(
    r"\[\^?\]?(?:\\.|\[:[^\]]*:\]|[^\]\\])*\]|\{(\d*),?(\d*)\}|\\(?:[pP]\{[^}]*\}|.)|.", re.DOTALL
)
_HIDDEN: Final = re.compile(r"\\[xXuU0-7]")  # in a text that is not raw they may stand for a backslash
_VERBOSE: Final = re.compile(r"\(\?[A-Za-z-]*x")
_STATES: Final = {**dict.fromkeys("wWpP", 300), **dict.fromkeys("dDsS", 40)}
CLASS_STATES: Final = 4
STATE_STEPS: Final = 10  # to compile one
BOUNDARY_STEPS: Final = 20  # for each state and piece of text: a boundary keeps the fast way closed
FAST_STATES: Final = 8  # that cost one step for each piece of text


def _pattern_steps(literal: str) -> tuple[float, float]:
    """The steps to compile a regular expression, and those for each piece of the text that it looks at."""
    if len(literal) > PATTERN_OCTETS_MAX:
        raise MappingError(f"matches: a pattern has at most {PATTERN_OCTETS_MAX} characters")
    pattern = literal.strip("rRbB")[1:-1]
    if not set("rR") & set(literal[:2]):
        pattern = pattern.replace("\\\\", "\0")
        if _HIDDEN.search(pattern):
            raise MappingError("matches: a pattern is written without \\x, \\u and octal numbers")
        pattern = pattern.replace("\0", "\\")
    if _VERBOSE.search(pattern):
        raise MappingError("matches: a pattern cannot be verbose")
    states = _count_states(pattern)
    bounded = re.search(r"\\[bB]", pattern) is not None
    return states * STATE_STEPS, states * BOUNDARY_STEPS if bounded else 1 + states / FAST_STATES


def _count_states(pattern: str) -> float:
    """About how many states the automaton has; a part that is repeated by number has so many copies."""
    groups = [[0.0, 0.0]]  # of each open group: the states before its last part, and those of this part
    for piece in _PIECE.finditer(pattern):
        text = piece[0]
        if text == "(":
            groups.append([0.0, 0.0])
        elif text == ")" and len(groups) > 1:
            inner = sum(groups.pop())
            groups[-1] = [sum(groups[-1]), inner]
        elif piece[1] is not None:
            groups[-1][1] *= max(int(count) if count else 1 for count in piece.groups())
        elif text not in "*+?|":
            groups[-1] = [sum(groups[-1]), float(_states_of(text))]
    return 1 + sum(map(sum, groups))


def _states_of(text: str) -> int:
    wide = CLASS_STATES if text == "." or text[0] == "[" else 1
    return max([wide, *(_STATES.get(letter, 1) for letter in re.findall(r"\\(.)", text))])
