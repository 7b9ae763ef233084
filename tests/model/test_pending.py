"""Commands that are run again until no result is pending any more."""

from __future__ import annotations

import trio
import trio.testing

from gateway.model.pending import RESULTS_MAX, Pending, completed


async def test_a_command_is_run_again_after_each_result() -> None:
    results = [trio.Event() for _ in range(3)]
    attempts: list[int] = []

    def command() -> None:
        attempts.append(sum(result.is_set() for result in results))
        for result in results:
            if not result.is_set():
                raise Pending(result)

    outcomes: list[bool] = []

    async def run() -> None:
        outcomes.append(await completed(command))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        for result in results:
            await trio.testing.wait_all_tasks_blocked()
            assert not outcomes
            result.set()
    assert (attempts, outcomes) == ([0, 1, 2, 3], [True])


async def test_a_command_whose_results_are_forgotten_at_once_is_given_up() -> None:
    attempts: list[int] = []
    available = trio.Event()
    available.set()

    def command() -> None:
        attempts.append(1)
        raise Pending(available)

    assert not await completed(command)
    assert len(attempts) == RESULTS_MAX
