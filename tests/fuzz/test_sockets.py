"""A running gateway outlives what its clients say, and goes on serving others meanwhile.

Three packets are sent for ten inputs that FUZZ_COUNT asks of the codecs (default 50 000); FUZZ_SEED says
where the random numbers begin.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.sockets import fuzz

COUNT = int(os.environ.get("FUZZ_COUNT", "50000")) * 3 // 10
pytestmark = pytest.mark.needs("time")  # as many inputs as FUZZ_COUNT says
SEED = int(os.environ.get("FUZZ_SEED", "13"))


def test_packets_over_sockets(tmp_path: Path) -> None:
    assert fuzz(tmp_path, SEED, count=COUNT) >= COUNT
