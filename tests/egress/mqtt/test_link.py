"""How an MQTT link connects, subscribes, keeps the connection alive and leaves."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import structlog

from gateway.protocols.mqtt.packets import Connect, Disconnect, Pingreq, Subscribe, Subscription, Unsubscribe
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.transport.stream import Stream
from tests.egress.mqtt.remote import FakeStream, Remote, World, message, row

pytestmark = pytest.mark.interpreted  # the stream is one in memory


def connect_to(world: World, answer: bytes | None) -> Version:
    """A connection whose broker gives `answer` to CONNECT, or hangs up; returns the version that was said."""
    world.stream, world.remote = FakeStream(), Remote(world)
    peer = world.session.connect(cast(Stream, world.stream), world.settings.target(), 0.0)
    world.stream.owner = peer
    world.stats.add_connection(peer.machine)
    said = peer.data_to_send()
    assert said[:1] == b"\x10"
    if answer is not None:
        peer.receive(answer, 0.0)
    if world.stream.owner is not None and not peer.opened:
        world.drop()
    return peer.machine.version


FIVE, OLDER = Version.V5, Version.V311
YES_5, YES_3 = b"\x20\x03\x00\x00\x00", b"\x20\x02\x00\x00"


@pytest.mark.parametrize(
    "version, answers, said",
    [
        ("auto", [YES_5, YES_5], [FIVE, FIVE]),
        ("auto", [b"\x20\x02\x00\x01", YES_3, YES_3], [FIVE, OLDER, OLDER]),
        ("auto", [b"\x20\x02\x00\x84", YES_3, YES_3], [FIVE, OLDER, OLDER]),
        ("auto", [b"\x20\x03\x00\x84\x00", YES_3, YES_3], [FIVE, OLDER, OLDER]),
        ("auto", [None, YES_3, None, YES_3], [FIVE, OLDER, FIVE, OLDER]),
        ("auto", [None, None, YES_5, YES_5], [FIVE, OLDER, FIVE, FIVE]),
        ("auto", [YES_5, None, None, YES_5], [FIVE, FIVE, FIVE, FIVE]),
        ("auto", [b"HTTP/1.1 503\r\n\r\n", None, YES_5], [FIVE, OLDER, FIVE]),
        ("auto", [b"\x20\x03\x00\x87\x00", YES_5], [FIVE, FIVE]),
        ("5.0", [b"\x20\x03\x00\x84\x00", YES_5], [FIVE, FIVE]),
        ("3.1.1", [None, YES_3], [OLDER, OLDER]),
        ("3.1", [None, YES_3], [Version.V31, Version.V31]),
    ],
)
async def test_the_version_that_is_said(
    version: str, answers: list[bytes | None], said: list[Version]
) -> None:
    world = World(version=version)
    found = []
    for answer in answers:
        found.append(connect_to(world, answer))
        if world.stream.owner is not None:
            world.drop()
    assert found == said


async def test_what_connect_says(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("pass\n")
    world = World(username="me", password_file=secret, heartbeat_secs=20, session_expiry_secs=77)
    packet = world.connect().connect
    assert packet == Connect(
        "us",
        Version.V5,
        clean_start=False,
        keep_alive=20,
        user_name="me",
        password=b"pass",
        properties={
            Property.MAXIMUM_PACKET_SIZE: world.limits.message_bytes_max + world.limits.connect_bytes_max,
            Property.SESSION_EXPIRY_INTERVAL: 77,
            Property.RECEIVE_MAXIMUM: 1_000,
            Property.TOPIC_ALIAS_MAXIMUM: 64,
        },
    )
    assert world.link.ups == 1


@pytest.mark.parametrize("version", ["5.0", "3.1.1", "3.1"])
@pytest.mark.parametrize("expiry, clean", [(0, True), (60, False)])
async def test_a_session_is_kept_or_not(version: str, expiry: int, clean: bool) -> None:
    packet = World(version=version, session_expiry_secs=expiry).connect().connect
    assert packet is not None
    assert (packet.clean_start, packet.user_name, packet.password) == (clean, None, None)
    if version == "5.0":
        assert packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0) == expiry


@pytest.mark.parametrize("version, bridge", [("5.0", False), ("3.1.1", True), ("3.1", True)])
async def test_a_bridge_says_so_where_there_is_a_word_for_it(version: str, bridge: bool) -> None:
    packet = World(version=version, bridge=True).connect().connect
    assert packet is not None
    assert packet.bridge is bridge


async def test_a_refused_connection_says_why() -> None:
    world = World()
    world.connack_reason = ReasonCode.BAD_USER_NAME_OR_PASSWORD
    world.connect()
    assert world.link.downs == ["the broker refused the connection: bad_user_name_or_password"]
    assert world.link.ups == 0


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_filters_are_subscribed_to_with_the_options_of_a_bridge(qos: int) -> None:
    world = World(qos=qos)
    world.subscribe("a/#", "$share/g/b")
    remote = world.connect()
    (packet,) = remote.said(Subscribe)
    assert packet.subscriptions == (
        Subscription("a/#", qos, True, True, 1),
        Subscription("$share/g/b", qos, False, True, 1),
    )


def filters(remote: Remote) -> list[str]:
    return [one.filter for packet in remote.said(Subscribe) for one in packet.subscriptions]


@pytest.mark.parametrize(
    "version, present, again",
    [
        ("5.0", True, ["a", "b"]),
        ("5.0", False, ["a", "b"]),
        ("3.1.1", False, ["a", "b"]),
        ("3.1.1", True, []),
    ],
)
async def test_after_a_reconnect(version: str, present: bool, again: list[str]) -> None:
    world = World(version=version)
    world.subscribe("a", "b")
    world.connect()
    world.drop()
    world.present = present
    assert filters(world.connect()) == again


async def test_another_version_makes_its_subscriptions_anew() -> None:
    """3.1.1 cannot say no_local, and Mosquitto keeps the options of a subscription that is only repeated."""
    world = World()
    world.subscribe("a", "b")
    connect_to(world, None)
    world.connect()
    assert world.connection.machine.version is OLDER
    world.drop()
    world.present = True
    remote = world.connect()
    assert world.connection.machine.version is FIVE
    assert sorted(one for packet in remote.said(Unsubscribe) for one in packet.filters) == ["a", "b"]
    assert filters(remote) == ["a", "b"]
    assert type(remote.events[1]) is Unsubscribe
    assert type(remote.events[-1]) is Subscribe


async def test_many_filters_take_several_packets() -> None:
    world = World()
    names = [f"topic/{number}" for number in range(20)]
    world.subscribe(*names)
    remote = world.connect()
    assert filters(remote) == names
    assert [len(packet.subscriptions) for packet in remote.said(Subscribe)] == [8, 8, 4]
    assert len({packet.packet_id for packet in remote.said(Subscribe)}) == 3


async def test_a_filter_longer_than_the_broker_takes_does_not_keep_the_others() -> None:
    world = World()
    world.packet_bytes_max = 200
    world.subscribe("a", "x" * 300, "b")
    assert filters(world.connect()) == ["a", "b"]
    assert world.stats.filters_refused == 1


async def test_a_reload_says_the_difference() -> None:
    world = World()
    world.subscribe("a", "b")
    remote = world.connect()
    world.subscribe("b", "c")
    world.talk()
    assert filters(remote) == ["a", "b", "c"]
    assert [packet.filters for packet in remote.said(Unsubscribe)] == [("a",)]
    world.drop()
    world.subscribe("c")
    world.present = True
    remote = world.connect()
    assert filters(remote) == ["c"]
    assert [packet.filters for packet in remote.said(Unsubscribe)] == [("b",)]


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
@pytest.mark.parametrize("lost", [Subscribe, Unsubscribe])
async def test_what_no_route_needs_is_cancelled_although_a_packet_was_lost(lost: type, version: str) -> None:
    """The broker may have handled SUBSCRIBE, or may not have received UNSUBSCRIBE."""
    world = World(share="gateways", version=version)
    world.subscribe("a", "b")
    if lost is Unsubscribe:
        world.connect()
        world.subscribe("a")
    else:
        world.asks = True
        world.connect()
        world.asks = False
        world.connection.receive(YES_5 if version == "5.0" else YES_3, 0.0)
        world.connection.data_to_send()
    world.drop()
    world.subscribe("a")
    world.present = True
    remote = world.connect()
    assert [packet.filters for packet in remote.said(Unsubscribe)] == [("$share/gateways/b",)]
    world.drop()
    assert world.connect().said(Unsubscribe) == [], "UNSUBACK has arrived"


async def test_a_refused_filter_is_asked_for_again() -> None:
    world = World()
    world.refused_filters = {"b": ReasonCode.NOT_AUTHORIZED}
    world.subscribe("a", "b")
    remote = world.connect()
    asked = 1
    for now, more in ((0.5, 0), (1.5, 1), (2.0, 0), (4.0, 1), (5.0, 0)):
        world.session.tick(now)
        world.talk(now)
        asked += more
        assert filters(remote).count("b") == asked
    assert world.stats.filters_refused == 1
    assert world.session.filters.granted == {"a"}
    world.refused_filters = {}
    world.session.tick(20.0)
    world.talk(20.0)
    assert world.session.filters.granted == {"a", "b"}
    assert filters(remote).count("a") == 1
    assert world.stats.filters_refused == 0


@pytest.mark.parametrize("version", ["5.0", "3.1.1"])
async def test_a_group_shares_what_routes_need(version: str) -> None:
    world = World(share="gateways", version=version, qos=2)
    world.subscribe("a/#", "b")
    remote = world.connect()
    (packet,) = remote.said(Subscribe)
    assert [one.filter for one in packet.subscriptions] == ["$share/gateways/a/#", "$share/gateways/b"]
    if version == "5.0":  # to ask for no_local would be an error
        assert all(one.retain_as_published and not one.no_local for one in packet.subscriptions)
    world.subscribe("b")
    world.talk()
    assert [packet.filters for packet in remote.said(Unsubscribe)] == [("$share/gateways/a/#",)]
    world.deliver(row("x", topic="up/a"))
    assert [one.body for one in world.local.messages] == [b"x"]


@pytest.mark.parametrize("refusal", [b"\x20\x02\x00\x01", b"\x20\x03\x00\x84\x00", None])
async def test_a_group_keeps_to_mqtt_5(refusal: bytes | None) -> None:
    """Before it, the filter could be taken for that of a topic, and nothing would ever come."""
    world = World(share="g")
    assert [connect_to(world, refusal) for _ in range(3)] == [FIVE, FIVE, FIVE]
    assert all("share needs MQTT 5.0" in why for why in world.link.downs) is (refusal is not None)
    world = World(share="g", version="3.1.1")
    assert connect_to(world, YES_3) is OLDER


@pytest.mark.parametrize(
    "lacks, share, wanted, asked, why",
    [
        (Property.SHARED_SUBSCRIPTION_AVAILABLE, "g", ["a/#", "b"], [], "not support shared subscriptions"),
        (Property.SHARED_SUBSCRIPTION_AVAILABLE, None, ["a/#", "b"], ["a/#", "b"], ""),
        (
            Property.WILDCARD_SUBSCRIPTION_AVAILABLE,
            None,
            ["a/#", "+", "b"],
            ["b"],
            "not support wildcard subscriptions",
        ),
    ],
)
async def test_what_the_broker_has_not_is_not_asked_for(
    lacks: Property, share: str | None, wanted: list[str], asked: list[str], why: str
) -> None:
    world = World(share=share)
    world.subscribe(*wanted)
    world.connack_properties = {lacks: 0}
    with structlog.testing.capture_logs() as lines:
        remote = world.connect()
        for now in (2.0, 100.0):
            world.session.tick(now)
            world.talk(now)
    refused = [line for line in lines if "filter" in line]
    assert filters(remote) == asked
    assert world.stats.filters_refused == len(wanted) - len(asked) == len(refused)
    assert all(line["log_level"] == "error" and why in line["why"] for line in refused)
    world.drop()
    world.connack_properties = {}
    world.present = True
    assert len(filters(world.connect())) == len(wanted)
    assert world.stats.filters_refused == 0


async def test_silence_is_broken_by_pings_and_ends_the_connection() -> None:
    world = World(heartbeat_secs=10)
    remote = world.connect()
    for now in (1.0, 4.9, 5.0, 6.0):
        world.connection.tick(now)
        world.talk(now)
    assert len(remote.said(Pingreq)) == 1
    world.connection.tick(10.5)
    remote.receive(world.connection.data_to_send())
    remote.machine.data_to_send()  # the broker's answer is lost
    world.connection.tick(19.9)
    assert world.link.downs == []
    world.connection.tick(20.1)
    assert world.stream.closed
    assert world.link.downs == ["the broker has been silent for 15 s"]
    assert world.stats.protocol_errors.counts == {"keep_alive_timeout": 1}


async def test_a_broker_that_does_not_answer_connect() -> None:
    world = World(connect_timeout_secs=3.0)
    stream = world.stream = FakeStream()
    stream.owner = peer = world.session.connect(cast(Stream, stream), world.settings.target(), 100.0)
    peer.tick(102.9)
    assert world.link.downs == []
    peer.tick(103.0)
    assert stream.closed
    assert world.link.downs == ["no CONNACK received in time"]


async def test_goodbye() -> None:
    world = World()
    remote = world.connect()
    world.deliver(row("x", 1, 5))
    world.connection.shut_down()
    world.talk()
    assert remote.said(Disconnect) == [Disconnect(0)]
    assert world.stream.ending
    world.publish(message("later"))
    assert world.session.publisher.waiting_messages == 1


@pytest.mark.parametrize(
    "reason, reference, why",
    [
        (ReasonCode.SERVER_SHUTTING_DOWN, "", "the broker disconnected the link: server_shutting_down"),
        (
            ReasonCode.USE_ANOTHER_SERVER,
            "b:1883",
            "the broker disconnected the link: use_another_server; it refers to the server b:1883",
        ),
        (
            ReasonCode.SESSION_TAKEN_OVER,
            "",
            "the broker disconnected the link: session_taken_over; another client uses the link's client_id",
        ),
    ],
)
async def test_the_brokers_goodbye(reason: int, reference: str, why: str) -> None:
    world = World()
    remote = world.connect()
    remote.machine.send_disconnect(reason, reference=reference)
    world.talk()
    assert world.link.downs == [why]


async def test_a_broker_that_breaks_the_protocol_is_counted_and_left() -> None:
    world = World()
    world.connect()
    world.connection.receive(b"\x40\x02\x00\x00", 0.0)
    assert world.stream.ending
    assert world.stats.protocol_errors.total == 1
    assert len(world.link.downs) == 1


async def test_what_is_wrong_behind_the_connack_is_the_brokers_fault() -> None:
    """One read brings both, and the machine knows of the fault before anybody hears of the CONNACK."""
    world = World()
    connect_to(world, YES_5 + b"\x40\x02\x00\x00")
    assert world.stats.protocol_errors.total == 1
    assert world.link.downs[0].startswith("the broker violated the protocol")
