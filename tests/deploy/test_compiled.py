"""What is compiled, and that what lies in place is not older than its source."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from gateway import is_compiled

ROOT: Final = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe", ROOT / "deploy" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_named_tuple_names_a_class_that_comes_later(recipe: ModuleType) -> None:
    """Compiled, its fields are evaluated when it is made: the later class is a null pointer, a crash."""
    found: list[str] = []
    for path in recipe.sources():
        classes = [one for one in ast.parse((ROOT / path).read_text()).body if isinstance(one, ast.ClassDef)]
        later: set[str] = set()
        for one in reversed(classes):
            if any("NamedTuple" in ast.unparse(base) for base in one.bases):
                fields = [
                    ast.unparse(field.annotation) for field in one.body if isinstance(field, ast.AnnAssign)
                ]
                words = {word for text in fields for word in re.findall(r"\w+", text)}
                found += [f"{path}: {one.name} names {name}" for name in sorted(words & later)]
            later.add(one.name)
    assert found == []


def test_no_interpreted_class_inherits_from_one_that_forbids_it(recipe: ModuleType) -> None:
    """A compiled class without `allow_interpreted_subclasses` raises when its subclass is instantiated."""
    compiled: set[str] = set()
    subclasses: list[tuple[str, str, set[str]]] = []
    sources = set(recipe.sources())
    for path in (one.relative_to(ROOT) for one in sorted((ROOT / "gateway").rglob("*.py"))):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            marks = " ".join(ast.unparse(mark) for mark in node.decorator_list)
            is_open = "allow_interpreted_subclasses=True" in marks or "native_class=False" in marks
            if path not in sources:
                subclasses.append((str(path), node.name, bases))
            elif not is_open and not bases & {"Protocol", "NamedTuple"} and not node.name.endswith("Error"):
                compiled.add(node.name)
    found = [f"{path}: {name}" for path, name, bases in subclasses if bases & compiled]
    assert found == []


def test_the_way_of_a_message_is_compiled(recipe: ModuleType) -> None:
    found = {str(path) for path in recipe.sources()}
    for path in (
        "gateway/broker/dispatcher.py",
        "gateway/ingress/mqtt/connection.py",
        "gateway/model/batch.py",
        "gateway/protocols/amqp091/codec.py",
        "gateway/transport/stream.py",
    ):
        assert path in found
    assert not [path for path in found if path.endswith("__init__.py")]


def test_a_pattern_that_matches_nothing_is_an_error(recipe: ModuleType) -> None:
    with pytest.raises(SystemExit, match="nothing/\\*.py"):
        list(recipe._found(("nothing/*.py",)))


def test_what_is_older_than_its_source_is_found(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "ROOT", tmp_path)
    monkeypatch.setattr(recipe, "__file__", str(tmp_path / "compile.py"))
    (tmp_path / "gateway").mkdir()
    source, built = tmp_path / "gateway" / "a.py", tmp_path / "gateway" / "a.so"
    for path in (tmp_path / "compile.py", source):
        path.touch()
    assert not recipe.is_stale()  # nothing is compiled
    built.touch()
    os.utime(source, (1_000.0, 1_000.0))
    os.utime(tmp_path / "compile.py", (1_000.0, 1_000.0))
    assert not recipe.is_stale()
    os.utime(built, (999.0, 999.0))
    assert recipe.is_stale()
    recipe.remove()
    assert not built.exists()


def test_one_form_runs_throughout(recipe: ModuleType) -> None:
    """An extension for each module of the list, or none at all."""
    there = {str(path).partition(".")[0] for path in recipe.artifacts() if path.parent != Path()}
    assert there == ({str(path).removesuffix(".py") for path in recipe.sources()} if is_compiled() else set())
    assert "mypyc" not in sys.modules
