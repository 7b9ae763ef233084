"""The command line, run in this process as its entry point runs it."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from gateway.cli import main


class Ran(NamedTuple):
    """What a run of the command line came to."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call it with arguments (and `stdin`)."""

    def ran(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["gateway", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.delenv("GATEWAY_CONFIG", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return ran
