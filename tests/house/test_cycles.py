"""No file imports one that imports it, be it over others or only for its types: such files are one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.house.sources import OURS, ROOT, nodes_of


def test_no_file_imports_itself_over_others() -> None:
    cycles = circles({name: set(imported(path)) for name, path in MODULES.items()})
    assert cycles == [], "\n".join(" <-> ".join(sorted(cycle)) for cycle in cycles)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}) == [{"a", "b", "c"}]
    assert circles({"a": {"a"}, "b": {"c", "x"}, "c": {"b"}}) == [{"b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"d"}, "c": {"d"}, "d": set()}) == []


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES: Final = {_module(path): path for path in OURS}


def imported(path: Path) -> Iterator[str]:
    """The files of ours that a file imports, anywhere in it."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = [f"{node.module}.{name.name}" for name in node.names]
            yield from (name if name in MODULES else node.module for name in whole)


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of names, of two or more, that reach each other."""
    reached = {name: _reached(graph, name) for name in graph}
    found: list[set[str]] = []
    for name in graph:
        if not any(name in cycle for cycle in found):
            cycle = {other for other in reached[name] if name in reached.get(other, ())} | {name}
            found += [cycle] if len(cycle) > 1 else []
    return found


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        for name in graph.get(ahead.pop(), set()) - found:
            found.add(name)
            ahead.append(name)
    return found
