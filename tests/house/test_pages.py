"""What the pages for developers say of rooms, files and classes is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from tests.house.sources import OURS, ROOT, nodes_of

DEVELOPING: Final = ROOT / "docs" / "developing"
WORDS_MAX: Final = 40  # so that most words mean what the field means by them
NOT_ROOMS: Final = frozenset(("__init__.py", "__main__.py", "__pycache__", "py.typed"))


def rows_of(text: str) -> Iterator[list[str]]:
    """The cells of each row of a page's tables, without their heads."""
    for line in text.splitlines():
        if line.startswith("| ") and not line.startswith("|---"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def test_every_room_stands_in_the_architecture() -> None:
    text = (DEVELOPING / "architecture.md").read_text(encoding="utf-8")
    told = {name.rstrip("/") for row in rows_of(text) for name in re.findall(r"`([a-z_./]+)`", row[0])}
    there = {path.name for path in (ROOT / "gateway").iterdir() if not path.name.endswith(".so")}
    assert told - {"gateway"} == there - NOT_ROOMS
    drawn = set(re.findall(r"[a-z_]+", text.split("```")[1]))
    assert {name.removesuffix(".py") for name in there - NOT_ROOMS} - drawn == set()


def test_every_room_is_tested_by_a_folder() -> None:
    named = {"app", "clients"}  # said in words; tests/clients are others' programs
    rooms = {path.name for path in (ROOT / "gateway").iterdir() if (path / "__init__.py").exists()}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir()} - {"__pycache__"}
    assert rooms - folders <= named
    told = (DEVELOPING / "testing.md").read_text(encoding="utf-8")
    assert {one for one in folders - rooms if f"`tests/{one}`" not in told} == set()
    assert "`tests/blocking_clients`" in told


class Word(NamedTuple):
    """A row of the word list: its words, the files and folders named, and what they are said to define."""

    words: str
    places: list[Path]
    names: list[str]


def word_of(row: list[str]) -> Word:
    named = re.findall(r"`([^`]+)`", row[2])
    places: list[Path] = []
    for name in named:
        if name.startswith("gateway/"):
            places.append(ROOT / name)
        elif name.endswith(".py"):  # beside the one before
            places.append(places[-1].parent / name)
    return Word(row[0], places, [name for name in named if name.isidentifier()])


WORDS: Final = [
    word_of(row)
    for row in rows_of((DEVELOPING / "words.md").read_text(encoding="utf-8"))
    if row != ["word", "means", "in"]
]


def defined_in(place: Path) -> set[str]:
    """The classes, functions and other names that a file, or a folder, defines."""
    found: set[str] = set()
    for path in OURS:
        if path == place or place in path.parents:
            for node in nodes_of(path):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
    return found


@cache
def classes() -> set[str]:
    """Those of all files."""
    return {node.name for path in OURS for node in nodes_of(path) if isinstance(node, ast.ClassDef)}


def wrong_in(word: Word) -> Iterator[str]:
    """What a row says that is not so."""
    if not word.places:
        yield "names no file"
    yield from (f"{place} is not there" for place in word.places if not place.exists())
    expected = set(word.names)
    for one in word.words.split(", "):
        parts = re.split("[ -]", one)
        named = "".join(part.capitalize() for part in parts)
        if len(parts) > 1 and named in classes():  # one word alone may be another's, too
            expected.add(named)
    yield from (f"{name} is elsewhere" for name in expected - set().union(*map(defined_in, word.places)))


def test_a_word_is_where_the_list_says() -> None:
    assert 20 < len(WORDS) < WORDS_MAX
    assert {word.words: found for word in WORDS if (found := list(wrong_in(word)))} == {}
