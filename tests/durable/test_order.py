"""The order in which things reach the disk, after each commit of a gateway that is used at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pika
import pytest

from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.settings import StoreSettings as StoreSettings
from gateway.store.store import Store
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.store.crashes import Crashes

PUBREC, PUBREL, PUBCOMP = PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP
DAY: Final = {Property.SESSION_EXPIRY_INTERVAL: 86_400}
ROUTES: Final = ("near", "memory", "both", "also", "once")
MAPPING: Final = """version: 1
routes:
  - {name: near, from: {endpoint: mqtt, topic: "near/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: memory, from: {endpoint: mqtt, topic: "memory/#"}, to: {endpoint: amqp091, queue: memory}}
  - {name: both, from: {endpoint: mqtt, topic: "both/#"}, to: {endpoint: amqp091, queue: near}}
  - {name: also, from: {endpoint: mqtt, topic: "both/#"}, to: {endpoint: amqp091, queue: memory}}
  - {name: once, from: {endpoint: amqp091, exchange: in}, to: {endpoint: mqtt, topic: "{key}/once"},
     deduplicate: {window: 10m}}
"""
NOBODY: Final = "nobody/a"  # whom nothing leads to: it is settled at once
TOPICS: Final = ("near/a", "memory/a", "both/a", "kept/a", "live/a", "live/kept", NOBODY)
STEPS: Final = 150


@pytest.fixture
def crashes() -> Crashes:
    return Crashes()


@pytest.fixture
def gateway(tmp_path: Path, crashes: Crashes) -> Iterator[Running]:
    file = tmp_path / "mapping.yaml"
    file.write_text(MAPPING.replace('"{key}/once"', "kept/once"))
    settings = settings_of(store=StoreSettings(path=tmp_path / "data"), mappings=(str(file),))
    opened = partial(Store, factory=crashes.factory())
    with patch("gateway.app.storage.Store", opened), running(settings) as started:
        yield started


class Use:
    """Clients that do something at random, each with numbers of its own."""

    def __init__(self, gateway: Running, crashes: Crashes, seed: int) -> None:
        self.gateway = gateway
        self.crashes = crashes
        self.rng = random.Random(seed)
        self.published = 0
        self.said = 0
        self.channel = pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url)).channel()
        self.channel.exchange_declare("in", "fanout", durable=True)
        self.channel.queue_declare("near", durable=True)
        self.channel.queue_declare("memory")
        reader, _ = connect(gateway, "reader", version=Version.V5, properties=DAY)
        for topic in ("kept/#", "live/kept"):
            reader.subscribe(topic, 1)
        reader.cut()
        live, _ = connect(gateway, "live", version=Version.V5)
        live.subscribe("live/#", 2)
        self.live = live
        self.writer, _ = connect(gateway, "writer", version=Version.V5, properties=DAY)

    def step(self) -> None:
        what = self.rng.random()
        if what < 0.6:
            self.published += 1
            topic = self.rng.choice(TOPICS)
            if topic == NOBODY:
                self.crashes.settled.add(b"q%d" % self.published)
            self.writer.publish(topic, b"q%d" % self.published, 2, self.published)
        elif what < 0.8:
            self.said += 1
            given = pika.BasicProperties(message_id=str(self.said), delivery_mode=2)
            self.channel.basic_publish("in", "", b"d%d" % self.said, given)
        else:
            pauses = self.gateway.gateway.core.pauses
            act = pauses.resume if self.rng.random() < 0.5 else pauses.pause
            self.gateway.ask(partial(act, "route", self.rng.choice(ROUTES)))

    def finish(self) -> set[int]:
        """Everything goes on; returns the ids that were taken."""
        for route in ROUTES:
            self.gateway.ask(partial(self.gateway.gateway.core.pauses.resume, "route", route))
        taken = {self.writer.acked(PUBREC)[0] for _ in range(self.published)}
        self.channel.connection.close()
        return taken

    def close(self) -> None:
        for client in (self.writer, self.live):
            client.cut()


def body_of(one: str) -> bytes:
    kind, _, id = one.split("/")
    return (b"q%s" if kind == "incoming" else b"d%s") % id.encode()


@pytest.mark.parametrize("seed", range(3))
def test_an_id_on_disk_has_its_message_there_after_each_commit(
    gateway: Running, crashes: Crashes, seed: int
) -> None:
    use = Use(gateway, crashes, seed)
    for _ in range(STEPS):
        use.step()
    assert use.finish() == set(range(1, use.published + 1))
    use.close()
    gateway.until(lambda: gateway.gateway.core.pauses.waiting_by_route() == {})
    gateway.stop()
    crashes.check(body_of)
    kinds = {one.split("/")[0] for state in crashes.states for one in state.ids}
    assert kinds == {"incoming", "seen"}
