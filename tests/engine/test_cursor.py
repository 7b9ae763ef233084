"""Positions in a log: gaps mean nothing, the first record of a consumer says whether the log was cut."""

from __future__ import annotations

import pytest

from gateway.engine.cursor import LogCursor, Placement
from gateway.model.properties import Value, ValueType, string
from gateway.model.times import Monotonic

NOW = Monotonic(1.0)
NEW, KNOWN, CUT, SAME = Placement


def read(cursor: LogCursor, *offsets: int) -> list[Placement]:
    return [cursor.receive(offset, NOW) for offset in offsets]


def test_small_gaps_within_one_consumer_mean_nothing() -> None:
    cursor = LogCursor()
    assert cursor.begin(NOW) is None
    assert read(cursor, 4_000, 4_001, 4_003, 4_004, 4_006, 4_014) == [NEW] * 6
    assert cursor.position == 4_014


def test_a_large_gap_says_that_the_log_was_cut_before_it_was_read() -> None:
    """One that is found again where it was is none."""
    cursor = LogCursor()
    cursor.begin(NOW)
    assert read(cursor, 7, 8, 4_000, 4_001) == [NEW, NEW, CUT, KNOWN]
    cursor.begin_anew()
    cursor.begin(NOW)
    assert read(cursor, 3_000, 3_001, 3_002) == [NEW, NEW, NEW]
    cursor.begin_anew()
    cursor.begin(NOW)
    assert read(cursor, 7, 8, 4_000, 4_001) == [NEW] * 4


def test_the_next_consumer_asks_for_the_last_record() -> None:
    cursor = LogCursor(10)
    assert cursor.begin(NOW) == Value(ValueType.INT64, 10)
    assert read(cursor, 10, 12, 13) == [KNOWN, NEW, NEW]


@pytest.mark.parametrize("first", [3, 11, 12, 5_000])
def test_another_first_record_says_that_the_log_was_cut(first: int) -> None:
    """What comes behind it does not count either: it is read again from the beginning."""
    cursor = LogCursor(10)
    cursor.begin(NOW)
    assert read(cursor, first, 5_001, 5_002) == [CUT, KNOWN, KNOWN]
    cursor.begin_anew()
    assert read(cursor, 5_003) == [KNOWN]
    assert cursor.begin(NOW) is None
    assert read(cursor, first, first + 1) == [NEW, NEW]


def test_a_silent_log_is_asked_for_what_comes_next() -> None:
    """It is the same one if its offsets go on: then it is read from where reading stopped."""
    cursor = LogCursor(10)
    cursor.begin(NOW)
    cursor.stall()
    assert cursor.begin(NOW) == string("next")
    assert read(cursor, 17, 18) == [SAME, KNOWN]
    assert cursor.begin(NOW) == Value(ValueType.INT64, 10)
    assert read(cursor, 10, 17) == [KNOWN, NEW]


def test_a_log_that_was_replaced_by_a_shorter_one_is_read_from_its_beginning() -> None:
    cursor = LogCursor(10)
    cursor.begin(NOW)
    cursor.stall()
    cursor.begin(NOW)
    assert read(cursor, 10) == [CUT]


def test_silence_behind_the_first_record_is_no_reason_to_doubt_the_log() -> None:
    cursor = LogCursor(10)
    cursor.begin(NOW)
    assert read(cursor, 10) == [KNOWN]
    cursor.stall()
    assert cursor.begin(NOW) == Value(ValueType.INT64, 10)


def test_silence_before_anything_was_read_changes_nothing() -> None:
    cursor = LogCursor()
    cursor.begin(NOW)
    cursor.stall()
    assert cursor.begin(NOW) is None
    assert read(cursor, 5) == [NEW]
