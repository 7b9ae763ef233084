"""What is published before the cluster has said that a destination is there, and how much of it is here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from gateway.broker.pressure import FULL
from gateway.broker.priorities import PriorityQueue
from gateway.engine.amqpfast.storage import ClusterStorage
from gateway.model.batch import SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from tests.broker.parts import publish

HERE = Sender("fast", "c")


class Cluster:
    """A cluster that answers when it is told to. `prompt`: at once, to what is published."""

    exchange = "x"

    def __init__(self, *, prompt: bool = True) -> None:
        self.sent: list[bytes] = []
        self.unconfirmed: list[Callable[[], None]] = []
        self.purges: list[Callable[[], None]] = []
        self._prompt = prompt

    def send(
        self,
        part: SubBatch,
        messages: list[Message],
        address_of: Any,
        missing: Any,
        answered: Callable[[int], None],
    ) -> None:
        self.sent += [message.body for message in messages]

        def confirm() -> None:
            part.settle(ACCEPTED)
            answered(len(messages))

        self.unconfirmed.append(confirm)
        if self._prompt:
            self.confirm()

    def confirm(self) -> None:
        """The oldest that is not."""
        self.unconfirmed.pop(0)()

    def ask(self, method: m.Method, then: Callable[[], None]) -> None:
        assert isinstance(method, m.QueuePurge)
        self.purges.append(then)

    def question(self, method: Any, answered: Callable[[int, str], None]) -> None:
        """Nobody answers."""

    def keep(self, storage: ClusterStorage, *, ends: bool) -> None:
        """It is there."""

    def delete(self, storage: ClusterStorage) -> None:
        """It is not there any more."""

    def touch(self, storage: ClusterStorage) -> None:
        """Nothing is handed out."""

    def renew(self, storage: ClusterStorage) -> None:
        """As many come as the test says."""

    class reader:
        """Messages are their bodies."""

        @staticmethod
        def decode_one(body: bytes) -> Message:
            return Message(fast_address("queue", "q"), body, sender=HERE)


class Upstream:
    """A consumer of the cluster's queue."""

    def __init__(self) -> None:
        self.given_back: list[int] = []
        self.settled: list[int] = []

    def give_back(self, tag: int) -> None:
        self.given_back.append(tag)

    def settle(self, tag: int) -> None:
        self.settled.append(tag)


class Into:
    """The sink that a part is published to."""

    def __init__(self, storage: ClusterStorage) -> None:
        self._storage = storage

    def publish(self, part: SubBatch) -> None:
        self._storage.take(part, list(part.messages))


@pytest.mark.parametrize("limits, taken", [({"messages_max": 3}, 3), ({"octets_max": 9_000}, 2)])
def test_what_waits_for_the_answer_has_limits(limits: dict[str, int], taken: int) -> None:
    cluster = Cluster()
    storage = ClusterStorage(
        cluster,  # type: ignore[arg-type]  # what is not asked here is not there
        PriorityQueue("q", priority=lambda message: 0, **limits),
        lambda message: True, "ns.fast.q", amqp_address("", "ns.fast.q"), (), missing=lambda: None,
    )  # fmt: skip
    address = fast_address("queue", "q")
    told = [
        publish(Into(storage), [Message(address, b"%d" % number + bytes(5_000), sender=HERE)])
        for number in range(5)
    ]
    storage.found(ends=False)
    assert [answers.outcomes for answers in told] == [[ACCEPTED]] * taken + [[FULL]] * (5 - taken)
    assert [body[:1] for body in cluster.sent] == [b"%d" % number for number in range(taken)]
    assert publish(Into(storage), [Message(address, b"late", sender=HERE)]).outcomes == [ACCEPTED]
    assert cluster.sent[-1] == b"late"


def found(cluster: Cluster | None = None) -> tuple[ClusterStorage, PriorityQueue]:
    """A storage that is there, and the queue that it is for."""
    local = PriorityQueue("q", priority=lambda message: 0)
    storage = ClusterStorage(
        cluster or Cluster(),  # type: ignore[arg-type]
        local,
        lambda message: True, "ns.fast.q", amqp_address("", "ns.fast.q"), (), missing=lambda: None,
    )  # fmt: skip
    storage.found(ends=False)
    return storage, local


def test_what_came_for_less_credit_is_kept_beside_what_comes_for_more() -> None:
    """It is a while until a client has had that. When it leaves, all goes back, in order."""
    storage, local = found()
    upstream, tags = Upstream(), itertools.count()

    def come(count: int) -> None:
        for _ in range(count):
            storage.deliver(upstream, next(tags), False, (b"", b"", b"x"))  # type: ignore[arg-type]

    storage.adjust(5)
    come(5)
    storage.adjust(8)
    come(8)
    storage.adjust(8)
    assert (len(local), upstream.given_back) == (13, [])
    storage.adjust(0)
    come(1)
    storage.adjust(0)
    assert (len(local), upstream.given_back) == (0, list(range(14)))


def test_however_often_credit_grows_what_waits_has_a_limit() -> None:
    """Consumers join one after the other, and none of them takes anything."""
    storage, local = found()
    upstream, tags = Upstream(), itertools.count()
    for consumers in range(1, 50):
        window = 10 * consumers
        storage.adjust(window)
        for _ in range(window):
            storage.deliver(upstream, next(tags), False, (b"", b"", b"x"))  # type: ignore[arg-type]
        storage.adjust(window)
        assert len(local) <= 2 * window


def test_what_was_published_before_is_emptied_and_what_comes_next_is_not() -> None:
    """The cluster hears of each over another channel, in whatever order."""
    cluster = Cluster(prompt=False)
    storage, local = found(cluster)
    upstream = Upstream()

    def put(body: bytes) -> None:
        publish(Into(storage), [Message(fast_address("queue", "q"), body, sender=HERE)])

    def come(tag: int) -> None:
        storage.deliver(upstream, tag, False, (b"", b"", b"x"))  # type: ignore[arg-type]

    storage.adjust(5)
    come(1)
    put(b"old")
    put(b"older")
    local.purge()
    assert (upstream.settled, storage.there, storage.held) == ([1], False, 0)
    put(b"new")
    local.purge()  # again: it is being emptied
    come(2)  # which was on its way, and would be back behind what is emptied
    cluster.confirm()
    assert (cluster.sent, cluster.purges) == ([b"old", b"older"], [])
    cluster.confirm()
    (emptied,) = cluster.purges
    assert cluster.sent == [b"old", b"older"]
    emptied()
    assert storage.there
    assert (cluster.sent, len(local)) == ([b"old", b"older", b"new"], 0)
    assert (upstream.settled, upstream.given_back) == ([1, 2], [])
    come(3)
    assert len(local) == 1


def test_a_queue_that_goes_while_it_is_emptied_stays_gone() -> None:
    cluster = Cluster(prompt=False)
    storage, local = found(cluster)
    local.purge()
    (emptied,) = cluster.purges
    storage.drop()
    emptied()
    assert not storage.there
