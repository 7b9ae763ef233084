"""A gateway between MQTT clients and a real RabbitMQ: what is acknowledged is there, whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pika
import pytest
import trio
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from gateway.app import Gateway
from gateway.settings import Settings
from tests.interop.servers import LOOPBACK, RabbitMQ

PATIENCE_SECS: Final = 60.0
POLL_SECS: Final = 0.02
EXCHANGE: Final = "link.telemetry"
MAPPING: Final = f"""
version: 1
routes:
  - name: telemetry
    from: {{endpoint: mqtt, topic: "t/{{rest...}}"}}
    to: {{endpoint: erp, exchange: {EXCHANGE}, routing_key: "{{rest}}"}}
  - name: absent
    from: {{endpoint: mqtt, topic: "absent/{{rest...}}"}}
    to: {{endpoint: erp, exchange: "link.{{rest}}", routing_key: "k"}}
  - name: commands
    from: {{endpoint: erp, queue: link.commands}}
    to: {{endpoint: mqtt, topic: "commands/{{routing_key...}}"}}
  - name: events
    from: {{endpoint: erp, exchange: link.events, binding_key: "{{plant}}.#"}}
    to: {{endpoint: mqtt, topic: "events/{{plant}}"}}
"""


async def until(done: Callable[[], bool]) -> None:
    """Wait until something has happened; fail when it never does."""
    with trio.fail_after(PATIENCE_SECS):
        while not done():
            await trio.sleep(POLL_SECS)


@asynccontextmanager
async def gateway_to(rabbitmq: RabbitMQ, folder: Path, **link: Any) -> AsyncIterator[Gateway]:
    """A gateway with an MQTT listener and the link `erp`, which is up."""
    mapping = folder / "mapping.yaml"
    mapping.write_text(MAPPING)
    settings = Settings.model_validate(
        {
            "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": 0}},
            "links": {
                "erp": {"url": rabbitmq.url, "reconnect_min_secs": 0.2, "reconnect_max_secs": 1.0, **link}
            },
            "mappings": [str(mapping)],
            "http": {"enabled": False},
        }
    )
    gateway = Gateway(settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: gateway.run(task_status=task_status, signals=False))
        await until(lambda: gateway.links["erp"].up)
        yield gateway
        gateway.stop()


class Device:
    """An MQTT client with a thread of its own, which notes what it is told."""

    def __init__(self, gateway: Gateway, version: MQTTProtocolVersion = MQTTProtocolVersion.MQTTv5) -> None:
        self.acked: dict[int, int] = {}  # packet id -> reason code
        self.heard: list[tuple[str, bytes]] = []
        self.subscribed = 0
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=version)
        self._client.on_publish = self._on_publish
        self._client.on_message = self._on_message
        self._client.on_subscribe = self._on_subscribe
        self._port = gateway.listeners["mqtt"].port

    async def __aenter__(self) -> Device:
        await trio.to_thread.run_sync(self._client.connect, LOOPBACK, self._port)
        self._client.loop_start()
        await until(self._client.is_connected)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client.disconnect()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self._client.loop_stop)

    def _on_publish(self, client: object, data: object, mid: int, reason: Any, properties: object) -> None:
        self.acked[mid] = reason.value

    def _on_message(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        self.heard.append((message.topic, bytes(message.payload)))

    def _on_subscribe(self, client: object, data: object, mid: int, *_: object) -> None:
        self.subscribed += 1

    def publish(self, topic: str, body: bytes, qos: int = 1) -> int:
        return self._client.publish(topic, body, qos).mid

    async def subscribe(self, topic: str) -> None:
        self._client.subscribe(topic, 1)
        await until(lambda: self.subscribed > 0)


async def with_channel(rabbitmq: RabbitMQ, work: Callable[[Any], Any]) -> Any:
    """Run `work(channel)` over a pika connection in a thread."""

    def run() -> Any:
        with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            return work(channel)

    return await trio.to_thread.run_sync(run)


async def fetch(rabbitmq: RabbitMQ, queue: str) -> list[tuple[bytes, Any, str]]:
    """Everything in a queue: body, properties, routing key."""

    def drain(channel: Any) -> list[tuple[bytes, Any, str]]:
        found = []
        while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
            found.append((got[2], got[1], got[0].routing_key))
        return found

    return list(await with_channel(rabbitmq, drain))


async def sink_queue(rabbitmq: RabbitMQ, queue: str) -> None:
    """A fresh durable queue for all telemetry."""

    def declare(channel: Any) -> None:
        channel.exchange_declare(EXCHANGE, "topic", durable=True)
        channel.queue_declare(queue, durable=True)
        channel.queue_purge(queue)
        channel.queue_bind(queue, EXCHANGE, "#")

    await with_channel(rabbitmq, declare)


async def drop(rabbitmq: RabbitMQ, *, exchange: str = "", queue: str = "") -> None:
    def delete(channel: Any) -> None:
        if exchange:
            channel.exchange_delete(exchange)
        if queue:
            channel.queue_delete(queue)

    await with_channel(rabbitmq, delete)


async def test_what_a_device_publishes_is_in_the_queue_when_it_is_acknowledged(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        await sink_queue(rabbitmq, "link.sink")
        mids = [device.publish(f"t/a.b/{at}", b"%d" % at, at % 3) for at in range(300)]
        await until(lambda: len(device.acked) == 300)
        assert set(device.acked) == set(mids)
        assert set(device.acked.values()) == {0}
        found = await fetch(rabbitmq, "link.sink")
        assert sorted(int(body) for body, _, _ in found) == list(range(300))
        keys = {int(body): key for body, _, key in found}
        assert keys[7] == "a%2Eb.7"
        modes = {int(body): properties.delivery_mode for body, properties, _ in found}
        assert [modes[at] for at in range(3)] == [1, 2, 2]
        await until(lambda: gateway.links["erp"].conversation.idle)
        assert gateway.links["erp"].stats.messages_out == 300
    await drop(rabbitmq, queue="link.sink")


async def test_a_broker_that_dies_before_it_confirms(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """No PUBACK until the broker is back; then it comes, and the message is there."""
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        await sink_queue(rabbitmq, "link.sink")
        link = gateway.links["erp"]
        pid = int(
            (await trio.to_thread.run_sync(rabbitmq.control, "eval", "os:getpid().")).strip().strip('"')
        )
        os.kill(pid, signal.SIGSTOP)
        device.publish("t/one", b"one")
        await until(lambda: link.stats.messages_out == 1)
        assert link.stats.in_flight == 1
        await trio.to_thread.run_sync(lambda: rabbitmq.stop(kill=True))
        await until(lambda: not link.up)
        device.publish("t/two", b"two", 2)
        await until(lambda: gateway.listeners["mqtt"].stats.messages_in == 2)
        assert device.acked == {}
        await trio.to_thread.run_sync(rabbitmq.start)
        await until(lambda: len(device.acked) == 2)
        assert set(device.acked.values()) == {0}
        assert [body for body, _, _ in await fetch(rabbitmq, "link.sink")] == [b"one", b"two"]
    await drop(rabbitmq, queue="link.sink")


@pytest.mark.parametrize(
    "topic, word", [("t/unroutable", "NO_ROUTE"), ("absent/nowhere", "no exchange 'link.nowhere'")]
)
async def test_a_refusal_is_told_in_mqtt_5(rabbitmq: RabbitMQ, tmp_path: Path, topic: str, word: str) -> None:
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        mid = device.publish(topic, b"lost")
        await until(lambda: mid in device.acked)
        assert device.acked == {mid: 0x83}
        refused = list(gateway.listeners["mqtt"].stats.settled())
        assert [count for verdict, _, count in refused if verdict == "rejected"] == [1]
        await sink_queue(rabbitmq, "link.sink")
        mid = device.publish("t/routable", b"kept")
        await until(lambda: mid in device.acked)
        assert device.acked[mid] == 0
    await drop(rabbitmq, queue="link.sink")


async def test_mqtt_3_1_1_hears_nothing_until_the_exchange_is_there(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    async with (
        gateway_to(rabbitmq, tmp_path) as gateway,
        Device(gateway, MQTTProtocolVersion.MQTTv311) as device,
    ):
        mid = device.publish("absent/late", b"patient")
        route = next(route for route in gateway.switch.router.routes if route.name == "absent")
        await until(lambda: route.failed >= 1)
        assert device.acked == {}

        def declare(channel: Any) -> None:
            channel.exchange_declare("link.late", "fanout")
            channel.queue_declare("link.late")
            channel.queue_bind("link.late", "link.late")

        await with_channel(rabbitmq, declare)
        await until(lambda: mid in device.acked)
        assert [body for body, _, _ in await fetch(rabbitmq, "link.late")] == [b"patient"]
    await drop(rabbitmq, exchange="link.late", queue="link.late")


async def test_what_the_broker_has_reaches_devices_again_after_it_restarted(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        await device.subscribe("#")

        def say(body: bytes) -> Callable[[Any], None]:
            def publish(channel: Any) -> None:
                durable = pika.BasicProperties(delivery_mode=2)
                channel.basic_publish("", "link.commands", body, durable, mandatory=True)
                channel.basic_publish("link.events", "p1.x.y", body, durable, mandatory=True)

            return publish

        await with_channel(rabbitmq, say(b"before"))
        await until(lambda: len(device.heard) == 2)
        assert sorted(device.heard) == [("commands/link/commands", b"before"), ("events/p1", b"before")]
        await until(lambda: gateway.links["erp"].conversation.idle)
        await trio.to_thread.run_sync(rabbitmq.restart)
        await until(lambda: gateway.links["erp"].up)
        await with_channel(rabbitmq, say(b"after"))
        await until(lambda: len(device.heard) >= 4)
        assert sorted(device.heard[2:]) == [("commands/link/commands", b"after"), ("events/p1", b"after")]
        assert gateway.links["erp"].stats.reconnects >= 1
        await until(lambda: gateway.links["erp"].conversation.idle)
    for queue in ("link.commands", "gateway-gateway.link.events"):
        await drop(rabbitmq, queue=queue)


async def test_a_deleted_queue_is_declared_and_consumed_again(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        await device.subscribe("#")
        await drop(rabbitmq, queue="link.commands")

        async def consumed() -> bool:
            def count(channel: Any) -> int:
                return int(channel.queue_declare("link.commands", passive=True).method.consumer_count)

            try:
                return bool(await with_channel(rabbitmq, count))
            except pika.exceptions.ChannelClosedByBroker:
                return False

        with trio.fail_after(PATIENCE_SECS):
            while not await consumed():
                await trio.sleep(POLL_SECS)
        await with_channel(rabbitmq, lambda channel: channel.basic_publish("", "link.commands", b"x"))
        await until(lambda: device.heard == [("commands/link/commands", b"x")])
    await drop(rabbitmq, queue="link.commands")
