"""A gateway between MQTT devices and a real RabbitMQ, and how tests look at both ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import paho.mqtt.client as paho
import pika
import trio
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

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
    on_reject: retry
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
async def gateway_to(
    rabbitmq: RabbitMQ, folder: Path, *, mapping: str = MAPPING, **link: Any
) -> AsyncIterator[Gateway]:
    """A gateway with an MQTT listener and the link `erp`, which is up; `link` are its further options."""
    file = folder / "mapping.yaml"
    file.write_text(mapping)
    if "urls" not in link:
        link["url"] = rabbitmq.url
    settings = Settings.model_validate(
        {
            "listeners": {"mqtt": {"protocol": "mqtt", "host": LOOPBACK, "port": 0}},
            "links": {"erp": {"reconnect_min_secs": 0.2, "reconnect_max_secs": 1.0} | link},
            "mappings": [str(file)],
            "store": {"enabled": False},
            "http": {"enabled": False},
        }
    )
    gateway = Gateway(settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: gateway.run(task_status=task_status, signals=False))
        await until(lambda: gateway.links["erp"].is_up)
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
        del self._client  # it closes its own sockets when it goes; in a cycle with us they might go first

    def _on_publish(self, client: object, data: object, mid: int, reason: Any, properties: object) -> None:
        self.acked[mid] = reason.value

    def _on_message(self, client: object, data: object, message: paho.MQTTMessage) -> None:
        self.heard.append((message.topic, bytes(message.payload)))

    def _on_subscribe(self, client: object, data: object, mid: int, *_: object) -> None:
        self.subscribed += 1

    def publish(self, topic: str, body: bytes, qos: int = 1, *, pairs: Sequence[tuple[str, str]] = ()) -> int:
        """`pairs`: user properties, in MQTT 5."""
        properties = Properties(PacketTypes.PUBLISH) if pairs else None
        if properties is not None:
            properties.UserProperty = list(pairs)
        return self._client.publish(topic, body, qos, properties=properties).mid

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
