"""What checks what is deployed: helm and kube-score, built by `make peers`, and Prometheus' promtool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from tests.clients.builds import NotBuiltError, built
from tests.conftest import missing
from tests.needs import needed

DEPLOY: Final = Path(__file__).resolve().parents[2] / "deploy"
SECS_MAX: Final = 60.0


@needed("programs")
def tool(name: str, *arguments: object, given: str = "", succeeds: bool = True) -> str:
    """What it prints; of one that fails, with what it complains of.

    Skips the test where it is missing, and fails it under CI=true.
    """
    try:
        program = shutil.which(name) or str(built(name) / "main")
    except NotBuiltError as error:
        missing(f"{name}: {error}")
        raise
    done = subprocess.run(
        [program, *map(str, arguments)],
        input=given,
        capture_output=True,
        text=True,
        timeout=SECS_MAX,
        check=False,
    )
    assert (done.returncode == 0) is succeeds, done.stdout + done.stderr
    return done.stdout if succeeds else done.stdout + done.stderr
