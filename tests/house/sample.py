"""`python -m tests.house.sample --seed 1`: sentences to be judged by a reader who sees nothing else.

Prints docstrings with their signatures, log events and sentences of guides, drawn at random. The reader says
of each what it means; a second reader compares that with the code. The same seed draws the same sample from
the same files.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from typing import Final

from tests.house.sources import OURS, ROOT, nodes_of

SENTENCE: Final = re.compile(r"[A-Z][^.|]{40,220}\.(?=\s)")
LEVEL: Final = re.compile(r"^### (error|warning|info|debug)\n(.*?)(?=^#|^<!-- end)", re.MULTILINE | re.DOTALL)
EVENT: Final = re.compile(r"^\| ((?!event )[a-zA-Z][^|]* \| [^|]*) \|$", re.MULTILINE)


def docstrings() -> Iterator[str]:
    """Yield each function and class with a docstring: file, signature and docstring."""
    for path in OURS:
        for node in nodes_of(path):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            text = ast.get_docstring(node)
            if text:
                head = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
                yield f"{path.relative_to(ROOT)}: {node.name}{head}\n    {text}"


def events() -> list[str]:
    """Return the log events of the reference, with their levels and facts."""
    text = (ROOT / "docs" / "reference" / "log.md").read_text(encoding="utf-8")
    return [f"{level}: {row}" for level, rows in LEVEL.findall(text) for row in EVENT.findall(rows)]


def sentences() -> Iterator[str]:
    """Yield sentences of guides, tutorials and pages for developers."""
    for folder in ("guides", "tutorials", "developing"):
        for path in sorted((ROOT / "docs" / folder).glob("*.md")):
            for paragraph in path.read_text(encoding="utf-8").split("\n\n"):
                if (found := SENTENCE.match(paragraph)) is not None:  # later ones lean on the first
                    yield f"{path.relative_to(ROOT)}: {' '.join(found[0].split())}"


def main() -> None:
    """Print the sample."""
    parser = argparse.ArgumentParser(prog="python -m tests.house.sample", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docstrings", type=int, default=150)
    parser.add_argument("--events", type=int, default=60)
    parser.add_argument("--sentences", type=int, default=60)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    kinds = ("docstrings", list(docstrings())), ("events", events()), ("sentences", list(sentences()))
    for kind, found in kinds:
        print(f"# {kind}, of {len(found)}\n")
        for number, text in enumerate(chance.sample(found, min(getattr(chosen, kind), len(found))), 1):
            print(f"{number}. {text}\n")


if __name__ == "__main__":
    main()
