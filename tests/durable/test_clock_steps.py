"""Wall clocks that are set while a gateway runs: nothing expires for it, and no life becomes longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pika
import pytest

from gateway.protocols.mqtt.properties import decode_list
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.durable.test_amqp import channel
from tests.ingress.clients import connect
from tests.interop.gateway_process import GatewayProcess
from tests.interop.wrong_clock import Clock

HOUR_SECS: Final = 3_600.0
STEPS: Final = (2 * HOUR_SECS, -2 * HOUR_SECS, 8 * 24 * HOUR_SECS)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


@pytest.fixture
def gateway(tmp_path: Path, clock: Clock) -> Iterator[GatewayProcess]:
    made = GatewayProcess(tmp_path / "gateway")
    made.program = clock.program
    with made:
        yield made


@pytest.mark.parametrize("step", STEPS)
def test_a_step_ends_no_message(gateway: GatewayProcess, clock: Clock, step: float) -> None:
    with channel(gateway) as opened:
        opened.queue_declare("limited", durable=True, arguments={"x-message-ttl": 600_000})
        opened.queue_declare("plain", durable=True)
        limited = pika.BasicProperties(expiration="600000", delivery_mode=2)
        opened.basic_publish("", "limited", b"1")
        opened.basic_publish("", "plain", b"2", limited)
        clock.step(step)
        while "wall clock jumped" not in gateway.log:
            time.sleep(0.05)
        assert opened.basic_get("limited", auto_ack=True)[2] == b"1"
        assert opened.basic_get("plain", auto_ack=True)[2] == b"2"
        opened.basic_publish("", "plain", b"3", pika.BasicProperties(expiration="1"))
        opened.basic_publish("", "plain", b"4", limited)
        while opened.queue_declare("plain", passive=True).method.message_count > 1:
            pass
        assert opened.basic_get("plain", auto_ack=True)[2] == b"4"


@pytest.mark.parametrize("step", STEPS)
def test_a_subscriber_is_told_of_no_longer_life_than_was_given(
    gateway: GatewayProcess, clock: Clock, step: float
) -> None:
    lasting = {Property.SESSION_EXPIRY_INTERVAL: 7_200}
    client, _ = connect(gateway, clean=False, properties=lasting)
    with client:
        client.subscribe("a", 1)
    with connect(gateway, "writer")[0] as writer:
        writer.publish("a", b"x", 1, 1, properties=b"\x02\0\0\x02\x58", retain=True)
        writer.acked(PacketType.PUBACK)
    clock.step(step)
    client, connack = connect(gateway, clean=False, properties=lasting)
    with client:
        assert connack.session_present
        told = decode_list(client.row()[3], PacketType.PUBLISH)[Property.MESSAGE_EXPIRY_INTERVAL]
        assert 500 < told <= 600
