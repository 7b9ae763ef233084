"""Output of findings for all commands, as `FILE:LINE:COLUMN: severity: message (code)`.

Editors and scripts that parse the output of compilers can parse this. A finding without a file or line leaves
that part out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TextIO

from gateway.errors import ConfigurationError

if TYPE_CHECKING:
    from gateway.mapping.linter import Finding

INVALID: Final = "invalid"  # code of faults because of which a file cannot be used
COLOURS: Final = {"error": "\x1b[31m", "warning": "\x1b[33m", "note": "\x1b[2m"}
PLAIN: Final = "\x1b[0m"


def format_finding(
    text: str, severity: str, code: str, file: str = "", line: int = 0, column: int = 0
) -> str:
    """Format one finding as a line of text.

    `line` and `column` count from 1; 0 is unknown.
    """
    place = ":".join([file, *(str(number) for number in (line, column) if number)]) if file else ""
    return f"{place}{': ' if place else ''}{severity}: {text} ({code})"


def lines_of(error: ConfigurationError) -> Iterator[str]:
    """Yield a line of text for each error in a configuration that cannot be used."""
    for one in (error, *error.others):
        yield format_finding(one.reason, "error", INVALID, one.file, one.line, one.column)


def documents_of(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return findings as JSON objects for programs; an unknown file, line or column is null."""
    return [
        {
            "file": one.file or None,
            "line": one.line or None,
            "column": one.column or None,
            "severity": one.severity.value,
            "code": one.code,
            "message": one.text,
        }
        for one in findings
    ]


def show(findings: Iterable[Finding], to: TextIO | None = None) -> None:
    """Print findings to a stream (default: standard output), in colour on a terminal."""
    stream = sys.stdout if to is None else to
    lively = stream.isatty()
    for one in findings:
        severity = one.severity.value
        text = format_finding(one.text, severity, one.code, one.file, one.line, one.column)
        print(f"{COLOURS[severity]}{text}{PLAIN}" if lively else text, file=stream)
