"""The default mapping joins all listeners, whatever their names, and a message arrives once."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from tests.configured import make_listener
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.pahos import leave

PATIENCE_SECS = 20.0
LISTENERS = {
    "devices": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
    "web": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
    "apps": make_listener(protocol="amqp091", host=LOOPBACK, port=0),
    "partners": make_listener(protocol="amqp091", host=LOOPBACK, port=0),
    "tenant": make_listener(protocol="amqp091", host=LOOPBACK, port=0, virtual_hosts=["tenant"]),
}


@pytest.fixture
def gateway() -> Iterator[Running]:
    with running(settings_of(listeners=LISTENERS)) as one:
        yield one


def amqp(gateway: Running, listener: str, host: str = "/") -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.ConnectionParameters(LOOPBACK, gateway.port(listener), host))


def device(gateway: Running, listener: str, *filters: str) -> tuple[paho.Client, queue.Queue[Any]]:
    heard: queue.Queue[Any] = queue.Queue()
    subscribed: queue.Queue[Any] = queue.Queue()
    one = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
    one.on_message = lambda client, data, message: heard.put(message.payload)
    one.on_subscribe = lambda *given: subscribed.put(given)
    one.connect(LOOPBACK, gateway.port(listener))
    one.loop_start()
    for topic in filters:
        one.subscribe(topic, 1)
        subscribed.get(timeout=PATIENCE_SECS)
    return one, heard


@pytest.mark.parametrize("listener", ["devices", "web"])
def test_what_any_mqtt_listener_brings_reaches_each_virtual_host_once(
    gateway: Running, listener: str
) -> None:
    with amqp(gateway, "partners") as shared, amqp(gateway, "tenant", "tenant") as tenant:
        channels = [shared.channel(), tenant.channel()]
        for channel in channels:
            channel.queue_declare("q")
            channel.queue_bind("q", "amq.topic", "#")
        one, _ = device(gateway, listener)
        for body in (b"1", b"2"):
            one.publish("plant/t", body, 1).wait_for_publish(PATIENCE_SECS)
        leave(one)
        for channel in channels:
            assert channel.queue_declare("q", passive=True).method.message_count == 2


@pytest.mark.parametrize("listener, host", [("apps", "/"), ("partners", "/"), ("tenant", "tenant")])
def test_what_any_amqp_listener_brings_reaches_subscribers_once(
    gateway: Running, listener: str, host: str
) -> None:
    one, heard = device(gateway, "web", "#")
    with amqp(gateway, listener, host) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for body in (b"1", b"2"):
            channel.basic_publish("amq.topic", "plant.t", body)
    assert [heard.get(timeout=PATIENCE_SECS) for _ in range(2)] == [b"1", b"2"]
    one.publish("end", b"", 1).wait_for_publish(PATIENCE_SECS)
    assert heard.get(timeout=PATIENCE_SECS) == b""
    leave(one)
