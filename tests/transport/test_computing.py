"""A thread that computes does not keep the interpreter from the loop, and leaves all as it was."""

from __future__ import annotations

import sys

import pytest
import trio
import trio.testing

from gateway.transport.computation import SWITCH_SECS, computed


def test_the_switch_interval_is_short_while_somebody_computes() -> None:
    usual = sys.getswitchinterval()
    seen: list[float] = []

    async def main() -> None:
        first, second = trio.Event(), trio.Event()

        def waits(until: trio.Event) -> str:
            trio.from_thread.run(until.wait)
            seen.append(sys.getswitchinterval())
            return "done"

        async def one(until: trio.Event) -> None:
            assert await computed(lambda: waits(until)) == "done"

        async with trio.open_nursery() as others:
            others.start_soon(one, second)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, first)
                await trio.testing.wait_all_tasks_blocked(0.01)
                seen.append(sys.getswitchinterval())
                first.set()
            seen.append(sys.getswitchinterval())  # the other is still at it
            second.set()

    trio.run(main)
    assert seen == pytest.approx([SWITCH_SECS] * 4)
    assert sys.getswitchinterval() == usual


def test_what_goes_wrong_is_raised_and_the_interval_is_as_it_was() -> None:
    usual = sys.getswitchinterval()

    def fails() -> None:
        raise ValueError("no")

    async def main() -> None:
        with pytest.raises(ValueError, match="no"):
            await computed(fails)

    trio.run(main)
    assert sys.getswitchinterval() == usual
