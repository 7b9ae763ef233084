"""Fixed seeds of the simulation, and tests that it is repeatable and sees faults.

More seeds: `make simulate SECONDS=600` (docs/developing/simulation.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import pytest

from gateway.broker.bodies import SpooledStorage
from gateway.broker.queue import Queue
from gateway.model.outcome import ACCEPTED
from tests.simulation.plan import FAR_FAULTS, FAULTS, FEATURES, Plan
from tests.simulation.shrinking import report, shrink
from tests.simulation.simulation import simulate

pytestmark = pytest.mark.interpreted
SEEDS: Final = 32


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_promise_is_kept(seed: int) -> None:
    result = simulate(Plan.of_seed(seed))
    assert not result.faults, report(result)


def test_a_seed_does_the_same_twice() -> None:
    plan = Plan(4, 300, frozenset(FEATURES) - {"tight"}, frozenset(FAULTS + FAR_FAULTS))
    first, second = simulate(plan), simulate(plan)
    assert first.delivered
    assert first.trace == second.trace
    assert simulate(Plan(5, plan.steps, plan.features, plan.faults)).trace != first.trace


def test_each_feature_and_fault_is_on_in_some_seeds_and_off_in_others() -> None:
    plans = [Plan.of_seed(seed) for seed in range(SEEDS)]
    for one in (*FEATURES, *FAULTS, *FAR_FAULTS):
        assert 0 < sum(one in plan.features | plan.faults for plan in plans) < SEEDS, one


@contextmanager
def lossy() -> Iterator[None]:
    """Some acknowledged messages of a queue are neither stored nor delivered."""
    take, count = SpooledStorage.take, [0]

    def lose(storage: SpooledStorage, part: Any, messages: Any) -> Any:
        count[0] += 1
        if count[0] % 3:
            return take(storage, part, messages)
        part.settle(ACCEPTED)
        return []

    with patch.object(SpooledStorage, "take", lose):
        yield


@contextmanager
def stuck() -> Iterator[None]:
    """A queue does not say that it has drained."""
    with patch.object(Queue, "_resume_if_drained", lambda queue: None):
        yield


@pytest.mark.parametrize("broken, word", [(lossy, "is missing"), (stuck, "held")])
@pytest.mark.ids_alone
def test_it_sees_a_broken_gateway_and_finds_a_smaller_plan(broken: Any, word: str) -> None:
    features = frozenset({"queue", "tight", "sessions"})
    plans = [Plan(seed, 400, features, frozenset({"cut"})) for seed in range(8)]
    with broken():
        results = (simulate(plan) for plan in plans)
        result = next(one for one in results if any(word in fault for fault in one.faults))
        smaller = shrink(result, 2.0)
    assert not simulate(result.plan).faults
    assert smaller.faults
    assert smaller.plan.steps < result.plan.steps
