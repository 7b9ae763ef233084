"""A full queue without consumers removes what has expired, so that its publishers go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.broker.amqpfast.destinations import (
    EXPIRED_MAX,
    FULL_SECS,
    FastQueue,
    Interest,
    TopicSubscription,
)
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.bodies import SpooledBodies
from gateway.broker.pressure import FullQueues
from gateway.broker.scheduler import CallScheduler
from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import Properties, property_set
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.settings.amqpfast import FastVirtualHost
from gateway.settings.limits import Limits
from gateway.store.store import Store
from tests.broker.parts import publish
from tests.store.parts import Opened

SETS = [property_set(Properties(priority=level)) for level in range(2)]


class Time:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.utc = 1_000.0
        self.alarms = CallScheduler()
        monkeypatch.setattr("gateway.clock.utc", lambda: self.utc)

    def advance(self, secs: float) -> None:
        self.utc += secs
        self.alarms.run_due(self.utc)

    def messages(
        self, count: int, *, lifetime: float, levels: int = 1, durable: bool = False
    ) -> list[Message]:
        expires = self.utc + lifetime if lifetime else NEVER
        address = fast_address("queue", "q")
        return [
            Message(address, b"%d" % number, SETS[number % levels], expires=expires, durable=durable)
            for number in range(count)
        ]


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_held_publisher_resumes_when_the_messages_expire(time: Time, levels: int) -> None:
    count = 2 * EXPIRED_MAX
    queue = FastQueue("q", durable=False, messages_max=count, bytes_max=1 << 30, alarms=time.alarms)
    publish(queue, time.messages(count, lifetime=10.0, levels=levels))
    answers = publish(queue, time.messages(1, lifetime=0.0))
    assert (answers.outcomes, len(answers.held), answers.released) == ([ACCEPTED], 1, 0)
    time.advance(9.0)
    assert answers.released == 0
    time.advance(2.0)
    time.advance(FULL_SECS)
    assert (answers.released, len(queue)) == (1, 1)
    time.advance(100.0)
    assert len(time.alarms) == 0, "nobody waits any more"


def test_a_held_publisher_resumes_when_stored_messages_expire(time: Time, tmp_path: Path) -> None:
    def open_hosts(store: Store) -> None:
        nonlocal queue
        limits = Limits(queue_messages_max=4)
        hosts = FastHosts(
            {"/": FastVirtualHost()},
            lambda: None,
            limits,
            store,
            SpooledBodies(limits, store),
            alarms=time.alarms,
        )
        (found,) = hosts["/"].find("queue", "q", whole=False)
        assert isinstance(found, FastQueue)
        queue = found

    queue: FastQueue
    with Opened(tmp_path, before=open_hosts) as opened:
        publish(queue, time.messages(4, lifetime=10.0, durable=True))
        opened.commit()
    with Opened(tmp_path, before=open_hosts) as opened:
        answers = publish(queue, time.messages(1, lifetime=0.0, durable=True))
        opened.commit()
        assert (answers.outcomes, len(answers.held), answers.released) == ([ACCEPTED], 1, 0)
        for _ in range(5):
            time.advance(5.0)
            opened.commit()
        assert (answers.released, len(queue)) == (1, 1)


def test_a_full_subscription_loses_no_message_while_it_has_expired_ones(time: Time) -> None:
    full_queues = FullQueues(may_hold=lambda user: False)
    subscription = TopicSubscription(
        Interest("q", prefix=False), messages_max=4, bytes_max=1 << 30, full_queues=full_queues
    )
    publish(subscription, time.messages(4, lifetime=10.0))
    time.advance(20.0)
    publish(subscription, time.messages(1, lifetime=0.0))
    assert (len(subscription), full_queues.dropped) == (1, 0)
