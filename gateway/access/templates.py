"""Placeholders in rules: `{user}`, `{client_id}`, `{vhost}`, and what a certificate or token says.

What is put in is what it is and nothing more: a user who is called `#` gains nothing by it, nor one whose
name is a regular expression. A rule with a placeholder for which there is nothing does not apply.
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
    """The text with its placeholders filled in, each as `quote` has it; None: one cannot be."""
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
    """A topic filter; a value that is no level, or a wildcard, does not fit in."""
    filled = fill(text, variables, _one_level)
    if filled is None or (filled[:1] == "$") != (text[:1] == "$"):
        return None  # nobody reads $SYS by being called $SYS
    return filled


def denied_filter(text: str, variables: Variables) -> str:
    """The topic filter of a denial. Where a value does not fit in, or there is none, everything is meant from
    that level on: a denial fails closed."""
    levels: list[str] = []
    for level in text.split("/"):
        filled = fill(level, variables, _one_level)
        if filled is None:
            return "/".join((*levels, "#"))
        levels.append(filled)
    return "/".join(levels)


def expression(text: str, variables: Variables) -> Regex | None:
    """Return a regular expression, or None if it is empty (it matches nothing, as in RabbitMQ), a value is
    missing, or it is too large with the values put in."""
    try:
        filled = fill(text, variables, quote) if text else None
        return None if filled is None else Regex(filled)
    except RegexError:
        return None


def wildcard(text: str, variables: Variables) -> Regex | None:
    """A text with `*` for any characters, as a whole."""
    pieces = [fill(piece, variables, lambda value: value) for piece in text.split("*")]
    known = [piece for piece in pieces if piece is not None]
    try:
        return wildcard_regex(known) if len(known) == len(pieces) else None
    except RegexError:
        return None


def beginning(text: str, variables: Variables) -> str | None:
    """A name, or the beginning of names with a `*` behind it; a value never says the `*`."""
    return fill(text, variables, lambda value: None if "*" in value or "." in value else value)
