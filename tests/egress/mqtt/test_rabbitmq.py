"""An MQTT link and RabbitMQ's MQTT plugin, a broker that knows neither MQTT 5 nor QoS 2 towards us."""

from __future__ import annotations

from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

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
