"""The rules of the house: sizes, names, and which way imports point."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from importlinter.application.use_cases import lint_imports  # type: ignore[import-untyped]
from importlinter.configuration import configure  # type: ignore[import-untyped]

ROOT: Final = Path(__file__).resolve().parents[2]
FILE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 60
FOLDER_MODULES_MAX: Final = 12
BANNED_WORDS: Final = {"manager", "handler", "helper", "helpers", "util", "utils"}
UNFINISHED: Final = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

FILES = sorted(path for room in ("gateway", "tests") for path in (ROOT / room).rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_fits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    length = len(text.splitlines())
    assert length <= FILE_LINES_MAX
    assert ast.get_docstring(tree) or not text, "a file opens with its theory"
    assert [comment for comment in _comments(path) if UNFINISHED.search(comment)] == []
    long = [
        f"{function.name} has {_lines(function)} lines"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and _lines(function) > FUNCTION_LINES_MAX
    ]
    assert long == []


def _comments(path: Path) -> Iterator[str]:
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def _lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.is_relative_to(ROOT / "gateway")], ids=name_of
)
def test_names_are_the_projects_own(path: Path) -> None:
    banned = [name for name in (path.stem, *_defined(path)) if BANNED_WORDS & _words(name)]
    assert banned == []


def _defined(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def _words(name: str) -> set[str]:
    """`_EventHandler` and `event_handler` are both {event, handler}."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_a_folder_holds_a_dozen_modules(folder: Path) -> None:
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= FOLDER_MODULES_MAX


@pytest.mark.parametrize(
    "folder", [folder for folder in FOLDERS if folder.is_relative_to(ROOT / "gateway")], ids=name_of
)
def test_a_room_says_what_it_is_for(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_imports_point_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configure()
    assert lint_imports(cache_dir=None), "run lint-imports to see what broke"
