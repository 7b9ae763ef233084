"""When a beat is due, by a clock that looks only now and then."""

from __future__ import annotations

import pytest

from gateway.model.heartbeats import HeartbeatSchedule


@pytest.mark.parametrize("tick", [0.25, 1.0])
@pytest.mark.parametrize("interval", [4, 5, 30, 60])
@pytest.mark.parametrize("said", [(), (0.1,), (0.9, 1.9, 2.9), tuple(at / 7 for at in range(300))])
def test_nobody_waits_for_a_whole_interval(tick: float, interval: int, said: tuple[float, ...]) -> None:
    """Words are said at some times, ticks come at theirs; the longest silence between them is measured."""
    beats = HeartbeatSchedule()
    beats.agree(interval, 0.0)
    words, heard, longest = sorted(said), 0.0, 0.0
    for count in range(1, int(120 / tick)):
        now = count * tick
        while words and words[0] <= now:
            at = words.pop(0)
            longest, heard = max(longest, at - heard), at
            beats.has_sent = True
        if beats.is_due(now):
            longest, heard = max(longest, now - heard), now
    assert longest <= interval / 2 + tick


def test_it_beats_no_more_often_than_every_half_interval() -> None:
    beats = HeartbeatSchedule()
    beats.agree(10, 0.0)
    assert [now for now in range(1, 31) if beats.is_due(now)] == [5, 10, 15, 20, 25, 30]


def test_who_speaks_all_the_time_never_beats() -> None:
    beats = HeartbeatSchedule()
    beats.agree(10, 0.0)
    for now in range(1, 100):
        beats.has_sent = True
        assert not beats.is_due(now)


def test_without_an_interval_there_is_none() -> None:
    beats = HeartbeatSchedule()
    beats.agree(0, 0.0)
    assert not any(beats.is_due(now) for now in range(1_000))
