"""An MQTT client on the listener, packet by packet: qualities of service, sessions, wills, limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pika
import pytest
from pydantic import SecretStr

from gateway import clock
from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.ingress.mqtt.connection import REST_SECS
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.packets import Ack, Disconnect, Subscription, Will
from gateway.protocols.mqtt.runs import Acks
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from gateway.settings import Limits, StoreSettings, User
from tests.ingress.clients import Mqtt, connect, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.passwords import hashed

VERSIONS = (Version.V5, Version.V311, Version.V31)
PUBACK, PUBREC, PUBREL, PUBCOMP = (
    PacketType.PUBACK,
    PacketType.PUBREC,
    PacketType.PUBREL,
    PacketType.PUBCOMP,
)
EXPIRY = {Property.SESSION_EXPIRY_INTERVAL: 3_600}
LASTING = {Version.V5: EXPIRY, Version.V311: {}, Version.V31: {}}


def lasting(gateway: Running, client_id: str, version: Version = Version.V5) -> Mqtt:
    """A client whose session stays."""
    client, _ = connect(gateway, client_id, version=version, clean=False, properties=LASTING[version])
    return client


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_quality_of_service_in_both_directions(gateway: Running, version: Version, qos: int) -> None:
    reader, writer = (connect(gateway, name, version=version)[0] for name in ("reader", "writer"))
    with reader, writer:
        assert reader.subscribe("a/+", qos) == qos
        writer.publish("a/b", b"body", qos, packet_id=qos and 7)
        if qos == 1:
            assert writer.acked(PUBACK) == (7, 0)
        elif qos == 2:
            assert writer.acked(PUBREC) == (7, 0)
            writer.ack(PUBREL, 7)
            assert writer.acked(PUBCOMP) == (7, 0)
        flags, topic, packet_id, _, body = reader.row()
        assert (flags >> 1 & 3, topic, body) == (qos, b"a/b", b"body")
        if qos == 1:
            reader.ack(PUBACK, packet_id)
        elif qos == 2:
            reader.ack(PUBREC, packet_id)
            assert reader.acked(PUBREL) == (packet_id, 0)
            reader.ack(PUBCOMP, packet_id)
        reader.ping()
        session = gateway.gateway.mqtt.sessions["reader"]
        assert gateway.ask(lambda: len(session.in_flight)) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_quality_2_is_taken_once_however_often_it_is_sent(gateway: Running, version: Version) -> None:
    with lasting(gateway, "reader") as reader:
        reader.subscribe("#", 2)
        writer = lasting(gateway, "writer", version)
        writer.publish("a", b"once", 2, 5)
        assert writer.acked(PUBREC) == (5, 0)
        writer.publish("a", b"once", 2, 5, dup=True)
        assert writer.acked(PUBREC) == (5, 0)
        writer.cut()
        with lasting(gateway, "writer", version) as writer:
            writer.publish("a", b"once", 2, 5, dup=True)
            assert writer.acked(PUBREC) == (5, 0)
            writer.ack(PUBREL, 5)
            assert writer.acked(PUBCOMP) == (5, 0)
            writer.publish("a", b"another", 2, 5)
            assert writer.acked(PUBREC) == (5, 0)
        assert [reader.body(), reader.body()] == [b"once", b"another"]
        assert stats(gateway).duplicates == 2


@pytest.mark.parametrize("version, reason", [(Version.V5, 0x92), (Version.V311, 0), (Version.V31, 0)])
def test_acknowledgements_of_unknown_messages_are_answered(
    gateway: Running, version: Version, reason: int
) -> None:
    with connect(gateway, version=version)[0] as client:
        client.ack(PUBREL, 9)
        assert client.acked(PUBCOMP) == (9, reason)
        client.ack(PUBREC, 10)
        assert client.acked(PUBREL) == (10, reason)
        client.ack(PUBACK, 11)
        client.ack(PUBCOMP, 12)
        client.ping()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_session_is_resumed_with_what_was_in_flight(gateway: Running, version: Version) -> None:
    reader = lasting(gateway, "reader", version)
    reader.subscribe("#", 2)
    with connect(gateway, "writer")[0] as writer:
        for packet_id, qos in ((1, 1), (2, 2), (3, 2)):
            writer.publish("a", str(packet_id).encode(), qos, packet_id)
        rows = [reader.row() for _ in range(3)]
        reader.ack(PUBREC, rows[1][2])
        assert reader.acked(PUBREL)[0] == rows[1][2]
        reader.cut()
        gateway.until(lambda: gateway.gateway.mqtt.sessions["reader"].outlet is None)
        writer.publish("a", b"4", 1, 4)
        writer.ping()
        again, connack = connect(gateway, "reader", version=version, clean=False, properties=LASTING[version])
        with again:
            assert connack.session_present == (version > Version.V31)
            assert again.acked(PUBREL)[0] == rows[1][2]
            heard = [again.row() for _ in range(3)]
            assert [(row[4], row[0] >> 3 & 1) for row in heard] == [(b"1", 1), (b"3", 1), (b"4", 0)]
            assert [row[2] for row in heard[:2]] == [rows[0][2], rows[2][2]]


def test_a_session_that_was_not_to_stay_is_gone(gateway: Running) -> None:
    connect(gateway, "c")[0].cut()
    gateway.until(lambda: not gateway.gateway.mqtt.sessions)
    with lasting(gateway, "c") as client:
        client.subscribe("#", 1)
        client.machine.disconnect()
        client.flush()
        assert client.closed()
    assert list(gateway.gateway.mqtt.sessions) == ["c"]


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_client_has_said_counts_though_it_is_heard_of_elsewhere_first(
    gateway: Running, version: Version
) -> None:
    with lasting(gateway, "witness") as witness, lasting(gateway, "c", version) as client:
        witness.subscribe("last")
        client.subscribe("a", 1)
        witness.publish("a", b"had", 1, 1)
        _, _, packet_id, _, _ = client.row()

        def leave() -> None:
            """The loop reads nothing until this is over."""
            outlet: Any = gateway.gateway.mqtt.sessions["c"].outlet
            client.ack(PUBACK, packet_id)
            client.publish("last", b"word")
            client.machine.disconnect()
            client.flush()
            outlet.handle_takeover()

        gateway.ask(leave)
        witness.ping()
        assert witness.body() == b"word"
        with lasting(gateway, "c", version) as again:
            witness.publish("a", b"new", 1, 2)
            assert again.body() == b"new"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_second_connection_takes_the_session_over(gateway: Running, version: Version) -> None:
    with lasting(gateway, "c", version) as first:
        first.subscribe("#", 1)
        with lasting(gateway, "c", version) as second:
            if version is Version.V5:
                assert first.next(Disconnect).reason == ReasonCode.SESSION_TAKEN_OVER
            assert first.closed()
            second.publish("a", b"mine", 1, 1)
            assert second.body() == b"mine"
    assert stats(gateway).connections <= 1


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("goodbye", [True, False])
def test_a_will_is_published_for_a_client_that_vanishes(
    gateway: Running, version: Version, goodbye: bool
) -> None:
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("will/#", 1)
        client, _ = connect(gateway, "dying", version=version, will=Will("will/c", b"gone", 1, True))
        if goodbye:
            client.machine.disconnect()
            client.flush()
            assert client.closed()
        client.cut()
        gateway.until(lambda: "dying" not in gateway.gateway.mqtt.sessions)
        if goodbye:
            assert reader.quiet()
        else:
            assert reader.body() == b"gone"
            gateway.until_retains("will/c")  # maybe later
        assert gateway.retains("will/c") is not goodbye


def test_a_client_may_leave_with_its_will(gateway: Running) -> None:
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("#")
        client, _ = connect(gateway, "leaving", will=Will("w", b"said"))
        client.machine.disconnect(ReasonCode.DISCONNECT_WITH_WILL)
        client.flush()
        assert reader.body() == b"said"
        client.cut()


def test_a_will_with_delay_is_not_published_for_a_client_that_returns(gateway: Running) -> None:
    will = Will("w", b"gone", properties={Property.WILL_DELAY_INTERVAL: 600})
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("#")
        connect(gateway, "c", will=will, clean=False, properties=EXPIRY)[0].cut()
        gateway.until(lambda: len(gateway.gateway.mqtt._wills) == 1)
        with connect(gateway, "c", clean=False, properties=EXPIRY)[0]:
            assert gateway.ask(lambda: len(gateway.gateway.mqtt._wills)) == 0
            assert reader.quiet()


def test_a_wills_expiry_counts_from_its_publication(gateway: Running) -> None:
    will = Will("w", b"gone", 1, properties={Property.MESSAGE_EXPIRY_INTERVAL: 1})
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("#", 1)
        client, _ = connect(gateway, "c", will=will)
        gateway.ask(lambda: gateway.gateway.mqtt.sessions["c"])
        client.cut()
        assert reader.body() == b"gone"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_silent_client_is_let_go_after_one_and_a_half_keep_alives(
    gateway: Running, version: Version
) -> None:
    silent, _ = connect(gateway, "silent", version=version, keep_alive=1, will=Will("w", b"silence"))
    with silent, connect(gateway, "reader")[0] as reader:
        reader.subscribe("w")
        if version is Version.V5:
            assert silent.next(Disconnect).reason == ReasonCode.KEEP_ALIVE_TIMEOUT
        assert silent.closed()
        assert reader.body() == b"silence"
    assert stats(gateway).protocol_errors.counts == {"keep_alive_timeout": 1}


def test_an_idle_connection_rests_but_not_beyond_its_keep_alive(gateway: Running) -> None:
    with connect(gateway, "long", keep_alive=60)[0], connect(gateway, "short", keep_alive=3)[0]:
        found = {one.sender.client: one for one in gateway.gateway.listeners["mqtt"].connections}
        begun = gateway.ask(clock.now)

        def rests(client: str, secs: float) -> bool:
            """Whether it rests so long after a tick of now."""

            def ticked() -> bool:
                found[client].tick(begun)
                return found[client].is_at_rest(begun + secs)

            return gateway.ask(ticked)

        assert [rests("long", secs) for secs in (0.0, REST_SECS - 0.1, REST_SECS)] == [True, True, False]
        assert [rests("short", secs) for secs in (0.0, 3.1)] == [True, False]
        gateway.ask(found["long"].require_ticks)
        assert not gateway.ask(lambda: found["long"].is_at_rest(begun))


def test_a_connection_whose_acknowledgements_the_disk_refused_does_not_rest(tmp_path: Path) -> None:
    """They are tried again each second."""
    lasts = {Property.SESSION_EXPIRY_INTERVAL: 60}
    with (
        running(settings_of(store=StoreSettings(path=tmp_path))) as gateway,
        connect(gateway, "c", properties=lasts)[0] as client,
    ):
        (found,) = gateway.gateway.listeners["mqtt"].connections

        def rests(outcome: Outcome | None) -> bool:
            now = clock.now()
            found.tick(now)
            if outcome is not None:
                found._answers._committed(PacketType.PUBCOMP, [7], outcome)
            return found.is_at_rest(now)

        assert gateway.ask(lambda: rests(None))
        assert not gateway.ask(lambda: rests(Outcome(Verdict.RELEASED, Reason.STORE, "the disk is full")))
        assert client.acked(PacketType.PUBCOMP) == (7, 0)  # by the next tick
        assert gateway.ask(lambda: rests(None))


@pytest.mark.parametrize("qos", [0, 1])
def test_many_retained_messages_come_in_pieces_and_others_are_served_between(
    gateway: Running, qos: int
) -> None:
    count = 2 * PIECE_MESSAGES_MAX + 7
    names = [b"many/%04d" % at for at in range(count)]
    with connect(gateway, "writer")[0] as writer:
        for name in names:
            writer.publish(name.decode(), name, 0, retain=True)
        writer.ping()
        with lasting(gateway, "reader") as reader:
            reader.subscribe("many/#", qos)
            writer.ping()
            found = [reader.row()[4] for _ in range(count)]
            reader.ping()
    assert found == names
    session = gateway.gateway.mqtt.sessions["reader"]
    assert gateway.ask(lambda: (len(session.walks), len(session))) == (0, 0)


def test_what_is_owed_retained_waits_for_the_client_to_return(gateway: Running) -> None:
    count = 2 * PIECE_MESSAGES_MAX
    with connect(gateway, "writer")[0] as writer:
        for at in range(count):
            writer.publish(f"many/{at}", b"x", 0, retain=True)
        writer.ping()
    with lasting(gateway, "reader") as reader:
        reader.subscribe("a", 0)
    space = gateway.gateway.mqtt
    gateway.ask(lambda: space.subscribe(space.sessions["reader"], "many/+", SubscriptionOptions()))
    with lasting(gateway, "reader") as reader:
        assert {reader.row()[1] for _ in range(count)} == {b"many/%d" % at for at in range(count)}


def test_retained_messages_for_new_subscribers_by_wildcard(gateway: Running) -> None:
    with connect(gateway, "writer")[0] as writer:
        for topic in ("a/1", "a/2", "b/1"):
            writer.publish(topic, topic.encode(), 1, 1, retain=True)
            writer.acked(PUBACK)
        with connect(gateway, "reader")[0] as reader:
            reader.subscribe("a/+", 1)
            rows = [reader.row(), reader.row()]
            assert sorted((row[1], row[0] & 1) for row in rows) == [(b"a/1", 1), (b"a/2", 1)]
            writer.publish("a/1", b"live", 0, retain=True)
            flags, _, _, _, body = reader.row()
            assert (flags & 1, body) == (0, b"live")


@pytest.mark.parametrize("topic_filter", ["a/#/b", "a+", "#a"])
def test_a_bad_filter_is_refused_by_itself_in_5(gateway: Running, topic_filter: str) -> None:
    with connect(gateway)[0] as client:
        assert client.subscribe(topic_filter) == ReasonCode.TOPIC_FILTER_INVALID
        assert client.subscribe("good") == 0


@pytest.mark.parametrize("version", [Version.V311, Version.V31])
def test_a_bad_filter_ends_older_clients(gateway: Running, version: Version) -> None:
    with connect(gateway, version=version)[0] as client, pytest.raises(ConnectionError):
        client.subscribe("a/#/b")
    assert stats(gateway).protocol_errors.counts == {"topic_filter_invalid": 1}


@pytest.mark.parametrize(
    "version, client_id, clean, reason",
    [
        (Version.V5, "", True, 0),
        (Version.V311, "", True, 0),
        (Version.V311, "", False, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID),
        (Version.V31, "", True, ReasonCode.CLIENT_IDENTIFIER_NOT_VALID),
    ],
)
def test_clients_without_an_identifier(
    gateway: Running, version: Version, client_id: str, clean: bool, reason: int
) -> None:
    client, connack = connect(gateway, client_id, version=version, clean=clean)
    with client:
        assert connack.reason == reason
        if version is Version.V5:
            assert connack.properties[Property.ASSIGNED_CLIENT_IDENTIFIER]


def test_a_client_that_takes_no_connack_of_ours_is_refused_and_leaves_no_session(gateway: Running) -> None:
    client, connack = connect(gateway, "tiny", properties={Property.MAXIMUM_PACKET_SIZE: 8})
    with client:
        assert connack.reason == ReasonCode.PACKET_TOO_LARGE
        assert client.closed()
    assert gateway.ask(lambda: len(gateway.gateway.mqtt.sessions)) == 0


def test_enhanced_authentication_is_refused(gateway: Running) -> None:
    client, connack = connect(gateway, properties={Property.AUTHENTICATION_METHOD: "SCRAM"})
    with client:
        assert connack.reason == ReasonCode.BAD_AUTHENTICATION_METHOD
        assert client.closed()


def test_passwords_are_verified_and_what_follows_connect_waits() -> None:
    with running(settings_of(users={"ann": User(password_hash=SecretStr(hashed("right")))})) as gateway:
        client, connack = connect(gateway, user=("ann", b"wrong"))
        with client:
            assert connack.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD
            assert client.closed()
        for _ in range(2):  # verified in a thread, then remembered
            client, connack = connect(gateway, user=("ann", b"right"))
            with client:
                assert connack.reason == 0
                client.publish("a", b"x", 1, 1)
                assert client.acked(PUBACK) == (1, 0x10)
        assert stats(gateway).refused.counts == {"bad_user_name_or_password": 1}


def test_bodies_up_to_the_limit_pass_and_one_over_it_is_refused_in_the_clients_words() -> None:
    with running(settings_of(limits=Limits(message_bytes_max=1_000, connect_bytes_max=1_000))) as gateway:
        with connect(gateway, "reader")[0] as reader, connect(gateway, "writer")[0] as writer:
            reader.subscribe("#", 1)
            assert writer.machine.peer_packet_bytes_max == 1_000, "all that is announced is taken"
            writer.machine.peer_packet_bytes_max = 1 << 28
            writer.publish("a", bytes(1_000), 1, 1)
            assert writer.acked(PUBACK) == (1, 0)
            assert reader.body() == bytes(1_000)
            writer.publish("a", bytes(1_001), 1, 2)
            assert writer.acked(PUBACK) == (2, ReasonCode.QUOTA_EXCEEDED)
            writer.publish("a", bytes(1_001), 2, 3)
            assert writer.acked(PUBREC) == (3, ReasonCode.QUOTA_EXCEEDED)
            writer.publish("a", bytes(1_001))
            assert reader.quiet()
            writer.publish("a", bytes(5_000))
            assert writer.next(Disconnect).reason == ReasonCode.PACKET_TOO_LARGE
        assert stats(gateway).protocol_errors.counts == {"packet_too_large": 1}


def test_a_publisher_before_5_is_read_no_further_than_what_may_be_unsettled() -> None:
    with running(settings_of(limits=Limits(inflight_max=10))) as gateway:
        client, _ = connect(gateway, version=Version.V311)
        with client, connect(gateway, "reader")[0] as reader:
            reader.subscribe("a")
            for packet_id in range(1, 101):
                client.machine.publish(b"a", b"x", 1, packet_id=packet_id)
            client.flush()
            acked: list[tuple[int, int]] = []
            while len(acked) < 100:
                acked += client.next(Acks).rows
            assert [packet_id for packet_id, _ in acked] == list(range(1, 101))


def test_what_is_pipelined_behind_connect_is_answered(gateway: Running) -> None:
    with Mqtt(gateway.mqtt) as client:
        client.send(
            b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"  # CONNECT
            b"\x82\x06\x00\x01\x00\x01a\x00"  # SUBSCRIBE
            b"\x30\x04\x00\x01ax"  # PUBLISH
            b"\xc0\x00\xe0\x00"  # PINGREQ, DISCONNECT
        )
        assert client.rest() == b"\x20\x02\x00\x00\xd0\x00"  # it left without waiting for the SUBACK


@pytest.mark.parametrize("version", VERSIONS)
def test_what_a_client_asks_for_right_before_it_leaves_is_done(gateway: Running, version: Version) -> None:
    client = lasting(gateway, "c", version)
    client.machine.subscribe(1, [Subscription("kept"), Subscription("gone")])
    client.machine.unsubscribe(2, ["gone"])
    client.machine.send(Ack(PUBREL, 3))
    client.machine.send(Ack(PUBREC, 4))
    client.machine.publish(b"a", b"retained", 1, True, packet_id=5)
    client.machine.disconnect()
    client.flush()
    assert client.closed()
    client.cut()
    assert list(gateway.gateway.mqtt.sessions["c"].subscriptions) == ["kept"]
    assert gateway.retains("a")


def test_server_limits_are_told_in_the_connack() -> None:
    limits = Limits(keep_alive_secs_max=60, session_expiry_secs_max=100, topic_alias_max=3)
    with running(settings_of(limits=limits)) as gateway:
        client, connack = connect(gateway, properties={Property.SESSION_EXPIRY_INTERVAL: 1_000})
        client.cut()
        assert connack.properties[Property.SERVER_KEEP_ALIVE] == 60
        assert connack.properties[Property.SESSION_EXPIRY_INTERVAL] == 100
        assert connack.properties[Property.TOPIC_ALIAS_MAXIMUM] == 3


def test_subscription_identifiers_and_no_local(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.subscribe("a", 0, {Property.SUBSCRIPTION_IDENTIFIER: (77,)})
        client.subscribe("mine", 0, no_local=True)
        client.publish("mine", b"not for me")
        client.publish("a", b"x")
        _, _, _, properties, body = client.row()
        assert (properties, body) == (b"\x0b\x4d", b"x")


@pytest.mark.parametrize("stored", [False, True])
def test_no_local_is_about_the_client_and_not_its_namesakes(tmp_path: Path, stored: bool) -> None:
    """The name of an AMQP connection is free, and so is that of a link at its remote broker."""
    store = {"store": StoreSettings(path=tmp_path / "data")} if stored else {}
    with running(settings_of(**store)) as gateway, lasting(gateway, "me") as client:
        client.publish("a/b", b"kept", retain=True)
        client.subscribe("a/b", 1, no_local=True)
        assert client.body() == b"kept"
        client.publish("a/b", b"mine", 1, 1)
        client.acked(PacketType.PUBACK)
        parameters = pika.ConnectionParameters(
            LOOPBACK, gateway.amqp, client_properties={"connection_name": "me"}
        )
        with pika.BlockingConnection(parameters) as connection:
            connection.channel().basic_publish("amq.topic", "a.b", b"theirs")
        assert client.body() == b"theirs"


def test_a_full_session_table_refuses_new_clients_only() -> None:
    with running(settings_of(limits=Limits(sessions_max=1))) as gateway:
        first = lasting(gateway, "first")
        other, connack = connect(gateway, "other")
        other.cut()
        assert connack.reason == ReasonCode.QUOTA_EXCEEDED
        first.cut()
        with lasting(gateway, "first") as again:
            again.publish("a", b"x")
            assert again.quiet()
