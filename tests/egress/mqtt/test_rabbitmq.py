"""An MQTT link and RabbitMQ's MQTT plugin, a broker that knows neither MQTT 5 nor QoS 2 towards us."""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from gateway.egress.mqtt.publisher import SWEEP_SECS, SWEEPS_MAX
from gateway.protocols.mqtt.spec import Version
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.pahos import leave
from tests.interop.servers import RabbitMQ
from tests.interop.test_mqtt_link import (
    WAIT_SECS,
    channel,
    conversation,
    fetch,
    linked,
    mqtt,
    publish,
    queue_of,
    subscribed,
)


def client(port: int, client_id: str) -> paho.Client:
    made = paho.Client(
        CallbackAPIVersion.VERSION2, client_id=client_id, protocol=MQTTProtocolVersion.MQTTv311
    )
    made.connect(LOOPBACK, port)
    made.loop_start()
    return made


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_link_falls_back_and_messages_pass_both_ways(rabbitmq: RabbitMQ, tmp_path: Path, qos: int) -> None:
    port = rabbitmq.mqtt_port
    with linked(port, tmp_path, qos=qos) as gateway, channel(gateway) as amqp:
        peer = conversation(gateway)._connection
        assert peer is not None
        assert peer.machine.version is Version.V311
        queue = queue_of(amqp, "up.#")
        other = client(port, f"{tmp_path.name}-other")
        try:
            told = [other.publish("up/x", b"%d" % number, qos) for number in range(50)]
            for one in told:
                one.wait_for_publish(WAIT_SECS)
            assert [body for _, _, body in fetch(amqp, queue, 50)] == [b"%d" % number for number in range(50)]
        finally:
            leave(other)
        for number in range(50):
            amqp.basic_publish("amq.topic", "down.x", b"%d" % number, mqtt())
        gateway.until(lambda: conversation(gateway).idle)
        assert conversation(gateway).stats.connects == 1


def test_what_was_published_while_it_was_away_comes_after_all(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    port = rabbitmq.mqtt_port
    with linked(port, tmp_path):
        pass
    other = client(port, f"{tmp_path.name}-other")
    try:
        other.publish("up/away", b"kept", 1).wait_for_publish(WAIT_SECS)
    finally:
        leave(other)
    with linked(port, tmp_path) as gateway:
        subscribed(gateway)
        gateway.until(lambda: conversation(gateway).stats.messages_in == 1)
        gateway.until(lambda: conversation(gateway).idle)


def test_what_knows_no_qos_2_gets_it_from_the_next_life_too(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Which would free the packet ids of the one before: behind a PUBREL this broker reads nothing more."""
    port = rabbitmq.mqtt_port
    heard: SimpleQueue[bytes] = SimpleQueue()
    other = client(port, f"{tmp_path.name}-other")
    other.on_message = lambda _, __, message: heard.put(bytes(message.payload))
    try:
        subscribed_to = threading.Event()
        other.on_subscribe = lambda *_: subscribed_to.set()
        other.subscribe("once/#", 1)
        assert subscribed_to.wait(WAIT_SECS)
        for life in (b"one", b"two"):
            with linked(port, tmp_path) as gateway:
                publish(gateway.mqtt, "once/x", life, 2)
                assert heard.get(timeout=SWEEPS_MAX * SWEEP_SECS + WAIT_SECS) == life
                gateway.until(lambda: conversation(gateway).idle)
    finally:
        leave(other)
