"""The systemd guide, with the permissions that its commands give to files.

systemd does not run on the machines of these tests. A process without capabilities stands for the service:
the kernel grants it access to files by owner and group alone, as it does for the unit's user.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from configparser import RawConfigParser
from pathlib import Path
from typing import Final

import pytest

from gateway.cli.exits import Exit
from tests.conftest import missing
from tests.deploy.test_package import ROOT
from tests.needs import needed

SERVICE_GROUP: Final = 64_001
OTHER_GROUP: Final = 64_002
OWNER: Final = 64_003
PAGE: Final = (ROOT / "docs/guides/systemd.md").read_text()


def installed(target: str) -> tuple[int, str]:
    """Return the mode and the group that the guide's `install` command gives to `target`."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith("# install ") and line.endswith(target)]
    words = shlex.split(line)
    return int(words[words.index("-m") + 1], 8), words[words.index("-g") + 1]


def unit() -> RawConfigParser:
    parser = RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(ROOT / "deploy/systemd/gateway.service")
    return parser


@needed("setpriv")
@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    """A configuration file as the guide installs it; its group stands for the unit's group."""
    if shutil.which("setpriv") is None or os.geteuid() != 0:
        missing("root and setpriv, to run a process with other groups")
    file = tmp_path / "etc" / "gateway.yaml"
    file.parent.mkdir()
    file.write_text("listeners: {mqtt: {protocol: mqtt, port: 1}}\n")
    for path, target in ((file, "/etc/gateway/gateway.yaml"), (file.parent, "/etc/gateway")):
        os.chown(path, OWNER, SERVICE_GROUP)
        path.chmod(installed(target)[0])
    return file


def gateway(group: int, command: str, configuration: Path) -> tuple[int, str]:
    """Run a command as a member of `group`, without capabilities. Return its exit code and its output."""
    restricted = ("setpriv", "--groups", str(group), "--bounding-set=-all", "--inh-caps=-all")
    program = (sys.executable, "-c", "from gateway.cli import main; main()")
    done = subprocess.run(
        (*restricted, *program, command, "--config", str(configuration)),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_unit_runs_as_the_group_that_the_guide_gives_the_files_to() -> None:
    service = dict(unit()["Service"])
    assert installed("/etc/gateway/gateway.yaml") == (0o640, service["Group"])
    assert installed("/etc/gateway") == (0o750, service["Group"])
    assert re.search(rf"^# adduser --system --group .* {service['User']}$", PAGE, re.MULTILINE)
    assert "DynamicUser" not in service


def test_the_service_reads_the_configuration(configuration: Path) -> None:
    code, output = gateway(SERVICE_GROUP, "check", configuration)
    assert code == Exit.OK, output


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize("hidden", ["file", "folder"])
def test_an_unreadable_configuration_is_not_tried_again(
    command: str, hidden: str, configuration: Path
) -> None:
    """Exit code 78, which the unit does not restart after, whether the file or its folder is unreadable."""
    configuration.parent.chmod(0o755 if hidden == "file" else 0o750)
    code, output = gateway(OTHER_GROUP, command, configuration)
    assert code == Exit.CONFIGURATION == int(unit()["Service"]["RestartPreventExitStatus"]), output
    assert f"{configuration}: error: cannot be read: Permission denied" in output


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_missing_configuration_is_a_faulty_one(command: str, configuration: Path) -> None:
    code, output = gateway(SERVICE_GROUP, command, configuration.with_name("absent.yaml"))
    assert code == Exit.CONFIGURATION, output
