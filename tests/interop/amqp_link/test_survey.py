"""What somebody deletes at a real RabbitMQ while a link needs it: found, restored, and said by readiness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pika
import trio

from tests.interop.amqp_link.rig import POLL_SECS, drop, gateway_to, until, with_channel
from tests.interop.servers import RabbitMQ

MAPPING = """
version: 1
routes:
  - name: events
    from: {endpoint: erp, exchange: survey.events, binding_key: "{plant}.#"}
    to: {endpoint: mqtt, topic: "events/{plant}"}
  - name: jobs
    from: {endpoint: mqtt, topic: "jobs/{name}"}
    to: {endpoint: erp, exchange: survey.jobs, routing_key: "{name}"}
"""
OWN_QUEUE = "gateway-gateway.survey.events"


def published(channel: Any) -> bool:
    """Publish an event. Return True if a queue has got it."""
    try:
        channel.basic_publish("survey.events", "p1.x", b"event", mandatory=True)
    except pika.exceptions.UnroutableError:
        return False
    return True


async def test_an_exchange_that_is_deleted_and_made_anew_is_bound_again(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    def make_anew(channel: Any) -> None:
        channel.exchange_delete("survey.events")
        channel.exchange_declare("survey.events", "topic", durable=True)

    async with gateway_to(rabbitmq, tmp_path, mapping=MAPPING, survey_secs=1, required=True) as gateway:
        stats = gateway.links["erp"].stats
        assert await with_channel(rabbitmq, published)
        await until(lambda: stats.messages_in == 1)
        await with_channel(rabbitmq, make_anew)
        with trio.fail_after(30):
            while not await with_channel(rabbitmq, published):
                await trio.sleep(POLL_SECS)
        await until(lambda: stats.messages_in == 2)
        assert gateway.readiness.reasons() == []
    await drop(rabbitmq, exchange="survey.events", queue=OWN_QUEUE)


async def test_readiness_says_what_is_lacking(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    def declare(channel: Any) -> None:
        for exchange in ("survey.jobs", "survey.events"):
            channel.exchange_declare(exchange, "topic", durable=True)
        channel.queue_declare(OWN_QUEUE, durable=True)

    await with_channel(rabbitmq, declare)
    async with gateway_to(
        rabbitmq, tmp_path, mapping=MAPPING, survey_secs=1, required=True, declare="check"
    ) as gateway:
        await until(lambda: gateway.readiness.reasons() == [])
        await with_channel(rabbitmq, lambda channel: channel.exchange_delete("survey.jobs"))
        await until(lambda: gateway.readiness.reasons() != [])
        (reason,) = gateway.readiness.reasons()
        assert reason.startswith("link erp: missing at the broker: exchange 'survey.jobs': ")
        await with_channel(rabbitmq, declare)
        await until(lambda: gateway.readiness.reasons() == [])
        assert gateway.links["erp"].stats.restored.counts == {"exchange": 1}
    for exchange in ("survey.jobs", "survey.events"):
        await drop(rabbitmq, exchange=exchange, queue=OWN_QUEUE)
