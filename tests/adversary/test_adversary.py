"""Every attack costs the attacker only.

How long others may wait is a bound that a busy machine keeps as well; `python -m tests.adversary` prints what
it really was, and holds it to 100 ms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.adversary import http_attacks, memory, places, poison, work
from tests.adversary.arena import Arena, attacked
from tests.adversary.cases import CASES, MIB

STALL_SECS_MAX: Final = 2.0  # the attacks took the gateway ten seconds and more when they were found
ATTACKS: Final = (http_attacks, memory, places, poison, work)


@pytest.mark.parametrize("name", CASES)
def test_an_attack_costs_the_attacker_only(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    with Arena(tmp_path, **case.configuration) as arena:
        seen = attacked(arena, case.attack)
        assert seen.failures == []
        assert seen.longest < STALL_SECS_MAX
        assert seen.grown_bytes < case.grown_mib * MIB
        assert seen.internal_errors == {}, arena.log[-3_000:]
        assert arena.await_idle() == []
        arena.restart()
        assert arena.alive
        assert arena.terminate() == 0
