"""Recorded messages sent again: in order, once, at the right time, and on from where it stopped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from gateway.clients.amqp import AmqpClient
from gateway.clients.wire import ReceivedMessage
from gateway.errors import LinkError, PipelineError
from gateway.model.message import Message
from gateway.pipeline.jobs.replay import COLUMNS, Progress, Replay, ReplayPosition, ReplaySpeed, select_rows
from gateway.pipeline.traffic.loader import RowSelection, traffic
from gateway.protocols import show
from gateway.protocols.mqtt.dialect import topic_address
from tests.cli.conftest import Run
from tests.pipeline.jobs.conftest import HOT, PATIENCE_SECS, READINGS, Recorded, reading
from tests.pipeline.journals import RETURNED, Journal, written

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Broker:
    """A peer that keeps what it is given, and breaks after so many messages."""

    def __init__(self, clock: Clock, breaks_after: int = 1 << 30) -> None:
        self.clock = clock
        self.left = breaks_after
        self.got: list[tuple[float, Message]] = []

    def publish_many(self, messages: Any, *, in_flight: int = 1) -> dict[int, Any]:
        if len(messages) > self.left:
            raise LinkError("cut")
        self.left -= len(messages)
        self.got += [(self.clock.now, message) for message in messages]
        return {}

    def arrivals(self, seconds: float) -> list[ReceivedMessage]:
        raise AssertionError("it is only published to")

    def acknowledge(self, arrivals: Any) -> None:
        raise AssertionError("it is only published to")

    def pause_reading(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        pass

    def close_abruptly(self) -> None:
        pass


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def replay(
    broker: Broker, rows: list[Any], pace: ReplaySpeed | None = None, file: Path | None = None, **also: Any
) -> Replay:
    clock = broker.clock
    made = Replay(broker, pace or ReplaySpeed(), Progress(file), clock=clock, sleep=clock.sleep, **also)
    made.send(rows)
    return made


def rows_of(
    spark: SparkSession, folder: str | Path, progress: Progress | None = None, where: str | None = None
) -> list[Any]:
    rows = traffic(spark, str(folder), COLUMNS, RowSelection(where=where))
    return select_rows(rows, after=progress.read() if progress else None).collect()


def test_it_is_cut_between_two_targets_of_a_message() -> None:
    """What was not sent yet is sent then; its message counts when all of it has been."""
    common = {"received_us": 1, "shard": "0", "source_endpoint": "mqtt", "source_protocol": "mqtt"}
    common |= {"source_scope": None, "source_name": "t", "client": "", "user": "", "body": b"x"}
    common |= {"target_protocol": "amqp091", "target_scope": "amq.topic", "assurance": 1, "durable": True}
    common |= {"retain": False, "expires_us": None, "properties": "{}", "body_size": 1}
    rows = [
        Row(common | {"slot": slot, "sequence": 2 * slot + at, "target_name": name, "target_address": name})
        for slot in (0, 1)
        for at, name in enumerate("ab")
    ]

    class Noted(Progress):
        at: ReplayPosition | None = None

        def write(self, position: ReplayPosition) -> None:
            self.at = position

    for sent, place in ((1, None), (2, 0), (3, 0), (4, 1)):
        broker, noted = Broker(Clock(), breaks_after=sent), Noted(None)
        clock = broker.clock
        made = Replay(broker, ReplaySpeed(rate=1.0), noted, at_target=True, clock=clock, sleep=clock.sleep)
        if sent < 4:
            with pytest.raises(LinkError):
                made.send(rows)
        else:
            made.send(rows)
        assert len(broker.got) == sent
        assert (None if noted.at is None else noted.at.slot) == place


class Row(dict[str, Any]):
    """As Spark's."""

    def asDict(self) -> dict[str, Any]:
        return self


PACES = [
    (ReplaySpeed(), [0.0, 0.0, 0.0]),
    (ReplaySpeed(speed=1.0), [0.0, 0.001, 0.002]),
    (ReplaySpeed(speed=0.1), [0.0, 0.01, 0.02]),
    (ReplaySpeed(rate=4.0), [0.0, 0.25, 0.5]),
]


@pytest.mark.parametrize("pace, due", PACES)
def test_paces(spark: SparkSession, tmp_path: Path, pace: ReplaySpeed, due: list[float]) -> None:
    broker = Broker(Clock())
    replay(broker, rows_of(spark, written(tmp_path, 3)), pace)
    assert [moment - 100.0 for moment, _ in broker.got] == pytest.approx(due, abs=1e-6)


def test_one_that_breaks_goes_on_where_it_was(spark: SparkSession, tmp_path: Path) -> None:
    folder, file = written(tmp_path / "journal", 2_500), tmp_path / "at" / "position"
    first = Broker(Clock(), breaks_after=1_000)
    with pytest.raises(LinkError):
        replay(first, rows_of(spark, folder), file=file)
    position = Progress(file).read()
    assert isinstance(position, ReplayPosition)
    second = Broker(Clock())
    replay(second, rows_of(spark, folder, Progress(file)), file=file)
    bodies = [message.body for _, message in first.got + second.got]
    assert bodies == [b'{"n": %d}' % number for number in range(2_500)]
    assert rows_of(spark, folder, Progress(file)) == []
    file.write_text("{}")
    with pytest.raises(PipelineError, match="is not a position file of a replay"):
        Progress(file).read()


def test_two_replays_with_one_position_do_not_both_send(tmp_path: Path) -> None:
    """Until the first one ends, or is killed; without a file each is on its own."""
    file = tmp_path / "at" / "position"
    with Progress(file).locked():
        with pytest.raises(PipelineError, match="another replay uses"), Progress(file).locked():
            pass
        with Progress(tmp_path / "another").locked(), Progress(None).locked(), Progress(None).locked():
            pass
    with Progress(file).locked():
        Progress(file).write(ReplayPosition(1, "0", "mqtt", 2))
    assert Progress(file).read() == ReplayPosition(1, "0", "mqtt", 2)


def test_a_message_with_several_lanes_is_sent_once(spark: SparkSession, recorded: Recorded) -> None:
    """As it came; and to where it went, once for each place."""
    rows = rows_of(spark, recorded.journal, where="route in ('up', 'hot')")
    broker = Broker(Clock())
    replay(broker, rows)
    sent = [message for _, message in broker.got]
    assert [message.body for message in sent] == [reading(number).body for number in range(READINGS)]
    assert [message.address for message in sent] == [reading(number).address for number in range(READINGS)]
    assert len({message.properties.message_id for message in sent}) == READINGS
    assert sent[0].properties.content_type == "application/json"
    assert (sent[0].assurance, sent[0].hops) == (1, 0)
    broker = Broker(Clock())
    replay(broker, rows, at_target=True)
    places = Counter(show(message.address) for _, message in broker.got)
    assert places[":hot"] == len(HOT)
    assert sum(places.values()) == READINGS + len(HOT)


def test_what_was_refused_before_it_had_a_target_is_not_sent(spark: SparkSession, tmp_path: Path) -> None:
    """What nobody took is: a publisher heard that it was accepted."""
    journal = Journal(tmp_path)
    journal.write_unrouted(0, 3)
    journal.write_unrouted(3, 2, RETURNED)
    journal.close()
    assert [row["body"] for row in rows_of(spark, tmp_path)] == [b'{"n": %d}' % number for number in range(3)]


def test_what_was_not_recorded_whole_is_not_sent(spark: SparkSession, tmp_path: Path) -> None:
    broker = Broker(Clock())
    made = replay(broker, rows_of(spark, written(tmp_path, 4, body_bytes_max=4)), to=topic_address("x"))
    assert (made.done.incomplete, made.done.sent, broker.got) == (4, 0, [])


def test_the_command_sends_a_range_to_a_queue_and_only_once(
    spark: SparkSession, recorded: Recorded, run: Run, tmp_path: Path
) -> None:
    peer = AmqpClient(recorded.access("amqp091"))
    peer.declare("again", "amq.direct", [])
    target = recorded.access("amqp091").target
    asked = (
        *("pipeline", "replay", f"amqp://guest:guest@{target.host}:{target.port}", "--queue", "again"),
        *("--journal", recorded.journal, "--where", "route = 'hot'", "--rate", "500"),
        *("--resume", str(tmp_path / "position")),
    )
    for sent in (len(HOT), 0):
        done = run(*asked)
        assert done.code == 0, done.err
        assert f"{sent} messages sent" in done.out
    with Progress(tmp_path / "position").locked():
        refused = run(*asked)
    assert (refused.code, "another replay uses" in refused.err) == (1, True)
    peer.consume("again", None, "")
    found: list[ReceivedMessage] = []
    while len(found) < len(HOT):
        found += peer.arrivals(PATIENCE_SECS)
    peer.acknowledge(found)
    assert [arrival.message.body for arrival in found] == [reading(number).body for number in HOT]
    peer.close()
    assert run(*asked, "--topic", "a").code == 2
    assert run(*asked, "--speed", "1").code == 2
