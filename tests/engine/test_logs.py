"""One log that replicas follow: reading takes its time, silence does not, and what is lost is noticed."""

from __future__ import annotations

import pytest
import structlog
import trio
import trio.testing

from gateway import clock
from gateway.engine.logs import RETURN_SECS, Record, SharedLog
from gateway.model.times import Monotonic
from tests.engine.streams import Stream


class Reader:
    """What it has read."""

    def __init__(self, log: SharedLog) -> None:
        self.bodies: list[bytes] = []
        self.begun = 0
        log.use(self)

    def begin_anew(self) -> None:
        self.bodies.clear()
        self.begun += 1

    def apply(self, record: Record) -> None:
        self.bodies.append(record.body)

    def lost(self) -> None: ...

    def tick(self, now: Monotonic) -> None: ...

    def stop(self) -> None: ...


def pair() -> tuple[Stream, SharedLog, Reader, SharedLog]:
    """A log with ten records of a replica, which is the last one, and one that does not follow it yet."""
    stream = Stream()
    log, writes = stream.log(), stream.log()
    reader = Reader(log)
    Reader(writes)
    stream.connect(writes)
    for at in range(10):
        writes.put(b"%d" % at)
    return stream, log, reader, writes


async def late(log: SharedLog) -> str:
    """What is wrong when nothing has come back in time."""
    await trio.sleep(RETURN_SECS)
    return log.tick(clock.now(), blocked=False)


async def test_a_log_is_read_for_as_long_as_records_arrive(autojump_clock: trio.testing.MockClock) -> None:
    """Others see meanwhile that this replica lives."""
    stream, log, reader, _ = pair()
    stream.follow(log)
    for at in range(8):
        before = len(stream.rows)
        await trio.sleep(RETURN_SECS / 2)
        stream.step(log)
        assert not log.tick(clock.now(), blocked=False)
        assert len(stream.rows) == before + at % 2
    while not log.up:
        assert not stream.step(log)
    stream.settle()
    assert reader.bodies == [b"%d" % at for at in range(10)]
    assert not reader.begun


async def test_a_silent_log_is_connected_to_again_and_read_on(autojump_clock: trio.testing.MockClock) -> None:
    stream, log, reader, _ = pair()
    stream.follow(log)
    for _ in range(5):
        stream.step(log)
    assert await late(log)
    log.disconnected()
    stream.connect(log)
    assert stream.read[log] == len(stream.rows)
    assert reader.bodies == [b"%d" % at for at in range(10)]
    assert not reader.begun


async def test_a_log_that_says_nothing_for_some_time_is_read_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Not even the last record that was read: as when it has no leader."""
    stream, log, reader, _ = pair()
    stream.connect(log)
    for _ in range(2):
        log.disconnected()
        stream.follow(log)
        assert await late(log)
    log.disconnected()
    stream.follow(log)  # from whatever comes next
    assert "goes on" in stream.step(log)
    log.disconnected()
    stream.connect(log)
    assert not reader.begun
    assert len(reader.bodies) == 10


async def test_another_log_is_read_from_its_beginning(autojump_clock: trio.testing.MockClock) -> None:
    """As when somebody has deleted the stream."""
    stream, log, reader, _ = pair()
    stream.connect(log)
    log.disconnected()
    stream.rows.clear()
    stream.follow(log)
    stream.read[log] = 1_000  # the broker waits for an offset that there will not be
    assert await late(log)
    log.disconnected()
    stream.follow(log)
    with structlog.testing.capture_logs() as lines:
        assert "cut" in stream.step(log)
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["log cut, reading it again"]
    assert (reader.begun, log.discarded, reader.bodies) == (1, 1, [])
    log.disconnected()
    stream.connect(log)


@pytest.mark.parametrize("behind", [0, 3], ids=["nothing that was not read", "records that were not read"])
async def test_a_log_that_was_cut_is_read_from_its_beginning(behind: int) -> None:
    stream, log, reader, writes = pair()
    stream.connect(log)
    log.disconnected()
    for at in range(10, 15):
        writes.put(b"%d" % at)
    stream.cut = stream.read[log] + behind
    stream.follow(log)
    assert "cut" in stream.step(log)
    assert not stream.step(log)  # what is on its way counts for nothing
    assert not reader.bodies
    log.disconnected()
    stream.connect(log)
    assert reader.bodies == [b"%d" % at for at in range(10 + behind, 15)]
    assert (reader.begun, log.discarded) == (1, 1)


async def test_a_record_that_the_log_has_lost_is_written_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Though those of others arrive all the time."""
    stream, log, _, writes = pair()
    stream.connect(log)
    told: list[int] = []
    log.put(b"mine", lambda: told.append(1))
    del stream.rows[-1]
    await trio.sleep(RETURN_SECS)
    writes.put(b"theirs")
    stream.step(log)
    assert not log.tick(clock.now(), blocked=False)
    assert "lost" in stream.step(log)
    log.disconnected()
    stream.connect(log)
    stream.settle()
    assert told == [1]
    assert stream.rows[-1].endswith(b"mine")


async def test_a_mark_that_the_log_has_lost_is_noticed(autojump_clock: trio.testing.MockClock) -> None:
    stream, log, _, writes = pair()
    stream.follow(log)
    del stream.rows[-1]
    await trio.sleep(RETURN_SECS)
    writes.put(b"theirs")
    while stream.read[log] < len(stream.rows):
        assert not stream.step(log)
    assert not log.tick(clock.now(), blocked=False)
    assert "lost" in stream.step(log)


async def test_a_cluster_that_takes_nothing_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    stream, log, _, _ = pair()
    stream.follow(log)
    await trio.sleep(10 * RETURN_SECS)
    assert not log.tick(clock.now(), blocked=True)
