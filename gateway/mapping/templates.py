"""Templates that build the address and the headers of a crossed message from the captures of its route.

A template is split at the target's separator before names are replaced, so the text of a captured level can
never change the number of levels. A name that stands for several levels (`{rest...}`, or the whole `{topic}`)
must be alone between two separators and inserts each of its levels; a name of one level may be a part of
a level (`dev-{id}`). `{{` and `}}` are braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Final, NamedTuple

from gateway.errors import MappingError
from gateway.mapping.patterns import WORDS_OF_SENDER, Captures, Pattern, PatternToken, TokenKind
from gateway.model.dialect import Dialect, Levels
from gateway.model.properties import Value, ValueType, string

Values = Callable[[str], Levels]
_PIECE: Final = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}|[{}]|[^{}]+")


class Name(NamedTuple):
    """A reference in a template, by the name that it refers to."""

    name: str


class Vocabulary(NamedTuple):
    """Names that a route's templates may use: those of several levels (`several`), and all (`names`)."""

    several: frozenset[str]
    names: frozenset[str]


def vocabulary(pattern: Pattern) -> Vocabulary:
    """Return the names that templates of a route from `pattern` may use.

    They are its captures, the words of its address and of the sender, and `endpoint`.
    """
    rest = {token.text for token in pattern.tokens if token.kind is TokenKind.REST and token.text}
    dialect = pattern.dialect
    return Vocabulary(
        frozenset(rest.union(dialect.level_words)),
        frozenset((*pattern.names, *dialect.address_words, *WORDS_OF_SENDER, "endpoint")),
    )


def unknown_name(name: str, known_names: Iterable[str]) -> str:
    """Return the text of an error about `name`, with a similar known name, or else all known names."""
    options = sorted(known_names)
    near = get_close_matches(name, options, 1)
    return f"unknown name {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"known: {', '.join(options)}"
    )


def _pieces(text: str, words: Vocabulary) -> list[str | Name]:
    found: list[str | Name] = []
    for piece in _PIECE.finditer(text):
        if piece[1]:
            if piece[1] not in words.names:
                raise MappingError(f"{text!r}: {unknown_name(piece[1], words.names)}")
            if piece[2] and piece[1] not in words.several:
                raise MappingError(f"{text!r}: {{{piece[1]}}} is one level; write it without the dots")
            found.append(Name(piece[1]))
        elif piece[0] in ("{", "}"):
            raise MappingError(f"{text!r}: a brace that belongs to no name; write {{{{ or }}}} for a brace")
        else:
            found.append(piece[0][0] if piece[0] in ("{{", "}}") else piece[0])
    return found


class Template:
    """A template of a name in a protocol's form, with references in it.

    `levels` holds the pieces of each level; `names` the names that it refers to. Raises MappingError for
    a name that the route does not know or that is in a place where it is not allowed.
    """

    __slots__ = ("levels", "names", "per_message", "separator", "text")

    def __init__(self, text: str, dialect: Dialect, words: Vocabulary) -> None:
        self.text = text
        self.separator = dialect.separator
        self.levels: list[list[str | Name]] = [[]]
        for piece in _pieces(text, words):
            if isinstance(piece, Name):
                self.levels[-1].append(piece)
                continue
            first, *more = piece.split(self.separator)
            self.levels[-1].append(first)
            self.levels.extend([level] for level in more)
        self.levels = [[piece for piece in level if piece != ""] for level in self.levels]
        for level in self.levels:
            for piece in level:
                if isinstance(piece, Name) and piece.name in words.several and len(level) > 1:
                    raise MappingError(
                        f"{text!r}: {{{piece.name}...}} stands alone between two {self.separator!r}"
                    )
        if not text:
            self.levels = []
        self.names = frozenset(
            piece.name for level in self.levels for piece in level if isinstance(piece, Name)
        )
        self.per_message = not self.names.isdisjoint(WORDS_OF_SENDER)

    def render(self, values: Values) -> str:
        """Return the name with each placeholder replaced by its value.

        `values` returns the levels of a placeholder's value, encoded for the target's protocol.
        """
        levels: list[str] = []
        for level in self.levels:
            if len(level) == 1 and isinstance(level[0], Name):
                levels.extend(values(level[0].name))
            else:
                texts = (values(piece.name)[0] if isinstance(piece, Name) else piece for piece in level)
                levels.append("".join(texts))
        return self.separator.join(levels)

    def literal_bytes(self) -> int:
        """Count the bytes of the template's own text, without references and separators."""
        texts = (piece for level in self.levels for piece in level if isinstance(piece, str))
        return sum(len(text.encode()) for text in texts)

    def pattern(self, dialect: Dialect, scope: str, several: frozenset[str]) -> Pattern | None:
        """Build the pattern of the names that this template makes.

        Return None if a level holds more than one piece. A name used twice becomes two captures (`name`, then
        `name '`), which `agree` joins again.
        """
        tokens: list[PatternToken] = []
        used: set[str] = set()
        for level in self.levels:
            if len(level) > 1:
                return None
            if not level or isinstance(level[0], str):
                tokens.append(PatternToken(TokenKind.LITERAL, str(level[0]) if level else ""))
                continue
            name = level[0].name
            tokens.append(
                PatternToken(TokenKind.REST if name in several else TokenKind.ONE, _fresh(name, used))
            )
        return Pattern(dialect, tuple(tokens), scope)


def _fresh(name: str, used: set[str]) -> str:
    while name in used:
        name += " '"
    used.add(name)
    return name


def agree(captures: Captures) -> Captures | None:
    """Join the captures of repeated names. Return None if a repeated name has two values."""
    joined: Captures = {}
    for key, levels in captures.items():
        if joined.setdefault(key.rstrip(" '"), levels) != levels:
            return None
    return joined


def nothing(name: str) -> Levels:
    """Raise AssertionError: the values for a template without references."""
    raise AssertionError(name)


class Text:
    """A header's template: nothing is escaped, and several levels are joined by the source's separator."""

    __slots__ = ("_pieces", "names", "per_message")

    def __init__(self, text: str, words: Vocabulary) -> None:
        self._pieces = _pieces(text, words)
        self.names = frozenset(piece.name for piece in self._pieces if isinstance(piece, Name))
        self.per_message = not self.names.isdisjoint(WORDS_OF_SENDER)

    def render(self, value: Callable[[str], str]) -> str:
        """Build the text; `value` returns the text of a reference in the source's form."""
        return "".join(value(piece.name) if isinstance(piece, Name) else piece for piece in self._pieces)


def typed_value(value: str | int | float | bool) -> Value:
    """Convert a header value from YAML to a `Value`. Raises MappingError if an integer exceeds 64 bits."""
    if isinstance(value, bool):
        return Value(ValueType.BOOL, value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise MappingError(f"{value} has more than 64 bits")
        return Value(ValueType.INT64, value)
    if isinstance(value, float):
        return Value(ValueType.DOUBLE, value)
    return string(value)
