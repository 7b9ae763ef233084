"""Patterns that match addresses, compiled from the words of `from`.

A pattern is a list of tokens over the levels of a name: a literal, one level, or any number of levels (zero
included), the latter two with or without a capture's name. MQTT writes them `+` and `#`, AMQP and AMQP/Fast
`*` and `#`; a capture is `{name}` or `{name...}`. As in MQTT 4.7.1.2 `#` ends a topic filter; in a binding
key it may be anywhere, and there the leftmost matches as many levels as possible. A topic pattern that does
not begin with a literal never matches topics that begin with `$` (MQTT 4.7.2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

from gateway.errors import MappingError
from gateway.mapping.names import split_levels
from gateway.model.address import Address
from gateway.model.dialect import Dialect, Levels
from gateway.protocols import DIALECTS

Captures = dict[str, Levels]

WORDS_OF_SENDER: Final = ("client_id", "user")
WORDS_OF_MESSAGE: Final = ("body", "qos", "retain", "durable", "headers", "content_type", "size")
RESERVED: Final = frozenset(
    (
        *(word for dialect in DIALECTS.values() for word in dialect.address_words),
        *(*WORDS_OF_SENDER, *WORDS_OF_MESSAGE, "endpoint"),
    )
)
PATTERN_LEVELS_MAX: Final = 256  # patterns are compared with each other, level by level
_CAPTURE: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")


class TokenKind(Enum):
    """Kind of a token of a pattern.

    LITERAL matches one level, whose text is that of the token. ONE matches any single level. REST matches any
    number of levels, including none.
    """

    LITERAL = "literal"
    ONE = "one"
    REST = "rest"


class PatternToken(NamedTuple):
    """Token of a pattern.

    `text` is the text of a literal, the name of a capture, or "" for a wildcard without a name.
    """

    kind: TokenKind
    text: str


Tokens = tuple[PatternToken, ...]


def parse_tokens(dialect: Dialect, text: str) -> Tokens:
    """Parse `text`, a topic filter, binding key or destination pattern, into tokens.

    Raises MappingError.
    """
    levels = split_levels(text, dialect.separator)
    if not levels and not dialect.words[dialect.pattern_word].empty:
        raise MappingError(f"a {dialect.pattern_word} has at least one character")
    if len(levels) > PATTERN_LEVELS_MAX:
        raise MappingError(f"a pattern has at most {PATTERN_LEVELS_MAX} levels")
    tokens = [_token(level, dialect.one) for level in levels]
    if dialect.rest_is_last and any(token.kind is TokenKind.REST for token in tokens[:-1]):
        raise MappingError(
            f"{text!r}: '#' and '{{name...}}' may only be the last level of a topic filter (MQTT 4.7.1.2)"
        )
    names = [token.text for token in tokens if token.kind is not TokenKind.LITERAL and token.text]
    for name in names:
        if names.count(name) > 1:
            raise MappingError(f"{text!r}: the name {{{name}}} is used twice")
        if name in RESERVED:
            raise MappingError(f"{text!r}: {name!r} is a reserved word; give the capture another name")
    return tuple(tokens)


def _token(level: str, one: str) -> PatternToken:
    """Parse one level of a pattern. `one` is the protocol's single-level wildcard. Raises MappingError."""
    if level == one:
        return PatternToken(TokenKind.ONE, "")
    if level == "#":
        return PatternToken(TokenKind.REST, "")
    capture = _CAPTURE.fullmatch(level)
    if capture:
        return PatternToken(TokenKind.REST if capture[2] else TokenKind.ONE, capture[1])
    if any(character in level for character in "{}\0" + one + "#"):
        raise MappingError(
            f"{level!r}: a wildcard or capture must fill a whole level: {{name}}, {{name...}}, {one}, #"
        )
    return PatternToken(TokenKind.LITERAL, level)


class Pattern:
    """Pattern of a route, which matches addresses of one protocol.

    `scope` is the exchange or the service. `queue` is the name of a queue to consume from, or None; with a
    queue, `tokens` match any routing key. `first` is the text of the first level if that is a literal,
    otherwise None: to compare it is a fast test that excludes most names.
    """

    __slots__ = ("dialect", "first", "names", "queue", "scope", "tokens")

    def __init__(self, dialect: Dialect, tokens: Tokens, scope: str = "", queue: str | None = None) -> None:
        self.dialect = dialect
        self.tokens = tokens
        self.scope = scope
        self.queue = queue
        self.first = tokens[0].text if tokens and tokens[0].kind is TokenKind.LITERAL else None
        self.names = tuple(
            token.text for token in tokens if token.kind is not TokenKind.LITERAL and token.text
        )

    def accepts_source(self, address: Address, queue: str = "") -> bool:
        """Return True if protocol, scope (exchange or service) and queue match. The name is not compared.

        `queue` is as in `match`.
        """
        if self.queue is None and not queue:
            return address.scope == self.scope and address.protocol == self.dialect.name
        return not self._scope_differs(address, queue)

    def excludes_hidden(self, levels: Levels) -> bool:
        """Return True if these are the levels of a hidden name, which the pattern does not match.

        The first level of a hidden name begins with `$`. A pattern that begins with a wildcard does not match
        it.
        """
        hidden = self.dialect.hidden
        if not hidden or not levels or not levels[0].startswith(hidden):
            return False
        return self.tokens[0].kind is not TokenKind.LITERAL

    def match(self, address: Address, queue: str = "") -> Captures | None:
        """Return the levels that the pattern captures from an address, by name, or None without a match.

        `queue` is the queue from which a link has consumed the message if a route names this queue, otherwise
        "". With a queue, only patterns that name this queue match; routes with other patterns receive the
        message through bindings of their own.
        """
        if self._scope_differs(address, queue):
            return None
        return self.match_levels(self.dialect.levels(address.name))

    def match_levels(self, levels: Levels) -> Captures | None:
        """Return the levels that the pattern captures from a name's levels, or None without a match."""
        return None if self.excludes_hidden(levels) else self.capture(levels)

    def capture(self, levels: Levels) -> Captures | None:
        """Do what `match_levels` does, but let a leading wildcard match hidden names (`$...`), too.

        Use this method for names that the gateway has built.
        """
        spans = _place(self.tokens, levels)
        if spans is None:
            return None
        return {
            token.text: levels[start:end]
            for token, (start, end) in zip(self.tokens, spans, strict=True)
            if token.text and token.kind is not TokenKind.LITERAL
        }

    def mismatch(self, address: Address, queue: str = "") -> str:
        """Return a text for users with the reason why the address does not match, or "" if it matches.

        `queue` is as in `match`.
        """
        differs = self._scope_differs(address, queue)
        if differs:
            return differs
        levels = self.dialect.levels(address.name)
        if self.excludes_hidden(levels):
            return (
                "a wildcard or capture at the first level does not match "
                f"{self.dialect.name_word}s that begin with {self.dialect.hidden!r}"
            )
        if _place(self.tokens, levels) is not None:
            return ""
        for at, token in enumerate(self.tokens):
            if token.kind is TokenKind.REST:
                break
            if at >= len(levels):
                return f"the address has {len(levels)} levels, fewer than the pattern"
            if token.kind is TokenKind.LITERAL and token.text != levels[at]:
                return f"level {at + 1} is {levels[at]!r}, not {token.text!r}"
        else:
            return f"the address has {len(levels)} levels, the pattern only {len(self.tokens)}"
        return f"the levels do not match {self.show()!r}"

    def render(self, captures: Mapping[str, Levels]) -> Levels | None:
        """Return the levels of the name from which this pattern would capture `captures`.

        This is the inverse of `capture`. Return None if a wildcard has no captured levels.
        """
        levels: list[str] = []
        for token in self.tokens:
            if token.kind is TokenKind.LITERAL:
                levels.append(token.text)
            elif token.text not in captures:
                return None
            else:
                levels.extend(captures[token.text])
        return tuple(levels)

    def show(self) -> str:
        """Return the pattern with the wildcards of its protocol, for a subscription or binding."""
        words = {TokenKind.ONE: self.dialect.one, TokenKind.REST: "#"}
        texts = (
            token.text if token.kind is TokenKind.LITERAL else words[token.kind] for token in self.tokens
        )
        return self.dialect.separator.join(texts)

    def literal_prefix(self) -> str:
        """Return the text with which every matching name begins.

        The text ends with the separator before the first wildcard. If the pattern has no wildcard, it is the
        whole name.
        """
        literal: list[str] = []
        for token in self.tokens:
            if token.kind is not TokenKind.LITERAL:
                return "".join(text + self.dialect.separator for text in literal)
            literal.append(token.text)
        return self.dialect.separator.join(literal)

    def leading_literals(self) -> list[tuple[int, str]]:
        """Return the index and text of each literal level before the first multi-level wildcard."""
        found: list[tuple[int, str]] = []
        for at, token in enumerate(self.tokens):
            if token.kind is TokenKind.REST:
                break
            if token.kind is TokenKind.LITERAL:
                found.append((at, token.text))
        return found

    def _scope_differs(self, address: Address, queue: str) -> str:
        """Return the reason why protocol, scope or queue do not match, or "" if they match.

        `queue` is as in `match`.
        """
        if address.protocol != self.dialect.name:
            return f"its source is {self.dialect.name}, not {address.protocol}"
        if self.queue is None:
            if queue:
                return (
                    f"the message was consumed from queue {queue!r}; the source of this route is"
                    f" exchange {self.scope!r}"
                )
            if address.scope != self.scope:
                return f"{self.dialect.scope_word} is {address.scope!r}, not {self.scope!r}"
        elif queue:
            return "" if queue == self.queue else f"queue is {queue!r}, not {self.queue!r}"
        elif address.scope or address.name != self.queue:
            return f"not published to queue {self.queue!r}"
        return ""


def _place(tokens: Tokens, levels: Levels) -> list[tuple[int, int]] | None:
    """Return the range (start, end) of the levels that each token matches, or None without a match.

    If there are several multi-level wildcards, the leftmost one matches as many levels as possible.
    """
    rests = [at for at, token in enumerate(tokens) if token.kind is TokenKind.REST]
    if len(rests) > 1:
        return _place_rests(tokens, levels)
    more = len(levels) - len(tokens)  # levels that the rest matches, besides one
    if (more != 0 and not rests) or more < -1:
        return None
    spans: list[tuple[int, int]] = []
    at = 0
    for token in tokens:
        kind, text = token
        end = at + 1
        if kind is TokenKind.REST:
            end += more
        elif kind is TokenKind.LITERAL and levels[at] != text:
            return None
        spans.append((at, end))
        at = end
    return spans


def _place_rests(tokens: Tokens, levels: Levels) -> list[tuple[int, int]] | None:
    """Do what `_place` does, for tokens with several multi-level wildcards.

    First compute, from the end, which tokens can match all levels from some level on. Then assign the levels
    to tokens, from the start.
    """
    count = len(levels)
    fits = [bytearray(count + 1) for _ in range(len(tokens) + 1)]  # 1: from this token and level on all match
    fits[-1][count] = 1
    for token in range(len(tokens) - 1, -1, -1):
        kind, text = tokens[token]
        here, behind = fits[token], fits[token + 1]
        for at in range(count, -1, -1):
            if kind is TokenKind.REST:
                here[at] = behind[at] or (at < count and here[at + 1])
            elif at < count and (kind is TokenKind.ONE or levels[at] == text):
                here[at] = behind[at + 1]
    if not fits[0][0]:
        return None
    spans: list[tuple[int, int]] = []
    at = 0
    for token, (kind, _) in enumerate(tokens):
        end = fits[token + 1].rindex(1, at) if kind is TokenKind.REST else at + 1
        spans.append((at, end))
        at = end
    return spans


def covers(wide: Pattern, narrow: Pattern) -> bool:
    """Return True if `wide` certainly matches every address that `narrow` matches.

    In rare cases, the result is False although `wide` does match all of them.
    """
    if not _same_scope(wide, narrow) or _first_hidden(wide, narrow):
        return False
    return _covers(wide.tokens, narrow.tokens)


def _covers(wide: Tokens, narrow: Tokens) -> bool:
    """Return True if the tokens `wide` certainly match every name that the tokens `narrow` match."""
    for at, token in enumerate(wide):
        if token.kind is TokenKind.REST:
            return at == len(wide) - 1 or _covers_behind(wide[at:], narrow[at:])
        if at >= len(narrow) or narrow[at].kind is TokenKind.REST:
            return False
        if token.kind is TokenKind.LITERAL and narrow[at] != token:
            return False
    return len(wide) == len(narrow)


def _covers_behind(wide: Tokens, narrow: Tokens) -> bool:
    """Do what `_covers` does, for tokens `wide` that begin with a multi-level wildcard.

    The tokens are compared from the end.
    """
    count = len(narrow)
    behind = bytearray(count + 1)
    behind[count] = 1
    for token in reversed(wide):
        here = bytearray(count + 1)
        for at in range(count, -1, -1):
            if token.kind is TokenKind.REST:
                here[at] = behind[at] or (at < count and here[at + 1])
            elif at < count and narrow[at].kind is not TokenKind.REST:
                here[at] = behind[at + 1] if token.kind is TokenKind.ONE or narrow[at] == token else 0
        behind = here
    return behind[0] == 1


def witness(one: Pattern, other: Pattern) -> Levels | None:
    """Return the levels of a name that both patterns match, or None if there is no such name."""
    if not _same_scope(one, other) or _literals_differ(one.tokens, other.tokens):
        return None
    if _first_hidden(one, other) or _first_hidden(other, one):
        return None
    end = (len(one.tokens), len(other.tokens))
    visited: set[tuple[int, int]] = set()
    stack: list[tuple[tuple[int, int], _LevelPath | None]] = [((0, 0), None)]
    while stack:
        place, way = stack.pop()
        if place == end:
            levels: list[str] = []
            while way is not None:
                if way.level is not None:
                    levels.append(way.level)
                way = way.before
            return tuple(reversed(levels))
        if place in visited:
            continue
        visited.add(place)
        for following, level in reversed(_steps(one.tokens, other.tokens, place)):
            stack.append((following, _LevelPath(level, way)))
    return None


def _literals_differ(one: Tokens, other: Tokens) -> bool:
    """Return True if two literals for the same level differ before the first multi-level wildcard.

    No name then matches both patterns. This fast test often avoids a slower search.
    """
    for a, b in zip(one, other, strict=False):
        if a.kind is TokenKind.REST or b.kind is TokenKind.REST:
            return False
        if a.text != b.text and a.kind is b.kind is TokenKind.LITERAL:
            return True
    return False


class _LevelPath(NamedTuple):
    """Linked list of levels that two patterns have matched step by step; the last level comes first.

    `level` is None for a step at which a multi-level wildcard ends.
    """

    level: str | None
    before: _LevelPath | None


def _steps(one: Tokens, other: Tokens, place: tuple[int, int]) -> list[tuple[tuple[int, int], str | None]]:
    """Return the states after one step from `place`, each with the level that the step matches.

    A state is a pair of token indices, one in each pattern; `place` is one. A step either matches one level
    with both patterns, or ends a multi-level wildcard of one pattern; the level is then None.
    """
    i, j = place
    a = one[i] if i < len(one) else None
    b = other[j] if j < len(other) else None
    steps: list[tuple[tuple[int, int], str | None]] = []
    if a and b and a.kind is not TokenKind.REST and b.kind is not TokenKind.REST:
        if not (a.kind is b.kind is TokenKind.LITERAL and a.text != b.text):
            steps.append(((i + 1, j + 1), _common_text(a, b)))
        return steps
    if a and a.kind is TokenKind.REST:
        steps.append(((i + 1, j), None))
        if b and b.kind is not TokenKind.REST:
            steps.append(((i, j + 1), _common_text(b, b)))
    if b and b.kind is TokenKind.REST:
        steps.append(((i, j + 1), None))
        if a and a.kind is not TokenKind.REST:
            steps.append(((i + 1, j), _common_text(a, a)))
    return steps


def _common_text(a: PatternToken, b: PatternToken) -> str:
    """Return a level that both tokens match: the text of the one that is a literal, or "x" for wildcards."""
    literal = a if a.kind is TokenKind.LITERAL else b
    return literal.text if literal.kind is TokenKind.LITERAL else "x"


def _same_scope(one: Pattern, other: Pattern) -> bool:
    return (one.dialect, one.scope, one.queue) == (other.dialect, other.scope, other.queue)


def _first_hidden(wild: Pattern, literal: Pattern) -> bool:
    """Return True if `literal` begins with a hidden level (`$...`) and `wild` begins with a wildcard.

    No name then matches both, because a leading wildcard does not match hidden names.
    """
    hidden = wild.dialect.hidden
    if not hidden or wild.tokens[0].kind is TokenKind.LITERAL:
        return False
    first = literal.tokens[0]
    return first.kind is TokenKind.LITERAL and first.text.startswith(hidden)
