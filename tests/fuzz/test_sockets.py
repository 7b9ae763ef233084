"""A running gateway outlives what its clients say, and goes on serving others meanwhile.

`FUZZ_SOCKETS` says how many packets (default 15 000), FUZZ_SEED where the random numbers begin.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz.sockets import fuzz

COUNT = int(os.environ.get("FUZZ_SOCKETS", "15000"))
SEED = int(os.environ.get("FUZZ_SEED", "13"))


def test_packets_over_sockets(tmp_path: Path) -> None:
    assert fuzz(tmp_path, SEED, count=COUNT) >= COUNT
