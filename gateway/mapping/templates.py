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
    """Placeholder in a template, which the value of the variable `name` replaces."""

    name: str


class Vocabulary(NamedTuple):
    """Variables to which the templates of a route may refer.

    `names` has all of them, `several` those that stand for several levels of a name.
    """

    several: frozenset[str]
    names: frozenset[str]


def vocabulary(pattern: Pattern) -> Vocabulary:
    """Return the variables to which the templates of a route from `pattern` may refer.

    These are its captures, the keys of its address (such as `topic`), `client_id`, `user` and `endpoint`.
    """
    rest = {token.text for token in pattern.tokens if token.kind is TokenKind.REST and token.text}
    dialect = pattern.dialect
    return Vocabulary(
        frozenset(rest.union(dialect.level_words)),
        frozenset((*pattern.names, *dialect.address_words, *WORDS_OF_SENDER, "endpoint")),
    )


def unknown_name(name: str, known_names: Iterable[str]) -> str:
    """Return an error text about the unknown variable `name`, which suggests a similar known one.

    If none is similar, the text lists all `known_names`.
    """
    options = sorted(known_names)
    near = get_close_matches(name, options, 1)
    return f"unknown name {name!r}; " + (
        f"did you mean {near[0]!r}?" if near else f"known: {', '.join(options)}"
    )


def _pieces(text: str, words: Vocabulary) -> list[str | Name]:
    """Split a template into constant texts and placeholders.

    Raises MappingError for a placeholder that is not in `words`.
    """
    found: list[str | Name] = []
    for piece in _PIECE.finditer(text):
        if piece[1]:
            if piece[1] not in words.names:
                raise MappingError(f"{text!r}: {unknown_name(piece[1], words.names)}")
            if piece[2] and piece[1] not in words.several:
                raise MappingError(f"{text!r}: {{{piece[1]}}} captures one level; write it without the dots")
            found.append(Name(piece[1]))
        elif piece[0] in ("{", "}"):
            raise MappingError(f"{text!r}: unmatched brace; write {{{{ or }}}} for a literal brace")
        else:
            found.append(piece[0][0] if piece[0] in ("{{", "}}") else piece[0])
    return found


class Template:
    """Template with placeholders for a name in the target's protocol.

    `levels` has the pieces of each level, `names` the variables to which the template refers. Raises
    MappingError for a variable that the route does not have, or that is not permitted at its position.
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
                        f"{text!r}: {{{piece.name}...}} must fill a whole level, between two "
                        f"{self.separator!r}"
                    )
        if not text:
            self.levels = []
        self.names = frozenset(
            piece.name for level in self.levels for piece in level if isinstance(piece, Name)
        )
        self.per_message = not self.names.isdisjoint(WORDS_OF_SENDER)

    def render(self, values: Values) -> str:
        """Return the name that results when each placeholder is replaced.

        `values` takes the name of a variable, and returns its levels, encoded for the target's protocol.
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
        """Return the size in bytes of the template's text outside of placeholders, without separators."""
        texts = (piece for level in self.levels for piece in level if isinstance(piece, str))
        return sum(len(text.encode()) for text in texts)

    def pattern(self, dialect: Dialect, scope: str, several: frozenset[str]) -> Pattern | None:
        """Return a pattern that captures the variables of this template from a name that it has built.

        Return None if a level consists of several pieces. A variable that occurs twice becomes two captures
        (`name` and `name '`); `merge_captures` checks that they are equal. `several` has the variables that
        stand for several levels.
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
                PatternToken(TokenKind.REST if name in several else TokenKind.ONE, _unused_name(name, used))
            )
        return Pattern(dialect, tuple(tokens), scope)


def _unused_name(name: str, used: set[str]) -> str:
    while name in used:
        name += " '"
    used.add(name)
    return name


def merge_captures(captures: Captures) -> Captures | None:
    """Merge the captures that belong to the same variable, because a template uses it several times.

    Return None if they differ.
    """
    joined: Captures = {}
    for key, levels in captures.items():
        if joined.setdefault(key.rstrip(" '"), levels) != levels:
            return None
    return joined


def no_levels(name: str) -> Levels:
    """Raise AssertionError. Parameter of `Template.render` for a template without placeholders."""
    raise AssertionError(name)


class Text:
    """Template of a header's value, with placeholders.

    Values of variables are not encoded. If a variable has several levels, the separator of the source's
    protocol joins them.
    """

    __slots__ = ("_pieces", "names", "per_message")

    def __init__(self, text: str, words: Vocabulary) -> None:
        self._pieces = _pieces(text, words)
        self.names = frozenset(piece.name for piece in self._pieces if isinstance(piece, Name))
        self.per_message = not self.names.isdisjoint(WORDS_OF_SENDER)

    def render(self, value: Callable[[str], str]) -> str:
        """Return the text that results when each placeholder is replaced.

        `value` takes the name of a variable, and returns its text in the notation of the source's protocol.
        """
        return "".join(value(piece.name) if isinstance(piece, Name) else piece for piece in self._pieces)


def typed_value(value: str | int | float | bool) -> Value:
    """Convert a header value from YAML to a `Value`. Raises MappingError for an integer beyond 64 bits."""
    if isinstance(value, bool):
        return Value(ValueType.BOOL, value)
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise MappingError(f"{value} has more than 64 bits")
        return Value(ValueType.INT64, value)
    if isinstance(value, float):
        return Value(ValueType.DOUBLE, value)
    return string(value)
