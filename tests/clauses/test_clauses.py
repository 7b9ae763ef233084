"""Every statement that binds a server has a row, and every row's test exists."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.protocols.amqpfast.spec import ReplyCode, Scope
from tests.clauses import amqpfast
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


def test_every_line_of_the_flow_summaries_has_one_row() -> None:
    placed = Counter((row.clause, command) for row in amqpfast.read().flow for command in row.commands)
    assert placed == Counter(amqpfast.every_flow())


def test_every_section_has_a_row() -> None:
    table = amqpfast.read()
    placed = {row.clause.split()[0] for row in (*table.rows, *table.flow)}
    assert placed == set(table.sections)


def test_every_reply_code_has_a_row_and_no_scope_two() -> None:
    errors = amqpfast.read().errors
    assert {int(row.clause.split()[0]) for row in errors} == set(ReplyCode)
    assert {row.clause.split()[1] for row in errors} == {*(scope.value for scope in Scope), "reply"}
    assert len({row.clause for row in errors}) == len(errors)


def test_every_test_of_amqpfast_exists() -> None:
    table = amqpfast.read()
    assert [row for row in (*table.rows, *table.flow, *table.errors) if not amqpfast.is_there(row)] == []


def test_the_readme_has_the_table_of_amqpfast() -> None:
    readme = (TESTS.parent / "README.md").read_text()
    assert "\n".join(amqpfast.lines()) in readme
