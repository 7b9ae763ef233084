"""Draw mutants of some files with a seed, and print one JSON object for each.

This file runs in an environment of its own that has cosmic-ray, whose operators make the mutants. Mutants of
annotations, which have no effect, are left out, and those of a module's constants, which are tuned figures.

    python mutants.py COUNT SEED FILE...
"""

from __future__ import annotations

import ast
import difflib
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final, NamedTuple

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# They need a configuration, or what they make fails when it is imported.
LEFT_OUT: Final = ("VariableInserter", "VariableReplacer", "RemoveDecorator", "ExceptionReplacer")


class Place(NamedTuple):
    """One mutation that an operator can make in a file."""

    path: Path
    operator: str
    occurrence: int


def places_of(path: Path) -> dict[int, list[Place]]:
    """Return all possible mutations of a file, by line."""
    found: dict[int, list[Place]] = defaultdict(list)
    tree = get_ast(path.read_text())
    for name in sorted(operator_names()):
        if name.endswith(LEFT_OUT):
            continue
        operator, count = get_operator(name)(), 0
        nodes = [tree]
        while nodes:
            node = nodes.pop(0)
            for (line, _), _ in operator.mutation_positions(node):
                found[line].append(Place(path, name, count))
                count += 1
            nodes[:0] = getattr(node, "children", [])
    return found


class Essence(ast.NodeTransformer):
    """Removes what has no effect: annotations, and constants at the head of a module."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [one for one in node.body if not isinstance(one, ast.Assign | ast.AnnAssign)]
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant("")
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node


def essence(code: str) -> str:
    """Return what a program does, without positions."""
    return ast.dump(Essence().visit(ast.parse(code)))


def mutated(place: Place) -> str | None:
    """Return the text of a mutant, or None if it is no program or does the same."""
    code = place.path.read_text()
    changed = mutate_code(code, get_operator(place.operator)(), place.occurrence)
    try:
        return None if changed is None or essence(changed) == essence(code) else changed
    except SyntaxError:
        return None


def main(count: int, seed: int, files: list[str]) -> None:
    """Print `count` mutants of some files: lines are drawn first, then a mutation of the line."""
    chance = random.Random(seed)
    lines: list[list[Place]] = []
    for file in files:
        lines += places_of(Path(file)).values()
    chance.shuffle(lines)
    for places in lines:
        if not count:
            return
        place = chance.choice(places)
        text = mutated(place)
        if text is None:
            continue
        count -= 1
        lines_before, lines_after = place.path.read_text().splitlines(), text.splitlines()
        diff = list(difflib.unified_diff(lines_before, lines_after, str(place.path), "", "", "", 1, ""))
        print(json.dumps({"path": str(place.path), "text": text, "diff": diff[2:]}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
