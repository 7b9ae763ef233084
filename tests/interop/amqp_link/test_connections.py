"""RabbitMQ reads nothing more of a connection that publishes while memory is short: what that holds up."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from tests.interop.amqp_link.rig import (
    MAPPING,
    Device,
    drop,
    gateway_to,
    sink_queue,
    until,
    with_channel,
)
from tests.interop.amqp_link.test_failover import in_thread, memory_alarm
from tests.interop.servers import RabbitMQ

QUEUE: Final = "link.commands"
MANY: Final = 100
BEFORE: Final = MAPPING.replace(QUEUE, "link.nothing")


def fill(channel: Any) -> None:
    channel.queue_declare(QUEUE, durable=True)
    channel.queue_purge(QUEUE)
    for number in range(MANY):
        channel.basic_publish("", QUEUE, b"%d" % number)


def left(channel: Any) -> tuple[int, int]:
    """Messages and consumers of the queue."""
    found = channel.queue_declare(QUEUE, passive=True).method
    return found.message_count, found.consumer_count


@pytest.mark.parametrize("connections", [1, 2])
async def test_what_is_consumed_goes_on_over_a_connection_of_its_own(
    rabbitmq: RabbitMQ, tmp_path: Path, connections: int
) -> None:
    given = {"connections": connections, "prefetch": 5, "client_id": f"link {connections}"}
    await sink_queue(rabbitmq, "link.sink")
    await with_channel(rabbitmq, fill)
    alarm = memory_alarm(rabbitmq)
    end = await in_thread(alarm.__enter__)
    try:
        async with (
            gateway_to(rabbitmq, tmp_path, mapping=BEFORE, **given) as gateway,
            Device(gateway) as device,
        ):
            await device.subscribe("commands/#")
            await until(lambda: all(link.is_up for link in gateway.links.values()))
            device.publish("t/first", b"x")
            await until(lambda: gateway.links["erp"].stats.blocked)
            (tmp_path / "mapping.yaml").write_text(MAPPING)
            assert await gateway.reload_mappings()
            if connections == 2:
                await until(lambda: len(device.heard) == MANY)
                assert device.acked == {}
            else:
                assert await with_channel(rabbitmq, left) == (MANY, 0)
            await in_thread(end)
            await until(lambda: (len(device.heard), len(device.acked)) == (MANY, 1))
    finally:
        await in_thread(alarm.__exit__, None, None, None)
        for queue in ("link.sink", QUEUE, "link.nothing"):
            await drop(rabbitmq, queue=queue)
