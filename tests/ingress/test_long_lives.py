"""What lives longer than another protocol can say is told as it is, or counted."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import decode_properties
from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.properties import decode_list
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import Mqtt, connect
from tests.ingress.test_lost_properties import lost
from tests.interop.gateway_fixture import Running, no_errors_logged, running, settings_of

LONGEST: Final = 0xFFFF_FFFF  # seconds; 136 years
TEN_YEARS: Final = 315_360_000
MAPPING: Final = """
version: 1
routes:
  - name: there
    from: {endpoint: mqtt, topic: "a"}
    to: {endpoint: amqp091, exchange: "", routing_key: q}
  - name: fast
    from: {endpoint: mqtt, topic: "a"}
    to: {endpoint: amqpfast, service: queue, destination: q}
"""


def publish(client: Mqtt, secs: int) -> None:
    """Publish a message that lives so long, and wait until it has been taken."""
    client.publish("a", b"x", 1, 1, properties=b"\x02" + secs.to_bytes(4, "big"))
    client.acked(PacketType.PUBACK)


def told(gateway: Running, secs: int) -> tuple[int, int]:
    """Return how long the message lives: in seconds for MQTT, in milliseconds for AMQP 0-9-1."""
    with connect(gateway, "reader")[0] as reader, Amqp(gateway).open() as amqp:
        reader.subscribe("a")
        amqp.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        amqp.call(m.BasicConsume("q", no_ack=True), m.BasicConsumeOk)
        with connect(gateway, "writer")[0] as writer:
            publish(writer, secs)
        properties = decode_list(reader.row()[3], PacketType.PUBLISH)
        expiration = decode_properties(amqp.delivered(1)[0][5]).expiration
        assert expiration is not None
        return properties[Property.MESSAGE_EXPIRY_INTERVAL], int(expiration)


@pytest.mark.parametrize("secs", [TEN_YEARS, TEN_YEARS + 1, LONGEST])
def test_a_subscriber_hears_how_long_a_message_lives(tmp_path: Path, secs: int) -> None:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    with running(settings_of(mappings=[str(tmp_path / "mapping.yaml")])) as gateway:
        for_mqtt, for_amqp = told(gateway, secs)
        assert secs - 30 < for_mqtt <= secs
        assert (secs - 30) * 1000 < for_amqp <= secs * 1000
        assert lost(gateway) == ({"expiration_range": 1} if secs == LONGEST else {})


@pytest.mark.parametrize("argument", ["x-message-ttl", "x-expires"])
def test_the_longest_delay_queue_of_nservicebus_is_declared(argument: str) -> None:
    """It holds messages for 2^27 seconds; RabbitMQ accepts up to ten years."""
    with running() as gateway, Amqp(gateway).open() as amqp:
        arguments = ((argument, Value(ValueType.INT64, 2**27 * 1_000)),)
        amqp.call(m.QueueDeclare("delay", arguments=arguments), m.QueueDeclareOk)
        amqp.publish("", "delay", b"x")
        assert amqp.call(m.QueueDeclare("delay", passive=True), m.QueueDeclareOk).message_count == 1


def test_a_session_that_is_kept_for_less_than_a_disconnect_asks_is_logged() -> None:
    week = {Property.SESSION_EXPIRY_INTERVAL: 60}
    with running() as gateway, no_errors_logged() as lines:
        client, _ = connect(gateway, "c", properties=week)
        with client:
            client.machine.send(Disconnect(0, {Property.SESSION_EXPIRY_INTERVAL: LONGEST}))
            client.flush()
            assert client.closed()
        most = gateway.gateway.settings.limits.session_expiry_secs_max
        assert gateway.ask(lambda: gateway.gateway.mqtt.sessions["c"].expiry_secs) == most
    (line,) = [line for line in lines if line["event"] == "session expiry shortened"]
    assert (line["client"], line["wanted_seconds"], line["seconds"]) == ("c", LONGEST, most)
