"""When a window may be told, without Spark: marks of several shards, what is late, and what is told again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

pytest.importorskip("pyspark")

from gateway.errors import PipelineError
from gateway.pipeline.jobs.rates import silent_of
from gateway.pipeline.traffic.windows import SECOND, WindowRows, Windows, duration_us, runs_of
from gateway.store.journal.reader import JournalReader
from tests.pipeline.journals import written

S = SECOND
NOW: Final = 1_800_000_000.0


def touched(second: int, rows: int = 1, shard: str = "0", next_: int = 1) -> WindowRows:
    return WindowRows(shard, second * S, (second + 1) * S, rows, next_, second * S + 500_000)


def windows(*seconds: int) -> list[tuple[int, int]]:
    return [(second * S, (second + 1) * S) for second in seconds]


def test_windows_wait_for_the_mark_of_every_shard() -> None:
    rows = [touched(1), touched(2), touched(5, shard="1")]
    for marks, told in (
        ({"0": 9 * S, "1": 9 * S}, windows(1, 2, 5)),
        ({"0": 9 * S, "1": 2 * S}, windows(1)),
        ({"0": 2 * S - 1, "1": 9 * S}, []),
        ({"0": 9 * S, "1": None}, []),
        ({}, []),
    ):
        state = Windows().read(0, rows)
        due = state.take_due(rows, marks, 600 * S)
        assert (due.windows, due.again, due.late_rows) == (told, set(), 0)
        assert state.waiting == [one for one in windows(1, 2, 5) if one not in told]


def test_a_replica_that_is_gone_holds_no_window_up(tmp_path: Path) -> None:
    """One that lives writes a mark a minute; where all are gone, what they have said last is all there is."""
    for replica, ago in (("lives", 0), ("slow", 100), ("gone", 1_000)):
        written(tmp_path / replica, 5)
        for path in (tmp_path / replica).glob("*.gwj"):
            os.utime(path, (NOW - ago, NOW - ago))
    reader = JournalReader(tmp_path)
    assert silent_of(reader, reader.shards(), NOW) == {"gone/0"}
    assert silent_of(reader, reader.shards(), NOW + 3_600) == set()


def test_a_message_that_is_never_settled_holds_windows_up_for_so_long_and_no_longer() -> None:
    state = Windows().read(0, [touched(1)])
    assert state.take_due([], {"0": S}, 10 * S).windows == []
    state = state.read(1, [touched(11)])
    assert state.take_due([], {"0": S}, 10 * S).windows == []
    state = state.read(2, [touched(12)])
    assert state.take_due([], {"0": S}, 10 * S).windows == windows(1)


def test_what_is_later_still_is_counted_and_told_again() -> None:
    first = [touched(1), touched(2), touched(3)]
    state = Windows().read(0, first)
    assert state.take_due(first, {"0": 4 * S}, 600 * S).windows == windows(1, 2, 3)
    second = [touched(2, 5, next_=9), touched(7, next_=8)]
    state = Windows.decode(state.encode()).read(1, second)
    due = state.take_due(second, {"0": 5 * S}, 600 * S)
    assert (due.windows, due.again, due.late_rows) == (windows(2), set(windows(2)), 5)
    assert (state.waiting, state.ends) == (windows(7), {"0": 9})


def test_the_horizon_never_goes_back() -> None:
    state = Windows().read(0, [touched(1)])
    assert state.take_due([], {"0": 5 * S}, 600 * S).windows == windows(1)
    rows = [touched(3, 2)]
    due = state.read(1, rows).take_due(rows, {"0": 2 * S}, 600 * S)
    assert (due.windows, due.late_rows) == (windows(3), 2)


def test_a_repeated_batch_is_decided_alike() -> None:
    rows = [touched(1), touched(2)]
    before = Windows().read(0, rows)
    before.take_due(rows, {"0": 2 * S}, 600 * S)
    more = [touched(3), touched(1, 4)]
    once, again = before.read(1, more), before.read(1, more)
    assert once.take_due(more, {"0": 4 * S}, 600 * S) == again.take_due(more, {"0": 4 * S}, 600 * S)
    assert once.encode() == again.encode()


def test_runs() -> None:
    assert runs_of(windows(9, 1, 2, 3, 7)) == [(S, 4 * S), (7 * S, 8 * S), (9 * S, 10 * S)]


@pytest.mark.parametrize(
    "text, seconds", [("10 minutes", 600), ("0 seconds", 0), ("1 hour", 3_600), ("2days", 172_800)]
)
def test_durations(text: str, seconds: int) -> None:
    assert duration_us(text) == seconds * S


@pytest.mark.parametrize("text", ["", "ten", "5", "3 weeks", "-1 second"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(PipelineError, match="10 minutes"):
        duration_us(text)
