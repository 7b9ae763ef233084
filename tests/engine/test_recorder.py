"""What a replica writes to the log comes back in its order, or is written again."""

from __future__ import annotations

from pathlib import Path

import pytest
from paho.mqtt.client import MQTTv311

from gateway.engine.recorder import Recorder
from gateway.engine.records import Record, Willed
from gateway.model.outcome import Outcome
from tests.engine.replicas import Client, Replica, replicas
from tests.interop.servers import RabbitMQ


@pytest.fixture
def written() -> list[int]:
    """The numbers of the records."""
    return []


@pytest.fixture
def recorder(written: list[int]) -> Recorder:
    made = Recorder(lambda: None)
    made.begin("life")
    made.up(lambda record: written.append(record.number))
    return made


def put(recorder: Recorder, count: int) -> list[int]:
    """Numbers of so many records."""
    numbers = [recorder.next_number() for _ in range(count)]
    for number in numbers:
        recorder.put(Willed("client", "life", number, ("life", 1)))
    return numbers


def test_what_comes_in_order_is_whole(recorder: Recorder) -> None:
    assert all(recorder.came(number) for number in put(recorder, 3))
    assert not len(recorder)


def test_what_is_overtaken_is_lost(recorder: Recorder, written: list[int]) -> None:
    """And written again over the next connection, with what came after it; who waits hears then."""
    told: list[Outcome] = []
    first, second, third = put(recorder, 3)
    recorder.after_logged(told.append)
    assert recorder.came(first)
    assert not recorder.came(third)
    recorder.down()
    written.clear()
    recorder.up(lambda record: written.append(record.number))
    assert written == [second, third]
    assert recorder.came(second)
    assert not told
    assert recorder.came(third)
    assert told


def test_a_mark_tells_that_what_was_written_before_it_is_lost(recorder: Recorder) -> None:
    put(recorder, 1)
    mark = recorder.next_number()
    recorder.wrote(mark)
    assert not recorder.came(mark)


def test_what_came_over_an_earlier_connection_comes_again_behind_what_that_lost(
    recorder: Recorder, written: list[int]
) -> None:
    """The log is read up to its end before anything is written again. Who has subscribed, and is no longer,
    would be subscribed if the record of the first came behind that of the second."""
    told: list[Outcome] = []
    first, second, third = put(recorder, 3)
    recorder.after_logged(told.append)
    recorder.down()
    written.clear()
    assert all(recorder.came(number) for number in (first, third))
    assert not told
    recorder.up(lambda record: written.append(record.number))
    assert written == [second, third]
    assert recorder.came(second)
    assert not told
    assert recorder.came(third)
    assert told
    assert not len(recorder)


def test_a_lost_record_does_not_hold_up_a_client(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Without it a session of QoS 2 stood for as long as its replica was connected."""
    replica = Replica("one", rabbitmq.url, "recorded")
    with (
        replicas(replica),
        Client(replica.port("mqtt"), "recorded-sub", version=MQTTv311, clean=False) as subscriber,
        Client(replica.port("mqtt"), "recorded-pub") as publisher,
    ):
        subscriber.subscribe("recorded/#", qos=2)
        publisher.publish("recorded/x", b"0", qos=1)
        subscriber.until(lambda: subscriber.messages)
        recorder = replica.engine.recorder
        write = recorder._write  # what RabbitMQ does with a lost node cannot be had at will
        assert write is not None
        lost: list[Record] = []

        def lose_one(record: Record) -> None:
            if lost:
                write(record)
            lost.append(record)

        recorder._write = lose_one
        for at in range(1, 20):
            publisher.publish("recorded/x", b"%d" % at, qos=2)
        subscriber.until(lambda: len(subscriber.messages) >= 20)
        assert [int(message.payload) for message in subscriber.messages] == list(range(20))
        assert replica.engine.records["lost"] == 1
