"""What is published to a destination before the cluster has said that it is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.broker.pressure import FULL
from gateway.broker.priorities import PriorityQueue
from gateway.engine.amqpfast.storage import ClusterStorage
from gateway.model.batch import SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from tests.broker.parts import publish

HERE = Sender("fast", "c")


class Cluster:
    """A cluster that answers when it is told to."""

    exchange = "x"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, part: SubBatch, messages: list[Message], *_: Any) -> None:
        self.sent += [message.body for message in messages]
        part.settle(ACCEPTED)

    def question(self, method: Any, answered: Callable[[int, str], None]) -> None:
        """Nobody answers."""

    def keep(self, storage: ClusterStorage, *, ends: bool) -> None:
        """It is there."""

    def touch(self, storage: ClusterStorage) -> None:
        """Nothing has come."""


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
