"""One message published in each of the three protocols reaches clients of the two others, as it was meant."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqpfast.codec import decode_head_properties
from gateway.protocols.mqtt.spec import PacketType
from gateway.settings.amqpfast import DestinationNames, FastVirtualHost
from tests.configured import make_listener
from tests.ingress.amqpfast.client import TOPIC, Fast, head
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


@pytest.fixture
def channel(gateway: Running) -> Iterator[BlockingChannel]:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        made = connection.channel()
        made.confirm_delivery()
        made.queue_declare("all")
        made.queue_bind("all", "amq.topic", "plant.#")
        yield made


@pytest.fixture
def mqtt(gateway: Running) -> Iterator[Mqtt]:
    client, _ = connect(gateway, "m")
    with client:
        client.subscribe("plant/#", 1)
        yield client


@pytest.fixture
def fast(gateway: Running) -> Iterator[Fast]:
    with Fast(gateway, "f").open() as client:
        client.consume(client.handle("plant.", TOPIC))
        yield client


def test_from_amqpfast(channel: BlockingChannel, mqtt: Mqtt, fast: Fast) -> None:
    expires = int(time.time()) + 600
    said = head(
        persistent=True,
        priority=3,
        expiration=expires,
        mime_type="text/plain",
        identifier="id-1",
        headers={"n": 7, "CORRELATION_ID": "c"},
    )
    handle = fast.handle("plant.v1%2E2.t", TOPIC)
    fast.put(handle, b"21.5", head=said)
    (own,) = fast.rows(1)
    assert own[3:] == (said, b"21.5", b"plant.v1%2E2.t")
    row = mqtt.row()
    assert (row[1], row[4], row[0] >> 1 & 3) == (b"plant/v1.2/t", b"21.5", 1)
    assert b"\x26\0\x01n\0\x017" in row[3]  # a user property
    method, properties, body = channel.basic_get("all", auto_ack=True)
    assert method is not None
    assert (method.routing_key, body) == ("plant.v1%2E2.t", b"21.5")
    assert (properties.delivery_mode, properties.priority) == (2, 3)
    assert (properties.content_type, properties.message_id) == ("text/plain", "id-1")
    assert (properties.correlation_id, properties.headers["n"]) == ("c", 7)
    assert 590_000 < int(properties.expiration) <= 600_000


def test_from_mqtt(channel: BlockingChannel, mqtt: Mqtt, fast: Fast) -> None:
    mqtt.publish("plant/l1/t", b"up", 1, 7)
    (row,) = fast.rows(1)
    found = decode_head_properties(row[3])
    assert (row[4], row[5], found.persistent) == (b"up", b"plant.l1.t", True)
    assert channel.basic_get("all", auto_ack=True)[2] == b"up"


def test_from_amqp091(channel: BlockingChannel, mqtt: Mqtt, fast: Fast) -> None:
    said = pika.BasicProperties(
        delivery_mode=2,
        content_type="text/csv",
        priority=9,
        headers={"s": "x", "big": 1 << 40},
        expiration="5000",
    )
    channel.basic_publish("amq.topic", "plant.l2", b"down", said)
    (row,) = fast.rows(1)
    found = decode_head_properties(row[3])
    assert (row[4], row[5]) == (b"down", b"plant.l2")
    assert (found.persistent, found.priority, found.mime_type) == (True, 9, "text/csv")
    assert dict(found.headers)["s"] == string("x")
    assert time.time() < found.expiration <= time.time() + 6
    assert mqtt.row()[4] == b"down"


def test_types_of_headers_survive_amqpfast(gateway: Running, channel: BlockingChannel, fast: Fast) -> None:
    said = pika.BasicProperties(headers={"big": 1 << 40, "list": [1, "a"]})
    channel.basic_publish("amq.topic", "plant.l2", b"x", said)
    (row,) = fast.rows(1)
    channel.basic_get("all", auto_ack=True)
    fast.put(fast.handle("plant.back", TOPIC), b"x", head=row[3])
    properties = channel.basic_get("all", auto_ack=True)[1]
    assert properties.headers["big"] == 1 << 40
    assert properties.headers["list"] == [1, "a"]


def test_retained_crosses_as_a_header(mqtt: Mqtt, fast: Fast) -> None:
    mqtt.publish("plant/state", b"on", 1, 9, retain=True)
    (row,) = fast.rows(1)
    assert ("RETAIN", Value(ValueType.INT32, 1)) in decode_head_properties(row[3]).headers


def test_a_confirmed_send_is_replied_to_when_every_world_has_it(gateway: Running, fast: Fast) -> None:
    handle = fast.handle("plant.x", TOPIC)
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        made = connection.channel()
        made.queue_declare("all")
        made.queue_bind("all", "amq.topic", "#")
        fast.put(handle, *[b"%d" % number for number in range(100)])
        assert made.queue_declare("all", passive=True).method.message_count == 100


JOBS = """
version: 1
routes:
  - name: jobs
    from: {endpoint: mqtt, topic: "jobs/{kind}"}
    to: {endpoint: amqpfast, service: queue, destination: "jobs.{kind}"}
  - name: done
    from: {endpoint: amqpfast, service: queue, destination: "done.{kind}"}
    to: {endpoint: mqtt, topic: "done/{kind}"}
"""


def test_routes_to_and_from_queues_whose_names_they_make(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    host = FastVirtualHost(destinations=DestinationNames(queues=("jobs.a", "done.a")))
    for hosts, code in (({"/": FastVirtualHost()}, 0), ({"/": host}, 0x80)):
        settings = settings_of(mappings=(str(tmp_path / "jobs.yaml"),))
        listener = make_listener(protocol="amqpfast", host=LOOPBACK, port=0, virtual_hosts=hosts)
        settings = settings_of(
            listeners=settings.listeners | {"amqpfast": listener}, mappings=settings.mappings
        )
        with running(settings) as gateway, Fast(gateway).open() as fast:
            client, _ = connect(gateway, "m")
            with client:
                client.subscribe("done/#", 1)
                client.publish("jobs/a", b"1", 1, 5)
                assert client.acked(PacketType.PUBACK) == (5, 0)
                client.publish("jobs/b", b"2", 1, 6)
                assert (client.acked(PacketType.PUBACK)[1] >= 0x80) == bool(code)
                fast.consume(fast.handle("jobs.a"))
                assert fast.bodies(1) == [b"1"]
                fast.put(fast.handle("done.a"), b"3")
                assert client.row()[1] == b"done/a"
