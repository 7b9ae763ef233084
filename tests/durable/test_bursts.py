"""Bursts of MQTT messages to a durable queue, and a gateway that is killed between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import PacketType, Version
from tests.durable.test_amqp import channel, taken
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_process import GatewayProcess

MANY = 40  # messages that are sent at once
BURSTS = 25
TOPIC = b"press/7/values"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path) as started, channel(started) as opened:
        opened.queue_declare("q", durable=True)
        opened.queue_bind("q", "amq.topic", "#")
        yield started


def say(client: Mqtt, burst: int) -> None:
    """Messages that differ in nothing but identifier and body."""
    for at in range(burst * MANY, (burst + 1) * MANY):
        client.machine.publish(TOPIC, b"%d" % at, 1, packet_id=at + 1)
    client.flush()


def answered(client: Mqtt, count: int) -> list[int]:
    """The numbers of messages that are accepted, until they are `count` at least."""
    found: list[int] = []
    while len(found) < count:
        acks = client.next(Acks)
        assert acks.kind is PacketType.PUBACK
        found += [packet_id - 1 for packet_id, _ in acks.rows]
    return found


@pytest.mark.parametrize("accepted", [1, 5 * MANY + 1, BURSTS * MANY])
def test_what_was_accepted_of_bursts_survives_in_order(gateway: GatewayProcess, accepted: int) -> None:
    with connect(gateway, "press", version=Version.V311)[0] as client:
        for burst in range(BURSTS):
            say(client, burst)
        told = answered(client, accepted)
        gateway.restart()
    assert told == list(range(len(told)))
    with channel(gateway) as opened:
        waiting = opened.queue_declare("q", durable=True, passive=True).method.message_count
        assert waiting >= len(told)
        assert taken(opened, waiting) == list(range(waiting))
