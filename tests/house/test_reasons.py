"""Reasons that users read are sentences: never empty, and never one word."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from tests.house.sources import OURS, ROOT, nodes_of


@cache
def constants() -> dict[str, str]:
    """Return the texts that modules of the gateway have names for."""
    return {
        target.id: node.value.value
        for path in OURS
        for node in nodes_of(path)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.isupper() and isinstance(node.value.value, str)
    }


def texts_of(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression may be, as far as its source names them; a value in one is `x`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(one.value) if isinstance(one, ast.Constant) else "x" for one in node.values)
    elif isinstance(node, ast.Name) and node.id in constants():
        yield constants()[node.id]
    elif isinstance(node, ast.IfExp):
        yield from (*texts_of(node.body), *texts_of(node.orelse))
    elif isinstance(node, ast.BoolOp):
        for value in node.values:
            yield from texts_of(value)


def reasons_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each `why` and of each outcome that is no success."""
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        given = [word.value for word in node.keywords if word.arg == "why"]
        if (
            isinstance(node.func, ast.Name)
            and node.func.id == "Outcome"
            and "ACCEPTED" not in ast.unparse(node)
        ):
            given.append(node.args[2] if len(node.args) > 2 else ast.Constant(""))
        yield from ((node.lineno, text) for one in given for text in texts_of(one))


def test_no_reason_is_empty_or_one_word() -> None:
    found = [(path, line, text) for path in OURS for line, text in reasons_in(nodes_of(path))]
    assert len(found) > 50, "the reasons are not found any more"
    poor = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}" for path, line, text in found if " " not in text.strip()
    ]
    assert poor == []


@pytest.mark.parametrize(
    "source", ['deny(why="no")', "Outcome(Verdict.REJECTED, Reason.FULL)", 'f(why=a or "x")']
)
def test_a_poor_reason_is_found(source: str) -> None:
    assert [text for _, text in reasons_in(ast.walk(ast.parse(source))) if " " not in text]
