"""The gateway's source files as syntax trees, parsed once for all tests that look at them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
OURS: Final = sorted((ROOT / "gateway").rglob("*.py"))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, the module first."""
    return tuple(ast.walk(ast.parse(path.read_bytes())))
