"""Who waits at a terminal sees that something happens; a file or another program gets none of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.cli import main, progress
from gateway.cli.progress import progress_bar
from gateway.store.store import Store

END = b"<that is all>"
SILENT = """
import sys
from gateway.cli.progress import progress_bar
with progress_bar("waiting") as bar:
    bar.update(1)
assert "rich" not in sys.modules
"""


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Standard error is a terminal; yields what reads it when all is said."""
    master, slave = os.openpty()
    with os.fdopen(master, "rb", buffering=0) as screen, os.fdopen(slave, "w") as line:
        monkeypatch.setattr(sys, "stderr", line)

        def said() -> str:
            line.write(END.decode())
            line.flush()
            found = b""
            while not found.endswith(END):  # a terminal hands on what it has been given piece by piece
                found += screen.read(65_536)
            return found.removesuffix(END).decode()

        yield said


def test_a_bar_is_drawn_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_SECS", 0.0)
    with terminal(monkeypatch) as read:
        with progress_bar("reading it all", total=4) as bar:
            bar.update(2)
        assert "reading it all" in read()


def test_what_is_soon_done_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_SECS", 60.0)
    with terminal(monkeypatch) as read:
        with progress_bar("reading it all") as bar:
            bar.update(2)
        bar.start()  # the timer, just too late
        assert read() == ""


def test_elsewhere_there_is_none_and_nothing_is_imported_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command, text", [("check", "reading the store"), ("repair", "copying the store")])
def test_a_command_that_may_take_long_has_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, text: str
) -> None:
    Store(tmp_path).close()
    monkeypatch.setattr(progress, "AFTER_SECS", 0.0)
    monkeypatch.setattr(sys, "argv", ["gateway", "store", command, "--store", str(tmp_path)])
    with terminal(monkeypatch) as read:
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert text in read()


@pytest.mark.parametrize(
    "command, text",
    [
        ("explain --message x -c FOLDER/gateway.yaml", "searching the journal"),
        ("pipeline ship --journal FOLDER/journal --to FOLDER/there", "shipping to"),
        ("pipeline bundle --to FOLDER/bundle", "writing the bundle"),
    ],
)
def test_commands_that_go_through_much_have_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, text: str
) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "gateway.yaml").write_text(f"journal: {{path: {tmp_path}/journal}}\n")
    monkeypatch.setattr(progress, "AFTER_SECS", 0.0)
    monkeypatch.setattr(sys, "argv", ["gateway", *command.replace("FOLDER", str(tmp_path)).split()])
    with terminal(monkeypatch) as read:
        with pytest.raises(SystemExit):
            main()
        assert text in read()
