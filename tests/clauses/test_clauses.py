"""Every statement that binds a server has a row, and every row's test exists."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from gateway.protocols.amqpfast.commands import COMMANDS
from gateway.protocols.amqpfast.spec import ReplyCode, Scope
from tests.clauses import amqpfast
from tests.clauses.mqtt import TESTS, VERSIONS, functions, read
from tests.clauses.tables import lines
from tests.interop.oracle.suite import DIFFERENT, SCRIPTS

PAGES: Final = TESTS.parent / "docs" / "conformance"


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


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pages_tables_are_these(version: str) -> None:
    """`make docs-reference` writes them anew."""
    assert "\n".join(lines(version)) in (PAGES / f"mqtt-{version}.md").read_text(encoding="utf-8")


def test_the_overview_counts_the_clauses() -> None:
    bound = [sum(len(row.clauses) for row in read(one).rows) for one in VERSIONS]
    said = f"{bound[0]} of 5.0 and {bound[1]} of 3.1.1"
    assert said in (PAGES / "index.md").read_text(encoding="utf-8")


def test_the_pages_and_the_readme_count_what_there_is() -> None:
    """Scripts of the oracle, statements that bind a server, lines of flow summaries, commands."""
    bound = sum(len(row.clauses) for row in read("5.0").rows)
    readme = (PAGES.parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"{len(SCRIPTS)} scripts get" in readme
    assert f"Each of the {bound} statements of MQTT 5.0" in readme
    assert f"{len(SCRIPTS)} scripts get" in (PAGES / "index.md").read_text(encoding="utf-8")
    assert len(DIFFERENT) == 4  # as the page says, too
    assert f"{len(SCRIPTS)} scripts get" in (PAGES / "amqp-0-9-1.md").read_text(encoding="utf-8")
    fast = (PAGES / "amqpfast.md").read_text(encoding="utf-8")
    assert f"each of the {Counter(amqpfast.every_flow()).total()} lines of the flow summaries" in fast
    assert f"all {len(COMMANDS)} commands" in fast


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


def test_the_page_has_the_table_of_amqpfast() -> None:
    assert "\n".join(amqpfast.lines()) in (PAGES / "amqpfast.md").read_text(encoding="utf-8")
