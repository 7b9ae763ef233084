"""What a test needs beside the packages of this checkout: programs, processes, a gateway, time.

What starts such a thing is declared so, where it is defined: `@needed("RabbitMQ")`. A test needs what it and
its fixtures reach by the names in their code; who reaches `subprocess` needs processes. It gets the marker
`needs` when tests are collected, and `make check` runs all that is left: `-m "not needs"`. A test that takes
long for a reason of its own has the marker written beside it.
"""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

T = TypeVar("T")
TESTS: Final = Path(__file__).parent
NEED: Final = "__gateway_test_need__"
FOLDERS: Final = (
    "adversary",
    "clients",
    "durable",
    "engine/listener",
    "fuzz",
    "interop",
)
"""Below tests: whatever is there needs something. `make check` does not even look into them, for to collect
two thousand tests that do not run took a fifth of its time."""
ALONE: Final = "TESTS_ALONE"  # set while only tests run that need nothing


def needed(what: str) -> Callable[[T], T]:
    """A class, function or fixture that starts something which tests then need."""

    def noted(thing: T) -> T:
        setattr(thing, NEED, what)
        return thing

    return noted


def refuse_alone(what: str) -> None:
    """Raises AssertionError in a run of tests that need nothing: the marker is missing."""
    assert ALONE not in os.environ, f"{what} is needed, and nothing that the test reaches says so"


def refuse_programs(event: str, arguments: tuple[object, ...]) -> None:
    """An audit hook: no program is started by whatever library a test calls, if the test does not say so."""
    if event in {"subprocess.Popen", "os.posix_spawn", "os.system"}:
        refuse_alone(str(arguments[0]))


@cache
def folder_of(path: Path) -> str | None:
    """Which of FOLDERS a file or folder is in."""
    return next((name for name in FOLDERS if path.is_relative_to(TESTS / name)), None)


def needs_of(item: pytest.Item) -> set[str]:
    """What a test and its fixtures need, and what all in its folder do."""
    folder = folder_of(item.path)
    return _needs_of(item) | (set() if folder is None else {folder})


def _needs_of(item: pytest.Item) -> set[str]:
    if not isinstance(item, pytest.Function):
        return set()
    fixtures = [one for found in item._fixtureinfo.name2fixturedefs.values() for one in found]
    return declared(item.function, *(fixture.func for fixture in fixtures))


def declared(*functions: Callable[..., Any]) -> set[str]:
    """What is declared by all that these reach by the names in their code, over functions of tests."""
    return set[str]().union(*map(_declared, functions))


@cache
def _declared(function: Callable[..., Any]) -> set[str]:
    seen: dict[int, Any] = {}
    _reach(function, seen)
    found = {vars(thing).get(NEED) for thing in seen.values() if hasattr(thing, "__dict__")} - {None}
    return found | ({"processes"} if id(subprocess) in seen else set())


def _reach(thing: Any, seen: dict[int, Any]) -> None:
    while "__wrapped__" in getattr(thing, "__dict__", ()):  # its own: each attribute of a mock exists
        thing = thing.__wrapped__
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if not isinstance(thing, types.FunctionType | type) or thing.__module__ == __name__:
        return
    if not thing.__module__.startswith("tests."):
        return
    if isinstance(thing, types.FunctionType):
        names = set(_names(thing.__code__))
        for name in names & thing.__globals__.keys():
            found = thing.__globals__[name]
            _reach(found, seen)
            if isinstance(found, types.ModuleType) and found.__name__.startswith("tests."):
                for attribute in names & vars(found).keys():
                    _reach(vars(found)[attribute], seen)
    else:
        for part in (*thing.__bases__, *vars(thing).values()):
            _reach(getattr(part, "fget", None) or getattr(part, "__func__", part), seen)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
