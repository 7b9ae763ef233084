"""Rows of the journal for what a link brings and no route takes; and when a link's messages came."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.mqtt.spec import PacketType
from gateway.settings.journal import Journal
from gateway.store.journal.reader import Gap, JournalReader, Row
from tests.configured import make_link
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

MAPPING: Final = """
version: 1
routes:
  - name: from-mqtt
    from: {endpoint: far-mqtt, topic: "in/#"}
    to: {endpoint: mqtt, topic: "came"}
    when: "body.wanted"
  - name: from-amqp
    from: {endpoint: far-amqp, queue: in}
    to: {endpoint: mqtt, topic: "came"}
    when: "body.wanted"
  - name: from-fast
    from: {endpoint: far-fast, service: queue, destination: fast-in}
    to: {endpoint: mqtt, topic: "came"}
    when: "body.wanted"
"""
BODIES: Final = (b'{"wanted": true}', b'{"wanted": false}')
PAUSE_SECS: Final = 1.2


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Running, Running]]:
    """A gateway with links of each protocol to another one."""
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(MAPPING)
    with ExitStack() as stack:
        far = stack.enter_context(running(settings_of()))
        with Amqp(far).open() as client:
            client.call(m.QueueDeclare("in"), m.QueueDeclareOk)
        links: dict[str, Any] = {
            "far-mqtt": make_link(url=f"mqtt://{LOOPBACK}:{far.mqtt}", client_id="near"),
            "far-amqp": make_link(url=f"amqp://guest:guest@{LOOPBACK}:{far.port('amqp091')}"),
            "far-fast": make_link(
                url=f"amqpfast://guest:guest@{LOOPBACK}:{far.port('amqpfast')}/", client_id="near"
            ),
        }
        journal = Journal(enabled=True, path=tmp_path / "journal", flush_interval_secs=0.02)
        near = stack.enter_context(
            running(settings_of(journal=journal, links=links, mappings=(str(mapping),)))
        )
        near.until(lambda: all(link.is_up for link in near.gateway.links.values()))
        stack.enter_context(connect(near, "reader")[0]).subscribe("came")
        yield far, near


def publish_all(far: Running, body: bytes) -> None:
    """Once for each link."""
    with connect(far, "device")[0] as device:
        for _ in range(100):
            device.publish("in/a", body, 1, 1)
            if device.acked(PacketType.PUBACK)[1] == 0:
                break
            time.sleep(0.05)  # the link has not subscribed yet
    with Amqp(far).open() as client:
        client.publish("", "in", body)
        client.call(m.QueueDeclare("in", passive=True), m.QueueDeclareOk)
    with Fast(far).open() as fast:
        fast.put(fast.handle("fast-in"), body)


def rows_of(near: Running, folder: Path, count: int) -> list[Row]:
    def found() -> list[Row]:
        return [row for row in JournalReader(folder).rows("0") if not isinstance(row, Gap)]

    near.until(lambda: len(found()) >= count)
    return found()


def test_what_no_route_takes_has_a_row(pair: tuple[Running, Running], tmp_path: Path) -> None:
    far, near = pair
    for body in BODIES:
        publish_all(far, body)
    rows = rows_of(near, tmp_path / "journal", 6)
    found = {(row["source_endpoint"], row["route"], row["outcome"], row["reason"]) for row in rows}
    ends = {"far-mqtt": "from-mqtt", "far-amqp": "from-amqp", "far-fast": "from-fast"}
    assert found == {
        *((end, route, "accepted", "none") for end, route in ends.items()),
        *((end, "", "accepted", "no_taker") for end in ends),
    }


def test_a_message_came_when_it_was_read(pair: tuple[Running, Running], tmp_path: Path) -> None:
    """Not when the link had last been busy."""
    far, near = pair
    publish_all(far, BODIES[0])
    rows_of(near, tmp_path / "journal", 3)
    time.sleep(PAUSE_SECS)  # this is the time that would be counted
    publish_all(far, BODIES[0])
    rows = rows_of(near, tmp_path / "journal", 6)
    assert all(row["settled"] - row["received"] < PAUSE_SECS * 500_000 for row in rows)
