"""The cluster's time: how exact it is, what a wall clock that is set does to it, and who is not ready."""

from __future__ import annotations

import pytest
import structlog
import trio
import trio.testing

from gateway import clock
from gateway.engine.cluster_clock import ClusterClock, dead_lettered_at
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.protocols.amqp091.translate import encode_properties
from tests.broker.parts import mqtt

BASE = 1_800_000_000.0


async def ask(cluster: ClusterClock, true: float, *, there: float = 0.05, back: float = 0.05) -> float:
    """The cluster says its time, which is `true` when it is asked. Returns what it is in the end."""
    asked = clock.now()
    await trio.sleep(there)
    said = int(true + there)
    await trio.sleep(back)
    cluster.apply_reply(said, asked, clock.now())
    return true + there + back


async def test_several_answers_are_more_exact_than_one(autojump_clock: trio.testing.MockClock) -> None:
    cluster = ClusterClock()
    assert cluster.unavailable_reason
    assert cluster.unavailable_reason
    true = BASE + 0.3
    for _ in range(20):
        true = await ask(cluster, true)
        assert abs(cluster.utc() - true) <= 0.6
        await trio.sleep(10.17)
        true += 10.17
    assert abs(cluster.utc() - true) < 0.15


async def test_a_slow_answer_spoils_nothing(autojump_clock: trio.testing.MockClock) -> None:
    cluster = ClusterClock()
    true = await ask(cluster, BASE)
    before = cluster.utc() - true
    true = await ask(cluster, true, there=20.0, back=30.0)
    assert abs(cluster.utc() - true) <= abs(before) + 0.01


async def test_another_clock_replaces_the_first(autojump_clock: trio.testing.MockClock) -> None:
    """As that of another node."""
    cluster = ClusterClock()
    await ask(cluster, BASE)
    true = await ask(cluster, BASE + 1_000)
    assert abs(cluster.utc() - true) <= 0.6


@pytest.mark.parametrize("off", [7_200.0, -7_200.0, 6.1, -6.1])
async def test_a_wrong_wall_clock_is_noticed_and_changes_nothing(
    off: float, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = [BASE]
    monkeypatch.setattr(clock, "unix_time", lambda: wall[0])
    monkeypatch.setattr(clock, "_steady", clock.SteadyClock())
    cluster = ClusterClock()
    assert cluster.utc() == pytest.approx(BASE, abs=0.1)  # nothing better is known
    await ask(cluster, BASE, there=0.0, back=0.0)
    assert not cluster.unavailable_reason
    assert cluster.correction == 0.0
    before = cluster.utc()
    wall[0] += off
    with structlog.testing.capture_logs() as lines:
        for _ in range(5):
            cluster.check()
    assert [line["event"] for line in lines] == ["clock differs from cluster, replica not ready"]
    assert cluster.utc() == before
    assert cluster.skew == pytest.approx(off, abs=0.6)
    assert cluster.correction == 0.0  # for the process goes by a clock that has not jumped
    assert f"{cluster.skew:.1f} seconds" in cluster.unavailable_reason
    wall[0] = BASE
    with structlog.testing.capture_logs() as lines:
        cluster.check()
    assert [line["event"] for line in lines] == ["clock agrees with cluster again"]
    assert not cluster.unavailable_reason


@pytest.mark.parametrize("off", [7_200.0, -7_200.0])
async def test_a_clock_that_is_wrong_from_the_start_jumps_nowhere(
    off: float, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is set right the replica is ready, and what it has stored itself lives as long as before."""
    wall = [BASE + off]
    monkeypatch.setattr(clock, "unix_time", lambda: wall[0])
    monkeypatch.setattr(clock, "_steady", clock.SteadyClock())
    cluster = ClusterClock()
    await ask(cluster, BASE, there=0.0, back=0.0)
    assert cluster.unavailable_reason
    assert cluster.correction == pytest.approx(off, abs=0.6)
    before = clock.utc()
    wall[0] = BASE
    cluster.check()
    assert not cluster.unavailable_reason
    assert cluster.skew == pytest.approx(0.0, abs=0.6)
    assert clock.utc() == pytest.approx(before, abs=1.0)
    assert cluster.correction == pytest.approx(off, abs=1.0)


async def test_an_answer_that_is_not_exact_blames_nobody(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the cluster takes half a minute to answer."""
    monkeypatch.setattr(clock, "unix_time", lambda: BASE + 30)
    cluster = ClusterClock()
    await ask(cluster, BASE, there=0.0, back=30.0)
    assert not cluster.unavailable_reason


def test_what_the_broker_says() -> None:
    death = (("count", Value(ValueType.INT64, 1)), ("time", Value(ValueType.TIMESTAMP, 17)))
    history = Value(ValueType.ARRAY, (Value(ValueType.TABLE, death),))
    for given, seconds in (
        ((("x-death", history),), 17),
        ((("x-death", Value(ValueType.ARRAY, ())),), None),
        ((("x-death", string("17")),), None),
        ((), None),
    ):
        raw = encode_properties(mqtt(properties=property_set(Properties(headers=given))), 0.0)
        assert dead_lettered_at(raw) == seconds
