"""Patterns and target templates of routes, each compiled to a Python expression over the levels of a name.

A route is read once, but evaluated for each new address, and a fleet of devices has more addresses than any
cache holds. A pattern is a test of some levels of a name, a template builds a list of levels. Both are known
when the mapping file is read, so they are compiled then. Routes of the same shape share the code and differ
in its literals. Routes that cannot be compiled (several multi-level wildcards, the sender, a queue's name)
are interpreted by patterns.py and templates.py, which also define what the compiled code has to do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final, cast

from gateway.mapping.names import LevelTranslation, changes
from gateway.mapping.patterns import Pattern, TokenKind, Tokens
from gateway.mapping.templates import Name, Template
from gateway.model.dialect import Levels

MatchesLevels = Callable[[Levels], bool]
RenderLevels = Callable[[str, Levels], str]
Code = Callable[..., object]
TRANSLATE: Final = "translate"  # the parameter of the compiled code that holds the translation
SHAPES_MAX: Final = 4_096  # shapes of routes whose compiled code is cached


def compile_level_test(pattern: Pattern) -> MatchesLevels | None:
    """Compile a pattern to a function that takes the levels of a name, and returns True if they match.

    Return None if the pattern has several multi-level wildcards. If the pattern begins with a wildcard, do
    not call the function for a hidden name (`$...`), because such a pattern does not match hidden names.
    """
    tokens = pattern.tokens
    rest = _only_rest(tokens)
    if rest is None:
        return None
    count = len(tokens)
    tests = [f"len(levels) == {count}" if rest == count else f"len(levels) >= {count - 1}"]
    literals: list[str] = []
    tests += [
        f"levels[{_place(tokens, at)}] == {_literal(token.text, literals)}"
        for at, token in enumerate(tokens)
        if token.kind is TokenKind.LITERAL
    ]
    return cast("MatchesLevels", _code(f"lambda levels: {' and '.join(tests)}", literals))


def compile_template(
    pattern: Pattern, template: Template, translate: LevelTranslation
) -> RenderLevels | None:
    """Compile a template to a function that returns the target's name for a source name.

    The function takes the source name, which must match `pattern`, and its levels. The function may raise
    NameRefused. Return None if the template depends on more than the levels of the name.
    """
    literals: list[str] = []
    parts = _parts(pattern, template, literals)
    if parts is None:
        return None
    separator = template.separator
    # Both have the translation as a parameter; `plain` is for names in which there is nothing to translate.
    plain, full = (
        _code(f"lambda levels, {TRANSLATE}: {separator!r}.join(({''.join(one)}))", literals)
        for one in zip(*parts, strict=True)
    )
    changed = changes(translate)
    joint = "" if changed(pattern.dialect.separator) else pattern.dialect.separator

    def make(name: str, levels: Levels) -> str:
        whole = name if joint else name.replace(pattern.dialect.separator, "")
        return str((full if changed(whole) else plain)(levels, translate))

    return make


def _parts(pattern: Pattern, template: Template, literals: list[str]) -> list[tuple[str, str]] | None:
    """Return two Python expressions, as source text, for each level of the template.

    The first expression copies the level, the second one translates it; each ends with a comma. The constant
    texts in the expressions are appended to `literals`. Return None if the template or the pattern cannot be
    compiled.
    """
    places = {
        token.text: at
        for at, token in enumerate(pattern.tokens)
        if token.text and token.kind is not TokenKind.LITERAL
    }
    if _only_rest(pattern.tokens) is None or not template.levels:
        return None
    parts: list[tuple[str, str]] = []
    for level in template.levels:
        both = [_piece(pattern, places, piece, literals) for piece in level]
        if any(one is None for one in both):
            return None
        found = [one for one in both if one is not None]
        if not found:
            parts.append(("'', ", "'', "))
        else:
            plain, full = zip(*found, strict=True)
            parts.append((f"{' + '.join(plain)}, ", f"{' + '.join(full)}, "))
    return parts


def _piece(
    pattern: Pattern, places: dict[str, int], piece: str | Name, literals: list[str]
) -> tuple[str, str] | None:
    """Return two Python expressions, as source text, for one piece of a level in the template.

    The first expression copies the piece, the second one translates it. `places` has the index of each
    capture in the pattern, by name. Return None if the piece cannot be compiled.
    """
    if isinstance(piece, str):
        name = _literal(piece, literals)
        return name, name
    tokens = pattern.tokens
    if piece.name == pattern.dialect.name_word:
        return "*levels", f"*map({TRANSLATE}, levels)"
    if piece.name not in places:
        return None
    at = places[piece.name]
    if tokens[at].kind is TokenKind.ONE:
        one = f"levels[{_place(tokens, at)}]"
        return one, f"{TRANSLATE}({one})"
    behind = len(tokens) - at - 1
    several = f"levels[{at}:{-behind if behind else ''}]"
    return f"*{several}", f"*map({TRANSLATE}, {several})"


def _only_rest(tokens: Tokens) -> int | None:
    """Return the index of the only multi-level wildcard in a pattern.

    Return the number of tokens if the pattern has no such wildcard, and None if it has several.
    """
    rests = [at for at, token in enumerate(tokens) if token.kind is TokenKind.REST]
    if len(rests) > 1:
        return None
    return rests[0] if rests else len(tokens)


def _place(tokens: Tokens, at: int) -> int:
    """Return the index in a name's levels of the level that the token at index `at` matches.

    For a token after the multi-level wildcard the index is negative: it counts from the end.
    """
    rest = _only_rest(tokens)
    assert rest is not None
    return at if at < rest else at - len(tokens)


def _literal(text: str, literals: list[str]) -> str:
    """Append `text` to `literals`. Return the name of the variable that stands for it in compiled code."""
    literals.append(text)
    return f"literal_{len(literals) - 1}"


def _code(function: str, literals: list[str]) -> Code:
    """Compile a lambda from its source text, and return it. Its variables have the values `literals`."""
    return _shared(function, len(literals))(*literals)


@lru_cache(SHAPES_MAX)
def _shared(function: str, literals: int) -> Callable[..., Code]:
    """Compile a lambda that uses the variables `literal_0` and so on; `literals` is their number.

    Return a function that takes the values of these variables, and returns the lambda. The source text of the
    lambda has no text from a mapping file, so that all routes of the same shape share the compiled code.
    """
    names = ", ".join([f"literal_{at}" for at in range(literals)])
    builtins = {"__builtins__": {"len": len, "map": map}}
    made = eval(f"lambda {names}: {function}", builtins)  # noqa: S307 - made of nothing from elsewhere
    return cast("Callable[..., Code]", made)
