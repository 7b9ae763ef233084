"""Tables on the terminal: columns as wide as their contents, one line a row, nothing cut off or wrapped.

A line is the same in a pipe as on a terminal, so that grep finds it. Programs use `--json`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Final

WIDTH_MAX: Final = 100_000  # characters of a line: enough for an address, a reason and some names


def table(
    rows: Iterable[Sequence[object]], headings: Sequence[str] = (), right: Sequence[str] = ()
) -> list[str]:
    """Return the lines of a text table. The columns whose headings are in `right` are aligned right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [[Text(printable(value)) for value in row] for row in rows]
    if not cells:
        return []
    made = Table(box=None, show_header=bool(headings), pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for heading in headings or ("",) * len(cells[0]):
        made.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for row in cells:
        made.add_row(*row)
    console = Console(file=io.StringIO(), width=WIDTH_MAX, color_system=None)
    with console.capture() as captured:
        console.print(made)
    return [line.rstrip() for line in captured.get().splitlines()]


def printable(value: object) -> str:
    """Return a value as one line of text without control characters.

    Names that peers have chosen may contain such characters.
    """
    text = "-" if value is None or value == "" else str(value)
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
