"""Every command explains itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from gateway.cli import commands


def every(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from every(below, (*path, name))


@pytest.mark.parametrize("path", list(every(typer.main.get_command(commands()))), ids=" ".join)
def test_help_of(path: tuple[str, ...]) -> None:
    found = CliRunner().invoke(commands(), [*path, "--help"])
    assert (found.exception, found.exit_code) == (None, 0)
    assert " ".join(("Usage: gateway", *path)) in found.output
