"""A link of QoS 2 whose gateway was killed: the broker still holds packet identifiers that nobody knows."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from gateway.settings import Settings
from tests.configured import make_link
from tests.ingress.clients import Mqtt
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.interop.servers import Mosquitto
from tests.interop.test_mqtt_link import Subscriber, channel, mqtt

HELD: Final = 20  # as many as Mosquitto lets be open (max_inflight_messages)
MAPPING: Final = """
version: 1
routes:
  - name: down
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "down.{rest...}"}
    to: {endpoint: plant, topic: "down/{rest...}", qos: 2}
"""


def killed_in_the_middle(port: int, client_id: str) -> None:
    """Publish HELD messages without a PUBREL, as the link did before its gateway was killed, and vanish."""
    with Mqtt(port) as before:
        expiry = {Property.SESSION_EXPIRY_INTERVAL: 600}
        before.say(Connect(client_id, Version.V5, False, properties=expiry))
        before.next(Connack)
        for packet_id in range(1, HELD + 1):
            before.publish("down/held", b"%d" % packet_id, 2, packet_id)
            assert before.acked(PacketType.PUBREC) == (packet_id, 0)


def _settings(port: int, folder: Path) -> Settings:
    mapping = folder / "mapping.yaml"
    mapping.write_text(MAPPING)
    plant = make_link(
        url=f"mqtt://{LOOPBACK}:{port}", client_id=folder.name, reconnect_min_secs=0.1, reconnect_max_secs=0.5
    )
    return settings_of(links={"plant": plant}, mappings=(str(mapping),))


def test_what_the_broker_holds_of_an_earlier_life_is_released(mosquitto: Mosquitto, tmp_path: Path) -> None:
    killed_in_the_middle(mosquitto.port, tmp_path.name)
    with (
        Subscriber(mosquitto.port, "down/live") as subscriber,
        running(_settings(mosquitto.port, tmp_path)) as gateway,
        channel(gateway) as amqp,
    ):
        bodies = [b"live %d" % number for number in range(3 * HELD)]
        for body in bodies:
            amqp.basic_publish("amq.topic", "down.live", body, mqtt())
        assert [subscriber.next().payload for _ in bodies] == bodies
        assert gateway.gateway.links["plant"].stats.connects == 1
