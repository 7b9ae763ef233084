"""Messages that a consumer cannot receive: acknowledged to their sender, and still there after `kill -9`.

A message that no consumer of a session can decode is a dead letter. A message that does not fit the frames of
one consumer stays in its queue for others. The gateway is killed as soon as the last message was
acknowledged; each message is then where it waited, or among the dead letters, and never nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

import httpx
import pytest

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Confirms
from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.protocols.mqtt.properties import encode_property
from gateway.protocols.mqtt.spec import PacketType, Property, Version
from tests.durable.outboxes.test_outbox import channel, url_of
from tests.durable.scenes import DAY, taken
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Mqtt
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.servers import free_ports
from tests.operator import bearer

COUNT: Final = 30
BODIES: Final = [b"%d" % number for number in range(COUNT)]
FRAME_MAX: Final = 4_096
# More than a frame takes.
WIDE: Final = b"".join(encode_property(Property.USER_PROPERTY, (name, "v" * 1_000)) for name in "abcdef")
UNREADABLE: Final = b"\x90\x00\x02\xff\xfe\x02"  # a content type that is not UTF-8; delivery-mode 2
MAPPING: Final = """
version: 1
routes:
  - name: fast
    from: {endpoint: mqtt, topic: "fast/{rest...}"}
    to: {endpoint: amqpfast, service: queue, destination: "q"}
  - name: device
    from: {endpoint: amqp091, exchange: amq.topic, binding_key: "unreadable.{rest...}"}
    to: {endpoint: mqtt, topic: "unreadable/{rest...}"}
  - name: amqp
    from: {endpoint: mqtt, topic: "wide/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "wide.{rest...}"}
"""


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    (http,) = free_ports(1)
    given = {"mappings": [str(tmp_path / "mapping.yaml")], "http": {"host": LOOPBACK, "port": http}}
    with GatewayProcess(tmp_path, **given) as started:
        yield started


def letters(gateway: GatewayProcess) -> set[bytes]:
    """The bodies of the dead letters."""
    api = f"http://{LOOPBACK}:{gateway.ports['http']}/api/v1/dead-letters"
    headers = bearer(gateway.ports["http"])
    found = httpx.get(api, params={"count": 10 * COUNT}, trust_env=False, headers=headers).json()["items"]
    return {str(letter["body"]).encode() for letter in found}


def device_publishes(gateway: GatewayProcess, topic: bytes) -> None:
    """With properties that do not fit a consumer's frame; returns when all is acknowledged."""
    with Mqtt(gateway.ports["mqtt"]) as device:
        device.say(Connect("device", Version.V5, True))
        device.next(Connack)
        for packet_id, body in enumerate(BODIES, 1):
            device.machine.publish(topic, body, 1, packet_id=packet_id, properties=WIDE)
        device.flush()
        for _ in BODIES:
            assert device.acked(PacketType.PUBACK)[1] == 0


def program_publishes(gateway: GatewayProcess) -> None:
    """With properties that cannot be read; returns when all is confirmed."""
    with Amqp(gateway).open() as program:
        program.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        program.publish("amq.topic", "unreadable.x", *BODIES, properties=UNREADABLE)
        confirmed: set[int] = set()
        while len(confirmed) < COUNT:
            for _, tag, multiple, accepted in program.next(Confirms).confirms:
                assert accepted
                confirmed |= set(range(1, tag + 1)) if multiple else {tag}


def amqp_queue(gateway: GatewayProcess) -> Iterator[set[bytes]]:
    """A consumer of small frames; then what is left in its queue."""
    with Amqp(gateway, frame_max=FRAME_MAX).open() as consumer:
        consumer.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        consumer.call(m.QueueBind("q", "amq.topic", "wide.#"), m.QueueBindOk)
        consumer.call(m.BasicConsume("q"), m.BasicConsumeOk)
        yield set()
    with channel(url_of(gateway)) as opened:
        found = iter(lambda: opened.basic_get("q", auto_ack=True)[2], None)
        yield set(found)


def fast_queue(gateway: GatewayProcess) -> Iterator[set[bytes]]:
    """The same over AMQP/Fast."""
    with Fast(gateway, frame_max=FRAME_MAX).open() as consumer:
        consumer.consume(consumer.handle("q"))
        yield set()
    with Fast(gateway).open() as other:
        other.consume(other.handle("q"))
        yield set(other.bodies(COUNT - len(letters(gateway))))


def session(gateway: GatewayProcess) -> Iterator[set[bytes]]:
    """A client with a session, of MQTT 5, which has to be told the properties; then of 3.1.1."""
    with Mqtt(gateway.ports["mqtt"]) as five:
        five.say(Connect("me", Version.V5, False, properties=DAY))
        five.next(Connack)
        assert five.subscribe("unreadable/#", 1) == 1
        yield set()
    with Mqtt(gateway.ports["mqtt"]) as older:
        older.say(Connect("me", Version.V311, False))
        assert older.next(Connack).session_present
        found: set[bytes] = set()
        for _ in range(COUNT - len(letters(gateway))):
            found |= set(taken(older, 1))
        yield found


ROWS: Final[dict[str, tuple[Callable[[GatewayProcess], Iterator[set[bytes]]], Callable[..., None]]]] = {
    "amqp091": (amqp_queue, partial(device_publishes, topic=b"wide/x")),
    "amqpfast": (fast_queue, partial(device_publishes, topic=b"fast/x")),
    "mqtt": (session, program_publishes),
}


@pytest.mark.parametrize("target", ROWS)
def test_what_cannot_be_delivered_is_somewhere(gateway: GatewayProcess, target: str) -> None:
    waiting_at, publish = ROWS[target]
    waiting = waiting_at(gateway)
    next(waiting)
    with closing(waiting):
        publish(gateway)
        gateway.restart()
        assert next(waiting) | letters(gateway) == set(BODIES)
        if target == "mqtt":
            assert letters(gateway), "some had been tried by then"
        else:
            assert not letters(gateway), "another consumer could take them"
