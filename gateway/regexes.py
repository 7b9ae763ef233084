r"""Regular expressions of users and of imported definitions, matched in time linear in the text's length.

Python's `re` tries every way in which an expression may match: `^(a+)+$` takes hours for a name of 60
letters. RE2 does not, and therefore has no look-around, no back-references, and no `\Z` (`\z` is the same).
`$` is the end of the text, `\d` and `\w` are ASCII. An expression that RE2 does not support is rejected
when it is compiled.
"""

from __future__ import annotations

from typing import Final

import re2

OPTIONS: Final = re2.Options()
OPTIONS.log_errors = False
WITH_LINE_BREAKS: Final = re2.Options()
WITH_LINE_BREAKS.log_errors = False
WITH_LINE_BREAKS.dot_nl = True
REMEMBERED_MAX: Final = 256  # texts and results: the same names are checked again and again


class RegexError(ValueError):
    """Error for a text that is not a regular expression, or one that RE2 does not support."""


class Regex:
    """Compiled regular expression. `pattern` is its text."""

    __slots__ = ("_compiled", "_found", "pattern")

    def __init__(self, pattern: str, *, dot_is_any: bool = False, memory_bytes_max: int = 0) -> None:
        """Compile a regular expression. Raises RegexError.

        With `dot_is_any` a dot also matches line breaks. `memory_bytes_max` limits the memory of the compiled
        expression, and thereby the time for a match; 0 stands for RE2's own limit.
        """
        self.pattern = pattern
        self._found: dict[str, bool] = {}
        try:
            data = pattern.encode()
            options = WITH_LINE_BREAKS if dot_is_any else OPTIONS
            if memory_bytes_max:
                options = _limited(memory_bytes_max, dot_is_any)
            self._compiled = re2.compile(data, options)
        except UnicodeEncodeError:
            raise RegexError("it is not valid Unicode") from None
        except re2.error as error:
            reason = error.args[0].decode(errors="replace") if error.args else "it is not valid"
            raise RegexError(
                f"{reason} (in the syntax of RE2: no look-around, no back-references, \\z for \\Z)"
            ) from None

    def search(self, text: str) -> bool:
        """Return True if the expression matches anywhere in `text`.

        Text that is not valid Unicode never matches.
        """
        found = self._found.get(text)
        if found is None:
            try:
                found = self._compiled.search(text.encode()) is not None
            except UnicodeEncodeError:
                found = False
            if len(self._found) >= REMEMBERED_MAX:
                self._found.clear()
            self._found[text] = found
        return found


def _limited(memory_bytes_max: int, dot_is_any: bool) -> re2.Options:
    options = re2.Options()
    options.log_errors = False
    options.dot_nl = dot_is_any
    options.max_mem = memory_bytes_max
    return options


def quote(text: str) -> str:
    """Return a regular expression that matches `text` literally. Raises RegexError for invalid Unicode."""
    try:
        return str(re2.escape(text))
    except UnicodeEncodeError:
        raise RegexError("it is not valid Unicode") from None


def wildcard_regex(pieces: list[str]) -> Regex:
    """Return an expression that matches a text with gaps; `pieces` are the texts around the gaps.

    The whole text must match: it begins with the first piece, ends with the last one, and may have any text
    between two pieces.
    """
    return Regex(rf"\A(?:{'.*'.join([quote(piece) for piece in pieces])})\z", dot_is_any=True)
