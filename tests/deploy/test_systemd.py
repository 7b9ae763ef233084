"""The systemd unit, as systemd reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import missing
from tests.deploy.programs import DEPLOY, tool

UNIT: Final = DEPLOY / "systemd" / "gateway.service"
PROGRAM: Final = "/opt/gateway/bin/gateway"
EXPOSURE_MAX: Final = 20  # of 100: systemd calls up to 20 OK, and a service that closes nothing has 96


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """It, with a program in the place of one that is not installed here."""
    text = UNIT.read_text()
    assert text.count(PROGRAM) == 2
    file = tmp_path / UNIT.name
    file.write_text(text.replace(PROGRAM, "/bin/true"))
    return file


def verified(unit: Path) -> str:
    """What systemd complains of; it warns on standard error, and goes on."""
    program = shutil.which("systemd-analyze")
    if program is None:
        missing("systemd-analyze is not installed")
        return ""
    done = subprocess.run(
        [program, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


def test_systemd_finds_nothing_wrong(unit: Path) -> None:
    assert verified(unit) == ""


def test_what_systemd_does_not_know_is_found(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHouse="))
    assert "ProtectHouse" in verified(unit)


def test_there_are_no_core_dumps() -> None:
    """They would contain messages and passwords. The last setting counts, and `-` or a comment is none."""
    found = [
        line.partition("=")[2] for line in UNIT.read_text().splitlines() if line.startswith("LimitCORE=")
    ]
    assert found == ["0"]


def test_what_it_does_not_need_is_closed(unit: Path) -> None:
    asked = ("security", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit)
    assert "exposure level" in tool("systemd-analyze", *asked)
