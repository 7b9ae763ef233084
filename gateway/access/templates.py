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
    """Replace the placeholders in a text by their values, each passed through `quote`.

    Return None if a value is missing, or if `quote` returns None for a value.
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
    """Replace the placeholders in a topic filter by their values.

    Return None if a value is missing or contains `/`, a wildcard or NUL. Also return None if the filter
    begins with `$` only because of a value.
    """
    filled = fill(text, variables, _one_level)
    if filled is None or (filled[:1] == "$") != (text[:1] == "$"):
        return None  # a user called $SYS may not read $SYS by that name
    return filled


def denied_filter(text: str, variables: Variables) -> str:
    """Replace the placeholders in the topic filter of a denying rule by their values.

    If a value is missing, or contains `/`, a wildcard or NUL, `#` replaces its level and all further levels.
    An incomplete rule thus denies more topics, not fewer.
    """
    levels: list[str] = []
    for level in text.split("/"):
        filled = fill(level, variables, _one_level)
        if filled is None:
            return "/".join((*levels, "#"))
        levels.append(filled)
    return "/".join(levels)


def expression(text: str, variables: Variables) -> Regex | None:
    """Compile a regular expression, after replacing its placeholders by quoted values.

    Return None if `text` is empty (which matches nothing, as in RabbitMQ), if a value is missing, or if the
    resulting expression is invalid or too large.
    """
    try:
        filled = fill(text, variables, quote) if text else None
        return None if filled is None else Regex(filled)
    except RegexError:
        return None


def wildcard(text: str, variables: Variables) -> Regex | None:
    """Compile a pattern in which `*` stands for any characters, after replacing its placeholders.

    The compiled expression matches whole texts only. Return None if a value is missing, or if the expression
    becomes too large.
    """
    pieces = [fill(piece, variables, lambda value: value) for piece in text.split("*")]
    complete = [piece for piece in pieces if piece is not None]
    try:
        return wildcard_regex(complete) if len(complete) == len(pieces) else None
    except RegexError:
        return None


def beginning(text: str, variables: Variables) -> str | None:
    """Replace the placeholders in a name by their values; the name may end in `*`.

    Return None if a value is missing, or contains `*` or `.`.
    """
    return fill(text, variables, lambda value: None if "*" in value or "." in value else value)
