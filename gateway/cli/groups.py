"""Groups whose commands are imported when somebody asks for them.

A file of commands holds their words: arguments, options, texts. What a command needs to run it imports when
it runs, so that help and completion are there at once, and a command pays for no other.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group

COMPLETE: Final = "_GATEWAY_COMPLETE"
"""The variable in which a shell says that it asks what could come next."""


class Commands(Mapping[str, Any]):
    """The commands of a package, each in the file that `files` says; it has them in its attribute `app`."""

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
    """A class for groups that have these commands of a package."""

    class Group(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands: Any = Commands(package, files)

    return Group


def _write_plainly(app: typer.Typer) -> None:
    """Colours and boxes take longer than everything else in `--help`."""
    app.rich_markup_mode = None
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _write_plainly(group.typer_instance)
