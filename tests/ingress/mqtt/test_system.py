"""The `$SYS` topics: there for who asks, refreshed, and nobody else's."""

from __future__ import annotations

import pytest

from gateway import __version__
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from tests.configured import make_listener
from tests.ingress.clients import connect, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

TOPICS = {
    "version",
    "uptime",
    "clients/connected",
    "messages/received",
    "messages/sent",
    "subscriptions/count",
    "retained messages/count",
}


def test_whoever_subscribes_gets_all_of_them_retained(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        assert gateway.ask(lambda: len(gateway.gateway.mqtt.retained)) == 0, "nobody has asked"
        client.subscribe("$SYS/#", 1)
        rows = [client.row() for _ in TOPICS]
        found = {row[1].decode().removeprefix("$SYS/broker/"): row for row in rows}
        assert found.keys() == TOPICS
        assert all(row[0] == 1 for row in rows), "retained, at QoS 0"
        assert found["version"][4] == f"gateway {__version__}".encode()
        assert found["clients/connected"][4] == b"1"
        assert found["subscriptions/count"][4] == b"1"


@pytest.mark.parametrize("topic_filter", ["$SYS/broker/messages/received", "$share/g/$SYS/broker/messages/#"])
def test_they_are_refreshed_while_somebody_subscribes(topic_filter: str) -> None:
    listener = make_listener(protocol="mqtt", host=LOOPBACK, port=0, sys_interval_secs=0.01)
    with running(settings_of(listeners={"mqtt": listener})) as gateway, connect(gateway)[0] as client:
        client.subscribe(topic_filter)
        client.publish("a")
        while client.row()[1:] != (b"$SYS/broker/messages/received", 0, b"", b"1"):
            pass


@pytest.mark.parametrize("version, reason", [(Version.V5, ReasonCode.NOT_AUTHORIZED), (Version.V311, 0)])
def test_clients_may_not_publish_there(gateway: Running, version: Version, reason: int) -> None:
    with connect(gateway, "r")[0] as reader, connect(gateway, version=version)[0] as client:
        reader.subscribe("$SYS/#", 1)
        for _ in TOPICS:
            reader.row()
        for retain in (False, True):
            client.publish("$SYS/broker/version", b"lies", 1, 1, retain=retain)
            assert client.acked(PacketType.PUBACK) == (1, reason)
        client.publish("$SYS/mine", b"x")
        client.ping()
        reader.ping()  # it may have heard of figures that have changed
        heard = {row[1].decode() for publishes in reader.events(Publishes) for row in publishes.rows}
        assert heard <= {f"$SYS/broker/{topic}" for topic in TOPICS - {"version"}}
        assert (
            sum(count for verdict, _, count in stats(gateway).settled_counts() if verdict != "accepted") == 3
        )
        other, connack = connect(gateway, "w", will=Will("$SYS/w"))
        other.cut()
        assert connack.reason == ReasonCode.NOT_AUTHORIZED


def test_wildcards_do_not_match_them(gateway: Running) -> None:
    with connect(gateway)[0] as client:
        client.subscribe("$SYS/broker/version")
        client.row()
        client.subscribe("#")
        client.subscribe("+/broker/version")
        assert client.quiet()
