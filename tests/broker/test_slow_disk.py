"""Publishers that a slow disk holds, because too much waits for it, go on however that ends.

The rows are what messages are stored for: queues of both protocols with queues, and MQTT sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.broker.amqpfast.destinations import FastQueue
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.model.batch import Sink
from gateway.model.message import MESSAGE_BYTES, Message
from gateway.model.outcome import ACCEPTED, Verdict
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.store import Store
from tests.broker.parts import SENDER, Space, connected, publish
from tests.store.parts import Disk, Opened


class Target(NamedTuple):
    """Something that stores messages. `end` deletes it."""

    sink: Sink
    root: object
    message: Message
    end: Callable[[], object]


def _stored(queue: Queue, store: Store) -> Queue:
    log = store.log("queue", queue.name)
    QueueStorage(queue, store, log, MemoryLimits(100, 1 << 20))
    return queue


def amqp_queue(store: Store) -> Target:
    queue = _stored(Queue("q"), store)
    return Target(queue, queue, Message(amqp_address("", "q"), b"x", sender=SENDER), queue.delete)


def fast_queue(store: Store) -> Target:
    queue = _stored(FastQueue("q", durable=True, messages_max=100, bytes_max=1 << 20), store)
    return Target(queue, queue, Message(fast_address("queue", "q"), b"x", sender=SENDER), queue.delete)


def absent_session(store: Store) -> Target:
    return _session(store, attached=False)


def session(store: Store) -> Target:
    return _session(store, attached=True)


def _session(store: Store, *, attached: bool) -> Target:
    space = Space(store=store)
    session = space.session("c", "#")
    if attached:
        connected(session)
    (grant,) = space.sinks(topic_address("a/b"))
    message = Message(topic_address("a/b"), b"x", sender=SENDER)
    return Target(grant, space, message, lambda: space.discard(session))


TARGETS = (amqp_queue, fast_queue, session, absent_session)
every_target = pytest.mark.parametrize("make", TARGETS, ids=lambda make: make.__name__)


class Slow:
    """A target on a disk that stands still with one message, so that no second one may wait for it."""

    def __init__(self, folder: Path, make: Callable[[Store], Target]) -> None:
        self.disk = Disk()
        made: list[Target] = []
        self.one = Opened(
            folder,
            before=lambda store: made.append(make(store)),
            factory=self.disk.factory(),
            pending_bytes_max=MESSAGE_BYTES,
        )
        (self.target,) = made
        assert self.one.commit() is ACCEPTED
        self.disk.gate.clear()
        self.first = publish(self.target.sink, [self.message(durable=True)])
        self.one.store.flush()

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.disk.gate.set()
        self.one.end(kind is None, self.target.root)

    def message(self, *, durable: bool) -> Message:
        sample = self.target.message
        return Message(sample.address, b"x" * 100, assurance=int(durable), durable=durable, sender=SENDER)


@every_target
@pytest.mark.parametrize("durable", [False, True])
def test_publishers_go_on_when_a_slow_disk_has_caught_up(
    make: Callable[[Store], Target], durable: bool, tmp_path: Path
) -> None:
    with Slow(tmp_path, make) as slow:
        later = publish(slow.target.sink, [slow.message(durable=durable)])
        assert (len(later.held), later.released) == (1, 0)
        slow.disk.gate.set()
        slow.one.until(lambda: later.released == 1)
        slow.one.until(lambda: slow.first.outcomes == later.outcomes == [ACCEPTED])


@every_target
def test_publishers_go_on_when_what_they_published_to_is_deleted(
    make: Callable[[Store], Target], tmp_path: Path
) -> None:
    with Slow(tmp_path, make) as slow:
        later = publish(slow.target.sink, [slow.message(durable=True)])
        slow.target.end()
        slow.one.store.flush()
        slow.disk.gate.set()
        slow.one.until(lambda: later.released == 1)
        slow.one.until(lambda: slow.first.told and later.told)


@every_target
def test_publishers_go_on_when_the_slow_disk_fails(make: Callable[[Store], Target], tmp_path: Path) -> None:
    """They are told that their messages were not stored, and may publish them again."""
    with Slow(tmp_path, make) as slow:
        later = publish(slow.target.sink, [slow.message(durable=True)])
        slow.one.store.flush()
        slow.disk.fault = "disk is full"
        slow.disk.gate.set()
        slow.one.until(lambda: later.released == 1)
        slow.one.until(lambda: later.told)
        assert [outcome.verdict for outcome in later.outcomes] == [Verdict.RELEASED]
        slow.disk.fault = ""
        slow.one.until_healthy(True)
        again = publish(slow.target.sink, [slow.message(durable=True)])
        slow.one.until(lambda: again.outcomes == [ACCEPTED])
