"""Upper bounds of what a CEL expression costs, computed before it runs: the evaluating library has no limit.

The text is parsed once more, by a parser that builds no tree but adds up *steps* (of some 0.2 µs). Their
number depends on the message, so the sum is a polynomial in the message's *size*: the values in its body and
headers, and its texts in pieces of TEXT_PIECE bytes. `all`, `exists` and the like are loops. If the inner
of two loops iterates over a part of the outer loop's variable
(`body.list.exists(x, x.tags.exists(t, ...))`), both together visit each value once; otherwise the costs
multiply.

| | steps |
|---|---|
| an operator, a literal, a call | 1 |
| an iteration of a loop | TURN |
| a field or element, a comparison, `+`, `in`, a function | the size of what it copies or reads |
| `map`, `filter` | the size of the result, for each of its elements: it is copied as it grows |
| `matches` | its pattern is compiled each time (so it has to be a literal), and run on each piece of text |

An expression that is too deep, too long, or too expensive with any message is refused when it is read; every
other one has its bound computed for each message. The limits of depth and length also keep the library's own
recursion within its stack.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.errors import MappingError

EXPRESSION_BYTES_MAX: Final = 4_096
DEPTH_MAX: Final = 20  # of parentheses, brackets, arguments, conditions: parsing is recursive
STEPS_MAX: Final = 100_000  # of one evaluation: some 20 ms
TEXT_PIECE: Final = 256
TURN: Final = 4
COPY: Final = 2  # steps to copy one value of the partial result of `map` or `filter`
DEGREE_MAX: Final = 4  # beyond this degree no message is small enough
PATTERN_BYTES_MAX: Final = 256

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


class UnsupportedExpression(Exception):
    """Error for a text that this parser does not support: it parses only a part of CEL."""


class SizedValue(NamedTuple):
    """Upper bound of the size of a subexpression's value: `weight` times the size that `level` selects.

    Sizes are numbers of values, as in Cost. Level 0 selects the size of the message. Level 1 selects the size
    of the variable of the outermost loop, level 2 that of the next inner loop, and so on. Level None selects
    1, because the value does not depend on the message.
    """

    level: int | None
    weight: float


class Cost(NamedTuple):
    """Number of steps or iterations that an evaluation takes: `weight` * size ** `degree`.

    The size is that of the message: the number of values in it, where a long text counts as several values.
    """

    weight: float
    degree: int

    def times(self, other: Cost) -> Cost:
        """Return the product of two costs, such as iterations and the steps of one iteration."""
        return Cost(self.weight * other.weight, self.degree + other.degree)


class _Loop(NamedTuple):
    """Loop in which the parser is: its variable (`name`), and the list or map over which it iterates."""

    name: str
    over: SizedValue
    turns: Cost  # iterations in the whole evaluation
    visits: Cost  # how often the loop visits one and the same value of the message

    def iterations(self) -> Cost:
        """Return the maximum number of iterations each time the loop runs."""
        return Cost(self.over.weight, 0 if self.over.level is None else 1)


NOTHING: Final = SizedValue(None, 1.0)  # floats overflow to infinity
ONCE: Final = Cost(1.0, 0)


class Expression:
    """Parsed CEL expression: its costs, and the names of the variables to which it refers (`names`).

    `compared` has each comparison of a variable with a literal: name of the variable, kind of the literal
    (`text`, `number`, or `word` for true, false and null) and literal. Raises UnsupportedExpression if the
    text cannot be parsed, and MappingError if the expression would be too expensive for any message.
    """

    __slots__ = ("_steps", "compared", "names")

    def __init__(self, text: str) -> None:
        found = _ExpressionParser(text)
        found.parse()
        self.names = frozenset(found.names)
        self.compared = [one for one in found.compared if one[0] in self.names]
        self._steps = tuple(found.steps)
        if not self.steps(1) <= STEPS_MAX:  # `not <=`: an overflow may also give NaN
            raise MappingError(
                "evaluating it takes too many steps; nest fewer loops, or let the inner loop"
                " iterate over the variable of the outer one"
            )

    def steps(self, size: int) -> float:
        """Return the maximum number of steps, of about 0.2 µs each, that an evaluation takes.

        `size` is the size of the message: the number of values in it, where a long text counts as several
        values.
        """
        total = 0.0
        for weight in reversed(self._steps):
            total = total * size + weight
        return total


class _ExpressionParser:
    """Recursive-descent parser of CEL that adds up the steps of an evaluation, and builds no syntax tree.

    Each method that parses a part of an expression returns an upper bound of the size of its value.
    """

    def __init__(self, text: str) -> None:
        self.names: set[str] = set()
        self.compared: list[tuple[str, str, str]] = []
        self.steps = [0.0] * (DEGREE_MAX + 1)
        self._tokens: list[tuple[str, str]] = []
        self._at = 0
        self._depth = 0
        self._loops: list[_Loop] = []
        if len(text.encode(errors="replace")) > EXPRESSION_BYTES_MAX:
            raise MappingError(f"an expression has at most {EXPRESSION_BYTES_MAX} bytes")
        at = 0
        while True:
            found = _TOKEN.match(text, at)
            if found is None or found.lastgroup is None:
                raise UnsupportedExpression
            kind = found.lastgroup
            self._tokens.append((kind, found[kind]))
            at = found.end()
            if kind == "end":
                return

    def parse(self) -> None:
        """Parse the whole text and add up its costs, including the cost of copying the result.

        Raises UnsupportedExpression, and MappingError if the expression is too complex.
        """
        self._use(self._condition())
        if self._tokens[self._at][0] != "end":
            raise UnsupportedExpression

    # Tokens.

    def _accept(self, *signs: str) -> str:
        """Skip and return the next token if it is one of `signs`. Otherwise return ""."""
        kind, text = self._tokens[self._at]
        if (kind == "sign" or text == "in") and kind != "text" and text in signs:
            self._at += 1
            return text
        return ""

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise UnsupportedExpression

    def _word(self) -> str:
        kind, text = self._tokens[self._at]
        if kind != "word":
            raise UnsupportedExpression
        self._at += 1
        return text

    # Costs.

    def _iterations(self) -> Cost:
        """Return how often one evaluation runs the code at the parser's position, because of loops."""
        return self._loops[-1].turns if self._loops else ONCE

    def _inner_iterations(self, level: int) -> Cost:
        """Return the number of iterations of all loops inside a loop, during one iteration of that loop.

        The loop is number `level`, counted from the outermost one; 0 stands for the whole expression.
        """
        found = ONCE
        for loop in self._loops[level:]:
            found = found.times(loop.iterations())
        return found

    def _uses(self, value: SizedValue) -> Cost:
        """Return the cost of reading a value at the parser's position, for all iterations of all loops."""
        turns = self._iterations().times(Cost(value.weight, value.level is not None))
        if not value.level:
            return turns
        visits = self._loops[value.level - 1].visits.times(self._inner_iterations(value.level))
        return min(turns, visits.times(Cost(value.weight, 1)), key=lambda cost: (cost.degree, cost.weight))

    def _spend(self, cost: Cost) -> None:
        """Add `cost` to the steps of the expression. Raises MappingError if loops are nested too deeply."""
        if cost.degree > DEGREE_MAX:
            raise MappingError(
                "its loops are nested too deeply; let each inner loop iterate over the variable of"
                " the outer one"
            )
        self.steps[cost.degree] += cost.weight

    def _use(self, *values: SizedValue) -> None:
        """Add the cost of an operation that reads all of `values` at the parser's position."""
        self._spend(self._iterations())
        for value in values:
            self._spend(self._uses(value))

    @staticmethod
    def _joined(values: list[SizedValue]) -> SizedValue:
        """Return the size of a list, map or text that contains all of `values`."""
        levels = [value.level for value in values if value.level is not None]
        return SizedValue(min(levels, default=None), sum(value.weight for value in values))

    # Productions, as in the grammar of CEL.

    def _condition(self) -> SizedValue:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise MappingError(f"nested deeper than {DEPTH_MAX}")
        found = self._parse_logical()
        if self._accept("?"):
            first = self._parse_logical()
            self._expect(":")
            found = self._joined([first, self._condition()])
            self._spend(self._iterations())
        self._depth -= 1
        return found

    def _parse_logical(self) -> SizedValue:
        """Parse a chain of `||` and `&&`. Their precedence does not matter for the cost."""
        found = self._relation()
        while self._accept("||", "&&"):
            self._spend(self._iterations())
            found = self._joined([found, self._relation()])
        return found

    def _relation(self) -> SizedValue:
        """Parse a chain of comparisons and `in`."""
        start = self._at
        found = self._sum()
        while sign := self._accept("<", "<=", ">", ">=", "==", "!=", "in"):
            middle = self._at
            other = self._sum()
            if sign != "in":
                self._note(self._tokens[start : middle - 1], self._tokens[middle : self._at])
            start = middle
            if sign == "in":
                self._use(other)
            else:  # a comparison reads no more than the size of the smaller one
                self._use(min(found, other, key=lambda value: (value.level is not None, value.weight)))
            found = NOTHING
        return found

    def _note(self, left: list[tuple[str, str]], right: list[tuple[str, str]]) -> None:
        """Add a comparison to `compared` if one operand is a variable and the other one a literal.

        `left` and `right` are the tokens of the operands.
        """
        for one, other in ((left, right), (right, left)):
            if len(one) == len(other) == 1 and one[0][0] == "word" and one[0][1] not in _CONSTANTS:
                kind, literal = other[0]
                if kind != "word" or literal in _CONSTANTS:
                    self.compared.append((one[0][1], kind, literal))

    def _sum(self) -> SizedValue:
        found = self._product()
        while self._accept("+", "-"):
            found = self._joined([found, self._product()])
            self._use(found)
        return found

    def _product(self) -> SizedValue:
        found = self._unary()
        while self._accept("*", "/", "%"):
            self._unary()
            self._spend(self._iterations())
            found = NOTHING
        return found

    def _unary(self) -> SizedValue:
        while self._accept("!", "-"):
            self._spend(self._iterations())
        found = self._primary()
        while sign := self._accept(".", "["):
            if sign == "[":
                self._condition()
                self._expect("]")
                self._use(found)
            else:
                found = self._selected(found, self._word())
        return found

    def _selected(self, value: SizedValue, name: str) -> SizedValue:
        """Parse the text after `value.name`, and return an upper bound of the size of the whole value.

        `value` is the size of what precedes the dot. If `name` is a loop or a function, the text is a list of
        arguments; if it is a field, there is nothing to parse.
        """
        if not self._accept("("):
            self._use(value)
            return value
        if name in LOOPS:
            return self._loop(value, name)
        return self._called(name, [value])

    def _called(self, name: str, values: list[SizedValue]) -> SizedValue:
        """Parse the arguments of a function and the closing parenthesis. Return the size of the result.

        `values` has the size of the value before the dot, if there is one. The result is assumed to be as
        large as this value and all arguments together. Raises MappingError if the pattern of `matches` is not
        a literal.
        """
        start = self._at
        values = values + self._listed(")")
        self._use(*values)
        if name == "matches":
            kind, literal = self._tokens[start]
            if kind != "text" or self._at != start + 2:
                raise MappingError("matches: the pattern must be one text in quotes")
            compiling, running = _pattern_steps(literal)
            self._spend(self._iterations().times(Cost(compiling, 0)))
            self._spend(self._uses(self._joined(values)).times(Cost(running, 0)))
        return self._joined(values) if values else NOTHING

    def _listed(self, end: str) -> list[SizedValue]:
        """Parse expressions separated by commas, and the token `end` behind them. Return their sizes."""
        found: list[SizedValue] = []
        while not self._accept(end):
            found.append(self._condition())
            if not self._accept(","):
                self._expect(end)
                break
        return found

    def _loop(self, over: SizedValue, name: str) -> SizedValue:
        """Parse the arguments of the loop function `name`, such as `exists`, and the closing parenthesis.

        `over` is the size of the list or map over which the loop iterates. Return the size of the result.
        """
        bound = self._word()
        self._expect(",")
        outer = self._iterations()
        if over.level is None:
            turns = outer.times(Cost(over.weight, 0))
            visits = ONCE
        else:
            turns = self._uses(over)
            visits = self._inner_iterations(over.level).times(Cost(over.weight, 0))
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
        self._spend(self._uses(found).times(loop.iterations()).times(Cost(COPY, 0)))
        return found

    @staticmethod
    def _mapped(loop: _Loop, level: int, made: SizedValue) -> SizedValue:
        """Return the size of the list that `map` builds from elements of the size `made`.

        `level` is the number of the loop `map`. Raises MappingError if the elements contain values from
        outside of this loop.
        """
        over = loop.over
        if made.level is None or made.level == level:
            return SizedValue(over.level, over.weight * max(made.weight, 1))
        if over.level is None:
            return SizedValue(made.level, over.weight * made.weight)
        raise MappingError(f"map: its result may only use {loop.name!r}, not names from outside")

    def _primary(self) -> SizedValue:
        """Parse a literal, a name, a list, a map, or an expression in parentheses."""
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "text":
            self._spend(self._iterations())
            return SizedValue(None, 1 + len(text) / TEXT_PIECE)
        if kind == "number":
            self._spend(self._iterations())
            return NOTHING
        if kind == "word":
            return self._named(text)
        if text == "(":
            found = self._condition()
            self._expect(")")
            return found
        if text == "[":
            return self._combined_value(self._listed("]"))
        if text == "{":
            return self._combined_value(self._entries())
        raise UnsupportedExpression

    def _combined_value(self, parts: list[SizedValue]) -> SizedValue:
        """Return the size of a list or map that consists of `parts`, and add the cost of building it."""
        found = self._joined([NOTHING, *parts])
        self._use(found)
        return found

    def _entries(self) -> list[SizedValue]:
        """Parse the entries of a map and its closing brace. Return the sizes of all keys and values."""
        found: list[SizedValue] = []
        while not self._accept("}"):
            found.append(self._condition())
            self._expect(":")
            found.append(self._condition())
            if not self._accept(","):
                self._expect("}")
                break
        return found

    def _named(self, name: str) -> SizedValue:
        """Parse the text after a name: arguments if it is a function, otherwise nothing.

        Return the size of the value.
        """
        self._spend(self._iterations())
        if self._accept("("):
            return self._called(name, [])
        for level in range(len(self._loops), 0, -1):
            loop = self._loops[level - 1]
            if loop.name == name:
                return loop.over if loop.over.level is None else SizedValue(level, 1)
        if name not in _CONSTANTS:
            self.names.add(name)
            return SizedValue(0, 1)
        return NOTHING


# Costs of `matches`.

_PIECE: Final = re.compile(
    r"\[\^?\]?(?:\\.|\[:[^\]]*:\]|[^\]\\])*\]|\{(\d*),?(\d*)\}|\\(?:[pP]\{[^}]*\}|.)|.", re.DOTALL
)
_HIDDEN: Final = re.compile(r"\\[xXuU0-7]")  # in a text that is not raw they may stand for a backslash
_VERBOSE: Final = re.compile(r"\(\?[A-Za-z-]*x")
_STATES: Final = {**dict.fromkeys("wWpP", 300), **dict.fromkeys("dDsS", 40)}
CLASS_STATES: Final = 4
STATE_STEPS: Final = 10  # steps to compile one state
BOUNDARY_STEPS: Final = 20  # for each state and piece of text: a word boundary prevents the fast matcher
FAST_STATES: Final = 8  # states that together cost one step for each piece of text


def _pattern_steps(literal: str) -> tuple[float, float]:
    """Return the steps to compile a regular expression, and the steps to match it with a piece of text.

    A piece has TEXT_PIECE bytes. `literal` is the CEL literal with its prefix and quotes. Raises MappingError
    if the pattern is too long, is verbose, or has numeric escapes in a literal that is not raw.
    """
    if len(literal) > PATTERN_BYTES_MAX:
        raise MappingError(f"matches: a pattern has at most {PATTERN_BYTES_MAX} characters")
    pattern = literal.strip("rRbB")[1:-1]
    if not set("rR") & set(literal[:2]):
        pattern = pattern.replace("\\\\", "\0")
        if _HIDDEN.search(pattern):
            raise MappingError("matches: a pattern is written without \\x, \\u and octal numbers")
        pattern = pattern.replace("\0", "\\")
    if _VERBOSE.search(pattern):
        raise MappingError("matches: a pattern must not use the verbose flag")
    states = _count_states(pattern)
    bounded = re.search(r"\\[bB]", pattern) is not None
    return states * STATE_STEPS, states * BOUNDARY_STEPS if bounded else 1 + states / FAST_STATES


def _count_states(pattern: str) -> float:
    """Estimate the number of states of the automaton for a regular expression.

    The states of a repeated part are counted once for each possible repetition.
    """
    groups = [[0.0, 0.0]]  # for each open group: the states before its last part, and those of this part
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
