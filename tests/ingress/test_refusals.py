"""What an MQTT publisher hears when a target does not take its message, and what it may do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.settings import Limits
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import Mqtt, connect, stats
from tests.interop.gateway_fixture import Running, running, settings_of

MAPPING = """version: 1
routes:
  - name: must-arrive
    from: {endpoint: mqtt, topic: "must/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.direct, routing_key: "{rest...}"}
    on_reject: retry
"""
REFUSED = ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    """`must/x` is refused unless a queue is bound to amq.direct with the key x."""
    mapping = tmp_path / "m.yaml"
    mapping.write_text(MAPPING)
    with running(settings_of(mappings=(str(mapping),), limits=Limits(inflight_max=10))) as one:
        yield one


def bind(amqp: Amqp, key: str) -> None:
    amqp.call(m.QueueDeclare("q"), m.QueueDeclareOk)
    amqp.call(m.QueueBind("q", "amq.direct", key), m.QueueBindOk)


def test_5_hears_why_and_goes_on(gateway: Running) -> None:
    with connect(gateway)[0] as client, Amqp(gateway).open() as amqp:
        bind(amqp, "good")
        client.publish("must/bad", b"x", 1, 1)
        assert client.acked(PacketType.PUBACK) == (1, REFUSED)
        client.publish("must/bad", b"x", 2, 2)
        assert client.acked(PacketType.PUBREC) == (2, REFUSED)
        client.publish("must/good", b"x", 2, 2)
        assert client.acked(PacketType.PUBREC) == (2, 0)
        client.publish("must/bad", b"lost", 0)
        client.ping()
        assert dict(stats(gateway)._refused_messages) == {("rejected", "no_route"): 3}


def test_refusals_free_the_place_of_their_messages(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        for packet_id in range(1, 51):
            client.machine.publish(b"must/bad", b"x", 1, packet_id=packet_id)
        client.flush()
        acked: list[tuple[int, int]] = []
        while len(acked) < 50:
            acked += client.next(Acks).rows
        assert acked == [(packet_id, REFUSED) for packet_id in range(1, 51)]
        client.ping()


def test_a_held_publisher_has_to_keep_its_connection_alive() -> None:
    with running(settings_of(limits=Limits(queue_messages_max=2))) as gateway:
        client, amqp = connect(gateway, keep_alive=1)[0], Amqp(gateway).open()
        with client, amqp:
            amqp.call(m.QueueDeclare("q"), m.QueueDeclareOk)
            amqp.call(m.QueueBind("q", "amq.topic", "#"), m.QueueBindOk)
            for packet_id in range(1, 4):
                client.publish("a", b"x", 1, packet_id)
                assert client.acked(PacketType.PUBACK)[0] == packet_id
            client.publish("a", b"held", 1, 9)
            client.ping()
            assert client.next(Disconnect).reason == ReasonCode.KEEP_ALIVE_TIMEOUT


@pytest.mark.parametrize("version", [Version.V311, Version.V31])
@pytest.mark.parametrize("qos, answer", [(1, PacketType.PUBACK), (2, PacketType.PUBREC)])
def test_older_clients_are_answered_when_it_succeeds(
    gateway: Running, version: Version, qos: int, answer: PacketType
) -> None:
    with connect(gateway, version=version)[0] as client, Amqp(gateway).open() as amqp:
        client.publish("must/late", b"x", qos, 1)
        client.publish("elsewhere", b"x", 1, 2)
        assert client.acked(PacketType.PUBACK) == (2, 0)
        bind(amqp, "late")
        assert client.acked(answer) == (1, 0)
        assert gateway.ask(lambda: len(gateway.gateway.host.queues["q"])) == 1


def lasting(gateway: Running) -> Mqtt:
    return connect(gateway, "c", version=Version.V311, clean=False)[0]


def test_a_refused_message_of_a_client_that_left_counts_as_new_when_it_returns(gateway: Running) -> None:
    client = lasting(gateway)
    client.publish("must/late", b"x", 2, 1)
    client.ping()
    client.cut()
    gateway.until(lambda: gateway.gateway.mqtt.sessions["c"].outlet is None)
    with lasting(gateway) as client, Amqp(gateway).open() as amqp:
        bind(amqp, "late")
        client.publish("must/late", b"x", 2, 1, dup=True)
        assert client.acked(PacketType.PUBREC) == (1, 0)
        assert stats(gateway).duplicates == 0


def test_a_publisher_that_is_not_read_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ingress.waiting_publishes.MESSAGES_MAX", 0)
    with running(settings_of(limits=Limits(queue_messages_max=2))) as gateway:
        client, amqp = connect(gateway, keep_alive=1)[0], Amqp(gateway).open()
        with client, amqp:
            amqp.call(m.QueueDeclare("q"), m.QueueDeclareOk)
            amqp.call(m.QueueBind("q", "amq.topic", "#"), m.QueueBindOk)
            for packet_id in range(1, 4):
                client.publish("a", b"x", 1, packet_id)
                assert client.acked(PacketType.PUBACK)[0] == packet_id
            (connection,) = gateway.gateway.listeners["mqtt"].connections
            began = gateway.ask(gateway.gateway.listeners["mqtt"]._protocol.now)  # type: ignore[attr-defined]
            client.publish("a", b"held", 1, 9)
            gateway.until(lambda: not connection.stream.reading)
            gateway.until(lambda: connection.machine.last_received > began + 2.0)  # type: ignore[attr-defined]
            assert stats(gateway).pause_count == 1
            amqp.call(m.QueuePurge("q"), m.QueuePurgeOk)
            assert client.acked(PacketType.PUBACK) == (9, 0)


@pytest.mark.parametrize("version", [Version.V311, Version.V31])
@pytest.mark.parametrize("qos, answer", [(1, PacketType.PUBACK), (2, PacketType.PUBREC)])
def test_what_an_older_client_cannot_be_told_is_a_dead_letter_unless_a_route_asks_for_more(
    tmp_path: Path, version: Version, qos: int, answer: PacketType
) -> None:
    mapping = tmp_path / "m.yaml"
    mapping.write_text(MAPPING.replace("    on_reject: retry\n", ""))
    settings = settings_of(mappings=(str(mapping),))
    with running(settings) as gateway, connect(gateway, version=version)[0] as client:
        for packet_id in range(1, 41):
            client.publish("must/bad", b"x", qos, packet_id)
            assert client.acked(answer) == (packet_id, 0)
        letters = gateway.ask(lambda: dict(gateway.gateway.dead_letters.counted))
        assert letters == {("must-arrive", "no_route"): 40}
    with running(settings) as gateway, connect(gateway)[0] as client:  # MQTT 5 has a word for it
        client.publish("must/bad", b"x", 1, 1)
        assert client.acked(PacketType.PUBACK) == (1, REFUSED)
        assert gateway.ask(lambda: dict(gateway.gateway.dead_letters.counted)) == {}
