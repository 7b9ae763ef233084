"""What a route recognises repeats of is delivered when it is on disk; what else comes waits behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.broker.dispatcher import RouteRecipient
from gateway.broker.queue import Queue
from gateway.broker.storage import MemoryLimits, QueueStorage
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.batch import Recipient, Sink
from gateway.model.outcome import ACCEPTED
from gateway.protocols.mqtt.dialect import topic_address
from gateway.store.store import Store
from tests.broker.parts import Space, Taker, connected, mqtt, publish
from tests.store.parts import Disk, Opened

MAPPING = """
version: 1
routes:
  - {name: plain, from: {endpoint: mqtt, topic: "#"}, to: {endpoint: erp, exchange: e}}
  - name: once
    from: {endpoint: mqtt, topic: "#"}
    to: {endpoint: erp, exchange: e}
    deduplicate: {by: message_id, window: 10m}
"""


def recipient(route: str, sink: Sink) -> Recipient:
    """That of a route to a sink."""
    router = Router([parse(MAPPING, "t.yaml")], {"mqtt": "mqtt", "erp": "amqp091"})
    return RouteRecipient(sink, next(one for one in router.routes if one.name == route), None)


@contextmanager
def target(kind: str, folder: Path, disk: Disk) -> Iterator[tuple[Opened, Sink, Callable[[], list[bytes]]]]:
    """A store, a sink that somebody consumes, and what has been delivered."""
    spaces: list[Space] = []

    def make(store: Store) -> None:
        spaces.append(Space(store=store))

    with Opened(folder, before=make, factory=disk.factory()) as one:
        if kind == "queue":
            queue, taker = Queue("q"), Taker()
            log = one.store.log("queue", "q")
            QueueStorage(queue, one.store, log, MemoryLimits(100, 1 << 20))
            queue.add(taker)
            yield one, queue, lambda: taker.bodies
        else:
            outlet = connected(spaces[0].session("c", "#"))
            (grant,) = spaces[0].sinks(topic_address("a/b"))
            yield one, grant, lambda: [body for body, *_ in outlet.said]


@pytest.mark.parametrize("kind", ["queue", "session"])
def test_what_has_an_id_is_delivered_when_it_is_stored(kind: str, tmp_path: Path) -> None:
    with target(kind, tmp_path, Disk()) as (one, sink, delivered):
        publish(sink, [mqtt(body=b"1")], recipient=recipient("plain", sink))
        assert delivered() == [b"1"]
        publish(sink, [mqtt(body=b"2"), mqtt(body=b"3")], recipient=recipient("once", sink))
        publish(sink, [mqtt(body=b"4")], recipient=recipient("plain", sink))
        assert delivered() == [b"1"], "the others are in no commit yet"
        one.until(lambda: len(delivered()) == 4)
        assert delivered() == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("kind", ["queue", "session"])
def test_what_the_disk_does_not_take_is_never_delivered(kind: str, tmp_path: Path) -> None:
    disk = Disk()
    with target(kind, tmp_path, disk) as (one, sink, delivered):
        assert one.commit() is ACCEPTED
        disk.fault = "disk is full"
        for number in range(2):
            answers = publish(sink, [mqtt(body=b"%d" % number)], recipient=recipient("once", sink))
            one.until(lambda told=answers.told: told)  # type: ignore[misc]
            one.until_healthy(False)
        disk.fault = ""
        one.until_healthy(True)
        publish(sink, [mqtt(body=b"2")], recipient=recipient("once", sink))
        one.until(delivered)
        assert delivered() == [b"2"]
