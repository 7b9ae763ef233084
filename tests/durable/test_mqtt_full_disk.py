"""A full disk and MQTT: what is refused and in which words, what goes on, and how it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.protocols.mqtt.packets import Connack, Connect, Will
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from tests.durable.test_full_disk import BODY, FILLING_MAX, small
from tests.ingress.clients import Mqtt, eventually
from tests.interop.gateway_process import GatewayProcess

__all__ = ["small"]  # a fixture

PUBACK, PUBREC, PUBREL, PUBCOMP = (
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
)
DAY: PropertyMap = {Property.SESSION_EXPIRY_INTERVAL: 86_400}
V5, V311 = Version.V5, Version.V311


@pytest.fixture
def gateway(tmp_path: Path, small: Path) -> Iterator[GatewayProcess]:
    with GatewayProcess(tmp_path, store={"path": str(small / "data"), "probe_secs": 0.05}) as started:
        yield started


@pytest.fixture
def clients() -> Iterator[list[Mqtt]]:
    made: list[Mqtt] = []
    yield made
    for client in made:
        client.cut()


class Site:
    """A gateway, and the clients that a test has made."""

    def __init__(self, gateway: GatewayProcess, clients: list[Mqtt]) -> None:
        self.gateway = gateway
        self._clients = clients

    def connect(self, who: str, version: Version = V5, *, clean: bool = False) -> tuple[Mqtt, Connack]:
        client = Mqtt(self.gateway.ports["mqtt"])
        self._clients.append(client)
        properties = DAY if version is V5 and not clean else {}
        client.say(Connect(who, version, clean, properties=properties))
        return client, client.next(Connack)

    def let_in(self, who: str, version: Version = V5, *, clean: bool = False) -> Mqtt:
        client, connack = self.connect(who, version, clean=clean)
        assert connack.reason == 0
        return client

    def fill(self) -> int:
        """Publish to the session of `reader`, which is away, until the disk is full."""
        reader = self.let_in("reader")
        reader.subscribe("t/#", 1)
        reader.machine.disconnect()
        reader.flush()
        assert reader.closed()
        writer = self.let_in("writer", clean=True)
        for taken in range(FILLING_MAX):
            writer.publish("t/a", BODY, 1, 1)
            if writer.acked(PUBACK)[1] != 0:
                return taken
        raise AssertionError("the disk never filled")


@pytest.fixture
def site(gateway: GatewayProcess, clients: list[Mqtt]) -> Site:
    return Site(gateway, clients)


def test_what_would_have_to_be_stored_is_refused_in_the_clients_words(site: Site) -> None:
    five, three = site.let_in("five"), site.let_in("three", V311)
    site.fill()
    assert site.connect("new")[1].reason == ReasonCode.QUOTA_EXCEEDED
    assert site.connect("new", V311)[1].reason == ReasonCode.SERVER_UNAVAILABLE
    assert five.subscribe("t/#", 1) == ReasonCode.QUOTA_EXCEEDED
    assert three.subscribe("t/#", 1) >= 0x80
    five.publish("t/a", BODY, 2, 2)
    assert five.acked(PUBREC) == (2, ReasonCode.QUOTA_EXCEEDED)
    five.publish("other", BODY, 1, 3, retain=True)
    assert five.acked(PUBACK) == (3, ReasonCode.QUOTA_EXCEEDED)


def test_what_need_not_be_stored_goes_on(site: Site) -> None:
    site.fill()
    client = site.let_in("clean", clean=True)
    assert client.subscribe("other", 1) == 1
    for qos in (0, 1):
        client.publish("other", b"goes on", qos, qos)
        assert client.body() == b"goes on"
    assert client.acked(PUBACK) == (1, 0)


@pytest.mark.parametrize("version", [V5, V311])
def test_acknowledgements_of_qos_2_go_on(site: Site, version: Version) -> None:
    reader, writer = site.let_in("second reader", version), site.let_in("second writer", version)
    reader.subscribe("second", 2)
    writer.publish("second", b"x", 2, 7)
    assert writer.acked(PUBREC) == (7, 0)
    packet_id = reader.row()[2]
    site.fill()
    reader.ack(PUBREC, packet_id)
    assert reader.acked(PUBREL) == (packet_id, 0)
    reader.ack(PUBCOMP, packet_id)
    writer.ack(PUBREL, 7)
    assert writer.acked(PUBCOMP) == (7, 0)
    reader.cut()
    assert site.connect("second reader", version)[1].session_present


def test_a_session_is_resumed_read_and_makes_room(site: Site) -> None:
    taken = site.fill()
    reader, connack = site.connect("reader")
    assert (connack.reason, connack.session_present) == (0, True)
    for _ in range(taken):
        _, _, packet_id, _, body = reader.row()
        assert body == BODY
        reader.ack(PUBACK, packet_id)
    assert reader.quiet()
    writer = site.let_in("writer", clean=True)

    def accepted() -> bool:
        writer.publish("t/a", b"again", 1, 1)
        return writer.acked(PUBACK) == (1, 0)

    eventually(accepted)
    assert site.connect("new")[1].reason == 0


def test_nothing_accepted_is_lost_when_it_is_killed_then(site: Site) -> None:
    taken = site.fill()
    site.gateway.restart()
    reader, connack = site.connect("reader")
    assert connack.session_present
    for _ in range(taken):
        reader.ack(PUBACK, reader.row()[2])
    assert reader.quiet()


def test_a_will_that_the_disk_does_not_take_is_published_when_it_does(site: Site) -> None:
    client = Mqtt(site.gateway.ports["mqtt"])
    client.say(Connect("dying", V5, clean_start=True, will=Will("t/a", b"will", 1)))
    assert client.next(Connack).reason == 0
    taken = site.fill()
    client.cut()
    reader, _ = site.connect("reader")
    for _ in range(taken):
        reader.ack(PUBACK, reader.row()[2])
    assert reader.body() == b"will"
    assert reader.quiet()
