"""The rules of the house that no linter knows: theories, words, and which way imports point.

Sizes are not among them: a class and its methods live in one file, even a long one.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from importlinter.application.use_cases import lint_imports
from importlinter.configuration import configure

from tests.house.sources import OURS, ROOT, nodes_of

# What the field calls otherwise, or what meant several things here: see docs/developing/words.md.
BANNED_CLASSES: Final = frozenset(
    (
        *(
            "Announced",
            "Arriving",
            "Aside",
            "Backstop",
            "Conversation",
            "Crossing",
            "Deaths",
            "Entering",
            "Entry",
        ),
        *("Facts", "Found", "Incoming", "Intake", "Kept", "Lane", "Lanes", "Leaving", "Need", "Offered"),
        *("Outgoing", "Part", "Passage", "Reaching", "Said", "Standing", "Switch", "Waiting", "Way"),
    )
)
BANNED_WORDS: Final = {"manager", "handler", "helper", "helpers", "util", "utils"}
OPENING: Final = re.compile(r'(#.*\n)*r?"""\S')
WITHOUT_SUBJECT: Final = re.compile(
    r"(It|They|This|These|Those|What|Who|Whom|Whose|Where|How|There|So|The same|As|Of these|Another|Nobody"
    r"|Somebody|Whoever|Everywhere|Whether)\b"
)
UNFINISHED: Final = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")

FILES = sorted(path for room in ("gateway", "tests") for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_a_file_opens_with_its_theory() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    assert [name_of(path) for path, text in texts.items() if text and not OPENING.match(text)] == []


def documentation(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""


def test_a_docstring_names_its_subject() -> None:
    """Of `gateway/`: a docstring is read alone, in a search result or below a signature."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = {
        name_of(path): texts
        for path in OURS
        if (
            texts := [
                text.partition("\n")[0]
                for node in nodes_of(path)
                if isinstance(node, documented) and WITHOUT_SUBJECT.match(text := documentation(node))
            ]
        )
    }
    assert found == {}


def test_nothing_is_left_unfinished() -> None:
    suspects = [path for path in FILES if UNFINISHED.search(path.read_text(encoding="utf-8"))]
    found = {
        name_of(path): [text for text in _comments(path) if UNFINISHED.search(text)] for path in suspects
    }
    assert {name: texts for name, texts in found.items() if texts} == {}


def test_names_are_the_projects_own() -> None:
    banned = {
        name_of(path): names
        for path in OURS
        if (names := [name for name in (path.stem, *_defined(path)) if BANNED_WORDS & _words(name)])
    }
    assert banned == {}


def test_classes_have_the_fields_words() -> None:
    """Names of types count, too."""
    banned = {
        name_of(path): names
        for path in OURS
        if (names := [name for name in _types(path) if name.lstrip("_") in BANNED_CLASSES])
    }
    assert banned == {}


def test_a_peer_is_nothing_of_ours() -> None:
    """The word is for the other side of a connection, and for AMQP/Fast's peer services."""
    ours = {
        name_of(path): node.lineno
        for path in OURS
        if path.parent.name != "amqpfast"
        for node in nodes_of(path)
        if isinstance(node, ast.Name | ast.arg | ast.Attribute)
        for name in [getattr(node, "id", "") or getattr(node, "arg", "") or getattr(node, "attr", "")]
        if name.lstrip("_") == "peer"
    }
    assert ours == {}


def test_a_room_says_what_it_is_for() -> None:
    rooms = {path.parent / "__init__.py" for path in OURS}
    assert [name_of(room) for room in rooms if not ast.get_docstring(_module(room))] == []


def test_imports_point_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    configure()
    assert lint_imports(cache_dir=None), "run lint-imports to see what broke"


def _module(path: Path) -> ast.Module:
    module = nodes_of(path)[0]
    assert isinstance(module, ast.Module)
    return module


def _comments(path: Path) -> Iterator[str]:
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.string


def _defined(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name


def _types(path: Path) -> Iterator[str]:
    """Classes, and what else a module names at its top."""
    for node in _module(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (name.asname for name in node.names if name.asname)
    yield from (node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef))


def _words(name: str) -> set[str]:
    """`_EventHandler` and `event_handler` are both {event, handler}."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}


def test_a_class_name_means_one_class() -> None:
    """Of `gateway/`. The packages of the protocols have one shape, and so the same names in each."""
    places: dict[str, list[str]] = {}
    for path in OURS:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name_of(path))
    twice = {
        name: paths
        for name, paths in places.items()
        if len(paths) > 1 and not all(path.startswith("gateway/protocols/") for path in paths)
    }
    assert twice == {}
