"""Code of earlier commits, for tests of updates."""

from __future__ import annotations

import compileall
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.test_package import ROOT
from tests.interop.gateway_process import GatewayProcess

EARLIER: Final = "1b612a75e681d56b8c11feacb9aa43f27b5cfb4d"
"""A commit with the store layout, the journal format and the database schema of release 0.1.0."""
BEFORE_SCHEMA_7: Final = "96a689e6ab46d6ff67f660583ac22023cbee260e"
"""A commit whose database schema for replicas was number 6."""
PREVIOUS: Final = "HEAD~1"

PROGRAM: Final = """
import sys, gateway
print("code of", gateway.__file__, file=sys.stderr, flush=True)
from gateway.cli import main
main()
"""


def package_of(commit: str, folder: Path) -> Path:
    """Write the package of a commit into `folder`, and return it. Skip the test without that commit."""
    archive = ("git", "archive", "--format=tar", commit, "gateway", "mappings")
    done = subprocess.run(archive, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"commit {commit[:8]} is not here: this is a shallow clone or a release")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as files:
        files.extractall(folder, filter="data")
    compileall.compile_dir(folder, quiet=1)  # else its start does, which has to be over in time
    return folder


def run_code_of(gateway: GatewayProcess, package: Path | None) -> None:
    """Let a gateway start with the code in `package` from now on; None: with that of this checkout."""
    gateway.python_path = (ROOT if package is None else package,)
    gateway.program = None if package is None else (sys.executable, "-c", PROGRAM)
