"""Wills that a replica has claimed: they are settled in the database when the cluster has them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from gateway.access.rights import Rights
from gateway.broker.mqtt.namespace import OVERDUE, DelayedWill
from gateway.broker.routing import RoutingEntry
from gateway.engine import sessions
from gateway.engine.namespace import EngineNamespace
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.model.address import Address
from gateway.model.pending import Pending
from gateway.protocols.mqtt.dialect import topic_address
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Client, Replica, lasting, replicas
from tests.interop.servers import RabbitMQ


def test_a_will_is_not_forgotten_before_the_cluster_has_it(rabbitmq: RabbitMQ) -> None:
    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        one = Replica("one", url, "claimed", reconnect_max_secs=0.5)
        other = Replica("other", rabbitmq.url, "claimed")
        with replicas(one, other), Client(other.mqtt, "hears") as hears:
            hears.subscribe("wills/#", qos=1)
            mortal = Client(one.mqtt, "mortal", will="wills/mortal")
            way.stall("down")  # nothing is confirmed
            mortal.vanish()
            hears.until(lambda: hears.told == [("wills/mortal", b"gone")])
            assert one.stored("will", "mortal", "claimed") == [(1,)]
            way.resume()
            one.until(lambda: not one.stored("will", "mortal"))


def test_a_will_whose_check_was_pending_is_not_forgotten_before_the_cluster_has_it(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[tuple[trio.Event, trio.lowlevel.TrioToken]] = []
    permitted_entry = MqttIngress.permitted_entry

    def pending_once(ingress: MqttIngress, rights: Rights, address: Address) -> RoutingEntry:
        if address == topic_address("wills/mortal") and not checks:
            checks.append((trio.Event(), trio.lowlevel.current_trio_token()))
            raise Pending(checks[0][0])
        return permitted_entry(ingress, rights, address)

    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        one = Replica("one", url, "checked", reconnect_max_secs=0.5)
        other = Replica("other", rabbitmq.url, "checked")
        with replicas(one, other), Client(other.mqtt, "hears") as hears:
            hears.subscribe("wills/#", qos=1)
            mortal = Client(one.mqtt, "mortal", will="wills/mortal")
            monkeypatch.setattr(MqttIngress, "permitted_entry", pending_once)
            mortal.vanish()
            one.until(lambda: bool(checks))
            way.stall("down")  # nothing is confirmed
            trio.from_thread.run_sync(checks[0][0].set, trio_token=checks[0][1])
            hears.until(lambda: hears.told == [("wills/mortal", b"gone")])
            assert one.stored("will", "mortal", "claimed") == [(1,)]
            way.resume()
            one.until(lambda: not one.stored("will", "mortal"))


def test_a_will_that_its_replica_cannot_publish_is_published_by_another(rabbitmq: RabbitMQ) -> None:
    """Its claim ends when the replica has been killed, or does not reach the cluster.

    The replica that waited for the cluster does not publish the will, too.
    """
    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        one = Replica("one", url, "unpublished", reconnect_max_secs=0.5)
        other = Replica("other", rabbitmq.url, "unpublished")
        with replicas(one, other), Client(other.mqtt, "hears") as hears:
            hears.subscribe("wills/#", qos=1)
            mortal = Client(one.mqtt, "mortal", will="wills/mortal")
            way.shut()
            one.until(lambda: bool(one.gateway.readiness.reasons()))
            mortal.vanish()
            hears.until(lambda: hears.told == [("wills/mortal", b"gone")])
            other.until(lambda: not other.stored("will", "mortal"))
            way.open()
            one.until_ready()
            with Client(one.mqtt, "next") as publisher:
                publisher.publish("wills/next", b"1")
            hears.until(lambda: hears.told[-1] == ("wills/next", b"1"))
            assert hears.told == [("wills/mortal", b"gone"), ("wills/next", b"1")]


def test_a_will_that_is_late_replaces_nothing_that_its_client_has_retained_since(
    rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that has claimed it does not reach the cluster; subscribers get it nevertheless."""
    monkeypatch.setattr(sessions, "WILL_SECS", 0.0)  # no client waits for a will that another replica has
    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        one = Replica("one", url, "latewills", reconnect_max_secs=0.5)
        other = Replica("other", rabbitmq.url, "latewills")
        with replicas(one, other), Client(other.mqtt, "hears") as hears:
            hears.subscribe("wills/#", qos=1)
            mortal = lasting(one.mqtt, "mortal", will="wills/mortal", will_retain=True)
            way.shut()
            one.until(lambda: bool(one.gateway.readiness.reasons()))
            mortal.vanish()
            one.until(lambda: one.stored("will", "mortal", "claimed") == [(1,)])
            with lasting(other.mqtt, "mortal") as again:
                again.publish("wills/mortal", b"here", retain=True)
                hears.until(lambda: ("wills/mortal", b"gone") in hears.told)
                other.until(lambda: not other.stored("will", "mortal"))
            assert hears.told == [("wills/mortal", b"here"), ("wills/mortal", b"gone")]
            with Client(other.mqtt, "reads") as reads:
                reads.subscribe("wills/#", qos=1)
                reads.until(lambda: reads.messages)
                assert reads.told == [("wills/mortal", b"here")]
            way.open()


@pytest.mark.parametrize("clean", [True, False])
def test_a_will_comes_before_what_its_client_publishes_elsewhere(rabbitmq: RabbitMQ, clean: bool) -> None:
    """The replica that takes the client over publishes the will first."""
    one, other = (Replica(name, rabbitmq.url, f"first-{clean}") for name in ("one", "other"))
    with replicas(one, other), Client(other.mqtt, "hears") as hears:
        hears.subscribe("wills/#", qos=1)
        for number in range(5):
            mortal = lasting(one.mqtt, "mortal", will="wills/mortal")
            again = lasting(other.mqtt, "mortal") if not clean else Client(other.mqtt, "mortal", clean=True)
            with again:
                again.publish("wills/next", b"%d" % number)
            mortal.leave()
            hears.until(lambda: hears.has_more_than(2 * number + 1))  # noqa: B023 - it is called at once
            assert hears.told[-2:] == [("wills/mortal", b"gone"), ("wills/next", b"%d" % number)]


@pytest.mark.parametrize("clean", [True, False])
def test_a_will_that_another_replica_publishes_comes_before_what_its_client_publishes(
    rabbitmq: RabbitMQ, clean: bool
) -> None:
    """The client waits: the replica that has lost it reaches the cluster slowly."""
    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        one = Replica("slow", url, f"waits-{clean}")
        other = Replica("quick", rabbitmq.url, f"waits-{clean}")
        with replicas(one, other), Client(other.mqtt, "hears") as hears:
            hears.subscribe("wills/#", qos=1)
            mortal = (Client if clean else lasting)(one.mqtt, "mortal", will="wills/mortal")
            way.delay(0.5)
            mortal.paho.reconnect_delay_set(60, 60)
            connection = mortal.paho.socket()
            assert connection is not None
            connection.shutdown(2)
            with (Client if clean else lasting)(other.mqtt, "mortal") as again:
                again.publish("wills/mortal", b"here")
            hears.until(lambda: hears.has_more_than(1))
            assert hears.told == [("wills/mortal", b"gone"), ("wills/mortal", b"here")]
            mortal.leave()


@pytest.mark.interpreted
def test_a_refused_will_leaves_the_share_of_its_user_when_its_claim_ends() -> None:
    """Another replica publishes it."""
    calls: list[str] = []

    class Namespace:
        _publish_will = EngineNamespace._publish_will
        publish_stored_will = EngineNamespace.publish_stored_will

        def __init__(self) -> None:
            published, dropped = partial(calls.append, "published"), partial(calls.append, "dropped")
            self._publishing = {"c": SimpleNamespace(is_ending=True)}
            self._wills = {"c": DelayedWill(OVERDUE, published, dropped, 0.0)}

    namespace: Any = Namespace()
    for _ in range(2):
        namespace._publish_will("c")
    assert (calls, namespace._wills, namespace._publishing) == (["dropped"], {}, {})
