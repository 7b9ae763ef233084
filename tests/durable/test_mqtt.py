"""What MQTT clients were told is safe, after the gateway was killed: each half of each handshake.

A SUBSCRIBE of a session that is recorded is answered when all that was done before is on disk; where the
protocol itself has no answer to wait for (PUBACK, PUBCOMP), `settled` asks for one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import paho.mqtt.client as paho
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from gateway.broker.mqtt.retained import PIECE_MESSAGES_MAX
from gateway.protocols.mqtt.packets import Disconnect, Unsuback, Will
from gateway.protocols.mqtt.properties import PropertyMap
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from tests.durable.scenes import (
    DAY,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SCENES,
    V5,
    V311,
    Scene,
    Steps,
    goodbye,
    numbers,
    play,
    scene,
    settled,
    taken,
    taken_once,
)
from tests.ingress.clients import eventually
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess
from tests.interop.pahos import leave
from tests.interop.wrong_clock import Clock

HALF_AN_HOUR: Final[PropertyMap] = {Property.SESSION_EXPIRY_INTERVAL: 1_800}
DUP: Final = 8
LIMITS: Final = {"queue_memory_messages_max": 50, "inflight_max": 100}

# Out, towards a client.


@scene((1, V5), (1, V311), (2, V5), (2, V311))
def what_a_client_is_owed_while_away_comes_unsent(at: Scene, qos: int, version: Version) -> Steps:
    at.awaiting(qos, version)
    at.publish(b"1", b"2", b"3", qos=qos)
    yield 0
    reader = at.resume(version=version)
    rows = [reader.row() for _ in range(3)]
    assert [(row[0] & DUP, row[2], row[4]) for row in rows] == [(0, n, b"%d" % n) for n in (1, 2, 3)]


@scene((1, V5), (1, V311), (2, V5), (2, V311))
def what_was_sent_and_not_acknowledged_comes_under_its_id(at: Scene, qos: int, version: Version) -> Steps:
    at.awaiting(qos, version)
    reader = at.resume(version=version)
    at.publish(b"1", b"2", qos=qos)
    sent = [reader.row() for _ in range(2)]
    assert [row[0] & DUP for row in sent] == [0, 0]
    yield 0
    at.publish(b"3", qos=qos)
    reader = at.resume(version=version)
    again = [reader.row() for _ in range(3)]
    assert [row[2:] for row in again[:2]] == [row[2:] for row in sent]
    assert [(row[0] & DUP, row[4]) for row in again] == [(DUP, b"1"), (DUP, b"2"), (0, b"3")]


@scene((V5,), (V311,))
def retained_messages_that_a_subscription_is_owed_come_all_the_same(at: Scene, version: Version) -> Steps:
    """They are put into the session piece by piece, and the gateway ends between two pieces."""
    count = 3 * PIECE_MESSAGES_MAX
    writer, _ = at.connect("writer", clean=True, properties={})
    for number in range(count):
        writer.publish(f"{at.name}/{number}", b"%d" % number, 1, 1, retain=True)
        assert writer.acked(PUBACK) == (1, 0)
    reader = at.resume(present=False, version=version)
    assert reader.subscribe(at.filter, 1) == 1
    assert reader.body()
    yield 0
    reader = at.resume(version=version)
    bodies: set[bytes] = set()
    while len(bodies) < count:
        bodies.update(taken(reader, 1))
    assert bodies == set(numbers(0, count))


@scene()
def what_was_sent_before_the_client_left_is_told_from_what_was_not(at: Scene) -> Steps:
    at.awaiting(1)
    reader = at.resume()
    at.publish(b"sent")
    assert reader.body() == b"sent"
    goodbye(reader)
    at.publish(b"unsent")
    yield 0
    reader = at.resume()
    rows = [reader.row(), reader.row()]
    assert [(row[0] & DUP, row[4]) for row in rows] == [(DUP, b"sent"), (0, b"unsent")]


@scene((V5,), (V311,))
def what_was_acknowledged_stays_away_and_the_rest_keeps_its_ids(at: Scene, version: Version) -> Steps:
    at.awaiting(1, version)
    reader = at.resume(version=version)
    at.publish(*numbers(0, 6))
    ids = [reader.row()[2] for _ in range(6)]
    for packet_id in (ids[0], ids[2], ids[5]):
        reader.ack(PUBACK, packet_id)
    settled(reader)
    yield 0
    reader = at.resume(version=version)
    rows = [reader.row() for _ in range(3)]
    assert [(row[2], row[4]) for row in rows] == [(ids[1], b"1"), (ids[3], b"3"), (ids[4], b"4")]
    assert reader.quiet()


@scene((V5,), (V311,))
def a_received_message_is_released_again_and_not_sent_again(at: Scene, version: Version) -> Steps:
    at.awaiting(2, version)
    reader = at.resume(version=version)
    at.publish(b"received", b"not received", qos=2)
    ids = [reader.row()[2] for _ in range(2)]
    reader.ack(PUBREC, ids[0])
    assert reader.acked(PUBREL) == (ids[0], 0)  # so that it is on disk
    yield 0
    for _ in range(2):  # the second time by a gateway that has it from the disk itself
        reader = at.resume(version=version)
        assert reader.acked(PUBREL) == (ids[0], 0)
        flags, _, packet_id, _, body = reader.row()
        assert (flags & DUP, packet_id, body) == (DUP, ids[1], b"not received")
        yield 0
    reader = at.resume(version=version)
    assert reader.acked(PUBREL)[0] == ids[0]
    reader.ack(PUBCOMP, ids[0])
    assert taken_once(reader, 1) == [b"not received"]
    settled(reader)
    yield 0
    assert at.resume(version=version).quiet()


@scene()
def an_id_that_is_in_use_is_passed_over(at: Scene) -> Steps:
    at.awaiting(2)
    reader = at.resume()
    at.publish(b"first", qos=2)
    packet_id = reader.row()[2]
    reader.ack(PUBREC, packet_id)
    reader.acked(PUBREL)
    yield 0
    at.publish(b"second", qos=2)  # nothing else is stored: it gets the same position
    reader = at.resume()
    assert reader.acked(PUBREL) == (packet_id, 0)
    flags, _, another, _, body = reader.row()
    assert (flags & DUP, another == packet_id, body) == (0, False, b"second")
    reader.ack(PUBCOMP, packet_id)


@scene()
def a_session_longer_than_memory_keeps_its_order(at: Scene) -> Steps:
    at.awaiting(1)
    at.publish(*numbers(0, 500))
    yield 0
    reader = at.resume()
    assert taken(reader, 200) == numbers(0, 200)
    at.publish(*numbers(500, 600))
    assert taken(reader, 400) == numbers(200, 600)
    at.publish(*numbers(600, 800))
    settled(reader)
    yield 0
    reader = at.resume()
    assert taken(reader, 200) == numbers(600, 800)
    settled(reader)
    yield 0
    assert at.resume().quiet()


# In, from a client.


@scene((V5,), (V311,))
def a_qos_2_message_that_was_received_is_taken_once(at: Scene, version: Version) -> Steps:
    at.awaiting(2)
    writer = at.resume("writer", present=False, version=version)
    writer.publish(at.topic, b"once", 2, 7)
    assert writer.acked(PUBREC) == (7, 0)
    yield 0
    writer = at.resume("writer", version=version)
    writer.publish(at.topic, b"once", 2, 7, dup=True)
    assert writer.acked(PUBREC) == (7, 0)
    writer.ack(PUBREL, 7)
    assert writer.acked(PUBCOMP) == (7, 0)
    yield 0
    writer = at.resume("writer", version=version)
    writer.ack(PUBREL, 7)  # PUBCOMP may not have reached it
    assert writer.acked(PUBCOMP) == (7, 0 if version is V311 else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)
    writer.publish(at.topic, b"another", 2, 7)
    assert writer.acked(PUBREC) == (7, 0)
    reader = at.resume()
    assert taken_once(reader, 2) == [b"once", b"another"]
    assert reader.quiet()


@scene()
def a_qos_2_message_for_nobody_is_taken_once_too(at: Scene) -> Steps:
    writer = at.resume("writer", present=False)
    writer.publish(at.topic, b"nobody", 2, 9)
    assert writer.acked(PUBREC) == (9, 0)
    yield 0
    at.awaiting(2)
    writer = at.resume("writer")
    writer.publish(at.topic, b"nobody", 2, 9, dup=True)
    assert writer.acked(PUBREC) == (9, 0)
    assert at.resume().quiet()


@scene()
def a_message_and_its_id_are_both_stored_or_neither(at: Scene) -> Steps:
    at.awaiting(2)
    for turn in range(5):
        writer = at.resume("writer", present=turn > 0)
        for packet_id in range(20 * turn + 1, 20 * turn + 21):
            writer.machine.publish(at.topic.encode(), b"%d" % packet_id, 2, packet_id=packet_id)
        writer.flush()  # and nobody waits for an answer
        yield 0
    writer = at.resume("writer")
    for packet_id in range(1, 101):
        writer.publish(at.topic, b"%d" % packet_id, 2, packet_id, dup=True)
        assert writer.acked(PUBREC) == (packet_id, 0)
    reader = at.resume()
    assert sorted(taken_once(reader, 100), key=int) == numbers(1, 101)
    assert reader.quiet()


@scene()
def accepted_messages_survive_with_what_they_say(at: Scene) -> Steps:
    reader = at.resume(present=False)
    reader.subscribe(at.filter, 1, {Property.SUBSCRIPTION_IDENTIFIER: (300,)}, retain_as_published=True)
    goodbye(reader)
    said = b"\x03\x00\x04text"  # content type
    at.publish(b"body", qos=2, retain=True, properties=said)
    yield 0
    flags, topic, _, properties, body = at.resume().row()
    assert (flags, topic, body) == (3, at.topic.encode(), b"body")
    assert properties == said + b"\x0b\xac\x02"


@scene()
def messages_from_amqp_reach_a_session(at: Scene) -> Steps:
    at.awaiting(1)
    parameters = pika.ConnectionParameters(LOOPBACK, at.gateway.ports["amqp091"])
    connection = pika.BlockingConnection(parameters)
    channel = connection.channel()
    channel.confirm_delivery()
    for body in numbers(0, 20):
        key = at.topic.replace("/", ".")
        channel.basic_publish("amq.topic", key, body, pika.BasicProperties(delivery_mode=2))
    connection.close()
    yield 0
    assert taken(at.resume(), 20) == numbers(0, 20)


# Sessions.


@scene()
def subscriptions_survive_and_so_do_their_ends(at: Scene) -> Steps:
    kept, gone, mine = (f"{at.name}/{word}" for word in ("kept", "gone", "mine"))
    reader = at.resume(present=False)
    for topic_filter in (kept, gone, mine):
        reader.subscribe(topic_filter, 1, no_local=topic_filter == mine)
    reader.machine.unsubscribe(2, [gone])
    reader.flush()
    assert reader.next(Unsuback).reasons == (0,)
    yield 0
    at.publish(b"x", topic=gone)
    at.publish(b"y", topic=kept)
    reader = at.resume()
    reader.publish(mine, b"z", 1, 1)
    assert taken(reader, 1) == [b"y"]
    assert reader.quiet()


@scene(("clean start",), ("expiry 0 at the end",), ("expiry 0 when it came back",))
def a_session_that_has_ended_stays_away(at: Scene, how: str) -> Steps:
    at.awaiting(1)
    at.publish(b"old")
    if how == "clean start":
        assert not at.connect("reader", clean=True)[1].session_present
    elif how == "expiry 0 at the end":
        reader = at.resume()
        reader.machine.send(Disconnect(0, {Property.SESSION_EXPIRY_INTERVAL: 0}))
        reader.flush()
        assert reader.closed()
    else:
        at.connect("reader", properties={})
    yield 0
    at.publish(b"new")
    reader = at.resume(present=how == "clean start")
    assert reader.quiet()
    assert reader.subscribe(at.filter, 1) == 1


# Retained messages and wills.


@scene((0,), (1,), (2,))
def retained_messages_survive_and_so_do_their_ends(at: Scene, qos: int) -> Steps:
    one_second = b"\x02\x00\x00\x00\x01"
    at.publish(b"old", b"new", qos=qos, retain=True)
    at.publish(b"x", b"", qos=qos, retain=True, topic=f"{at.name}/gone")
    at.publish(b"x", qos=qos, retain=True, topic=f"{at.name}/expired", properties=one_second)
    settled(at.resume("other", present=False))  # so that QoS 0 is on disk, too
    yield 1.1
    reader = at.resume(present=False)
    reader.subscribe(at.filter, 2)
    flags, topic, _, _, body = reader.row()
    assert (flags >> 1 & 3, flags & 1, topic, body) == (qos, 1, at.topic.encode(), b"new")
    assert reader.quiet()


@scene()
def a_retained_message_that_a_session_was_sent_comes_again_as_one(at: Scene) -> Steps:
    at.publish(b"kept", retain=True)
    reader = at.resume(present=False)
    reader.subscribe(at.filter, 1)
    assert reader.row()[0] == 3
    yield 0
    assert at.resume().row()[0] == 3 | DUP


@scene((True,), (False,))
def a_will_is_published_for_a_client_that_was_lost_with_the_gateway(at: Scene, stays: bool) -> Steps:
    at.awaiting(1)
    at.connect("dying", properties=DAY if stays else {}, will=Will(at.topic, b"gone", 1))
    yield 0
    reader = at.resume()
    assert taken(reader, 1) == [b"gone"]
    settled(reader)
    yield 0
    at.ticked()
    assert at.resume().quiet()


@scene((True,), (False,))
def a_will_is_published_for_a_client_that_is_back_at_once(at: Scene, stays: bool) -> Steps:
    at.awaiting(1)
    given = DAY if stays else {}
    at.connect("dying", properties=given, will=Will(at.topic, b"gone", 1))
    yield 0
    at.connect("dying", properties=given)
    assert taken(at.resume(), 1) == [b"gone"]


@scene(("goodbye",), ("another will",), ("no will",))
def only_the_last_will_counts(at: Scene, how: str) -> Steps:
    at.awaiting(1)
    client, _ = at.connect("living", will=Will(at.topic, b"gone", 1))
    goodbye(client)
    if how == "another will":
        at.connect("living", will=Will(at.topic, b"other", 1))
    elif how == "no will":
        at.connect("living")
    yield 0
    reader = at.resume()
    if how == "another will":
        assert taken(reader, 1) == [b"other"]
    else:
        at.ticked()
    assert reader.quiet()


@scene((True,), (False,))
def a_will_with_a_delay_is_for_a_client_that_does_not_return(at: Scene, returns: bool) -> Steps:
    at.awaiting(1)
    delay = {Property.WILL_DELAY_INTERVAL: 600 if returns else 1}
    at.connect("dying", will=Will(at.topic, b"gone", 1, properties=delay))
    yield 0
    if returns:
        goodbye(at.resume("dying"))
        at.connect("dying", clean=True)  # the end of its session would publish a will that waits
        assert at.resume().quiet()
    else:
        assert taken(at.resume(), 1) == [b"gone"]


@scene()
def a_will_that_waits_for_its_delay_survives(at: Scene) -> Steps:
    at.awaiting(1)
    delay = {Property.WILL_DELAY_INTERVAL: 600}
    client, _ = at.connect("dying", will=Will(at.topic, b"gone", 1, properties=delay))
    client.machine.disconnect(ReasonCode.DISCONNECT_WITH_WILL)
    client.flush()
    assert client.closed()
    yield 0
    reader = at.resume()
    at.ticked()
    assert reader.quiet()
    assert at.connect("dying", clean=True)[1].session_present is False  # its session ends: the will is due
    assert taken(reader, 1) == [b"gone"]


# A client of the field.


@scene()
def paho_with_a_session_loses_nothing(at: Scene) -> Steps:
    got: list[bytes] = []
    subscribed: list[bool] = []
    client = paho.Client(CallbackAPIVersion.VERSION2, f"{at.name} paho", clean_session=False)
    client.reconnect_delay_set(1, 1)
    client.on_message = lambda client, data, message: got.append(bytes(message.payload))
    client.on_subscribe = lambda *told: subscribed.append(True)
    client.connect(LOOPBACK, at.gateway.ports["mqtt"])
    client.subscribe(at.filter, 2)
    client.loop_start()
    try:
        eventually(lambda: bool(subscribed))
        for turn in range(3):
            at.publish(*numbers(10 * turn, 10 * turn + 10), qos=2)
            yield 0
        eventually(lambda: len(got) >= 30)
    finally:
        leave(client)
    assert got == numbers(0, 30)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exception | None]:
    """What became of each scene."""
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), limits=LIMITS) as gateway:
        found = play(gateway)
        assert "internal error" not in gateway.log
    return found


@pytest.mark.parametrize("name", SCENES)
def test_after_the_gateway_was_killed(name: str, outcomes: dict[str, Exception | None]) -> None:
    error = outcomes[name]
    if error is not None:
        raise error


def test_expiry_goes_on_while_the_gateway_is_down(tmp_path: Path) -> None:
    clock = Clock(tmp_path / "clock")
    with GatewayProcess(tmp_path / "gateway") as gateway:
        gateway.kill()
        gateway.clock = clock
        gateway.start()
        scenes = {here: Scene(gateway, f"expiry {here}") for here in (True, False)}
        for here, at in scenes.items():
            client, _ = at.connect("reader", properties=HALF_AN_HOUR)
            client.subscribe(at.filter, 1)
            if not here:
                goodbye(client)
        gateway.kill()
        clock.advance(3_600.0)
        gateway.start()
        for here, at in scenes.items():  # for a client that was here it counts from the restart
            at.cut()
            assert at.connect("reader", properties=HALF_AN_HOUR)[1].session_present is here
            at.cut()


def test_a_gateway_that_is_stopped_leaves_its_sessions_and_their_wills(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        at = Scene(gateway, "stopped")
        at.awaiting(1)
        at.publish(b"sent")
        reader, _ = at.connect("reader", will=Will(at.topic, b"gone", 1))
        assert reader.body() == b"sent"
        assert gateway.terminate() == 0
        at.cut()
        gateway.start()
        at.publish(b"unsent")
        reader = at.resume()
        rows = [reader.row() for _ in range(3)]
        assert [(row[0] & DUP, row[4]) for row in rows] == [(DUP, b"sent"), (0, b"gone"), (0, b"unsent")]
        at.cut()
