"""Groups of commands whose modules are imported only when a command of them is used.

A module of commands has their arguments, options and texts. A command imports what it needs only when it
runs, so that help and completion are fast, and no command loads the imports of another command.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_group
from typer.models import DefaultPlaceholder

from gateway.cli.examples import EXAMPLES

COMPLETE: Final = "_GATEWAY_COMPLETE"
"""Environment variable that a shell sets when it requests completions."""


class LazyCommands(Mapping[str, Any]):
    """Commands of a package by name; each is imported when it is first accessed.

    `files` maps a command's name to its module, which has the command in its attribute `app`. `prefix` is the
    name of the group and a blank, or "" for the program itself.
    """

    def __init__(self, package: str, files: Mapping[str, str], prefix: str) -> None:
        self._prefix = prefix
        self._package = package
        self._files = files
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        file = self._files[name]
        if name not in self._made:
            app: typer.Typer = importlib.import_module(f"{self._package}.{file}").app
            _disable_rich_help(app)
            found = get_group(app).commands
            for one, command in found.items():
                _add_examples(command, f"{self._prefix}{one}")
            self._made |= found
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class WholeSummaries(TyperGroup):
    """Group of commands whose help lists each command with the whole first sentence of its help.

    Long sentences are wrapped; typer would cut them.
    """

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands to the help."""
        rows = [(name, _first_sentence(self.commands[name].help)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _first_sentence(text: str | None) -> str:
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()), maxsplit=1)[0]


def group_of(package: str, files: Mapping[str, str], prefix: str = "") -> type[TyperGroup]:
    """Return a class of command groups that contain the commands of a package.

    `files` and `prefix` are those of `LazyCommands`.
    """

    class CommandGroup(WholeSummaries):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands: Any = LazyCommands(package, files, prefix)

    return CommandGroup


def _disable_rich_help(app: typer.Typer) -> None:
    """Turn off colours and boxes in the help of commands, because drawing them takes longer than all else."""
    app.rich_markup_mode = None
    for group in app.registered_groups:
        if group.typer_instance is not None:
            own: Any = group.typer_instance.info
            if isinstance(own.cls, DefaultPlaceholder):
                group.cls = WholeSummaries
            _disable_rich_help(group.typer_instance)


def _add_examples(command: Any, path: str) -> None:
    """Add examples to the help of a command, or of all commands in a group. `path` is the command's name."""
    if isinstance(command, TyperGroup) and not isinstance(command.commands, LazyCommands):
        for name, one in command.commands.items():
            _add_examples(one, f"{path} {name}")
    elif lines := EXAMPLES.get(path):
        command.epilog = "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
