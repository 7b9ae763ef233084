"""Groups of commands whose modules are imported only when a command of them is needed.

A module of commands holds their arguments, options and texts. A command imports what it needs only when it
runs, so that help and completion are fast, and no command loads the imports of another one.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

COMPLETE: Final = "_GATEWAY_COMPLETE"
"""Environment variable that a shell sets when it requests completions."""


class Commands(Mapping[str, Any]):
    """Commands of a package by name, imported on access.

    `files` maps each name to the module that has the command in its attribute `app`.
    """

    def __init__(self, package: str, files: Mapping[str, str]) -> None:
        self._package = package
        self._files = files
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        file = self._files[name]
        if name not in self._made:
            app: typer.Typer = importlib.import_module(f"{self._package}.{file}").app
            _write_plainly(app)
            self._made |= get_group(app).commands
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def group_of(package: str, files: Mapping[str, str]) -> type[TyperGroup]:
    """Return a class of groups that have these commands of a package."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands: Any = Commands(package, files)

    return Group


def _write_plainly(app: typer.Typer) -> None:
    """Turn off colours and boxes, which take longer than everything else in `--help`."""
    app.rich_markup_mode = None
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _write_plainly(group.typer_instance)
