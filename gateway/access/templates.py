"""Placeholders in rules: `{user}`, `{client_id}`, `{vhost}`, and fields of a certificate or token.

Values are filled in literally: a user called `#` gains no rights by that name, nor does a user whose name is
a regular expression. A rule with a placeholder that has no value does not apply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from gateway.regexes import Regex, RegexError, quote, wildcard_regex
from gateway.settings.access import PLACEHOLDER

Variables = Mapping[str, str]
NOT_IN_A_LEVEL: Final = frozenset("/+#\0")


def fill(text: str, variables: Variables, quote: Callable[[str], str | None]) -> str | None:
    """Return a text whose placeholders are replaced by their values, each passed through `quote`.

    Return None if a value is missing, or `quote` returns None for it.
    """
    missing = False

    def replaced(found: re.Match[str]) -> str:
        nonlocal missing
        value = variables.get(found[1], "")
        quoted = quote(value) if value else None
        missing |= quoted is None
        return quoted or ""

    filled = PLACEHOLDER.sub(replaced, text) if "{" in text else text
    return None if missing else filled


def _one_level(value: str) -> str | None:
    return None if NOT_IN_A_LEVEL.intersection(value) else value


def topic_filter(text: str, variables: Variables) -> str | None:
    """Return a topic filter with its placeholders replaced by their values.

    Return None if a value is missing, contains `/`, a wildcard or NUL, or lets the filter begin with `$`.
    """
    filled = fill(text, variables, _one_level)
    if filled is None or (filled[:1] == "$") != (text[:1] == "$"):
        return None  # a user called $SYS may not read $SYS by that name
    return filled


def denied_filter(text: str, variables: Variables) -> str:
    """Return the topic filter of a denying rule with its placeholders replaced by their values.

    If a value is missing, or contains `/`, a wildcard or NUL, the filter ends in `#` at that level. So a rule
    that cannot be completed denies more, not less.
    """
    levels: list[str] = []
    for level in text.split("/"):
        filled = fill(level, variables, _one_level)
        if filled is None:
            return "/".join((*levels, "#"))
        levels.append(filled)
    return "/".join(levels)


def expression(text: str, variables: Variables) -> Regex | None:
    """Compile a regular expression after its placeholders are replaced by their values, taken literally.

    Return None if `text` is empty (it matches nothing, as in RabbitMQ), a value is missing, or the expression
    is then invalid or too large.
    """
    try:
        filled = fill(text, variables, quote) if text else None
        return None if filled is None else Regex(filled)
    except RegexError:
        return None


def wildcard(text: str, variables: Variables) -> Regex | None:
    """Compile a pattern in which `*` stands for any characters, after its placeholders are replaced.

    The expression matches whole texts. Return None if a value is missing, or the expression is too large with
    the values.
    """
    pieces = [fill(piece, variables, lambda value: value) for piece in text.split("*")]
    complete = [piece for piece in pieces if piece is not None]
    try:
        return wildcard_regex(complete) if len(complete) == len(pieces) else None
    except RegexError:
        return None


def beginning(text: str, variables: Variables) -> str | None:
    """Return a name, or a beginning of names followed by `*`, with its placeholders replaced by values.

    Return None if a value is missing or contains `*` or `.`.
    """
    return fill(text, variables, lambda value: None if "*" in value or "." in value else value)
