"""Base of pydantic models whose fields are described by a string literal below each field.

Pydantic can read these texts when a class is created (`use_attribute_docstrings`), which takes a fifth of the
gateway's start time. Only a JSON Schema uses them, so they are read when one is created.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class Documented(BaseModel):
    """Base class of models in whose JSON Schema the string literal below a field describes the field."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in attribute_docs(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


@cache
def attribute_docs(model: type) -> dict[str, str]:
    """Return the string literals below the fields of a model and its base classes, by field name."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, Documented) and kind is not Documented:
            found.update(_texts(kind))
    return found


def _texts(kind: type) -> Iterator[tuple[str, str]]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    for field, below in pairwise(tree.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield field.target.id, inspect.cleandoc(below.value.value)
