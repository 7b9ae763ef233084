"""A disk that fails: what is behind the first refusal is not handed out before that comes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.model.message import Message
from gateway.model.outcome import Reason
from gateway.protocols.amqp091.dialect import amqp_address
from tests.broker.parts import SENDER, Answers, Taker, publish
from tests.store.parts import Disk, Opened

FAULT = "disk I/O error"
MAKES: dict[str, Callable[[], Queue]] = {
    "queue": lambda: Queue("q"),
    "priorities": lambda: PriorityQueue("q", lambda message: int(message.body)),
}


def durable(*numbers: int) -> list[Message]:
    return [Message(amqp_address("", "q"), b"%d" % one, durable=True, sender=SENDER) for one in numbers]


class World:
    """A queue on a store whose disk waits and then fails."""

    def __init__(self, folder: Path, queue: Queue) -> None:
        self.disk = Disk()
        self.opened = Opened(folder, factory=self.disk.factory())
        store = self.opened.store
        self.queue = queue
        QueueStorage(queue, store, store.log("queue", "q"), MemoryLimits(99, 1 << 20))
        self.opened.commit()

    def committing(self, *numbers: int) -> Answers:
        """Messages whose commit waits."""
        self.disk.waiting.clear()
        self.disk.gate.clear()
        answers = publish(self.queue, durable(*numbers))
        self.opened.store.flush()
        assert self.disk.waiting.wait(10.0)
        return answers

    def fail(self) -> None:
        self.disk.fault = FAULT
        self.disk.gate.set()

    def step(self) -> None:
        """One thing that the store's thread hands back, and the end of a wake-up."""
        loop = self.opened.loop
        calls = loop.calls
        loop.run_until(lambda: loop.calls > calls)
        self.opened.store.flush()


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("way", ["consumer", "get"])
def test_nothing_overtakes_what_is_refused(tmp_path: Path, make: str, way: str) -> None:
    world = World(tmp_path, MAKES[make]())
    queue, got = world.queue, []
    taker = Taker(1)
    queue.add(taker)
    first = world.committing(9, 8)  # the consumer has credit for one
    behind = publish(queue, durable(7))
    world.opened.store.flush()
    assert [int(one[1].body) for one in taker.taken] == [9]
    world.fail()
    while not (first.told and behind.told):
        world.step()
        taker.credit = 5
        if way == "consumer":
            queue.dispatch()
        elif (taken := queue.take()) is not None:
            got.append(int(taken[1].body))
    assert {one.reason for one in (*first.outcomes, *behind.outcomes)} == {Reason.STORE}
    assert [int(one[1].body) for one in taker.taken] == [9]
    assert got == []
    world.disk.fault = ""
    world.opened.until_healthy(True)
    publish(queue, durable(9, 8, 7))
    world.opened.commit()
    assert [int(one[1].body) for one in taker.taken] == [9, 9, 8, 7]
    world.opened.store.close()


@pytest.mark.parametrize("make", MAKES)
def test_what_was_held_back_goes_out_when_all_is_known(tmp_path: Path, make: str) -> None:
    """A transient message that came in time is not refused, and nobody has to ask for it again."""
    world = World(tmp_path, MAKES[make]())
    queue = world.queue
    taker = Taker(0)
    queue.add(taker)
    first = world.committing(9)
    transient = Message(amqp_address("", "q"), b"5", sender=SENDER)
    publish(queue, [transient])
    world.fail()
    while world.opened.store.healthy:
        world.step()
    taker.credit = 5
    queue.dispatch()
    assert taker.taken == []
    world.opened.until(lambda: first.told and not queue.gate.shut)
    assert [int(one[1].body) for one in taker.taken] == [5]
    world.disk.fault = ""
    world.opened.store.close()
