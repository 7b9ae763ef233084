"""Retained messages that were cleared stay cleared, whatever a replica that has not read of it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.engine import retained
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, replicas
from tests.interop.servers import RabbitMQ

COUNT = 200


class Late:
    """A replica to which nothing comes of the cluster for some time, as to one that is frozen or slow."""

    def __init__(self, rabbitmq: RabbitMQ, way: Proxy, name: str) -> None:
        self.way = way
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        self.late = Replica("late", url, name)
        self.other = Replica("other", rabbitmq.url, name)
        self.name = name

    def clear_unnoticed(self) -> None:
        """All topics have a message at both replicas, and are cleared when one of them does not listen."""
        with Client(self.other.mqtt, "sets") as client:
            for at in range(COUNT):
                client.publish(f"{self.name}/{at}", b"%d" % at, retain=True)
            self.late.until(lambda: len(self._kept(self.late)) == COUNT)
            self.way.stall("down")
            for at in range(COUNT):
                client.publish(f"{self.name}/{at}", b"", retain=True)
            self.other.until(lambda: not self._kept(self.other))
        assert len(self.late.ask(lambda: self._kept(self.late))) == COUNT

    def _kept(self, replica: Replica) -> list[str]:
        topics = [message.address.name for message in replica.engine.kept.messages()]
        return [topic for topic in topics if topic.startswith(self.name)]

    def stays_cleared(self, rabbitmq: RabbitMQ) -> None:
        """At both, and at one that reads the log from its beginning."""
        self.way.resume()
        with Client(self.late.mqtt, "last") as client:  # what was written before has been read by then
            client.publish(f"{self.name}/last", b"x", retain=True)
        begins = Replica("begins", rabbitmq.url, self.name)
        with replicas(begins):
            for one in (self.late, self.other, begins):
                one.until(lambda one=one: self._kept(one) == [f"{self.name}/last"])


@pytest.fixture
def pair(rabbitmq: RabbitMQ, request: pytest.FixtureRequest) -> Iterator[Late]:
    with Proxy(rabbitmq.port) as way:
        made = Late(rabbitmq, way, request.node.name.replace("test_", "")[:40])
        with replicas(made.late, made.other):
            yield made


def test_who_has_not_read_of_a_clear_writes_nothing_again(
    pair: Late, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is due it reads the log to its end first."""
    late = pair.late
    pair.clear_unnoticed()
    monkeypatch.setattr(retained, "HALF", 0.0)  # everything is old
    monkeypatch.setattr(retained, "SPREAD", 0.0)
    late.ask(lambda: setattr(late.engine, "_look_at", 0.0))
    late.until(lambda: late.engine._look_at > 0.0)
    assert not late.engine.records["written_again"]
    pair.stays_cleared(rabbitmq)
    late.ask(lambda: setattr(late.engine, "_look_at", 0.0))
    late.until(lambda: late.engine.records["written_again"] > 0)  # what there is now
    assert late.engine.records["written_again"] < COUNT


def test_what_is_written_again_behind_a_clear_loses(
    pair: Late, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by one that was frozen in the midst of writing. The clears are written again behind it."""
    late, other = pair.late, pair.other
    pair.clear_unnoticed()
    with monkeypatch.context() as patch:
        patch.setattr(retained, "HALF", 0.0)
        patch.setattr(retained, "SPREAD", 0.0)
        late.ask(late.engine._write_again)
    assert late.engine.records["written_again"] == COUNT
    other.until(lambda: other.engine.records["late"] >= COUNT)
    other.ask(lambda: setattr(other.engine, "_look_at", 0.0))
    other.until(lambda: other.engine.records["written_again"] == COUNT)
    other.until(lambda: not other.engine.kept.due(1e6, 1 << 30))
    pair.stays_cleared(rabbitmq)
