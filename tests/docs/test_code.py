"""What the code names in its texts is there: files of this repository, and none outside of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import DOCS, PAGES, ROOT
from tests.house.sources import OURS, nodes_of

NAMED: Final = re.compile(
    r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.(?:html|lock|md|py|toml|txt|yaml)|"
    r"(?:deploy|docs|gateway|mappings|shared|tests)/[\w./-]*\w)(?![\w/-])"
)
"""Names of files, and paths that begin at the root of a repository."""


COMMENT: Final = re.compile(r"(?:^|\s)#[ :].*")


def texts_of(path: Path) -> Iterator[str]:
    """Docstrings, those of attributes too, and comments."""
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
    yield from COMMENT.findall(path.read_text(encoding="utf-8"))


def is_there(name: str, path: Path) -> bool:
    """Whether it is in a folder that the file is in, up to the root, or a shipped mapping."""
    folders = [folder for folder in path.parents if folder.is_relative_to(ROOT)]
    return any((folder / name).exists() for folder in (*folders, ROOT / "mappings"))


def test_files_that_are_named_are_there() -> None:
    lost = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in OURS
        for text in texts_of(path)
        for name in NAMED.findall(text)
        if not is_there(name, path)
    ]
    assert lost == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("see `docs/gone.md`", ["docs/gone.md"]),
        ("(`gone.py`)", ["gone.py"]),
        ("see shared/style.md, rule 5", ["shared/style.md"]),
        ("tests/gone/test_x.py says", ["tests/gone/test_x.py"]),
        ("`a/b`: a topic; `Application/JMS`", []),
        ("`docs/index.md` and `pyproject.toml`", []),
    ],
)
def test_the_test_finds(text: str, found: list[str]) -> None:
    path = ROOT / "gateway" / "errors.py"
    assert [name for name in NAMED.findall(text) if not is_there(name, path)] == found


def test_methods_that_developers_are_told_of_are_there() -> None:
    """`Class.method`, so that these pages are renamed with the code."""
    known: dict[str, set[str]] = {}
    for path in (*OURS, *sorted((ROOT / "tests" / "simulation").glob("*.py"))):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                known.setdefault(node.name, set()).update(
                    one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
                )
    pages = [page for path, page in PAGES.items() if path.is_relative_to(DOCS / "developing")]
    told = {found for page in pages for found in re.findall(r"`([A-Z][a-z]\w*)\.(\w+)`", page.prose)}
    assert told
    assert {(name, method) for name, method in told if method not in known.get(name, ())} == set()
