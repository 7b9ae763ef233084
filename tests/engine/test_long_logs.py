"""Logs of several segment files, at each of which RabbitMQ skips an offset, and logs that were cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pika
import pytest

from gateway.engine import connection as connections
from gateway.engine import session
from gateway.engine.records import Mark, encode_record
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.servers import RabbitMQ

SEGMENT: Final = 1_048_576
FILES: Final = 3
RETAINED: Final = 50
AWAY: Final = 10
OWED: Final = 5
LOG_CUT: Final = "log cut, reading it again"
# A sign of life with a long name says nothing; of other logs it is passed over.
FILL: Final = encode_record(Mark("x" * 4_096, "filler", 1))
STATE: Final = {"state_segment_bytes": SEGMENT, "engine_timeout_secs": 4.0, "reconnect_max_secs": 0.5}


def fill(rabbitmq: RabbitMQ, stream: str, files: int, each: Callable[[], None] = lambda: None) -> None:
    """Add records that say nothing, until the stream has begun that many segment files more. `each` is
    called for each of them."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(files):
            before = rabbitmq.segments(stream)
            assert before
            while rabbitmq.segments(stream)[-1] == before[-1]:
                channel.basic_publish("", stream, FILL)
            each()


@pytest.fixture
def keeper(rabbitmq: RabbitMQ, request: pytest.FixtureRequest) -> Iterator[Replica]:
    name = request.node.name.replace("test_", "")[:40]
    one = Replica("keeper", rabbitmq.url, name, **STATE)
    with replicas(one):
        yield one


def leave_sessions(port: int, name: str) -> None:
    """Retained messages, and sessions of clients that are away and owed messages."""
    with Client(port, f"{name}-feeds") as feeding:
        for at in range(RETAINED):
            feeding.publish(f"{name}/kept/{at}", b"%d" % at, retain=True)
        for at in range(AWAY):
            with lasting(port, f"{name}-{at}") as client:
                client.subscribe(f"{name}/owed/{at}", qos=1 + at % 2)
    owe(port, name)


def owe(port: int, name: str) -> None:
    with Client(port, f"{name}-feeds") as feeding:
        for at in range(AWAY):
            for number in range(OWED):
                feeding.publish(f"{name}/owed/{at}", b"%d" % number, qos=1 + at % 2)


def find_sessions(port: int, name: str) -> None:
    """All of it is there. What was owed is taken, and owed again."""
    for at in range(AWAY):
        with lasting(port, f"{name}-{at}") as client:
            assert client.present
            client.until(lambda one=client: len(one.messages) >= OWED)
            assert [body for _, body in client.told] == [b"%d" % number for number in range(OWED)]
    with Client(port, f"{name}-finds") as client:
        client.subscribe(f"{name}/kept/#", qos=1)
        client.until(lambda: len(client.messages) >= RETAINED)
        assert dict(client.told) == {f"{name}/kept/{at}": b"%d" % at for at in range(RETAINED)}
    owe(port, name)


def test_new_segment_files_cost_no_session_and_no_retained_message(
    keeper: Replica, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    """At a replica that follows, one with a store that comes back, and one that begins."""
    name = keeper.engine.settings.namespace
    stored = Replica("stored", rabbitmq.url, name, tmp_path, **STATE)
    leave_sessions(keeper.mqtt, name)
    with replicas(stored):
        find_sessions(stored.mqtt, name)
    fill(rabbitmq, f"{name}.state", FILES)
    find_sessions(keeper.mqtt, name)
    begins = Replica("begins", rabbitmq.url, name, **STATE)
    again = Replica("stored", rabbitmq.url, name, tmp_path, **STATE)
    with replicas(begins, again):
        find_sessions(begins.mqtt, name)
        find_sessions(again.mqtt, name)
        fill(rabbitmq, f"{name}.state", 1)
        for one in (keeper, begins, again):
            find_sessions(one.mqtt, name)
            assert not one.engine.discarded


def test_a_log_that_was_cut_is_read_from_its_beginning(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """A replica that was away meanwhile forgets what it knew, and has what the log still says."""
    name = "cutlog"
    small: dict[str, Any] = {
        **STATE,
        "state_bytes_max": 4 * SEGMENT,
        "limits": {"retained_bytes_max": SEGMENT},
    }
    keeper = Replica("keeper", rabbitmq.url, name, **small)
    with replicas(keeper, but=LOG_CUT):
        leave_sessions(keeper.mqtt, name)
        with replicas(Replica("stored", rabbitmq.url, name, tmp_path, **small)):
            pass
        first = rabbitmq.segments(f"{name}.state")[0]

        def written() -> None:
            before = keeper.engine.records["written_again"]
            keeper.ask(lambda: setattr(keeper.engine, "_look_at", 0.0))
            keeper.until(lambda: keeper.engine.records["written_again"] > before or not _due(keeper))

        fill(rabbitmq, f"{name}.state", 8, written)
        assert first not in rabbitmq.segments(f"{name}.state")
        again = Replica("stored", rabbitmq.url, name, tmp_path, **small)
        with replicas(again, but=LOG_CUT):
            assert again.engine.discarded == 1
            find_sessions(again.mqtt, name)
            assert not keeper.engine.discarded


def _due(replica: Replica) -> bool:
    """Something is near the end of the log."""
    engine = replica.engine
    oldest = engine.kept.oldest(engine.settings.state_bytes_max / 2)
    return any(state.placed <= oldest for state in list(engine.table.states.values()))


def test_a_replica_that_reads_for_long_becomes_ready(
    keeper: Replica, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Longer than a mark may take to come back, and though its connection is lost in between: what was read
    is not read again."""
    name = keeper.engine.settings.namespace
    leave_sessions(keeper.mqtt, name)
    fill(rabbitmq, f"{name}.state", 1)
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        for _ in range(30_000):
            channel.basic_publish("", f"{name}.state", encode_record(Mark("x", "filler", 1)))
        channel.confirm_delivery()
        channel.basic_publish("", f"{name}.state", FILL)
    monkeypatch.setattr(session, "MARK_SECS", 0.3)
    monkeypatch.setattr(connections, "LOG_PREFETCH", 10)
    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        begins = Replica("begins", url, name, tmp_path, **STATE, reconnect_min_secs=0.1)
        with replicas(begins, ready=False):
            for at in (1_000, 3_000):
                begins.until(lambda at=at: begins.engine.kept.position > at)
                before = begins.ask(lambda: begins.engine.kept.position)
                gone = begins.ask(lambda: begins.engine._connection)
                way.cut()
                begins.until(lambda gone=gone: begins.engine._connection is not gone)
                assert begins.ask(lambda: begins.engine.kept.position) >= before
                assert begins.gateway.readiness.reasons()
            begins.until_ready()
            assert not begins.engine.discarded
            find_sessions(begins.mqtt, name)


def test_a_reader_that_the_log_does_not_wait_for_reads_it_again(rabbitmq: RabbitMQ) -> None:
    """RabbitMQ deletes segment files that it has not come to, and tells nobody."""
    name = "overtaken"
    limits = {"retained_bytes_max": SEGMENT}
    small: dict[str, Any] = {**STATE, "state_bytes_max": 4 * SEGMENT, "limits": limits, "heartbeat_secs": 60}
    keeper = Replica("keeper", rabbitmq.url, name, **small)
    with Proxy(rabbitmq.port) as way:
        slow = Replica("slow", rabbitmq.url.replace(str(rabbitmq.port), str(way.port)), name, **small)
        with replicas(keeper, slow, but=LOG_CUT):
            leave_sessions(keeper.mqtt, name)
            slow.until(lambda: len(slow.engine.table) >= AWAY)
            way.stall("down")

            def written() -> None:
                keeper.ask(lambda: setattr(keeper.engine, "_look_at", 0.0))
                keeper.until(lambda: not _due(keeper))

            fill(rabbitmq, f"{name}.state", 12, written)
            way.resume()
            slow.until(lambda: slow.engine.discarded > 0, 30)
            slow.until_ready()
            find_sessions(slow.mqtt, name)
            assert not keeper.engine.discarded
