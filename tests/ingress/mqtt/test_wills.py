"""Wills in every combination: version, QoS, retain, delay, and the way in which the client goes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final
from unittest.mock import patch

import pytest

from gateway.access.principal import Principal
from gateway.broker.mqtt.namespace import OVERDUE, RETRIED_MAX
from gateway.ingress.client import CloseReason
from gateway.ingress.mqtt.ingress import WILL_DOUBLINGS_MAX, MqttIngress, SentWill
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import Value, ValueType, string
from gateway.protocols.mqtt.dialect import topic_address
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.spec import PacketType, Property, ReasonCode, Version
from tests.broker.parts import Space
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running, running

VERSIONS: Final = (Version.V5, Version.V311, Version.V31)
COMBINATIONS: Final = [*itertools.product((0, 1, 2), (False, True))]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    with running() as one:
        yield one


def vanishes(gateway: Running, client: Mqtt, name: str) -> None:
    client.cut()


def breaks_the_protocol(gateway: Running, client: Mqtt, name: str) -> None:
    client.send(b"\x30\xff\xff\xff\xff\xff").rest()


def is_taken_over(gateway: Running, client: Mqtt, name: str) -> None:
    connect(gateway, name)[0].cut()


def is_dismissed(gateway: Running, client: Mqtt, name: str) -> None:
    def dismiss() -> None:
        for connection in list(gateway.gateway.listeners["mqtt"].connections):
            if connection.sender.client == name:
                connection.shut_down(CloseReason.DISMISSED)
        gateway.gateway.writes.flush()

    gateway.ask(dismiss)


def leaves(gateway: Running, client: Mqtt, name: str) -> None:
    client.machine.disconnect()
    client.flush()
    client.rest()


def leaves_with_its_will(gateway: Running, client: Mqtt, name: str) -> None:
    client.machine.disconnect(ReasonCode.DISCONNECT_WITH_WILL)
    client.flush()


End = Callable[[Running, Mqtt, str], None]
ENDS: Final[list[tuple[End, bool]]] = [
    (vanishes, True),
    (breaks_the_protocol, True),
    (is_taken_over, True),
    (is_dismissed, True),
    (leaves_with_its_will, True),
    (leaves, False),
]


@pytest.mark.parametrize(
    "version, end, published",
    [
        pytest.param(version, end, published, id=f"{version.name} {end.__name__}")
        for version, (end, published) in itertools.product(VERSIONS, ENDS)
        if version is Version.V5 or end is not leaves_with_its_will  # only MQTT 5 has a word for that
    ],
)
def test_every_will(gateway: Running, version: Version, end: End, published: bool) -> None:
    topic = f"{version.name}/{end.__name__}"
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe(f"{topic}/#", 2, retain_as_published=True)
        for qos, retain in COMBINATIONS:
            place = f"{topic}/{qos}/{retain}"
            client, _ = connect(gateway, place, version=version, will=Will(place, b"gone", qos, retain))
            end(gateway, client, place)
            client.cut()
            gateway.until(lambda name=place: name not in gateway.gateway.mqtt.sessions)
            if not published:
                assert reader.quiet()
                continue
            flags, heard, packet_id, _, body = reader.row()
            assert (flags >> 1 & 3, flags & 1 == 1, heard, body) == (qos, retain, place.encode(), b"gone")
            if qos == 1:
                reader.ack(PacketType.PUBACK, packet_id)
            elif qos == 2:
                reader.ack(PacketType.PUBREC, packet_id)
                assert reader.acked(PacketType.PUBREL) == (packet_id, 0)
                reader.ack(PacketType.PUBCOMP, packet_id)
            gateway.until_retains(place, retain)


@pytest.mark.parametrize(
    "expiry_secs, delay_secs, clean, comes",
    [
        pytest.param(600, 600, False, False, id="back in time"),
        pytest.param(600, 600, True, True, id="back, but anew: the session has ended"),
        pytest.param(600, 0, False, True, id="no delay"),
        pytest.param(0, 600, False, True, id="no session that could wait"),
    ],
)
def test_a_delay_ends_with_the_session_or_with_a_return(
    gateway: Running, expiry_secs: int, delay_secs: int, clean: bool, comes: bool
) -> None:
    will = Will("later", b"gone", properties={Property.WILL_DELAY_INTERVAL: delay_secs})
    lasting = {Property.SESSION_EXPIRY_INTERVAL: expiry_secs}
    with connect(gateway, "reader")[0] as reader:
        reader.subscribe("later")
        connect(gateway, "c", clean=False, will=will, properties=lasting)[0].cut()
        gateway.until(lambda: "c" not in gateway.gateway.mqtt.sessions or _away(gateway))
        with connect(gateway, "c", clean=clean)[0]:
            assert (reader.body() == b"gone") if comes else reader.quiet()
    gateway.until(lambda: "c" not in gateway.gateway.mqtt.sessions)


def _away(gateway: Running) -> bool:
    return gateway.gateway.mqtt.sessions["c"].outlet is None


def test_refused_wills_beyond_the_share_of_their_user_are_dead_letters() -> None:
    with running() as gateway:

        def declare() -> None:
            host = gateway.gateway.hosts["/"]
            arguments = (
                ("x-max-length", Value(ValueType.INT32, 0)),
                ("x-overflow", string("reject-publish")),
            )
            queue = host.declare_queue(
                "full",
                None,
                durable=False,
                exclusive=False,
                auto_delete=False,
                arguments=arguments,
                user=None,
            )
            host.bind("amq.topic", queue, "w.#", (), user=None)
            gateway.gateway.mqtt.will_shares.set_limits(3, 1 << 20)

        gateway.ask(declare)
        for at in range(5):
            connect(gateway, f"c{at}", will=Will("w/x", b"gone", 1))[0].cut()
        gateway.until(lambda: len(gateway.gateway.dead_letters) == 2)
        shares = gateway.gateway.mqtt.will_shares
        assert gateway.ask(lambda: (shares.count, shares.refused >= 2)) == (3, True)
        gateway.ask(
            lambda: gateway.gateway.hosts["/"].delete_queue(gateway.gateway.hosts["/"].queues["full"])
        )
        gateway.until(lambda: not shares.count)
        assert gateway.ask(lambda: (shares.total, len(gateway.gateway.mqtt._wills))) == (0, 0)


def test_few_refused_wills_are_published_at_one_tick() -> None:
    space = Space()
    published: list[int] = []
    for at in range(2 * RETRIED_MAX + 1):
        space.delay_will(f"c\0{at}", OVERDUE, partial(published.append, at))
    space.delay_will("due", 1.0, partial(published.append, -1))
    space.expire(1.0)
    assert published == [-1, *range(RETRIED_MAX)]
    space.expire(1.0)
    space.expire(1.0)
    assert published == [-1, *range(2 * RETRIED_MAX + 1)]


def test_a_will_is_published_again_later_and_later_while_it_is_refused() -> None:
    with running() as gateway:
        mqtt = gateway.gateway.mqtt
        ingress = gateway.gateway.listeners["mqtt"]._protocol
        assert isinstance(ingress, MqttIngress)
        will, sender = Will("w/x", b"gone", 1), Sender("mqtt", "c", "", "127.0.0.1:1")
        message = Message(topic_address("w/x"), b"gone", assurance=1, sender=sender)

        def refuse(refusals: int) -> float:
            """Return the seconds until the next attempt."""
            sent = SentWill(ingress, will, message, Principal(""), refusals)
            sent.process_outcome(Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "down"))
            delayed = mqtt._wills.pop(sent.key)
            assert delayed.is_overdue(delayed.retry_at)
            assert not delayed.is_overdue(delayed.retry_at - 0.1)
            delayed.dropped()
            mqtt.forget_will(sent.key)
            return delayed.retry_at - ingress.now()

        waits = gateway.ask(lambda: [refuse(refusals) for refusals in range(WILL_DOUBLINGS_MAX + 1)])
        assert [round(wait) for wait in waits] == [1, 2, 4, 8, 10, 10, 10]
        assert gateway.ask(lambda: (mqtt.will_shares.count, len(mqtt._wills))) == (0, 0)


@pytest.mark.interpreted
def test_a_refused_will_counts_its_refusals() -> None:
    with running() as gateway:
        mqtt, ingress = gateway.gateway.mqtt, gateway.gateway.listeners["mqtt"]._protocol
        assert isinstance(ingress, MqttIngress)
        will, sender = Will("w/x", b"gone", 1), Sender("mqtt", "c", "", "127.0.0.1:1")
        message = Message(topic_address("w/x"), b"gone", assurance=1, sender=sender)
        counts: list[int] = []

        def publish_again(refusals: int) -> None:
            sent = SentWill(ingress, will, message, Principal(""), refusals)
            sent.process_outcome(Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, "down"))
            with patch.object(MqttIngress, "publish_will", lambda *given: counts.append(given[-1])):
                mqtt._publish_will(sent.key)

        gateway.ask(lambda: [publish_again(refusals) for refusals in (0, 1, WILL_DOUBLINGS_MAX)])
        assert counts == [1, 2, WILL_DOUBLINGS_MAX]
