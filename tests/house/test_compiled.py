"""What compiled modules must not do, though Python and the type checker allow it."""

from __future__ import annotations

import ast
import importlib.util
from collections import defaultdict

from tests.house.sources import ROOT, nodes_of


def compiled() -> list[str]:
    """The modules of deploy/compile.py."""
    spec = importlib.util.spec_from_file_location("compile_", ROOT / "deploy" / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [str(path) for path in module.sources()]


def test_an_error_has_the_type_of_its_name() -> None:
    """mypyc gives a name the type that it has first in a function, and raises TypeError for another: so what
    guards against anything would let it through."""
    found = []
    for name in compiled():
        for function in nodes_of(ROOT / name):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            types: dict[str, set[str]] = defaultdict(set)
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.name and node.type is not None:
                    types[node.name].add(ast.unparse(node.type))
            found += [(name, function.name, word) for word, given in types.items() if len(given) > 1]
    assert found == []


def test_abstract_classes_are_plain_classes() -> None:
    """Subclasses of a compiled ABC share one cache of `isinstance`, so it answers for each other's objects.
    The type checker looks after `abstractmethod` without it, too."""
    found = [
        (name, node.name)
        for name in compiled()
        for node in nodes_of(ROOT / name)
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "ABC" for base in node.bases)
    ]
    assert found == []
