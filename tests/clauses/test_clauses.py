"""Every statement that binds a server has a row, and every row's test exists."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.clauses.__main__ import lines
from tests.clauses.mqtt import TESTS, VERSIONS, functions, read


@pytest.mark.parametrize("version", VERSIONS)
def test_every_clause_has_one_place(version: str) -> None:
    table = read(version)
    placed = Counter([*table.clients, *[clause for row in table.rows for clause in row.clauses]])
    assert [clause for clause in table.every if not placed[clause]] == []
    assert [clause for clause in placed if clause not in table.every] == []
    assert [clause for clause, count in placed.items() if count > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_every_test_exists(version: str) -> None:
    known = functions()
    assert [row for row in read(version).rows if row.test not in known and not row.reason] == []


def test_the_readmes_tables_are_these() -> None:
    """`python -m tests.clauses` prints them anew."""
    text = (TESTS.parent / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines()) in text
    bound = [sum(len(row.clauses) for row in read(one).rows) for one in VERSIONS]
    assert f"none: {bound[0]} of 5.0 and {bound[1]} of 3.1.1." in text
