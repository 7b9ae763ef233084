"""A gateway between MQTT clients and a real RabbitMQ: what is acknowledged is there, whatever happens."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
import trio
from paho.mqtt.enums import MQTTProtocolVersion

from tests.interop.amqp_link.rig import (
    PATIENCE_SECS,
    POLL_SECS,
    Device,
    drop,
    fetch,
    gateway_to,
    sink_queue,
    until,
    with_channel,
)
from tests.interop.servers import RabbitMQ


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
        await until(lambda: gateway.links["erp"].session.idle)
        assert gateway.links["erp"].stats.messages_out == 300
    await drop(rabbitmq, queue="link.sink")


async def test_a_broker_that_dies_before_it_confirms(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """No PUBACK until the broker is back; then it comes, and the message is there."""
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        await sink_queue(rabbitmq, "link.sink")
        link = gateway.links["erp"]
        await trio.to_thread.run_sync(rabbitmq.save)
        said = await trio.to_thread.run_sync(rabbitmq.control, "eval", "os:getpid().")
        pid = int(said.strip().strip('"'))
        os.kill(pid, signal.SIGSTOP)
        device.publish("t/one", b"one")
        await until(lambda: link.stats.messages_out == 1)
        assert link.stats.in_flight == 1
        await trio.to_thread.run_sync(lambda: rabbitmq.stop(kill=True))
        await until(lambda: not link.is_up)
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
        refused = list(gateway.listeners["mqtt"].stats.settled_counts())
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
        route = next(route for route in gateway.dispatcher.router.routes if route.name == "absent")
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
        await until(lambda: gateway.links["erp"].session.idle)
        await trio.to_thread.run_sync(rabbitmq.restart)
        await until(lambda: gateway.links["erp"].is_up)
        await with_channel(rabbitmq, say(b"after"))
        await until(lambda: len(device.heard) >= 4)
        assert sorted(device.heard[2:]) == [("commands/link/commands", b"after"), ("events/p1", b"after")]
        assert gateway.links["erp"].stats.reconnects >= 1
        await until(lambda: gateway.links["erp"].session.idle)
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


async def test_a_device_gives_the_broker_no_orders(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Keys for copies would have RabbitMQ obey; a user that is not ours is none."""
    async with gateway_to(rabbitmq, tmp_path) as gateway, Device(gateway) as device:
        await sink_queue(rabbitmq, "link.sink")
        await with_channel(rabbitmq, lambda channel: channel.queue_declare("link.victim"))
        for at, pairs in enumerate(
            ([("CC", "link.victim")], [("BCC", "a"), ("BCC", "link.victim")], [("amqp-user-id", "somebody")])
        ):
            device.publish("t/one", b"%d" % at, pairs=pairs)
        await until(lambda: len(device.acked) == 3)
        assert set(device.acked.values()) == {0}
        found = await fetch(rabbitmq, "link.sink")
        assert [body for body, _, _ in found] == [b"0", b"1", b"2"]
        assert [properties.user_id for _, properties, _ in found] == [None] * 3
        assert found[2][1].headers["amqp-user-id"] == "somebody"
        told = {name for _, properties, _ in found for name in properties.headers}
        assert told.isdisjoint({"CC", "BCC"})
        assert await fetch(rabbitmq, "link.victim") == []
        stats = gateway.links["erp"].stats
        assert (stats.degraded.counts, stats.connects) == ({"orders": 2}, 1)
    await drop(rabbitmq, queue="link.sink")
    await drop(rabbitmq, queue="link.victim")
