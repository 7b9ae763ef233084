"""`--help` of every command: its texts are markup to whatever draws them, and may break it."""

from __future__ import annotations

import pkgutil
import shlex
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

import gateway.cli.pipeline
from gateway.cli import commands
from gateway.cli.examples import EXAMPLES
from tests.cli.conftest import Run


def paths(group: TyperGroup, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The names of all groups and commands, from the program's own on."""
    found = [above]
    for name, command in group.commands.items():
        under = (*above, name)
        found += paths(command, under) if isinstance(command, TyperGroup) else [under]
    return found


def all_paths() -> list[tuple[str, ...]]:
    whole = get_command(commands())
    assert isinstance(whole, TyperGroup)
    return paths(whole)


@pytest.mark.parametrize("group", [gateway.cli, gateway.cli.pipeline], ids=lambda one: str(one.__name__))
def test_every_file_with_commands_is_known_to_its_group(group: ModuleType) -> None:
    files = {
        found.name
        for found in pkgutil.iter_modules(group.__path__)
        if not found.ispkg and hasattr(import_module(f"{group.__name__}.{found.name}"), "app")
    }
    assert files - set(group.FILES.values()) == set()


@pytest.mark.parametrize("path", all_paths(), ids=" ".join)
def test_every_command_has_help(run: Run, path: tuple[str, ...]) -> None:
    ran = run(*path, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert f"Usage: gateway {' '.join(path)}".rstrip() in ran.out
    assert run(*path, "-h") == ran


def test_help_says_what_a_url_looks_like(run: Run) -> None:
    for verb in ("publish", "subscribe"):
        said = "".join(run(verb, "--help").out.replace("│", "").split())
        assert "amqp://user:password@host:port/virtual-host" in said


def command_of(path: tuple[str, ...]) -> Any:
    found: Any = get_command(commands())
    for name in path:
        found = found.commands[name]
    return found


@pytest.mark.parametrize(
    "path", [path for path in all_paths() if path and not hasattr(command_of(path), "commands")], ids=" ".join
)
def test_every_command_has_an_example_that_its_parser_accepts(path: tuple[str, ...]) -> None:
    examples = EXAMPLES[" ".join(path)]
    assert examples
    assert [line.strip() for line in (command_of(path).epilog or "").splitlines()[2:]] == list(examples)
    for line in examples:
        program, *words = shlex.split(line.partition(" > ")[0])
        assert (program, tuple(words[: len(path)])) == ("gateway", path)
        command = command_of(path)
        context = typer.Context(command, info_name=line)
        _, rest, _ = command.make_parser(context).parse_args(words[len(path) :])  # refuses unknown options
        assert not rest


@pytest.mark.parametrize("path", all_paths(), ids=" ".join)
def test_no_summary_is_cut(run: Run, path: tuple[str, ...]) -> None:
    said = run(*path, "--help").out
    listed = said.partition("Commands:")[2].partition("Examples:")[0]
    assert "..." not in listed
    assert "…" not in listed


@pytest.mark.parametrize("path", [path for path in all_paths() if path[-1:] == ("list",)], ids=" ".join)
def test_every_list_has_a_limit(path: tuple[str, ...]) -> None:
    options = {option for parameter in command_of(path).params for option in parameter.opts}
    bounded = path == ("tokens", "list")  # TOKENS_MAX
    assert ("--limit" in options) is not bounded
    assert "--count" not in options


@pytest.mark.parametrize("group", ["clients", "links", "queues", "retained", "routes", "sessions"])
def test_the_summary_of_a_group_has_the_verbs_of_its_commands(group: str) -> None:
    command = command_of((group,))
    assert [verb for verb in command.commands if verb not in command.help.lower()] == []


def test_one_verb_for_one_act() -> None:
    verbs = {path[-1] for path in all_paths() if path}
    assert verbs.isdisjoint({"remove", "kill", "drop", "clear"})
