"""Tables of the command line: one line a row, whatever stands in it."""

from __future__ import annotations

from gateway.cli.tables import table


def test_columns_are_as_wide_as_what_is_in_them() -> None:
    rows = [("a", 7, "x"), ("größe/日本", 1_000, None), ("", 0, "z y")]
    assert table(rows, ("name", "count", "who"), right=("count",)) == [
        "name        count  who",
        "a               7  x",
        "größe/日本   1000  -",
        "-               0  z y",
    ]


def test_rows_without_headings() -> None:
    assert table([("a:", 1), ("long:", 2)]) == ["a:     1", "long:  2"]
    assert table([]) == []
    assert table([], ("name",)) == []


def test_nothing_is_cut_off_or_taken_for_markup() -> None:
    long = "[bold]" + "x" * 5_000 + ":smile:"
    assert table([(long, "[/]")], ("a", "b"))[1] == f"{long}  [/]"


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert table([("\x1b[2J\n\r\x07\u202e", "b")]) == ["\\x1b[2J\\n\\r\\x07\\u202e  b"]
