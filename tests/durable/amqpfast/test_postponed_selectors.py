"""The process dies while a subscription has postponed its selector: what was accepted is on disk.

A source whose targets are all local hands its identifier, acknowledgement or id to the store with its batch,
so that one transaction has both. A postponed message is in no transaction yet.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pika
import pytest
from pika.spec import Tx

from gateway.broker.amqpfast.destinations import Interest
from gateway.broker.amqpfast.virtual_host import FastHost
from gateway.broker.selection_work import SelectionWork
from gateway.model.message import Message
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.mqtt.packets import Connack, Connect, Will
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.settings import Settings, StoreSettings
from tests.ingress.amqpfast.client import PERSISTENT, TOPIC, Fast
from tests.ingress.clients import Mqtt
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.simulation.disk import LOCK

MAPPING = """version: 1
routes:
  - name: far
    from: {endpoint: mqtt, topic: "jobs/#"}
    to: {endpoint: amqpfast, service: topic, destination: jobs}
  - name: tx
    from: {endpoint: amqp091, exchange: out}
    to: {endpoint: amqpfast, service: topic, destination: jobs}
  - name: once
    from: {endpoint: amqp091, exchange: once}
    to: {endpoint: amqpfast, service: topic, destination: jobs}
    deduplicate: {window: 10m}
"""
LASTING = pika.BasicProperties(delivery_mode=2)
SUBSCRIPTION = ("client", "sub")
NEXT_PASS = SelectionWork._next_pass


def slow(message: Message) -> bool:
    """Select a message, and use up the time of a pass."""
    time.sleep(0.006)
    return True


def host(gateway: Running) -> FastHost:
    return gateway.gateway.fast_hosts["/"]


def owed(gateway: Running) -> int:
    return gateway.ask(lambda: len(host(gateway).durable[SUBSCRIPTION]))


def subscribe(gateway: Running, key: tuple[str, str] | None = SUBSCRIPTION) -> None:
    interest = Interest("jobs", prefix=False, selector=b"n IS NULL", selects=slow)
    gateway.ask(lambda: host(gateway).subscribe(interest, key, "guest"))


def commit(gateway: Running) -> None:
    """Wait until everything that the gateway has handed to its store is on disk."""
    store = gateway.gateway.store
    assert store is not None
    done = threading.Event()

    def ask() -> None:
        store.put("x", "y", b"")
        store.after_commit(lambda outcome: done.set())
        store.flush()

    gateway.ask(ask)
    assert done.wait(10)


class Site:
    """A gateway whose store can be copied as if the process had died."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "m.yaml").write_text(MAPPING)

    def settings(self, store: str) -> Settings:
        return settings_of(
            mappings=[str(self.folder / "m.yaml")], store=StoreSettings(path=self.folder / store)
        )

    @contextmanager
    def dead(self, gateway: Running) -> Iterator[Running]:
        """Yield a gateway with what the disk of `gateway` has."""
        commit(gateway)
        shutil.copytree(self.folder / "s", self.folder / "dead", ignore=shutil.ignore_patterns(LOCK))
        try:
            with running(self.settings("dead"), unrepaired=True) as started:
                yield started
        finally:
            selection = gateway.gateway.dispatcher.selection
            while selection._calls:  # so that clients that wait for an answer can go
                gateway.ask(partial(NEXT_PASS, selection))

    @contextmanager
    def postponing(self) -> Iterator[Running]:
        """Yield a gateway that dies before the next pass of its selectors."""
        with patch.object(SelectionWork, "_next_pass", lambda self: None), self.started() as gateway:
            yield gateway

    @contextmanager
    def started(self) -> Iterator[Running]:
        with running(self.settings("s"), unrepaired=True) as gateway:
            yield gateway


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def postponed(gateway: Running) -> None:
    gateway.until(lambda: gateway.gateway.dispatcher.selection.postponed_count > 0)


def writer(gateway: Running, *, will: Will | None = None) -> Mqtt:
    client = Mqtt(gateway.mqtt)
    client.say(
        Connect(
            "writer",
            Version.V5,
            will is not None,
            will=will,
            properties={} if will else {Property.SESSION_EXPIRY_INTERVAL: 86_400},
        )
    )
    assert client.next(Connack).reason == 0
    return client


def send_at_qos_2(client: Mqtt, *packet_ids: int) -> None:
    """Send messages in one segment."""
    for at in packet_ids:
        client.machine.publish(b"jobs/x", b"%d" % at, 2, packet_id=at)
    client.flush()


def ids_of(gateway: Running) -> list[int]:
    received = gateway.gateway.mqtt.sessions["writer"].received_ids
    return gateway.ask(lambda: [at for at in (1, 2, 3) if at in received])


def test_an_identifier_at_qos_2_is_not_on_disk_before_its_message(site: Site) -> None:
    with site.postponing() as gateway:
        subscribe(gateway)
        with writer(gateway) as client:
            send_at_qos_2(client, 1, 2)
            postponed(gateway)
            assert client.acked(PacketType.PUBREC) == (1, 0)
            with site.dead(gateway) as second:
                assert (ids_of(second), owed(second)) == ([1], 1)


def test_an_identifier_at_qos_2_is_on_disk_before_its_pubrec(site: Site) -> None:
    with site.started() as gateway:
        subscribe(gateway)
        with writer(gateway) as client:
            send_at_qos_2(client, 1, 2, 3)
            assert [client.acked(PacketType.PUBREC) for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]
            postponed(gateway)
            with site.dead(gateway) as second:
                assert (ids_of(second), owed(second)) == ([1, 2, 3], 3)


def test_an_identifier_at_qos_2_is_in_memory_like_its_message(site: Site) -> None:
    with site.started() as gateway:
        subscribe(gateway, None)
        with writer(gateway) as client:
            send_at_qos_2(client, 1, 2, 3)
            assert [client.acked(PacketType.PUBREC) for _ in range(3)] == [(1, 0), (2, 0), (3, 0)]
            postponed(gateway)
            with site.dead(gateway) as second:
                assert ids_of(second) == []


def test_a_commit_of_amqp_acknowledges_nothing_before_its_messages_are_on_disk(site: Site) -> None:
    with site.postponing() as gateway:
        subscribe(gateway)
        with channel(gateway) as opened:
            opened.queue_declare("in", durable=True)
            with channel(gateway) as filling:
                for _ in range(2):
                    filling.basic_publish("", "in", b"x", LASTING)
            opened.tx_select()
            tags = [opened.basic_get("in")[0].delivery_tag for _ in range(2)]
            for at in range(2):
                opened.basic_publish("out", "k", b"%d" % at, LASTING)
            opened.basic_ack(tags[-1], multiple=True)
            opened._impl._send_method(Tx.Commit())
            opened.connection._flush_output()
            postponed(gateway)
            with site.dead(gateway) as second:
                jobs = second.ask(lambda: len(second.gateway.hosts["/"].queues["in"]))
                assert (jobs, owed(second)) == (2, 1)


def test_a_commit_of_amqpfast_acknowledges_nothing_before_its_messages_are_on_disk(site: Site) -> None:
    with site.postponing() as gateway:
        subscribe(gateway)
        with Fast(gateway).open() as filling:
            filling.put(filling.handle("in"), b"x", head=PERSISTENT)
        with Fast(gateway).open(transacted=True) as client:
            taking, giving = client.handle("in"), client.handle("jobs", TOPIC)
            client.consume(taking)
            (row,) = client.rows(1)
            for _ in range(2):
                client.put(giving, b"x", head=PERSISTENT)
            client.ack(row[1])
            client.say(m.ChannelCommit(1, client.machine.new_tag(1)))
            postponed(gateway)
            with site.dead(gateway) as second:
                jobs = second.ask(lambda: len(host(second).queues["in"]))
                assert (jobs, owed(second)) == (1, 1)


@contextmanager
def channel(gateway: Running) -> Iterator[Any]:
    with pika.BlockingConnection(pika.URLParameters(gateway.idle_amqp_url)) as connection:
        opened = connection.channel()
        for exchange in ("out", "once"):
            opened.exchange_declare(exchange, "fanout", durable=True)
        yield opened


def once(opened: Any, *numbers: int) -> None:
    """Publish messages with ids in one segment, without waiting for confirms."""
    for at in numbers:
        properties = pika.BasicProperties(delivery_mode=2, message_id=f"m{at}")
        opened._impl.basic_publish("once", "k", b"%d" % at, properties)
    opened.connection._flush_output()


def accepted(gateway: Running) -> list[str]:
    return gateway.ask(lambda: list(gateway.gateway.dispatcher.deduplication.of("once").accepted))


@pytest.mark.parametrize(
    "key, passes, ids",
    [
        (SUBSCRIPTION, False, ["m0"]),
        (SUBSCRIPTION, True, ["m0", "m1", "m2"]),
        (None, True, []),
    ],
    ids=["postponed", "written", "in memory"],
)
def test_an_id_is_on_disk_only_with_its_message(
    site: Site, key: tuple[str, str] | None, passes: bool, ids: list[str]
) -> None:
    begin: Callable[[], Any] = site.started if passes else site.postponing
    with begin() as gateway:
        subscribe(gateway, key)
        with channel(gateway) as opened:
            once(opened, 0, 1, 2)
            postponed(gateway)
            gateway.until(
                lambda: (
                    len(gateway.gateway.dispatcher.deduplication.of("once").accepted) == (3 if passes else 1)
                )
            )
            with site.dead(gateway) as second:
                assert accepted(second) == ids
                assert key is None or owed(second) == len(ids)


def test_a_will_is_published_again(site: Site) -> None:
    with site.postponing() as gateway:
        subscribe(gateway)
        client = writer(gateway, will=Will("jobs/x", b"will", 1, False))
        client.publish("jobs/x", b"1", 1, 1)
        assert client.acked(PacketType.PUBACK) == (1, 0)
        client.cut()
        gateway.until(lambda: "writer" not in gateway.gateway.mqtt.sessions)
        postponed(gateway)
        with site.dead(gateway) as second:
            second.until(lambda: len(host(second).durable[SUBSCRIPTION]) == 2)


def test_a_will_whose_selector_was_only_late_is_published_once(site: Site) -> None:
    with site.started() as gateway:
        subscribe(gateway)
        client = writer(gateway, will=Will("jobs/x", b"will", 1, False))
        client.publish("jobs/x", b"1", 1, 1)
        client.cut()
        gateway.until(lambda: len(host(gateway).durable[SUBSCRIPTION]) == 2)
        with site.dead(gateway) as second:
            assert owed(second) == 2
            assert not second.ask(lambda: second.gateway.mqtt._wills)
