"""Shared subscriptions on the wire, of every version."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from gateway.protocols.mqtt.packets import Disconnect, Subscription
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running

VERSIONS = (Version.V5, Version.V311, Version.V31)
EXPIRY = {Property.SESSION_EXPIRY_INTERVAL: 3_600}
SHARED = "$share/g/jobs/+"


def heard(client: Mqtt, count: int) -> list[bytes]:
    return [client.body() for _ in range(count)]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_member(gateway: Running, version: Version, qos: int) -> None:
    with ExitStack() as stack:
        members = [stack.enter_context(connect(gateway, name, version=version)[0]) for name in "abc"]
        writer = stack.enter_context(connect(gateway, "writer")[0])
        for member in members:
            assert member.subscribe(SHARED, qos) == qos
        for number in range(6):
            writer.publish("jobs/x", str(number).encode(), qos, packet_id=qos and number + 1)
        bodies = [body for member in members for body in heard(member, 2)]
        assert sorted(bodies) == [str(number).encode() for number in range(6)]
        assert all(member.quiet() for member in members)


def test_the_connack_offers_them_and_no_local_is_a_fault(gateway: Running) -> None:
    client, connack = connect(gateway)
    with client:
        assert connack.properties[Property.SHARED_SUBSCRIPTION_AVAILABLE] == 1
        client.machine.subscribe(1, [Subscription(SHARED, no_local=True)])
        client.flush()
        assert client.next(Disconnect).reason == ReasonCode.PROTOCOL_ERROR


def test_retained_messages_are_not_sent_to_a_group(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.publish("jobs/x", b"kept", 1, 1, retain=True)
        client.acked(PacketType.PUBACK)
        client.subscribe(SHARED, 1)
        assert client.quiet()
        client.subscribe("jobs/+", 1)
        assert client.body() == b"kept"


@pytest.mark.parametrize("lasting", [True, False])
def test_what_a_member_did_not_acknowledge_goes_to_another(gateway: Running, lasting: bool) -> None:
    properties = EXPIRY if lasting else {}
    lost, _ = connect(gateway, "lost", properties=properties)
    with connect(gateway, "other")[0] as other, connect(gateway, "writer")[0] as writer:
        lost.subscribe(SHARED, 1)
        writer.publish("jobs/x", b"work", 1, 1)
        assert lost.body() == b"work"
        other.subscribe(SHARED, 1)
        lost.cut()
        flags, _, _, _, body = other.row()
        assert (flags & 8, body) == (0, b"work")
        if lasting:
            again, connack = connect(gateway, "lost", clean=False, properties=EXPIRY)
            with again:
                assert connack.session_present
                assert again.quiet()


def test_quality_2_is_completed_with_the_member_that_has_it(gateway: Running) -> None:
    lost, _ = connect(gateway, "lost", properties=EXPIRY)
    with connect(gateway, "other")[0] as other, connect(gateway, "writer")[0] as writer:
        lost.subscribe(SHARED, 2)
        writer.publish("jobs/x", b"once", 2, 1)
        first = lost.row()
        other.subscribe(SHARED, 2)
        lost.cut()
        gateway.until(lambda: gateway.gateway.mqtt.sessions["lost"].outlet is None)
        assert other.quiet()
        with connect(gateway, "lost", clean=False, properties=EXPIRY)[0] as again:
            assert again.row()[2:] == first[2:]
        gateway.until(lambda: gateway.gateway.mqtt.sessions["lost"].outlet is None)
        gateway.ask(lambda: gateway.gateway.mqtt.discard(gateway.gateway.mqtt.sessions["lost"]))
        assert other.quiet()


def test_members_may_be_away(gateway: Running) -> None:
    kept, _ = connect(gateway, "kept", properties=EXPIRY)
    kept.subscribe(SHARED, 1)
    kept.cut()
    gateway.until(lambda: gateway.gateway.mqtt.sessions["kept"].outlet is None)
    with connect(gateway, "writer")[0] as writer:
        writer.publish("jobs/x", b"later", 1, 1)
        assert writer.acked(PacketType.PUBACK) == (1, 0)
    with connect(gateway, "kept", clean=False, properties=EXPIRY)[0] as again:
        assert again.body() == b"later"


@pytest.mark.parametrize("topic_filter", ["$share/g", "$share//a", "$share/g+/a", "$share/g/", "$share/#/a"])
def test_filters_that_are_none(gateway: Running, topic_filter: str) -> None:
    with connect(gateway)[0] as client:
        assert client.subscribe(topic_filter) == ReasonCode.TOPIC_FILTER_INVALID
