"""Transactions whose messages the disk does not take: all or nothing, in AMQP 0-9-1 and in AMQP/Fast."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from unittest.mock import patch

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from gateway.protocols.amqp091 import methods as m091
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.events import ChannelClosed as ChannelClosed091
from gateway.protocols.amqp091.events import GetResponse
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import ChannelClosed, Replies
from gateway.protocols.mqtt.packets import Connack, Connect, Will
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import StoreSettings as StoreSettings
from gateway.store.store import Store
from tests.durable.test_amqp import PERSISTENT, channel
from tests.durable.test_full_disk import BODY, filled, gateway, small
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import PERSISTENT as PERSISTENT_HEAD
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Mqtt, connect, eventually
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.interop.gateway_process import GatewayProcess
from tests.store.crashes import Crashes
from tests.store.parts import Disk

__all__ = ["gateway", "small"]  # fixtures
FULL: Final = "store not writable, durable messages refused"
LASTING: Final = encode_basic_properties(BasicProperties(delivery_mode=2))


def fill(gateway: GatewayProcess, small: Path, *, known: bool) -> None:
    """Fill the disk; `known`: the gateway has noticed."""
    if known:
        with channel(gateway) as opened:
            opened.queue_declare("q", durable=True)
            filled(opened)
    else:
        with (small / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
            while True:
                ballast.write(b"x" * 4_096)


def takes(gateway: GatewayProcess) -> bool:
    """Whether a persistent message is taken now, by a queue that is emptied before."""
    with channel(gateway) as opened:
        try:
            opened.queue_declare("q", durable=True)
            opened.queue_purge("q")
            opened.basic_publish("", "q", b"x", PERSISTENT)
        except (pika.exceptions.NackError, pika.exceptions.ConnectionClosedByBroker):
            return False
    return True


def empty(gateway: GatewayProcess, small: Path) -> None:
    (small / "ballast").unlink(missing_ok=True)
    eventually(lambda: takes(gateway))


def depths(gateway: GatewayProcess, *queues: str) -> list[int]:
    with channel(gateway) as opened:
        return [opened.queue_declare(one, durable=True, passive=True).method.message_count for one in queues]


def one_job(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        for queue in ("jobs", "next"):
            opened.queue_declare(queue, durable=True)
        opened.basic_publish("", "jobs", BODY, PERSISTENT)


def move(opened: BlockingChannel, *to: str, body: bytes = BODY) -> None:
    """Take a job, hand on what came of it, and commit."""
    opened.tx_select()
    method, _, found = opened.basic_get("jobs")
    assert found == body
    for queue in to or ("next",):
        opened.basic_publish("", queue, body, PERSISTENT)
    opened.basic_ack(method.delivery_tag)
    opened.tx_commit()


def move_until_refused(opened: BlockingChannel) -> None:
    for _ in range(20):
        move(opened, "next", "jobs")


@pytest.mark.parametrize("known", [True, False], ids=["known to be full", "full since just now"])
def test_amqp_acknowledges_nothing_when_its_publish_is_refused(
    gateway: GatewayProcess, small: Path, known: bool
) -> None:
    one_job(gateway)
    fill(gateway, small, known=known)
    with channel(gateway, confirm=False) as opened, pytest.raises(pika.exceptions.ChannelClosedByBroker):
        move_until_refused(opened)
    eventually(lambda: depths(gateway, "jobs") == [1])
    gateway.restart()
    ((count, before),) = [depths(gateway, "jobs", "next")]
    assert count == 1
    empty(gateway, small)
    with channel(gateway, confirm=False) as opened:
        move(opened)
    assert depths(gateway, "jobs", "next") == [0, before + 1]


def test_amqp_consumers_commit_their_acknowledgements_on_a_full_disk(gateway: GatewayProcess) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("q", durable=True)
        count = filled(opened)
    with channel(gateway, confirm=False) as opened:
        opened.tx_select()
        for _ in range(count):
            method, _, _ = opened.basic_get("q")
            opened.basic_ack(method.delivery_tag)
            opened.tx_commit()
    eventually(lambda: takes(gateway))


@pytest.mark.parametrize("known", [True, False], ids=["known to be full", "full since just now"])
def test_amqpfast_acknowledges_nothing_when_its_send_is_refused(
    gateway: GatewayProcess, small: Path, known: bool
) -> None:
    with Fast(gateway).open() as client:
        client.put(client.handle("jobs"), BODY, head=PERSISTENT_HEAD)
    fill(gateway, small, known=known)
    with Fast(gateway).open(transacted=True) as client:
        taking, giving = client.handle("jobs"), client.handle("next")
        client.consume(taking)
        for _ in range(20):
            (row,) = client.rows(1)
            client.put(giving, BODY, head=PERSISTENT_HEAD)
            client.put(taking, BODY, head=PERSISTENT_HEAD)
            client.ack(row[1])
            client.say(m.ChannelCommit(1, client.machine.new_tag(1)))
            if not committed(client):
                break
        else:
            raise AssertionError("the disk never filled")
    with Fast(gateway).open() as client:
        client.consume(client.handle("jobs"))
        assert client.bodies(1) == [BODY]
        assert client.quiet()
        client.cut()
    gateway.restart()
    with Fast(gateway).open() as client:
        client.consume(client.handle("jobs"))
        assert client.bodies(1) == [BODY]


def committed(client: Fast) -> bool:
    """Whether the commit is answered by a reply, and not by the end of the channel."""
    while True:
        for event in client.events:
            if isinstance(event, Replies | ChannelClosed):
                client.events.remove(event)
                return isinstance(event, Replies)
        client.hear()


# In one process, looked at after each commit.

MAPPING: Final = """
version: 1
routes:
  - name: results
    from: {endpoint: amqpfast, service: queue, destination: results}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: w.x}
  - name: topics
    from: {endpoint: mqtt, topic: "w/{x}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "w.{x}"}
"""


class Site:
    """A gateway whose disk does what it is told, and what each commit leaves there."""

    def __init__(self, started: Running, crashes: Crashes, disk: Disk) -> None:
        self.started = started
        self.crashes = crashes
        self.disk = disk

    def channel(self) -> BlockingChannel:
        return pika.BlockingConnection(pika.URLParameters(self.started.idle_amqp_url)).channel()

    def unacknowledged(self, queue: str) -> int:
        return self.started.ask(lambda: self.started.gateway.host.queues[queue].unacknowledged)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    crashes, disk = Crashes(), Disk()
    opened = partial(Store, factory=crashes.factory(disk.factory()))
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    store = StoreSettings(path=tmp_path / "data", probe_secs=0.02)
    settings = settings_of(store=store, mappings=[str(tmp_path / "mapping.yaml")])
    with (
        patch("gateway.app.storage.Store", opened),
        running(settings, but=FULL) as started,
    ):
        yield Site(started, crashes, disk)
    crashes.check()


def jobs(opened: BlockingChannel, count: int) -> list[bytes]:
    for queue in ("jobs", "next"):
        opened.queue_declare(queue, durable=True)
    bodies = [b"%d" % number for number in range(count)]
    opened.confirm_delivery()
    for body in bodies:
        opened.basic_publish("", "jobs", body, PERSISTENT)
    return bodies


def test_a_job_is_in_one_queue_after_every_commit(site: Site) -> None:
    opened = site.channel()
    bodies = jobs(opened, 30)
    opened.connection.close()
    moving = site.channel()
    for body in bodies:
        move(moving, body=body)
    moving.connection.close()
    assert not [state for state in site.crashes.states if state.twice]
    assert site.crashes.last.bodies == set(bodies)
    assert site.unacknowledged("jobs") == 0


@pytest.mark.parametrize("fails", [True, False])
def test_a_client_that_is_cut_off_during_its_commit_does_it_wholly_or_not_at_all(
    site: Site, fails: bool
) -> None:
    opened = site.channel()
    bodies = jobs(opened, 2)
    opened.connection.close()
    gateway = site.started.gateway
    client = Amqp(site.started).open()
    client.call(m091.TxSelect(), m091.TxSelectOk)
    client.say(m091.BasicGet("jobs"))
    tag = client.next(GetResponse).method.delivery_tag
    client.publish("", "next", bodies[0], properties=LASTING)
    site.disk.gate.clear()
    site.disk.waiting.clear()
    client.say(m091.BasicAck(tag), m091.TxCommit())
    assert site.disk.waiting.wait(20)

    def cut() -> None:
        for one in list(gateway.listeners["amqp091"].connections):
            one.stream.abort("cut by the test")
        gateway.writes.flush()

    site.started.ask(cut)
    site.started.until(lambda: not gateway.listeners["amqp091"].connections)
    site.disk.fault = "disk is full" if fails else ""
    site.disk.gate.set()
    queues = gateway.host.queues
    expected = (2, 0) if fails else (1, 1)
    site.started.until(lambda: (len(queues["jobs"]), len(queues["next"])) == expected)
    site.started.until(lambda: queues["jobs"].unacknowledged == 0)
    site.disk.fault = ""
    site.started.until(lambda: gateway.store is not None and gateway.store.healthy)
    client.cut()


# One queue of two refuses its copy at once; the other one stores it, which takes until the commit.


def half_full(site: Site) -> None:
    """Bind `roomy` and `full`, which has all it may have, to the topics below `w`."""
    opened = site.channel()
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    for queue, given in (("roomy", {}), ("full", arguments)):
        opened.queue_declare(queue, durable=True, arguments=given)
        opened.queue_bind(queue, "amq.topic", "w.#")
    opened.confirm_delivery()
    opened.basic_publish("", "full", b"before", PERSISTENT)
    opened.basic_publish("", "roomy", b"job", PERSISTENT)
    opened.connection.close()


def test_no_packet_id_is_stored_of_a_message_that_one_queue_has_refused(site: Site) -> None:
    half_full(site)
    client, _ = connect(site.started, "dev", clean=False, properties={Property.SESSION_EXPIRY_INTERVAL: 60})
    client.publish("w/x", b"once", 2, 7)
    assert client.acked(PacketType.PUBREC) == (7, ReasonCode.QUOTA_EXCEEDED)
    client.cut()
    assert b"once" in site.crashes.last.bodies
    assert not any(state.ids for state in site.crashes.states)


def test_no_acknowledgement_is_stored_of_a_commit_that_one_queue_has_refused(site: Site) -> None:
    half_full(site)
    client = Amqp(site.started).open()
    client.call(m091.TxSelect(), m091.TxSelectOk)
    client.say(m091.BasicGet("roomy"))
    tag = client.next(GetResponse).method.delivery_tag
    client.publish("amq.topic", "w.x", b"result", properties=LASTING)
    client.say(m091.BasicAck(tag), m091.TxCommit())
    client.next(ChannelClosed091)
    client.cut()
    assert site.crashes.last.bodies == {b"before", b"job", b"result"}


def test_amqpfast_stores_no_acknowledgement_of_a_commit_that_one_queue_has_refused(site: Site) -> None:
    half_full(site)
    with Fast(site.started).open() as client:
        client.put(client.handle("jobs"), b"task", head=PERSISTENT_HEAD)
    with Fast(site.started).open(transacted=True) as client:
        taking, giving = client.handle("jobs"), client.handle("results")
        client.consume(taking)
        (row,) = client.rows(1)
        client.put(giving, b"result", head=PERSISTENT_HEAD)
        client.ack(row[1])
        client.say(m.ChannelCommit(1, client.machine.new_tag(1)))
        assert not committed(client)
        client.cut()
    assert b"task" in site.crashes.last.bodies


def test_a_will_that_one_queue_has_refused_is_recorded_until_it_is_published_again(site: Site) -> None:
    half_full(site)
    will = Will("w/x", b"last", 1)
    client, _ = connect(site.started, "dev", clean=False, will=will)
    stored = site.crashes.states
    count = len(stored)
    client.cut()
    eventually(lambda: any(b"last" in state.bodies for state in stored[count:]))
    assert all(state.wills for state in stored[count:])
    site.crashes.settled.add(b"before")
    with_room = site.channel()
    with_room.queue_purge("full")
    with_room.connection.close()
    eventually(lambda: not site.crashes.last.wills)


def test_a_will_is_recorded_until_its_message_is_stored(site: Site) -> None:
    """The commit of its message fails, and the next one succeeds before the gateway knows of that."""
    opened = site.channel()
    opened.queue_declare("roomy", durable=True)
    opened.queue_bind("roomy", "amq.topic", "w.#")
    opened.connection.close()
    client, _ = connect(site.started, "dev", clean=False, will=Will("w/x", b"last", 1))
    stored = site.crashes.states
    count = len(stored)
    assert stored[-1].wills
    failures: list[sqlite3.OperationalError] = []

    def fail_once() -> None:
        if not failures:
            failures.append(sqlite3.OperationalError("database or disk is full"))
            raise failures[0]

    with patch.object(site.disk, "check", fail_once):
        client.cut()
        eventually(lambda: b"last" in site.crashes.last.bodies and not site.crashes.last.wills)
    assert failures
    assert all(state.wills or b"last" in state.bodies for state in stored[count:])


def test_a_session_whose_connack_the_disk_has_refused_is_not_present(site: Site) -> None:
    lasting = {Property.SESSION_EXPIRY_INTERVAL: 600}
    reader, _ = connect(site.started, "reader")
    reader.subscribe("w/#")
    site.disk.fault = "database or disk is full"
    with Mqtt(site.started.port("mqtt")) as lost:
        lost.say(Connect("dev", Version.V5, False, will=Will("w/x", b"last"), properties=lasting))
        with pytest.raises(ConnectionError):
            lost.next(Connack)
    site.disk.fault = ""
    gateway = site.started.gateway
    site.started.until(lambda: gateway.store is not None and gateway.store.healthy)
    client, connack = connect(site.started, "dev", clean=False, properties=lasting)
    assert (connack.reason, connack.session_present) == (ReasonCode.SUCCESS, False)
    client.cut()
    assert reader.quiet()
    reader.cut()
    site.started.until(lambda: gateway.mqtt.sessions["dev"].outlet is None)
    client, connack = connect(site.started, "dev", clean=False, properties=lasting)
    assert connack.session_present
    client.cut()
