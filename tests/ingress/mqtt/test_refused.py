"""What a client is told when a message, will, filter or acknowledgement is not taken; and what the log is."""

from __future__ import annotations

from typing import Any, Final
from unittest.mock import patch

import pytest
import structlog

from gateway.broker.dead_letters import Letter
from gateway.model.outcome import Reason
from gateway.protocols.mqtt.packets import Connack, Connect, Disconnect, Suback, Subscription, Will
from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits
from tests.ingress.clients import Mqtt, connect, eventually, stats
from tests.interop.gateway_fixture import Running, running, settings_of

PUBACK, PUBREC, PUBREL, PUBCOMP = PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP
OLD: Final = (Version.V311, Version.V31)
ALL: Final = (Version.V5, *OLD)
DEEP: Final = "/".join("a" * 200)
SMALL: Final = Limits(message_bytes_max=1_000, connect_bytes_max=1_000)


def kept_letters(gateway: Running) -> list[Letter]:
    """The dead letters, the oldest first; the database of replicas may have to be asked."""
    told: list[list[Letter]] = []
    gateway.ask(lambda: gateway.gateway.dead_letters.newest(99, told.append))
    gateway.until(lambda: bool(told))
    return told[0][::-1]


def letters(gateway: Running) -> list[tuple[str, int, str]]:
    """The dead letters: topic, bytes, and why."""
    kept = kept_letters(gateway)
    return [(one.message.address.name, len(one.message.body), one.outcome.text) for one in kept]


def lines(event: str, logged: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logged if line["event"] == event]


# Levels of topics.


@pytest.mark.parametrize("version", ALL)
def test_200_levels_are_taken(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client:
        assert client.subscribe(DEEP, 1) == 1
        assert client.subscribe("/".join("+" * 200), 1) == 1
        client.publish(DEEP, b"x", 1, 1)
        assert client.row()[1] == DEEP.encode()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("qos, kind", [(0, None), (1, PUBACK), (2, PUBREC)])
@pytest.mark.parametrize("version", ALL)
def test_more_are_refused_in_the_versions_words(
    gateway: Running, version: Version, qos: int, kind: PacketType | None, retain: bool
) -> None:
    with structlog.testing.capture_logs() as logged, connect(gateway, version=version)[0] as client:
        for packet_id in (1, 2):  # the second one finds it remembered
            client.publish(f"{DEEP}/b", b"x", qos, qos and packet_id, retain=retain)
            if kind is not None:
                said = ReasonCode.TOPIC_NAME_INVALID if version is Version.V5 else 0
                assert client.acked(kind) == (packet_id, said)
        client.ping()
        told = lines("message refused", logged)
        assert [(one["client"], one["reason"]) for one in told] == [("c", "name_invalid")] * 2
        assert sum(stats(gateway)._refused_messages.values()) == 2
        assert len(letters(gateway)) == (2 if qos and version is not Version.V5 else 0)
        assert gateway.ask(lambda: len(gateway.gateway.mqtt.retained)) == 0


@pytest.mark.parametrize("version", ALL)
def test_filters_and_wills_with_more_are_refused(gateway: Running, version: Version) -> None:
    with structlog.testing.capture_logs() as logged, connect(gateway, version=version)[0] as client:
        client.machine.subscribe(7, [Subscription(f"{DEEP}/#"), Subscription("a")])
        client.flush()
        said = ReasonCode.TOPIC_FILTER_INVALID if version is Version.V5 else ReasonCode.UNSPECIFIED_ERROR
        assert client.next(Suback).reasons == (said, 0)
        (told,) = lines("subscription refused", logged)
        assert (told["client"], told["reason"]) == ("c", "topic_filter_invalid")
        other, connack = connect(gateway, "w", version=version, will=Will(f"{DEEP}/b", b"x"))
        other.cut()
        assert connack.reason == (
            ReasonCode.TOPIC_NAME_INVALID if version is Version.V5 else ReasonCode.SERVER_UNAVAILABLE
        )
        (told,) = lines("client refused by MQTT listener", logged)
        assert told["client"] == "w"
        assert told["error"].startswith("topic_name_invalid: ")


# Sizes.


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("size, kept", [(1_001, True), (1_900, True), (2_100, False), (300_000, False)])
@pytest.mark.parametrize("version", OLD)
def test_a_body_over_the_limit_does_not_come_for_ever(
    version: Version, size: int, kept: bool, qos: int
) -> None:
    with running(settings_of(limits=SMALL)) as gateway, connect(gateway, "reader")[0] as reader:
        reader.subscribe("#", 2)
        with connect(gateway, version=version)[0] as client:
            client.publish("a/b", bytes(size), qos, qos and 9, retain=True)
            if qos == 1:
                assert client.acked(PUBACK) == (9, 0)
            elif qos == 2:
                assert client.acked(PUBREC) == (9, 0)
                client.publish("a/b", bytes(size), qos, 9, dup=True)
                assert client.acked(PUBREC) == (9, 0)
                client.ack(PUBREL, 9)
                assert client.acked(PUBCOMP) == (9, 0)
            client.publish("a/b", b"small", 1, 10)
            assert client.acked(PUBACK) == (10, 0)
            assert reader.body() == b"small"
            assert sum(stats(gateway)._refused_messages.values()) == 1
            assert stats(gateway).protocol_errors.counts == {}
            found = letters(gateway)
            assert [one[:2] for one in found] == ([("a/b", size if kept else 0)] if qos else [])
            if qos and not kept:
                assert f"{size} bytes" in found[0][2]
            assert gateway.ask(lambda: len(gateway.gateway.mqtt.retained)) == 0


def test_what_was_not_kept_cannot_be_published_again() -> None:
    with running(settings_of(limits=SMALL)) as gateway, connect(gateway, version=Version.V311)[0] as client:
        client.subscribe("#")
        client.publish("a", bytes(5_000), 1, 1)
        client.acked(PUBACK)
        heard: list[Any] = []
        kept, redriving = kept_letters(gateway), gateway.gateway.core.redriving
        gateway.ask(lambda: redriving.redrive(kept, lambda id, outcome: heard.append(outcome)))
        gateway.until(lambda: bool(heard))
        assert client.quiet()
        assert [outcome.reason for outcome in heard] == [Reason.NO_ROUTE]


@pytest.mark.parametrize("version", ALL)
@pytest.mark.parametrize("size, taken", [(500, True), (501, False)])
def test_a_will_has_the_same_limit(version: Version, size: int, taken: bool) -> None:
    with running(settings_of(limits=Limits(message_bytes_max=500))) as gateway:
        client, connack = connect(gateway, version=version, will=Will("w", bytes(size)))
        client.cut()
        said = ReasonCode.PACKET_TOO_LARGE if version is Version.V5 else ReasonCode.SERVER_UNAVAILABLE
        assert connack.reason == (0 if taken else said)


# Acknowledgements of the wrong kind, and other violations.


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("qos, kind", [(1, PUBREC), (1, PUBCOMP), (2, PUBACK), (2, PUBCOMP)])
@pytest.mark.parametrize("version", ALL)
def test_an_acknowledgement_of_the_wrong_kind_ends_the_connection(
    gateway: Running, version: Version, qos: int, kind: PacketType, lasting: bool
) -> None:
    properties = {Property.SESSION_EXPIRY_INTERVAL: 60} if lasting and version is Version.V5 else {}
    client, _ = connect(gateway, version=version, clean=not lasting, properties=properties)
    with client, connect(gateway, "writer")[0] as writer:
        client.subscribe("a", qos)
        writer.publish("a", b"x", qos, 1)
        client.ack(kind, client.row()[2])
        if version is Version.V5:
            assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR
        assert client.closed()
        eventually(lambda: stats(gateway).protocol_errors.counts == {"protocol_error": 1})


def test_a_pubrec_that_is_said_again_is_answered_again_and_a_puback_is_wrong(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.subscribe("a", 2)
        with connect(gateway, "writer")[0] as writer:
            writer.publish("a", b"x", 2, 1)
            packet_id = client.row()[2]
        for _ in range(2):
            client.ack(PUBREC, packet_id)
            assert client.acked(PUBREL) == (packet_id, 0)
        client.ack(PUBACK, packet_id)
        assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR


@pytest.mark.parametrize("body", [b"\x0b\x01", b"\x26\x00\x01a\x00\x01b\x0b\x01", b"\x23\x00\x01\x0b\x01"])
def test_a_client_names_no_subscription(gateway: Running, body: bytes) -> None:
    """[MQTT-3.3.4-6]; a link takes it from its broker, which a list that was seen there must not change."""
    for _ in range(2):
        with connect(gateway)[0] as client:
            client.publish("a", b"x", properties=body)
            assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR


# The Receive Maximum.


def released(client: Mqtt, packet_id: int) -> None:
    client.ack(PUBREL, packet_id)
    assert client.acked(PUBCOMP) == (packet_id, 0)


@pytest.mark.parametrize("lasting", [False, True])
def test_quality_2_counts_until_pubcomp(lasting: bool) -> None:
    properties = {Property.SESSION_EXPIRY_INTERVAL: 60} if lasting else {}
    with running(settings_of(limits=Limits(inflight_max=3))) as gateway:
        with connect(gateway, clean=not lasting, properties=properties)[0] as client:
            for packet_id in (1, 2, 3):
                client.publish("a", b"x", 2, packet_id)
                assert client.acked(PUBREC) == (packet_id, 0x10)
            client.publish("a", b"x", 2, 3, dup=True)  # no new one
            assert client.acked(PUBREC) == (3, 0)
            released(client, 2)
            client.publish("a", b"x", 1, 4)
            assert client.acked(PUBACK) == (4, 0x10)
            client.publish("a", b"x", 2, 2)
            assert client.acked(PUBREC) == (2, 0x10)
            client.publish("a", b"x", 2, 5)
            assert client.next(Disconnect).reason == ReasonCode.RECEIVE_MAXIMUM_EXCEEDED
        if lasting:  # it counts for each connection anew (5: 4.9)
            with connect(gateway, clean=False, properties=properties)[0] as client:
                for packet_id in (11, 12, 13):
                    client.publish("a", b"x", 2, packet_id)
                    assert client.acked(PUBREC) == (packet_id, 0x10)
                for packet_id in (1, 11):
                    released(client, packet_id)


def test_what_is_refused_counts_no_longer() -> None:
    with running(settings_of(limits=Limits(inflight_max=2))) as gateway, connect(gateway)[0] as client:
        for packet_id in range(1, 6):
            client.publish("$SYS/x", b"x", 2, packet_id)
            assert client.acked(PUBREC) == (packet_id, ReasonCode.NOT_AUTHORIZED)


def test_a_pubrel_before_its_pubrec_frees_what_it_names() -> None:
    with running(settings_of(limits=Limits(inflight_max=2))) as gateway, connect(gateway)[0] as client:
        for _ in range(10):
            client.machine.publish(b"a", b"x", 2, packet_id=1)
            client.ack(PUBREL, 1)
            client.ping()
        client.publish("a", b"x", 1, 2)
        while (2, 0x10) not in client.next(Acks).rows:
            pass


# A CONNECT that is too large.


@pytest.mark.parametrize("version", ALL)
def test_a_connect_over_the_limit_is_answered_if_its_version_has_a_word(version: Version) -> None:
    with running(settings_of(limits=SMALL)) as gateway:
        with Mqtt(gateway.port("mqtt")) as client:
            client.say(Connect("c", version, True, 0, None, "u", bytes(2_000), {}))
            if version is Version.V5:
                assert client.next(Connack).reason == ReasonCode.PACKET_TOO_LARGE
            assert client.closed()
        with connect(gateway, version=version)[0] as client:
            client.subscribe("a", 1)
        eventually(lambda: stats(gateway).protocol_errors.counts == {"packet_too_large": 1})


def test_a_connect_of_128_kib_is_taken(gateway: Running) -> None:
    will = Will("a", bytes(65_535), 1, False, {})
    client, connack = connect(gateway, will=will, properties={Property.USER_PROPERTY: (("a", "b" * 60_000),)})
    with client:
        assert connack.reason == 0


@pytest.mark.interpreted
def test_a_session_whose_opening_has_failed_is_not_present() -> None:
    """The gateway has an error of its own behind the CONNACK."""
    properties = {Property.SESSION_EXPIRY_INTERVAL: 600}

    def fail(*_: object) -> None:
        raise RuntimeError("of this test")

    with running(but="internal error, contained") as gateway:
        for broken in (
            "gateway.broker.mqtt.namespace.MqttNamespace.store_will",
            "gateway.broker.mqtt.session.Session.attach",
        ):
            with patch(broken, fail):
                client = Mqtt(gateway.mqtt)
                client.say(Connect("c", Version.V5, False, will=Will("w/x", b"last"), properties=properties))
                client.rest()
                client.cut()
            assert "c" not in gateway.gateway.mqtt.sessions
        client, connack = connect(gateway, "c", clean=False, properties=properties)
        assert not connack.session_present
        client.cut()
